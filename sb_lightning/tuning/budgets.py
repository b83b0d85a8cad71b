"""The choice of budgets on plain arrays: checks, and C++ or its twin."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from sb_lightning._messages import explain
from sb_lightning.latency.engine import ENGINE
from sb_lightning.tuning.reference import MANY_BLOCKS, BudgetSequence, fixed_point
from sb_lightning.tuning.reference import choose_budgets as choose_in_python

__all__ = ["choose_budgets"]

INT32_MAX = 2**31 - 1
Integers = int | Sequence[int] | npt.NDArray[np.integer[Any]]


def choose_budgets(
    coverage: npt.ArrayLike,
    cost_us: npt.ArrayLike,
    tau_us: int,
    *,
    tolerance: float,
    k0: Integers,
    min_budget: int = 1,
    rows: Integers = 1,
    num_blocks: Integers | None = None,
    tune_short: bool = False,
) -> npt.NDArray[np.int32]:
    """Choose the attention budget of each sequence of a micro-batch (after SparseBalance, arXiv 2604.13847).

    Allowed are the budgets k with |C(k) - C(k0)| <= tolerance, an interval around k0. One sequence gets the
    largest allowed one that takes at most `tau_us`, or the least if none does. Several start at their least
    and grow block by block, each time where rows x coverage per time is highest, as long as the sum of
    times stays within `tau_us`. The rule is total, deterministic, and compares whole numbers only, so ranks
    and devices that are given the same choose the same.

    A sequence that `k0` covers whole stays at `k0`, and so do all at tolerance 0 and any whose coverage is
    constant.

    Args:
        coverage: C(k) at k = 1, 2, ..., max_budget # [N, max_budget]; rounded to 2^-30, and raised where it
            falls
        cost_us: Time at the same budgets in whole microseconds # [N, max_budget], as `LatencyTable.cost_us`
            gives it
        tau_us: Time that the sum may take.
        tolerance: Largest change of coverage, in [0, 1].
        k0: Budget when nothing is tuned; one for all or one per sequence.
        min_budget: No budget is lowered below it.
        rows: Weight of each sequence's coverage, as `sampled_rows` counts it.
        num_blocks: Blocks of each sequence; if None, none is covered whole by `k0`.
        tune_short: Also cut sequences that `k0` covers whole.

    Returns:
        # [N]

    Raises:
        TypeError: A count is no integer.
        ValueError: The shapes do not fit, or a value is out of range; the message names it.

    Example:
        >>> curve, times = [[0.0, 0.6, 0.9, 1.0]], [[10, 20, 30, 40]]
        >>> [choose_budgets(curve, times, tau, tolerance=0.35, k0=3).item() for tau in (45, 25, 5)]
        [4, 2, 2]
    """
    curves = np.asarray(coverage, dtype=np.float64)
    costs = np.asarray(cost_us)
    if curves.ndim != 2 or curves.shape != costs.shape or curves.shape[1] < 1:
        raise ValueError(
            explain(
                f"coverage has shape {curves.shape} and cost_us {costs.shape}",
                "each sequence has both at every budget from 1 to max_budget",
                "pass two arrays [sequences, max_budget]",
            )
        )
    costs = _integers("cost_us", costs, "microseconds")
    if costs.size and (costs.min() < 0 or costs.max() > INT32_MAX or bool((np.diff(costs) < 0).any())):
        raise ValueError(
            explain(
                "cost_us falls somewhere when the budget grows, or is no time of 31 bits",
                "the choice goes by what the next block costs",
                "take it from LatencyTable.cost_us",
            )
        )
    count = curves.shape[0]
    usual = _per_sequence("k0", k0, count, least=1)
    weights = _per_sequence("rows", rows, count, least=0)
    blocks = _per_sequence("num_blocks", MANY_BLOCKS if num_blocks is None else num_blocks, count, least=0)
    least = int(_per_sequence("min_budget", min_budget, 1, least=1)[0])
    if not tolerance >= 0:
        raise ValueError(
            explain(
                f"tolerance is {tolerance}",
                "it bounds how much coverage may change",
                "pass a tolerance between 0 and 1",
            )
        )
    tau = max(-(2**62), min(int(_integers("tau_us", np.asarray(tau_us), "microseconds")), 2**62))
    if ENGINE.available:
        chosen: npt.NDArray[np.int32] = import_module("sb_lightning._core").choose_budgets(
            curves, costs, tau, tolerance, usual, least, weights, blocks, tune_short
        )
        return chosen
    sequences = [
        BudgetSequence(
            coverage=np.maximum.accumulate([fixed_point(share) for share in curve]).tolist(),
            cost_us=cost,
            k0=k,
            rows=weight,
            blocks=number,
        )
        for curve, cost, k, weight, number in zip(
            curves.tolist(), costs.tolist(), usual.tolist(), weights.tolist(), blocks.tolist(), strict=True
        )
    ]
    budgets = choose_in_python(
        sequences,
        tau_us=tau,
        tolerance=fixed_point(tolerance),
        min_budget=least,
        tune_short=tune_short,
    )
    return np.asarray(budgets, dtype=np.int32)


def _integers(name: str, values: npt.NDArray[Any], what: str) -> npt.NDArray[np.int64]:
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(
            explain(
                f"{name} holds {values.dtype}",
                f"it counts {what}, and whole numbers compare alike everywhere",
                f"pass {name} as integers",
            )
        )
    return values.astype(np.int64)


def _per_sequence(name: str, given: Integers, count: int, least: int) -> npt.NDArray[np.int64]:
    values = _integers(name, np.asarray(given), "rows or blocks")
    if values.ndim > 1 or values.size not in (1, count):
        raise ValueError(
            explain(
                f"{name} has shape {values.shape} for {count} sequences",
                "there is one for all or one per sequence",
                f"pass {name} as an int or a list of {count}",
            )
        )
    if values.size and not least <= values.min() <= values.max() <= INT32_MAX:
        wrong = int(values.min() if values.min() < least else values.max())
        raise ValueError(
            explain(f"{name} is {wrong}", "it counts rows or blocks", f"pass {name} >= {least}, below 2^31")
        )
    return np.ascontiguousarray(np.broadcast_to(values.reshape(-1), (count,)))
