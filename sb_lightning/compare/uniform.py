"""The one budget with which coverage changes by as much as an arm changes it that tunes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CoverageCurve", "matching_budget"]


@dataclass(frozen=True, kw_only=True)
class CoverageCurve:
    """Coverage of the sequences of a round if all had the same budget."""

    rows: float
    """Their weight: sampled rows with an earlier block."""
    sums: tuple[float, ...]
    """Rows x coverage, added up, at budgets 1, 2, ..."""
    budget: int
    """With which the round was run."""
    usual: int
    """k0."""

    def change(self, budget: int) -> float:
        """Return rows x (coverage at a budget - coverage at k0), added up."""
        last = len(self.sums) - 1
        return self.sums[min(budget - 1, last)] - self.sums[min(self.usual - 1, last)]


def matching_budget(curves: Sequence[CoverageCurve], usual: int, change: float) -> int:
    """Return the budget of the next round.

    Budgets are whole numbers: what one round changes too much, the next ones make up for.

    Args:
        curves: Of the rounds so far; the first one is not counted.
        usual: k0, for the first round.
        change: Row-weighted change of coverage to come to on average.

    Example:
        >>> curve = CoverageCurve(rows=10.0, sums=(0.0, 5.0, 8.0, 10.0), budget=4, usual=4)
        >>> [matching_budget([curve], 4, change) for change in (0.0, -0.15, -0.19, -0.9)]
        [4, 3, 3, 1]
    """
    if not curves:
        return usual
    last = curves[-1]
    counted = curves[1:]
    changed = sum(curve.change(curve.budget) for curve in counted)
    wanted = change * (sum(curve.rows for curve in counted) + last.rows)
    # The nearest to k0 among equals.
    return min(
        range(1, len(last.sums) + 1),
        key=lambda k: (round(abs(changed + last.change(k) - wanted), 9), abs(k - usual), k),
    )
