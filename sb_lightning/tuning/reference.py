"""The choice of budgets in plain Python: the twin of csrc/tuning/budget.h.

It is the oracle of the tests, and serves where the C++ module is not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["FIXED_ONE", "MANY_BLOCKS", "BudgetSequence", "allowed_budgets", "choose_budgets", "fixed_point"]

FIXED_ONE = 1 << 30
"""Coverage is compared in units of one 2^30th."""
MANY_BLOCKS = 2**31 - 1
"""Blocks of a sequence whose length is not known."""


def fixed_point(share: float) -> int:
    """Return a share in units of 2^-30, the nearest, halves upward; NaN counts as 0.

    Example:
        >>> fixed_point(0.25) == FIXED_ONE // 4, fixed_point(2.0) == FIXED_ONE, fixed_point(float("nan"))
        (True, True, 0)
    """
    if not share > 0:
        return 0
    return FIXED_ONE if share >= 1 else int(share * FIXED_ONE + 0.5)


@dataclass(frozen=True, kw_only=True)
class BudgetSequence:
    """What the choice needs to know of one sequence."""

    coverage: Sequence[int]
    """C(k) at k = 1, 2, ... in any unit that all sequences share; never falls."""
    cost_us: Sequence[int]
    """Time at k = 1, 2, ... in microseconds; never falls."""
    k0: int
    """Budget when nothing is tuned."""
    rows: int
    """Weight of its coverage."""
    blocks: int
    """Blocks that it has."""


def allowed_budgets(
    sequence: BudgetSequence, *, tolerance: int, min_budget: int, tune_short: bool
) -> tuple[int, int]:
    """Return the least and the largest budget that keep the coverage within the tolerance.

    A sequence that `k0` covers whole keeps it unless `tune_short`; so does every sequence at tolerance 0,
    and one whose coverage is constant: there is nothing to tune by.
    """
    curve, end = sequence.coverage, len(sequence.coverage)
    k0 = min(sequence.k0, end)
    if sequence.blocks <= sequence.k0 and not tune_short:
        return sequence.k0, sequence.k0
    if tolerance <= 0 or curve[0] == curve[-1]:
        return k0, k0
    lowest, highest = min(min_budget, k0), max(min(sequence.blocks, end), k0)
    within = [k for k in range(lowest, highest + 1) if abs(curve[k - 1] - curve[k0 - 1]) <= tolerance]
    return within[0], within[-1]


def choose_budgets(
    sequences: Sequence[BudgetSequence],
    *,
    tau_us: int,
    tolerance: int,
    min_budget: int,
    tune_short: bool,
) -> list[int]:
    """Choose the budgets of one micro-batch and one layer.

    All start at their least allowed budget. The step by one block with the most rows x coverage per time
    is taken if the sum of costs stays within `tau_us`, and otherwise ends its sequence; of equal ones the
    lower position, and what costs nothing first.
    """
    most = []
    budgets = []
    for s in sequences:
        allowed = allowed_budgets(s, tolerance=tolerance, min_budget=min_budget, tune_short=tune_short)
        budgets.append(allowed[0])
        most.append(allowed[1])
    total = sum(s.cost_us[min(k, len(s.cost_us)) - 1] for s, k in zip(sequences, budgets, strict=True))
    while True:
        steps = []
        for i, (s, k) in enumerate(zip(sequences, budgets, strict=True)):
            if k < most[i]:
                gain, cost = s.rows * (s.coverage[k] - s.coverage[k - 1]), s.cost_us[k] - s.cost_us[k - 1]
                steps.append((cost > 0, -Fraction(gain, cost) if cost > 0 else Fraction(0), i, cost))
        if not steps:
            return budgets
        _, _, i, cost = min(steps)
        if total + cost <= tau_us:
            total += cost
            budgets[i] += 1
        else:
            most[i] = budgets[i]
