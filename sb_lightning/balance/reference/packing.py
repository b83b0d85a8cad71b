"""Items into cells by their tokens; the twin of csrc/balance/packing.cpp."""

from __future__ import annotations

from sb_lightning.balance.reference.greedy import largest_first
from sb_lightning.balance.reference.problem import MOST_SEARCHED, NO_CAP, Parts

__all__ = ["pack"]

SEARCHED_NODES = 100_000


def pack(
    tokens: list[int], items: list[int], cells: int, least: int, most: int, cap: int
) -> tuple[Parts | None, bool]:
    """Spread items over cells by tokens; where that breaks the cap, by best fit, then by search.

    Args:
        tokens: Tokens of each item of the window.
        items: The items to pack, ascending; enough for all cells.
        cells: Number of cells.
        least: Items that each cell holds at least.
        most: Items that each cell may hold.
        cap: Tokens that a cell may hold, or `NO_CAP`.

    Returns:
        The items of each cell, or None; and, for None, whether it is certain that there is no packing.
    """
    order = sorted(items, key=lambda i: (-tokens[i], i))
    sizes = [tokens[i] for i in order]
    parts: Parts | None = largest_first(sizes, cells, least, most)
    if cap != NO_CAP and max(_sums(sizes, parts or [])) > cap:
        if sum(sizes) > cells * cap or sizes[0] > cap:
            return None, True
        parts = _best_fit(sizes, cells, least, most, cap)
        if parts is None:
            if len(items) > MOST_SEARCHED:
                return None, False
            search = _Search(sizes, cells, least, most, cap)
            if not search.run(0):
                return None, search.nodes <= SEARCHED_NODES
            parts = search.parts
    return [sorted(order[i] for i in part) for part in parts or []], True


def _sums(sizes: list[int], parts: Parts) -> list[int]:
    return [sum(sizes[i] for i in part) for part in parts]


def _best_fit(sizes: list[int], cells: int, least: int, most: int, cap: int) -> Parts | None:
    """Put each item, largest first, where the least room remains."""
    parts: Parts = [[] for _ in range(cells)]
    sums = [0] * cells
    for i, size in enumerate(sizes):
        best = -1
        for c in range(cells):
            fits = len(parts[c]) < most and size <= cap - sums[c]
            if fits and (best < 0 or sums[c] > sums[best]):
                best = c
        if best < 0:
            return None
        parts[best].append(i)
        sums[best] += size
    for poor in range(cells):
        while len(parts[poor]) < least:
            rich = -1
            for c in range(cells):
                spare = len(parts[c]) > least and sizes[parts[c][-1]] <= cap - sums[poor]
                if spare and (rich < 0 or len(parts[c]) > len(parts[rich])):
                    rich = c
            if rich < 0:
                return None
            item = parts[rich].pop()
            parts[poor].append(item)
            sums[rich] -= sizes[item]
            sums[poor] += sizes[item]
    return parts


class _Search:
    """All packings, item after item, largest first; cells alike are tried once."""

    def __init__(self, sizes: list[int], cells: int, least: int, most: int, cap: int) -> None:
        self.sizes, self.least, self.most, self.cap = sizes, least, most, cap
        self.parts: Parts = [[] for _ in range(cells)]
        self.sums = [0] * cells
        self.missing = cells * least
        self.nodes = 0

    def run(self, item: int) -> bool:
        """Place this item and all after it."""
        if item == len(self.sizes):
            return True
        only_poor = len(self.sizes) - item == self.missing
        for c, part in enumerate(self.parts):
            count, total = len(part), self.sums[c]
            poor = count < self.least
            if count >= self.most or self.sizes[item] > self.cap - total or (only_poor and not poor):
                continue
            if any(self.sums[d] == total and len(self.parts[d]) == count for d in range(c)):
                continue
            self.nodes += 1
            if self.nodes > SEARCHED_NODES:
                return False
            part.append(item)
            self.sums[c] += self.sizes[item]
            self.missing -= poor
            if self.run(item + 1):
                return True
            self.missing += poor
            self.sums[c] -= self.sizes[item]
            part.pop()
        return False
