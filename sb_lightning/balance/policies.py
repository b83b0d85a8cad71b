"""Policies that deal a window's items by a fixed rule, to compare the planner with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

__all__ = ["OBJECTIVES", "POLICIES", "Objective", "Policy", "deal_random", "deal_sorted", "even_cells"]

Policy = Literal["random", "length", "tokens", "flops", "latency"]
POLICIES: tuple[str, ...] = get_args(Policy)
Objective = Literal["ddp", "fsdp"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


def deal_random(num_items: int, ranks: int) -> list[list[int]]:
    """Give item i to rank ``i % ranks``, as a ``DistributedSampler`` does; return the items of each rank.

    Example:
        >>> deal_random(5, 2)
        [[0, 2, 4], [1, 3]]
    """
    return [list(range(rank, num_items, ranks)) for rank in range(ranks)]


def deal_sorted(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal items by descending tokens, `ranks` at a time, in alternating direction; return each rank's items.

    Our reading of the length-based batching of SparseBalance (arXiv 2604.13847): neighbours in length share a
    slot.

    Example:
        >>> deal_sorted([5, 9, 7, 3], 2)
        [[1, 3], [2, 0]]
    """
    order = np.argsort(-np.asarray(tokens), kind="stable").tolist()
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        slot = order[start : start + ranks]
        backwards = start // ranks % 2 == 1
        for place, item in enumerate(slot):
            rows[ranks - 1 - place if backwards else place].append(item)
    return rows


def even_cells(items: Sequence[int], num_cells: int) -> list[list[int]]:
    """Cut items in order into cells whose counts differ by at most one, the larger first.

    Example:
        >>> even_cells([4, 2, 7, 1, 0], 2)
        [[4, 2, 7], [1, 0]]
    """
    share, extra = divmod(len(items), num_cells)
    cells, start = [], 0
    for cell in range(num_cells):
        stop = start + share + (cell < extra)
        cells.append(list(items[start:stop]))
        start = stop
    return cells
