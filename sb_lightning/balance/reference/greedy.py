"""Item after item, largest first; the twin of csrc/balance/greedy.cpp."""

from __future__ import annotations

import heapq

from sb_lightning.balance.reference.problem import NO_CAP, Parts, Problem

__all__ = ["dealt_in_turns", "largest_first", "least_increase"]


def largest_first(costs: list[int], bins: int, least: int, most: int) -> Parts:
    """Deal items over bins (longest processing time first: Graham, 1969).

    Args:
        costs: Cost of each item, descending.
        bins: Number of bins.
        least: Items that each bin gets at least.
        most: Items that each bin gets at most.
    """
    parts: Parts = [[] for _ in range(bins)]
    heap = [(0, 0, b) for b in range(bins)]
    missing = bins * least
    limit = most
    for item, cost in enumerate(costs):
        if len(costs) - item == missing and limit > least:
            # The rest is just enough for the bins that lack items.
            limit = least
            heap = [entry for entry in heap if entry[1] < least]
            heapq.heapify(heap)
        total, count, b = heapq.heappop(heap)
        parts[b].append(item)
        missing -= count < least
        if count + 1 < limit:
            heapq.heappush(heap, (total + cost, count + 1, b))
    return parts


def least_increase(problem: Problem) -> Parts | None:
    """Fill slots by descending cost, then put each item where the sum of the slot maxima grows least.

    Of cells that do not grow it the fullest is taken.

    Args:
        problem: The costs, descending, and limits.

    Returns:
        The items of each cell, or None if an item fits nowhere under the cap.
    """
    cap = problem.max_tokens
    cells: Parts = [[] for _ in range(problem.num_cells)]
    loads, tokens = [0] * len(cells), [0] * len(cells)
    maxima = [0] * problem.accumulate
    missing = len(cells) * problem.cell_least
    for item, cost in enumerate(problem.costs):
        size = problem.tokens[item]
        only_poor = len(problem.costs) - item == missing
        best, best_key = -1, (0, 0)
        # One item each, largest first: that is the best start.
        candidates = range(item, item + 1) if item < len(cells) else range(len(cells))
        for cell in candidates:
            count = len(cells[cell])
            if count >= problem.cell_most or (only_poor and count >= problem.cell_least):
                continue
            if cap != NO_CAP and size > cap - tokens[cell]:
                continue
            increase = max(0, loads[cell] + cost - maxima[cell // problem.ranks])
            key = (increase, -loads[cell])
            if best < 0 or key < best_key:
                best, best_key = cell, key
        if best < 0:
            return None
        missing -= len(cells[best]) < problem.cell_least
        cells[best].append(item)
        loads[best] += cost
        tokens[best] += size
        maxima[best // problem.ranks] = max(maxima[best // problem.ranks], loads[best])
    return cells


def dealt_in_turns(problem: Problem) -> Parts:
    """Deal items to ranks in alternating direction; cut each rank's items evenly into cells, larger first.

    Args:
        problem: The costs, descending, and limits.
    """
    ranks, accumulate, size = problem.ranks, problem.accumulate, len(problem.costs)
    cells: Parts = []
    for rank in range(ranks):
        mine = []
        for turn in range(-(-size // ranks)):
            item = turn * ranks + (ranks - 1 - rank if turn % 2 else rank)
            if item < size:
                mine.append(item)
        share, extra = divmod(len(mine), accumulate)
        start = 0
        for cell in range(accumulate):
            stop = start + share + (cell < extra)
            cells.append(mine[start:stop])
            start = stop
    return cells
