"""The differencing method; the twin of csrc/balance/karmarkar_karp.cpp."""

from __future__ import annotations

import heapq

from sb_lightning.balance.reference.problem import Parts

__all__ = ["differencing", "meet_least"]

Entry = tuple[int, list[int]]


def differencing(costs: list[int], bins: int, group: int) -> Parts:
    """Merge the two partial partitions of largest spread, largest bin with smallest, until one is left.

    Karmarkar and Karp (1982), for more than two bins. With `group` = `bins` it starts from tuples of that
    many neighbours, and all bins get the same number of items (one more where that cannot be).

    Args:
        costs: Cost of each item, descending.
        bins: Number of bins.
        group: Items of each partition at the start: 1, or `bins`.
    """
    heap: list[tuple[int, int, list[Entry]]] = []
    for start in range(0, len(costs), group):
        entries = [(costs[i], [i]) for i in range(start, min(start + group, len(costs)))]
        heap.append((-_spread(entries, bins), len(heap), entries))
    heapq.heapify(heap)
    created = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merge(first, second, bins)
        heapq.heappush(heap, (-_spread(merged, bins), created, merged))
        created += 1
    parts = [sorted(items) for _, items in heap[0][2]]
    return parts + [[] for _ in range(bins - len(parts))]


def _spread(entries: list[Entry], bins: int) -> int:
    return entries[0][0] - (entries[-1][0] if len(entries) == bins else 0)


def _merge(first: list[Entry], second: list[Entry], bins: int) -> list[Entry]:
    """Join partitions whose bins are listed by descending sum, without the empty ones."""
    merged = []
    for i, (total, items) in enumerate(first):
        other = bins - 1 - i
        if other < len(second):
            merged.append((total + second[other][0], items + second[other][1]))
        else:
            merged.append((total, items))
    for i in range(max(len(first), bins - len(second)), bins):
        merged.append(second[bins - 1 - i])
    merged.sort(key=lambda entry: -entry[0])
    return merged


def meet_least(costs: list[int], parts: Parts, least: int) -> None:
    """Give every bin its least number of items: the smallest of the fullest bin that can spare one."""
    sums = [sum(costs[i] for i in part) for part in parts]
    for poor, part in enumerate(parts):
        while len(part) < least:
            rich = max((b for b in range(len(parts)) if len(parts[b]) > least), key=lambda b: (sums[b], -b))
            item = parts[rich].pop()
            part.append(item)
            part.sort()
            sums[rich] -= costs[item]
            sums[poor] += costs[item]
