"""A window of tuned micro-batches: what each rank tells the others, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sb_lightning.balance.window_sync import Gathered
from sb_lightning.callbacks.sparse_balance_outcome import ForwardOutcome

__all__ = ["WindowOutcome", "decode_window", "encode_window", "payload_sizes"]

Floats = NDArray[np.float64]
SUMS = (
    "rows",
    "coverage",
    "base_coverage",
    "budget",
    "sequences",
    "decisions",
    "infeasible",
    "chosen_us",
    "tune_ms",
)
"""What adds up over micro-batches and ranks; both coverages are weighed by rows."""
EXTREMES = ("least_budget", "most_budget")
COUNTS = ("named", "cells", "base_total_us", "base_least_us", "base_most_us")
"""Whole numbers of a rank: sequences that follow, micro-batches, and their times at k0."""


def payload_sizes(capacity: int, points: int) -> tuple[int, int]:
    """Return how many floats and ints a rank tells of a window.

    Args:
        capacity: Sequences that there is room for.
        points: Points of a coverage curve; 0 where curves are not learnt.
    """
    return len(SUMS) + len(EXTREMES) + capacity * (1 + points + (points > 0)), len(COUNTS) + 2 * capacity


@dataclass(frozen=True, kw_only=True)
class WindowOutcome:
    """What a window came to, over all ranks; equal on all of them."""

    sums: dict[str, float]
    least_budget: int
    most_budget: int
    cells: int
    """Micro-batches."""
    base_total_us: int
    """Sum of their predicted times at k0."""
    base_least_us: int
    base_most_us: int
    ids: list[int]
    """Of each sequence whose budget is known; -1 where it has none."""
    lengths: list[int]
    budgets: list[float]
    rows: Floats
    """Weight of each sequence's coverage; nothing where curves are not learnt # [n] or [0]"""
    curves: Floats
    """Coverage curve of each sequence; NaN where it was not measured # [n, points]"""
    named: list[int]
    """Those of each rank."""
    forwards: list[int]
    """Micro-batches of each rank."""
    ranks: int

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the window by name."""
        sums, rows = self.sums, max(self.sums["rows"], 1.0)
        has_rows = self.sums["rows"] > 0
        return {
            "sparsity/budget_mean": sums["budget"] / max(sums["sequences"], 1.0),
            "sparsity/budget_min": float(self.least_budget),
            "sparsity/budget_max": float(self.most_budget),
            # Sequences of one block have nothing to leave out.
            "sparsity/coverage_mean": sums["coverage"] / rows if has_rows else 1.0,
            "sparsity/coverage_delta": (sums["coverage"] - sums["base_coverage"]) / rows,
            "sparsity/infeasible": sums["infeasible"] / max(sums["decisions"], 1.0),
            "balance/work_ratio": sums["chosen_us"] / max(self.base_total_us, 1),
            "time/tune_ms": sums["tune_ms"] / self.ranks,
        }


def encode_window(
    outcomes: Sequence[ForwardOutcome], *, capacity: int, points: int, tune_ms: float
) -> tuple[list[float], list[int]]:
    """Write this rank's part of a window as numbers of a fixed count.

    Args:
        outcomes: Its forwards; none for "nothing to tell".
        capacity: Sequences that there is room for; of those that are too many only the sums are told.
        points: Points of a coverage curve.
        tune_ms: Time that tuning has taken.
    """
    sums = {
        "rows": sum(float(o.rows.sum()) for o in outcomes),
        "coverage": sum(float(o.rows @ o.coverage) for o in outcomes),
        "base_coverage": sum(float(o.rows @ o.base_coverage) for o in outcomes),
        "budget": sum(float(o.budgets.sum()) for o in outcomes),
        "sequences": float(sum(len(o.lengths) for o in outcomes)),
        "decisions": float(sum(o.decisions for o in outcomes)),
        "infeasible": float(sum(o.infeasible for o in outcomes)),
        "chosen_us": sum(o.chosen_us for o in outcomes),
        "tune_ms": tune_ms,
    }
    floats = [float(sums[name]) for name in SUMS]
    floats.append(float(min((o.least_budget for o in outcomes), default=0)))
    floats.append(float(max((o.most_budget for o in outcomes), default=0)))
    base = [o.base_us for o in outcomes]
    ids = [i for o in outcomes for i in o.ids][:capacity]
    lengths = [n for o in outcomes for n in o.lengths][:capacity]
    ints = [len(ids), len(base), sum(base), min(base, default=0), max(base, default=0)]
    ints += ids + [0] * (capacity - len(ids)) + lengths + [0] * (capacity - len(lengths))
    floats += _padded([b for o in outcomes for b in o.budgets.tolist()], capacity)
    if points:
        floats += _padded([r for o in outcomes for r in o.rows.tolist()], capacity)
        flat = [np.full((len(o.lengths), points), np.nan) if o.curves is None else o.curves for o in outcomes]
        floats += _padded(np.concatenate(flat).ravel().tolist() if flat else [], capacity * points)
    return floats, ints


def decode_window(gathered: Gathered, *, capacity: int, points: int) -> WindowOutcome | None:
    """Read what all ranks have told; None where no rank had anything to tell."""
    floats, ints = gathered.floats, gathered.ints
    told = ints[:, 1] > 0
    if not told.any():
        return None
    # In the order of ranks, by plain additions: the same bits everywhere.
    sums = {name: float(sum(floats[:, i].tolist())) for i, name in enumerate(SUMS)}
    at = len(SUMS)
    named = np.minimum(ints[:, 0], capacity).tolist()
    ids, lengths, budgets, rows, curves = [], [], [], [], []
    start = len(SUMS) + len(EXTREMES)
    for rank, count in enumerate(named):
        row = ints[rank, len(COUNTS) :]
        ids += row[:count].tolist()
        lengths += row[capacity : capacity + count].tolist()
        values = floats[rank, start:]
        budgets += values[:count].tolist()
        if points:
            rows.append(values[capacity : capacity + count])
            curves.append(values[2 * capacity :].reshape(capacity, points)[:count])
    return WindowOutcome(
        sums=sums,
        least_budget=int(floats[told, at].min()),
        most_budget=int(floats[told, at + 1].max()),
        cells=int(ints[:, 1].sum()),
        base_total_us=int(ints[:, 2].sum()),
        base_least_us=int(ints[told, 3].min()),
        base_most_us=int(ints[told, 4].max()),
        ids=ids,
        lengths=lengths,
        budgets=budgets,
        rows=np.concatenate(rows) if rows else np.zeros(0),
        curves=np.concatenate(curves) if curves else np.zeros((0, points)),
        named=named,
        forwards=ints[:, 1].tolist(),
        ranks=len(ints),
    )


def _padded(values: list[float], count: int) -> list[float]:
    return [*values[:count], *([0.0] * (count - len(values)))]
