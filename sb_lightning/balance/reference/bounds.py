"""What no plan can beat; the twin of csrc/balance/bounds.cpp."""

from __future__ import annotations

from sb_lightning.balance.reference.problem import Problem

__all__ = ["ddp_bound", "fsdp_bound", "pigeonhole_bound", "prefix_sums"]


def ddp_bound(problem: Problem) -> int:
    """Return a lower bound of the largest sum of a rank.

    The largest of: the mean; the largest item with the fewest items that must go with it; and the pigeonhole:
    of the j * ranks + 1 largest items some rank gets j + 1.
    """
    sums = prefix_sums(sorted(problem.costs, reverse=True))
    return max(-(-sums[-1] // problem.ranks), pigeonhole_bound(sums, problem.ranks, problem.rank_least))


def pigeonhole_bound(sums: list[int], bins: int, least: int) -> int:
    """Return what the fullest bin holds: j + 1 of the j * bins + 1 largest items, and the least others.

    Args:
        sums: Prefix sums of the costs in descending order, from 0.
        bins: Number of bins.
        least: Items that each bin holds at least.
    """
    num_items, bound = len(sums) - 1, 0
    for j in range((num_items - 1) // bins + 1):
        last = j * bins + 1
        others = max(least - j - 1, 0)
        bound = max(bound, sums[last] - sums[last - j - 1] + sums[num_items] - sums[num_items - others])
    return bound


def fsdp_bound(problem: Problem) -> int:
    """Return a lower bound of the sum over slots of the slot's largest cell.

    With one item per cell it is the optimum: the j-th largest slot maximum is at least item j * ranks.
    Otherwise the mean, or the pigeonhole over slots.
    """
    sums = prefix_sums(sorted(problem.costs, reverse=True))
    if problem.one_per_cell:
        return sum(sums[i + 1] - sums[i] for i in range(0, len(problem.costs), problem.ranks))
    return max(-(-sums[-1] // problem.ranks), _slot_bound(problem, sums))


def _slot_bound(problem: Problem, sums: list[int]) -> int:
    """Return the largest, over j, of what one cell of each slot holds at least.

    The greatest counts of the j * ranks + 1 largest items in a cell of each slot add up to more than j: the
    fullest cells of some j + 1 slots hold j + 1. From each other slot take the cell of its largest item. The
    a slots where that is smallest hold a * ranks * cell_least items: it is no smaller than the item of that
    rank from the end. No item is counted twice; what is missing to accumulate * cell_least is no smaller than
    the smallest items.
    """
    ranks, accumulate, least = problem.ranks, problem.accumulate, problem.cell_least
    size = len(problem.costs)
    # Sums of the largest items of the 0, 1, ... other slots.
    lowest = [0]
    for a in range(1, accumulate):
        last = size - a * ranks * least
        lowest.append(lowest[-1] + sums[last + 1] - sums[last])
    bound = 0
    for j in range((size - 1) // ranks + 1):
        last = j * ranks + 1
        rest = max(accumulate - j - 1, 0)
        others = max(accumulate * least - (j + 1) - rest, 0)
        bound = max(bound, sums[last] - sums[last - j - 1] + lowest[rest] + sums[size] - sums[size - others])
    return bound


def prefix_sums(values: list[int]) -> list[int]:
    """Return the sums of the first 0, 1, ... values."""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
