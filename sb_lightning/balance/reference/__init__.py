"""The planner in plain Python: the twin of csrc/balance, result for result."""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from sb_lightning.balance.reference.bounds import ddp_bound, fsdp_bound
from sb_lightning.balance.reference.packing import pack
from sb_lightning.balance.reference.plan import plan_ddp, plan_fsdp
from sb_lightning.balance.reference.problem import NO_CAP, NoPacking, Problem

__all__ = ["NO_CAP", "lower_bound_us", "pack", "plan_cells"]

Integers = npt.NDArray[np.int64]


def plan_cells(
    costs: Integers,
    tokens: Integers,
    ranks: int,
    accumulate: int,
    is_fsdp: bool,
    max_tokens: int,
    equal_counts: bool,
    node_limit: int,
) -> tuple[Integers, Integers, bool]:
    """Deal items over ranks x accumulate cells.

    Args:
        costs: What is balanced, by item; not negative, and of a sum of 2**62 at most.
        tokens: Tokens of each item.
        ranks: Ranks.
        accumulate: Cells per rank; there are at least as many items as cells.
        is_fsdp: Whether the sum of the slot maxima is kept small, in place of the largest sum of a rank.
        max_tokens: Tokens that a cell may hold, or `NO_CAP`.
        equal_counts: Whether all cells hold the same number of items (one more where that cannot be).
        node_limit: Steps of the branch and bound; negative: no limit.

    Returns:
        The items, cell after cell, rank after rank; how many each cell holds; whether no plan is better.
        Where no cells under the cap were found there are no items, and the last tells whether none exist.
    """
    problem = _problem(costs, tokens, ranks, accumulate, max_tokens, equal_counts)
    try:
        rows, finished = (plan_fsdp if is_fsdp else plan_ddp)(problem, node_limit)
    except NoPacking as error:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, error.certain
    cells = list(chain.from_iterable(rows))
    items = np.array(list(chain.from_iterable(cells)), dtype=np.int64)
    return items, np.array([len(cell) for cell in cells], dtype=np.int64), finished


def lower_bound_us(costs: Integers, ranks: int, accumulate: int, is_fsdp: bool, equal_counts: bool) -> int:
    """Return a bound that no plan's value is below; arguments as for :func:`plan_cells`."""
    problem = _problem(costs, costs, ranks, accumulate, NO_CAP, equal_counts)
    return (fsdp_bound if is_fsdp else ddp_bound)(problem)


def _problem(
    costs: Integers, tokens: Integers, ranks: int, accumulate: int, max_tokens: int, equal_counts: bool
) -> Problem:
    return Problem(
        costs=costs.tolist(),
        tokens=tokens.tolist(),
        ranks=ranks,
        accumulate=accumulate,
        max_tokens=max_tokens,
        equal_counts=equal_counts,
    )
