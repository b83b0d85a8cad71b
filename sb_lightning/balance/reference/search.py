"""Branch and bound for few items; the twin of csrc/balance/search.cpp."""

from __future__ import annotations

from collections.abc import Callable

from sb_lightning.balance.reference.bounds import pigeonhole_bound, prefix_sums
from sb_lightning.balance.reference.problem import NO_CAP, Parts, Problem

__all__ = ["search_ranks", "search_slots"]


def search_ranks(
    costs: list[int],
    bins: int,
    least: int,
    most: int,
    value: int,
    bound: int,
    node_limit: int,
    fits: Callable[[list[int]], bool | None] | None,
) -> tuple[Parts | None, bool]:
    """Look for bins whose largest sum is below `value`, one bin after another.

    Args:
        costs: Cost of each item, descending.
        bins: Number of bins.
        least: Items that each bin holds at least.
        most: Items that each bin may hold.
        value: The largest sum known so far.
        bound: No largest sum is below this.
        node_limit: Steps after which it gives up; negative: never.
        fits: Whether a bin's items are allowed together, its answer None being not known; None: always.

    Returns:
        The best bins if any beat `value`, and whether nothing better exists.
    """
    search = _Ranks(costs, least, most, value, bound, node_limit, fits)
    search.next_bin(list(range(len(costs))), bins, sum(costs), 0, [])
    return search.found, not (search.stopped or search.in_doubt)


class _Ranks:
    def __init__(
        self,
        costs: list[int],
        least: int,
        most: int,
        value: int,
        bound: int,
        node_limit: int,
        fits: Callable[[list[int]], bool | None] | None,
    ) -> None:
        self.costs, self.least, self.most = costs, least, most
        self.best, self.bound, self.node_limit, self.fits = value, bound, node_limit, fits
        self.nodes = 0
        self.stopped = False
        self.in_doubt = False
        self.found: Parts | None = None

    def next_bin(self, rest: list[int], bins: int, total: int, largest: int, done: Parts) -> None:
        """Fill the next of `bins` bins from the items `rest` of sum `total`."""
        if bins == 1:
            if self.least <= len(rest) <= self.most and total < self.best and self._allowed(rest):
                self.best = max(total, largest)
                self.found = [*done, rest]
            return
        # Which bin is first does not matter: it is that of the largest item.
        sums = prefix_sums([self.costs[item] for item in rest])
        if pigeonhole_bound(sums, bins, self.least) >= self.best:
            return
        self._extend(rest, sums, bins, [0], 1, self.costs[rest[0]], largest, done)

    def _allowed(self, part: list[int]) -> bool:
        answer = True if self.fits is None else self.fits(part)
        self.in_doubt = self.in_doubt or answer is None
        return bool(answer)

    def _low(self, bins: int, total: int) -> int:
        """Return what this bin must hold so that the others stay below the best."""
        return total - (bins - 1) * (self.best - 1)

    def _over(self, largest: int) -> bool:
        return self.stopped or self.best <= self.bound or largest >= self.best

    def _extend(
        self,
        rest: list[int],
        sums: list[int],
        bins: int,
        chosen: list[int],
        start: int,
        total: int,
        largest: int,
        done: Parts,
    ) -> None:
        """Try the bin with the chosen places of `rest`, and with every extension from `start` on."""
        count, others = len(chosen), len(rest) - len(chosen)
        whole = sums[-1]
        if total >= self.best:
            return
        if (
            self.least <= count
            and (bins - 1) * self.least <= others <= (bins - 1) * self.most
            and total >= self._low(bins, whole)
        ):
            part = [rest[place] for place in chosen]
            if self._allowed(part):
                taken = set(chosen)
                left = [item for place, item in enumerate(rest) if place not in taken]
                self.next_bin(left, bins - 1, whole - total, max(largest, total), [*done, part])
        if count == self.most:
            return
        for place in range(start, len(rest)):
            if self._over(max(largest, total)):
                return
            self.nodes += 1
            if 0 <= self.node_limit < self.nodes:
                self.stopped = True
                return
            available = len(rest) - place
            if count + available < self.least:
                return
            take = min(self.most - count, available)
            if total + sums[place + take] - sums[place] < self._low(bins, whole):
                return
            cost = self.costs[rest[place]]
            if place > start and self.fits is None and cost == self.costs[rest[place - 1]]:
                continue
            need = max(self.least - count - 1, 0)
            if total + cost + whole - sums[len(rest) - need] >= self.best:
                continue
            self._extend(rest, sums, bins, [*chosen, place], place + 1, total + cost, largest, done)


def search_slots(problem: Problem, value: int, bound: int, node_limit: int) -> tuple[Parts | None, bool]:
    """Look for cells whose sum of slot maxima is below `value`, one item after another.

    Args:
        problem: The costs, descending, and limits.
        value: The sum known so far.
        bound: No sum is below this.
        node_limit: Steps after which it gives up; negative: never.

    Returns:
        The best cells if any beat `value`, and whether nothing better exists.
    """
    search = _Slots(problem, value, bound, node_limit)
    search.place(0)
    return search.found, not search.stopped


class _Slots:
    def __init__(self, problem: Problem, value: int, bound: int, node_limit: int) -> None:
        self.problem = problem
        self.best, self.bound, self.node_limit = value, bound, node_limit
        self.cells: Parts = [[] for _ in range(problem.num_cells)]
        self.loads, self.tokens = [0] * problem.num_cells, [0] * problem.num_cells
        self.missing = problem.num_cells * problem.cell_least
        self.maxima = [0] * problem.accumulate
        self.left = sum(problem.costs)
        self.nodes = 0
        self.stopped = False
        self.found: Parts | None = None

    def _hopeless(self) -> bool:
        """Whether what is placed, and what finds no room below the maxima, reaches the best."""
        ranks = self.problem.ranks
        value = sum(self.maxima)
        room = ranks * value - sum(self.loads)
        return value + max(0, -(-(self.left - room) // ranks)) >= self.best

    def place(self, item: int) -> None:
        """Place this item and all after it."""
        problem = self.problem
        if item == len(problem.costs):
            self.best = sum(self.maxima)
            self.found = [list(cell) for cell in self.cells]
            return
        cost, size = problem.costs[item], problem.tokens[item]
        only_poor = len(problem.costs) - item == self.missing
        for cell in range(len(self.cells)):
            slot = cell // problem.ranks
            count = len(self.cells[cell])
            poor = count < problem.cell_least
            if count >= problem.cell_most or (only_poor and not poor):
                continue
            if problem.max_tokens != NO_CAP and size > problem.max_tokens - self.tokens[cell]:
                continue
            if self._seen(cell, slot):
                continue
            self.nodes += 1
            if 0 <= self.node_limit < self.nodes:
                self.stopped = True
                return
            before = self.maxima[slot]
            self.cells[cell].append(item)
            self.loads[cell] += cost
            self.tokens[cell] += size
            self.maxima[slot] = max(before, self.loads[cell])
            self.missing -= poor
            self.left -= cost
            if not self._hopeless():
                self.place(item + 1)
            self.left += cost
            self.missing += poor
            self.maxima[slot] = before
            self.tokens[cell] -= size
            self.loads[cell] -= cost
            self.cells[cell].pop()
            if self.stopped or self.best <= self.bound:
                return

    def _seen(self, cell: int, slot: int) -> bool:
        """Whether a cell before this one in the slot, or an empty slot before, is just like it."""
        for other in range(slot * self.problem.ranks, cell):
            if (
                self.loads[other] == self.loads[cell]
                and self.tokens[other] == self.tokens[cell]
                and len(self.cells[other]) == len(self.cells[cell])
            ):
                return True
        start = slot * self.problem.ranks
        return slot > 0 and not any(
            self.cells[c] for c in range(start - self.problem.ranks, start + self.problem.ranks)
        )
