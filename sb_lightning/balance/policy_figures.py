"""Figures of one policy, collected window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sb_lightning.tracking.metrics import imbalances

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sb_lightning.balance.window import WindowPlan

__all__ = ["PERFECT", "SUFFIX", "PlanFigures", "PolicyFigures"]

PERFECT = "perfect balance"
"""The row of a table that tells what every policy would give if all ranks could have the mean load."""
SUFFIX = "_predicted"
"""Of the names of imbalances that are predicted."""


@dataclass(frozen=True, kw_only=True)
class PolicyFigures:
    """What one policy is predicted to give, over the windows that were planned."""

    policy: str
    """Name of the policy, or `PERFECT`."""
    objective: str
    """How ranks meet: `ddp` once per window, `fsdp` in every micro-batch."""
    windows: int
    """Windows that were planned."""
    window_ms_mean: float
    """Mean over windows of the objective's value: the predicted time of an optimizer step."""
    window_ms_median: float
    """Median of it."""
    window_ms_p90: float
    """It is longer than this in one window of ten."""
    window_ms_max: float
    """Its largest."""
    speedup: float
    """Time of all windows under `random` over their time under this policy."""
    waiting_share: float
    """Share of all ranks' time in which they wait for others."""
    imbalances: dict[str, float]
    """The four imbalances, means over windows, under the names of their metrics."""
    gap_to_best_mean: float
    """Mean over windows of how far the plan can be above the best one: 0 where it is proven to be the best,
    else the gap to the bound."""
    gap_to_best_max: float
    """Largest of it."""
    gap_to_bound_mean: float
    """Mean over windows of value / lower bound - 1; the bound may be below what any plan can reach."""
    gap_to_bound_max: float
    """Largest of it."""
    proven_share: float
    """Share of the windows whose plan is proven to be the best possible."""
    plan_ms: float
    """Median wall time of planning a window, prediction of its times included, as measured here."""
    median_window: int
    """The window in which the time lost waiting is the median, among full windows if there are any."""
    worst_window: int
    """The window that loses most time waiting, among the same."""


class PlanFigures:
    """Collects the figures of one policy's plans.

    Args:
        policy: Name of the policy.
        objective: How ranks meet.
        windows: Windows that will be added, in this order.
        is_full: Which of them hold as many sequences as a window can; an epoch's last may not # [W].

    Attributes:
        values: The objective's value of each window in milliseconds # [W].
        loads: Mean over ranks of each window's time # [W].
        longest: The longest micro-batch of each window # [W].
    """

    def __init__(
        self, policy: str, objective: str, windows: Sequence[int], is_full: NDArray[np.bool_]
    ) -> None:
        self.policy, self.objective, self.windows = policy, objective, windows
        self._is_full = is_full
        count = len(windows)
        self.values, self.loads, self.longest = np.zeros(count), np.zeros(count), np.zeros(count)
        self._gaps, self._plan_ms = np.zeros(count), np.zeros(count)
        self._proven = np.zeros(count, dtype=bool)
        self._ratios: dict[str, float] = {}

    def add(self, i: int, plan: WindowPlan, plan_ms: float) -> None:
        """Note the plan of the i-th window, and the wall time of making it."""
        times = np.asarray(plan.predicted_ms, dtype=np.float64)
        self.values[i], self._gaps[i], self._proven[i] = plan.value_ms, plan.gap, plan.proven_optimal
        self.loads[i], self.longest[i] = times.sum() / len(times), times.max()
        self._plan_ms[i] = plan_ms
        for name, ratio in imbalances(times, SUFFIX).items():
            self._ratios[name] = self._ratios.get(name, 0.0) + ratio

    def figures(self, baseline: PlanFigures) -> PolicyFigures:
        """Return the figures, with the speedup over a baseline of the same windows."""
        count = len(self.values)
        to_best = np.where(self._proven, 0.0, self._gaps)
        return self._figures(
            self.policy,
            self.values,
            baseline.values,
            imbalances={name: total / count for name, total in self._ratios.items()},
            gaps=(to_best, self._gaps),
            proven_share=float(self._proven.mean()),
            plan_ms=float(np.median(self._plan_ms)),
        )

    def perfect(self) -> PolicyFigures:
        """Return the figures of plans in which all ranks have the mean load, and nobody waits."""
        return self._figures(
            PERFECT,
            self.loads,
            self.values,
            imbalances=dict.fromkeys(self._ratios, 1.0),
            gaps=(np.zeros(1), np.zeros(1)),
            proven_share=1.0,
            plan_ms=0.0,
        )

    def _figures(
        self,
        policy: str,
        values: NDArray[np.float64],
        baseline: NDArray[np.float64],
        *,
        imbalances: dict[str, float],
        gaps: tuple[NDArray[np.float64], NDArray[np.float64]],
        proven_share: float,
        plan_ms: float,
    ) -> PolicyFigures:
        total, count = float(values.sum()), len(values)
        lost = np.maximum(values - self.loads, 0.0)
        to_best, to_bound = gaps
        # A short window has fewer micro-batches, and says little of the others.
        shown = np.flatnonzero(self._is_full) if self._is_full.any() else np.arange(count)
        order = shown[np.argsort(lost[shown], kind="stable")]
        return PolicyFigures(
            policy=policy,
            objective=self.objective,
            windows=count,
            window_ms_mean=total / count,
            window_ms_median=float(np.median(values)),
            window_ms_p90=float(np.percentile(values, 90)),
            window_ms_max=float(values.max()),
            speedup=float(baseline.sum()) / total if total > 0 else 1.0,
            waiting_share=float(lost.sum()) / total if total > 0 else 0.0,
            imbalances=imbalances,
            gap_to_best_mean=float(to_best.mean()),
            gap_to_best_max=float(to_best.max()),
            gap_to_bound_mean=float(to_bound.mean()),
            gap_to_bound_max=float(to_bound.max()),
            proven_share=proven_share,
            plan_ms=plan_ms,
            median_window=int(self.windows[order[(len(order) - 1) // 2]]),
            worst_window=int(self.windows[shown[lost[shown].argmax()]]),
        )
