"""Exchanges between cells, where cells have caps or slots have maxima; the twin of csrc/balance/cells.cpp."""

from __future__ import annotations

from sb_lightning.balance.reference.problem import NO_CAP, Parts, Problem
from sb_lightning.balance.reference.slots import by_load

__all__ = ["improve_ranks", "improve_slots", "loads_of"]

# Exchanges that are tried, and cells sorted; not a time, so that all ranks stop alike.
EXCHANGE_WORK = 1 << 17


def loads_of(problem: Problem, cells: Parts) -> list[int]:
    """Return the cost of each cell."""
    return [sum(problem.costs[i] for i in cell) for cell in cells]


class _Room:
    """What the cells can give and take."""

    def __init__(self, problem: Problem, cells: Parts) -> None:
        self.problem, self.cells = problem, cells
        self.tokens = [sum(problem.tokens[i] for i in cell) for cell in cells]

    def may_move(self, source: int, target: int, item: int) -> bool:
        counts = (
            len(self.cells[source]) > self.problem.cell_least
            and len(self.cells[target]) < self.problem.cell_most
        )
        return counts and self._fits(target, self.problem.tokens[item])

    def may_swap(self, source: int, target: int, given: int, taken: int) -> bool:
        extra = self.problem.tokens[given] - self.problem.tokens[taken]
        return self._fits(target, extra) and self._fits(source, -extra)

    def exchange(self, source: int, target: int, given: int, taken: int) -> None:
        self._shift(source, target, given)
        if taken >= 0:
            self._shift(target, source, taken)

    def _fits(self, cell: int, extra: int) -> bool:
        return self.problem.max_tokens == NO_CAP or extra <= self.problem.max_tokens - self.tokens[cell]

    def _shift(self, source: int, target: int, item: int) -> None:
        self.cells[source].remove(item)
        self.cells[target].append(item)
        self.cells[target].sort()
        self.tokens[source] -= self.problem.tokens[item]
        self.tokens[target] += self.problem.tokens[item]


def improve_ranks(problem: Problem, cells: Parts, rows: list[list[int]], bound: int) -> int:
    """Lower the largest sum of a rank by exchanges that keep every cell within its limits; return the sum.

    Args:
        problem: The costs and limits.
        cells: Items of each cell; changed in place.
        rows: The cells of each rank.
        bound: The largest sum is known not to go below this.
    """
    costs = problem.costs
    room = _Room(problem, cells)
    sums = [sum(costs[i] for cell in row for i in cells[cell]) for row in rows]
    work = EXCHANGE_WORK
    while True:
        full = max(range(len(rows)), key=lambda r: (sums[r], -r))
        if sums[full] <= bound:
            return sums[full]
        for other in sorted(range(len(rows)), key=lambda r: (sums[r], r)):
            difference = sums[full] - sums[other]
            if difference <= 1:
                return sums[full]
            best, chosen = difference, (-1, -1, -1, -1)
            for source in rows[full]:
                for target in rows[other]:
                    for given in cells[source]:
                        work -= 1 + len(cells[target])
                        if work < 0:
                            return sums[full]
                        for taken in [-1, *cells[target]]:
                            delta = costs[given] - (costs[taken] if taken >= 0 else 0)
                            off = abs(delta - (difference - delta))
                            if off >= best:
                                continue
                            if taken < 0:
                                allowed = room.may_move(source, target, given)
                            else:
                                allowed = room.may_swap(source, target, given, taken)
                            if allowed:
                                best, chosen = off, (source, target, given, taken)
            if chosen[0] >= 0:
                break
        else:
            return sums[full]
        source, target, given, taken = chosen
        room.exchange(source, target, given, taken)
        delta = costs[given] - (costs[taken] if taken >= 0 else 0)
        sums[full] -= delta
        sums[other] += delta


def improve_slots(problem: Problem, cells: Parts, bound: int) -> int:
    """Lower the sum of the slot maxima, cells being dealt to slots by descending cost; return the sum.

    The largest cell of a slot gives an item to any other cell, or swaps two; the first exchange that helps
    is made.

    Args:
        problem: The costs and limits.
        cells: Items of each cell; changed in place.
        bound: The sum is known not to go below this.
    """
    search = _Slots(problem, cells)
    slot, quiet = 0, 0
    while quiet < problem.accumulate and search.work >= 0 and search.value > bound:
        quiet = 0 if search.improve(slot) else quiet + 1
        slot = (slot + 1) % problem.accumulate
    return search.value


class _Slots:
    def __init__(self, problem: Problem, cells: Parts) -> None:
        self.problem, self.cells = problem, cells
        self.room = _Room(problem, cells)
        self.loads = loads_of(problem, cells)
        self.work = EXCHANGE_WORK
        self._sort()

    def _sort(self) -> None:
        self.order = by_load(self.loads)
        self.slot_of = [0] * len(self.order)
        for place, cell in enumerate(self.order):
            self.slot_of[cell] = place // self.problem.ranks
        self.value = sum(self.loads[cell] for cell in self.order[:: self.problem.ranks])

    def _most_without(self, slot: int, first: int, second: int) -> int:
        start = slot * self.problem.ranks
        for cell in self.order[start : start + min(self.problem.ranks, 3)]:
            if cell not in (first, second):
                return self.loads[cell]
        return 0

    def _change(self, source: int, target: int, delta: int) -> int:
        """Return how the sum of the maxima changes if `source` gives `delta` to `target`."""
        ranks, loads = self.problem.ranks, self.loads
        lower, higher = loads[source] - delta, loads[target] + delta
        here, there = self.slot_of[source], self.slot_of[target]
        old = loads[self.order[here * ranks]]
        if here == there:
            return max(self._most_without(here, source, target), lower, higher) - old
        change = max(self._most_without(here, source, source), lower) - old
        return (
            change + max(self._most_without(there, target, target), higher) - loads[self.order[there * ranks]]
        )

    def improve(self, slot: int) -> bool:
        """Make one exchange that helps; return whether there was one."""
        costs, cells = self.problem.costs, self.cells
        source = self.order[slot * self.problem.ranks]
        if self._most_without(slot, source, source) == self.loads[source]:
            return False
        for target in reversed(self.order):
            if target == source:
                continue
            for given in cells[source]:
                self.work -= 1 + len(cells[target])
                if self.work < 0:
                    return False
                for taken in [-1, *cells[target]]:
                    delta = costs[given] - (costs[taken] if taken >= 0 else 0)
                    if delta <= 0 or self._change(source, target, delta) >= 0:
                        continue
                    if taken < 0:
                        allowed = self.room.may_move(source, target, given)
                    else:
                        allowed = self.room.may_swap(source, target, given, taken)
                    if allowed:
                        self.room.exchange(source, target, given, taken)
                        self.loads[source] -= delta
                        self.loads[target] += delta
                        self._sort()
                        self.work -= len(cells)
                        return True
        return False
