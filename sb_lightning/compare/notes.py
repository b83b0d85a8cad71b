"""What a reader of the figures has to know: where they say little, and which keys change that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sb_lightning.compare.arms import Arm

__all__ = ["notes"]

# Of the predicted time at k0; and of coverage, as the table shows it.
LEAST_WORK = 0.002
LEAST_COVERAGE = 5e-5
MOST_TABLE_ERROR = 0.2


def notes(
    arms: Sequence[Arm], found: Mapping[str, Mapping[str, Any]], table_error: float | None = None
) -> list[str]:
    """Return them, a sentence or two each.

    Args:
        arms: What was compared.
        found: As `summarize` returns them.
        table_error: Median error of the latency table on its held-out points; None where it is not known.
    """
    told = []
    idle = [arm.label for arm in arms if arm.anchor is not None and _changes_nothing(found[arm.name])]
    if idle:
        told.append(
            f"tuning has changed next to nothing in {', '.join(idle)}. Either k0 covers the sequences whole "
            "(they are not longer than budget x block size), or one block more or less already changes "
            "coverage by more than p. Longer sequences (data.max_length), another k0 "
            "(model.attention.budget) or smaller blocks (model.attention.block_size) give it room."
        )
    if table_error is not None and table_error > MOST_TABLE_ERROR:
        told.append(
            f"the latency table is off by {table_error:.0%} (median of its held-out points), and SAB and "
            "tuning go by it: measure for longer (latency.budget_seconds) on an idle machine, and begin anew "
            "in another folder (--output)."
        )
    return told


def _changes_nothing(row: Mapping[str, Any]) -> bool:
    if not row["windows"]:
        return False
    work, coverage = abs(row["work_ratio"] - 1), abs(row["coverage_change"])
    return bool(work <= LEAST_WORK and coverage < LEAST_COVERAGE)
