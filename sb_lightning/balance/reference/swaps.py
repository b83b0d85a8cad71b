"""Moves and swaps between the fullest bin and others; the twin of csrc/balance/swaps.cpp."""

from __future__ import annotations

from bisect import bisect_left, insort

from sb_lightning.balance.reference.problem import Parts

__all__ = ["improve"]


def improve(costs: list[int], parts: Parts, least: int, most: int, bound: int) -> int:
    """Lower the largest sum until nothing helps, and return it.

    The fullest bin gives an item to another, or swaps two, so that both end below what it had; of the
    exchanges with one partner the one that levels them best is made. Partners are tried from the emptiest on.

    Args:
        costs: Cost of each item, descending.
        parts: Items of each bin, ascending; changed in place. Not all items need be there.
        least: Items that each bin holds at least.
        most: Items that each bin may hold.
        bound: The largest sum is known not to go below this.
    """
    sums = [sum(costs[i] for i in part) for part in parts]
    # A limit in work, not in time: all ranks must stop at the same point.
    work = 32 * sum(map(len, parts)) + 1024
    while work > 0:
        full = max(range(len(parts)), key=lambda b: (sums[b], -b))
        if sums[full] <= bound:
            break
        for n, other in enumerate(sorted(range(len(parts)), key=lambda b: (sums[b], b))):
            difference = sums[full] - sums[other]
            if difference <= 1 or work <= 0:
                return sums[full]
            work -= len(parts[full])
            may_move = len(parts[full]) > least and len(parts[other]) < most
            given, taken = _best(costs, parts[full], parts[other], difference, may_move)
            if given >= 0:
                break
            # The others have to be sorted.
            work -= len(parts) if n == 0 else 0
        else:
            return sums[full]
        _exchange(parts[full], parts[other], given, taken)
        delta = costs[given] - (costs[taken] if taken >= 0 else 0)
        sums[full] -= delta
        sums[other] += delta
    return max(sums)


def _best(
    costs: list[int], full: list[int], other: list[int], difference: int, may_move: bool
) -> tuple[int, int]:
    """Return (item given, item taken or -1) that leaves the two bins most alike; (-1, -1): none helps."""
    best, given, taken = difference, -1, -1
    for item in full:
        cost = costs[item]
        if may_move and 0 < cost < difference and abs(cost - (difference - cost)) < best:
            best, given, taken = abs(cost - (difference - cost)), item, -1
        # Items are in descending order of cost: the first partner whose swap moves at least half.
        low, high = 0, len(other)
        while low < high:
            middle = (low + high) // 2
            delta = cost - costs[other[middle]]
            if delta < difference - delta:
                low = middle + 1
            else:
                high = middle
        for place in (low, low - 1):
            if 0 <= place < len(other):
                delta = cost - costs[other[place]]
                if 0 < delta < difference and abs(delta - (difference - delta)) < best:
                    best, given, taken = abs(delta - (difference - delta)), item, other[place]
    return given, taken


def _exchange(full: list[int], other: list[int], given: int, taken: int) -> None:
    del full[bisect_left(full, given)]
    if taken >= 0:
        del other[bisect_left(other, taken)]
        insort(full, taken)
    insort(other, given)
