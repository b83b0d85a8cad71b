"""Cells into slots and ranks; the twin of csrc/balance/slots.cpp.

A slot is the same micro-batch of all ranks: `slots[slot][rank]` is a cell.
"""

from __future__ import annotations

__all__ = ["by_load", "even_ranks", "line_up", "polish"]

# Cells that are looked at; not a time, so that all ranks stop alike.
POLISH_WORK = 1 << 16


def by_load(loads: list[int]) -> list[int]:
    """Return the cells by descending cost; ties by number."""
    return sorted(range(len(loads)), key=lambda c: (-loads[c], c))


def even_ranks(loads: list[int], slots: list[list[int]]) -> None:
    """Permute the cells of each slot so that the sums of the ranks come close; slot maxima stay.

    Args:
        loads: Cost of each cell.
        slots: The cells of each slot, by rank; changed in place.
    """
    ranks = len(slots[0])
    sums = [0] * ranks

    def spread(slot: int) -> int:
        values = [loads[cell] for cell in slots[slot]]
        return max(values) - min(values)

    for slot in sorted(range(len(slots)), key=lambda s: (-spread(s), s)):
        cells = sorted(slots[slot], key=lambda cell: (-loads[cell], cell))
        for cell, rank in zip(cells, sorted(range(ranks), key=lambda r: (sums[r], r)), strict=True):
            slots[slot][rank] = cell
            sums[rank] += loads[cell]
    work = 32 * len(slots) * ranks + 1024
    while work > 0:
        full = max(range(ranks), key=lambda r: (sums[r], -r))
        for n, other in enumerate(sorted(range(ranks), key=lambda r: (sums[r], r))):
            difference = sums[full] - sums[other]
            if difference <= 1 or work <= 0:
                return
            work -= len(slots)
            best, chosen = difference, -1
            for slot, cells in enumerate(slots):
                delta = loads[cells[full]] - loads[cells[other]]
                if 0 < delta < difference and abs(delta - (difference - delta)) < best:
                    best, chosen = abs(delta - (difference - delta)), slot
            if chosen >= 0:
                break
            # The others have to be sorted.
            work -= ranks if n == 0 else 0
        else:
            return
        cells = slots[chosen]
        delta = loads[cells[full]] - loads[cells[other]]
        cells[full], cells[other] = cells[other], cells[full]
        sums[full] -= delta
        sums[other] += delta


def line_up(loads: list[int], rows: list[list[int]]) -> None:
    """Order the cells of each rank by descending cost, which makes the sum of the slot maxima least."""
    for row in rows:
        row.sort(key=lambda cell: (-loads[cell], cell))


def polish(loads: list[int], rows: list[list[int]]) -> None:
    """Swap cells between ranks while the sum of the slot maxima falls and no rank exceeds the fullest.

    Args:
        loads: Cost of each cell.
        rows: The cells of each rank by descending cost; changed in place.
    """
    ranks, accumulate = len(rows), len(rows[0])
    sums = [sum(loads[cell] for cell in row) for row in rows]
    most = max(sums)
    size = ranks * accumulate
    work = POLISH_WORK
    value = _slot_sum(loads, rows)
    improved = True
    while improved:
        improved = False
        for slot in range(accumulate):
            given = max(range(ranks), key=lambda r: (loads[rows[r][slot]], -r))
            for taken in range(ranks):
                for place in range(accumulate):
                    delta = loads[rows[given][slot]] - loads[rows[taken][place]]
                    work -= 1
                    if work < 0:
                        return
                    if taken == given or delta <= 0 or sums[taken] + delta > most:
                        continue
                    work -= size
                    if work < 0:
                        return
                    before = rows[given], rows[taken]
                    x, y = rows[given][slot], rows[taken][place]
                    rows[given] = _with(loads, rows[given], x, y)
                    rows[taken] = _with(loads, rows[taken], y, x)
                    after = _slot_sum(loads, rows)
                    if after >= value:
                        rows[given], rows[taken] = before
                        continue
                    value = after
                    improved = True
                    sums[given] -= delta
                    sums[taken] += delta
                    given = max(range(ranks), key=lambda r: (loads[rows[r][slot]], -r))


def _with(loads: list[int], row: list[int], old: int, new: int) -> list[int]:
    changed = [new if cell == old else cell for cell in row]
    changed.sort(key=lambda cell: (-loads[cell], cell))
    return changed


def _slot_sum(loads: list[int], rows: list[list[int]]) -> int:
    return sum(max(loads[row[slot]] for row in rows) for slot in range(len(rows[0])))
