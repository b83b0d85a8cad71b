"""Figures of policies as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sb_lightning.balance.policy_figures import PERFECT, SUFFIX

if TYPE_CHECKING:
    from sb_lightning.balance.policy_figures import PolicyFigures

__all__ = ["GAP_NOTE", "TimeUnit", "imbalance_table", "time_table", "time_unit"]

MANY_MS = 100_000.0
TimeUnit = tuple[str, float]
"""The name of a unit, and its milliseconds."""
GAP_NOTE = (
    "above best: how far a plan may be above the best one, mean and largest; 0 where it is proven best."
)


def time_unit(longest_ms: float) -> TimeUnit:
    """Return the unit in which times are shown, and its milliseconds.

    Args:
        longest_ms: The longest of the times.

    Example:
        >>> time_unit(90.0), time_unit(2.5e5)
        (('ms', 1.0), ('s', 1000.0))
    """
    return ("ms", 1.0) if longest_ms < MANY_MS else ("s", 1000.0)


def time_table(rows: Sequence[PolicyFigures], time_unit: TimeUnit) -> str:
    """Return the times of windows under each policy, a line each.

    Args:
        rows: The policies, and `PERFECT`.
        time_unit: In which times are shown.
    """
    unit, ms = time_unit
    heads = (
        f"mean {unit}",
        "median",
        "p90",
        "max",
        "speedup",
        "waiting",
        "above best",
        "largest",
        "proven",
        "plan ms",
    )
    lines: list[tuple[str, ...]] = [("policy", *heads)]
    for row in rows:
        times = (row.window_ms_mean, row.window_ms_median, row.window_ms_p90, row.window_ms_max)
        gaps = (f"{row.gap_to_best_mean:.1%}", f"{row.gap_to_best_max:.1%}")
        plans = (*gaps, f"{row.proven_share:.0%}", f"{row.plan_ms:.2f}")
        lines.append(
            (
                row.policy,
                *(f"{time / ms:,.1f}" for time in times),
                f"{row.speedup:.2f}x",
                f"{row.waiting_share:.1%}",
                # It is no plan.
                *(plans if row.policy != PERFECT else [""] * len(plans)),
            )
        )
    return _aligned(lines)


def imbalance_table(rows: Sequence[PolicyFigures]) -> str:
    """Return the four imbalances under each policy, a line each."""
    names = list(rows[0].imbalances)
    heads = [name.removeprefix("balance/").removesuffix(SUFFIX) for name in names]
    lines = [("policy", *heads)]
    lines += [(row.policy, *(f"{row.imbalances[name]:.3f}" for name in names)) for row in rows]
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
