"""Cells filled slot by slot; the twin of csrc/balance/slot_fill.cpp."""

from __future__ import annotations

from bisect import bisect_left

from sb_lightning.balance.reference.greedy import largest_first
from sb_lightning.balance.reference.problem import NO_CAP, Parts, Problem

__all__ = ["fill_slots", "one_full_slot"]


def fill_slots(problem: Problem) -> Parts | None:
    """Give each giant a slot, filled as far as the giant reaches; spread the rest over the other cells.

    A giant is an item above the mean load per cell of what is left. The room below it costs nothing. If all
    but one small item per cell to come fits there, it is spread over the slot. Else items go, largest first,
    where the least room remains; again one is kept for each cell to come. Without giants, or with equal
    counts, all items are spread, largest first.

    Args:
        problem: The costs, descending, and limits.

    Returns:
        The items of each cell, or None if a slot cannot be filled under the cap.
    """
    costs, ranks = problem.costs, problem.ranks
    cells: Parts = []
    rest = list(range(len(costs)))
    left = sum(costs)
    while not problem.equal_counts and len(cells) + ranks < problem.num_cells:
        giant, bins = costs[rest[0]], problem.num_cells - len(cells)
        if giant <= -(-left // bins):
            break
        parts = _one_full(problem, rest, bins)
        if all(
            sum(costs[item] for item in part) <= giant
            and (problem.max_tokens == NO_CAP or sum(problem.tokens[i] for i in part) <= problem.max_tokens)
            for part in parts
        ):
            return cells + parts
        filled = _fill(problem, rest, giant, bins)
        if filled is None:
            return None
        cells += filled
        taken = {item for cell in filled for item in cell}
        rest = [item for item in rest if item not in taken]
        left -= sum(costs[item] for item in taken)
    bins = problem.num_cells - len(cells)
    limits = problem.cell_least, min(problem.cell_most, len(rest))
    parts = largest_first([costs[item] for item in rest], bins, *limits)
    return cells + [[rest[place] for place in part] for part in parts]


def one_full_slot(problem: Problem) -> Parts:
    """Give the other slots one item per cell, the smallest, and spread the rest over the cells of one slot.

    Args:
        problem: The costs, descending, and limits; without equal counts.
    """
    return _one_full(problem, list(range(len(problem.costs))), problem.num_cells)


def _one_full(problem: Problem, items: list[int], bins: int) -> Parts:
    many = len(items) - bins + problem.ranks
    parts = largest_first([problem.costs[item] for item in items[:many]], problem.ranks, 1, many)
    return [[items[place] for place in part] for part in parts] + [[item] for item in items[many:]]


def _fill(problem: Problem, rest: list[int], budget: int, missing: int) -> Parts | None:
    """Return the cells of one slot, each of `budget` at most; `missing` are the empty cells of all slots."""
    cells: Parts = [[] for _ in range(problem.ranks)]
    tokens = [0] * problem.ranks
    # The cells by ascending room.
    rooms, by_room = [budget] * problem.ranks, list(range(problem.ranks))
    empty, unplaced = problem.ranks, len(rest)
    keys = [-problem.costs[item] for item in rest]
    place = 0
    while empty > 0 or unplaced > missing:
        # Items above the largest room fit nowhere.
        place = bisect_left(keys, -rooms[-1], place)
        if place == len(rest):
            break
        item, cost = rest[place], -keys[place]
        place += 1
        size = problem.tokens[item]
        for spot in range(bisect_left(rooms, cost), problem.ranks):
            cell = by_room[spot]
            fits = problem.max_tokens == NO_CAP or size <= problem.max_tokens - tokens[cell]
            if fits and (unplaced > missing or not cells[cell]):
                break
        else:
            continue
        if not cells[cell]:
            empty -= 1
            missing -= 1
        unplaced -= 1
        cells[cell].append(item)
        tokens[cell] += size
        room = rooms.pop(spot) - cost
        del by_room[spot]
        spot = bisect_left(rooms, room)
        rooms.insert(spot, room)
        by_room.insert(spot, cell)
    return None if empty > 0 else cells
