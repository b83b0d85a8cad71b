"""What the layers of a forward have decided, read from its record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sb_lightning.tuning.coverage import sampled_rows
from sb_lightning.tuning.target import BASE_COVERAGE, BUDGET, COVERAGE, SparseTarget

__all__ = ["ForwardOutcome", "RanForward"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ForwardOutcome:
    """What the sparse layers of one forward did, by sequence; padding is left out."""

    lengths: list[int]
    ids: list[int]
    rows: Floats
    """Weight of each sequence's coverage # [n]"""
    budgets: Floats
    """Mean over layers # [n]"""
    least_budget: int
    most_budget: int
    coverage: Floats
    """Mean over layers # [n]"""
    base_coverage: Floats
    """The same at k0 # [n]"""
    chosen_us: float
    """Predicted time of the micro-batch at the budgets used."""
    base_us: int
    """Predicted time of the micro-batch at k0."""
    decisions: int
    """Layers that have tuned."""
    infeasible: int
    """Of those, layers whose budgets take longer than they were to."""
    curves: Floats | None
    """Coverage at the points of the grid, mean over layers # [n, points]"""


@dataclass(frozen=True, kw_only=True)
class RanForward:
    """A forward that was given a target."""

    target: SparseTarget
    layers: list[int]
    """Its sparse layers."""
    lengths: list[int]
    ids: list[int]
    is_real: NDArray[np.bool_]
    """Which sequences are no padding # [N]"""
    cost_us: NDArray[np.int64]
    """# [N, max_budget]"""
    k0: NDArray[np.int64]
    """# [N]"""
    tau_us: int | None
    """Without the fixed cost; None: nothing was tuned."""
    fixed_us: int
    block_size: int
    expected: Floats | None = None
    """Coverage at budgets 1 to max_budget, where it was not measured # [n, max_budget]"""

    def outcome(self) -> ForwardOutcome | None:
        """Read the record, which may wait for the device; None if no layer has run."""
        if not self.is_real.any():
            return None
        record = self._read(self.target.record)
        ran = (record[..., BUDGET] > 0).all(axis=1)
        if not ran.any():
            return None
        record = record[ran][:, self.is_real]
        budgets = record[..., BUDGET].astype(np.int64)  # [layers, n]
        width = self.cost_us.shape[1]
        cost = self.cost_us[self.is_real]
        times = np.take_along_axis(cost[None], np.minimum(budgets, width)[..., None] - 1, axis=2)
        by_layer = times.sum(axis=(1, 2))
        usual = np.minimum(self.k0[self.is_real], width)[:, None] - 1
        real = np.flatnonzero(self.is_real).tolist()
        lengths = [self.lengths[n] for n in real]
        curves = self.target.curves
        if self.expected is not None:
            at = np.stack([np.minimum(budgets[0], width) - 1, usual[:, 0]], axis=1)
            record[..., [COVERAGE, BASE_COVERAGE]] = np.take_along_axis(self.expected, at, axis=1)
        is_tuned = self.tau_us is not None
        return ForwardOutcome(
            lengths=lengths,
            ids=[self.ids[n] for n in real],
            rows=np.array([sampled_rows(n, self.block_size) for n in lengths], dtype=np.float64),
            budgets=budgets.mean(axis=0),
            least_budget=int(budgets.min()),
            most_budget=int(budgets.max()),
            coverage=record[..., COVERAGE].mean(axis=0),
            base_coverage=record[..., BASE_COVERAGE].mean(axis=0),
            chosen_us=self.fixed_us + float(by_layer.mean()),
            base_us=self.fixed_us + int(np.take_along_axis(cost, usual, axis=1).sum()),
            decisions=len(budgets) if is_tuned else 0,
            infeasible=int((by_layer > self.tau_us).sum()) if self.tau_us is not None else 0,
            curves=None if curves is None else self._read(curves)[ran][:, self.is_real].mean(axis=0),
        )

    def _read(self, written: Tensor) -> Floats:
        """Return what the sparse layers have written # [layers, N, columns]."""
        return written[self.layers].to("cpu", torch.float64).numpy()
