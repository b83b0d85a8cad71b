"""What balancing and tuning are meant to reach, held against what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Target", "show_targets", "targets"]

Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One of them."""

    what: str
    measured: str
    is_met: bool


def targets(found: Figures) -> list[Target]:
    """Return the targets that the arms at hand can tell about.

    Args:
        found: As `summarize` returns them.
    """
    rows = {name: row for name, row in found.items() if row["windows"] and row.get("speedup")}
    return [*_times(rows), *_tuning(rows), *_predictions(rows)]


def show_targets(found: Figures) -> str:
    """Return the targets as a Markdown list; nothing where the arms tell about none."""
    return "".join(
        f"- {'met' if target.is_met else 'MISSED'}: {target.what}: {target.measured}\n"
        for target in targets(found)
    )


def _times(rows: Figures) -> Iterator[Target]:
    if "sab" in rows:
        share = rows["sab"]["share_of_perfect"]
        yield Target(
            what="+SAB reaches 95 % of perfect balance", measured=f"{share:.1%}", is_met=share >= 0.95
        )
        cost = rows["sab"]["plan_share"]
        yield Target(
            what="planning takes at most 0.1 % of a window", measured=f"{cost:.3%}", is_met=cost <= 0.001
        )
    if "sab_dst" in rows:
        speedup, cost = rows["sab_dst"]["speedup"], rows["sab_dst"]["tune_share"]
        yield Target(what="+SAB+DST is 1.33x", measured=f"{speedup:.3f}x", is_met=speedup >= 1.33)
        yield Target(what="tuning takes at most 1 % of a window", measured=f"{cost:.2%}", is_met=cost <= 0.01)


def _tuning(rows: Figures) -> Iterator[Target]:
    for name, control in (("sab_dst", "sab_uniform"), ("sab_dst_slack", "sab_uniform_slack")):
        if name not in rows or control not in rows:
            continue
        tuned, uniform = rows[name], rows[control]
        speedup = _at_coverage_of(tuned, uniform, rows.get("sab"))
        yield Target(
            what=f"{tuned['label']} is faster than one smaller budget for all, at equal change of coverage",
            measured=f"{tuned['speedup']:.3f}x at {tuned['coverage_change']:+.4f}, against {speedup:.3f}x "
            f"(from {uniform['speedup']:.3f}x at {uniform['coverage_change']:+.4f})",
            is_met=tuned["speedup"] > speedup,
        )
    if "sab_dst" not in rows:
        return
    mean = rows["sab_dst"]
    if "sab_dst_slack" in rows:
        slack = rows["sab_dst_slack"]
        yield Target(
            what="slack is no slower than mean, with no less coverage",
            measured=f"{slack['speedup']:.3f}x with coverage {slack['coverage_change']:+.4f}, against "
            f"{mean['speedup']:.3f}x with {mean['coverage_change']:+.4f}",
            # No slower than the clock can tell on a few windows.
            is_met=slack["speedup"] >= 0.99 * mean["speedup"]
            and slack["coverage_change"] >= mean["coverage_change"],
        )


def _at_coverage_of(
    tuned: Mapping[str, Any], uniform: Mapping[str, Any], untuned: Mapping[str, Any] | None
) -> float:
    """Return the control's speedup at the tuned arm's change of coverage.

    Budgets are whole numbers and the control follows from round to round, so that the two changes differ a
    little: between no change, as in +SAB, and the control's, time is taken as linear in coverage.
    """
    speedup = float(uniform["speedup"])
    if untuned is None or not uniform["coverage_change"]:
        return speedup
    share = tuned["coverage_change"] / uniform["coverage_change"]
    time = (1 - share) / untuned["speedup"] + share / speedup
    # Far from the control's own change the line says nothing.
    return 1 / time if 0.5 <= share <= 2 and time > 0 else speedup


def _predictions(rows: Figures) -> Iterator[Target]:
    off = {
        row["label"]: row["speedup"] / row["speedup_predicted"] - 1
        for row in rows.values()
        if row["speedup_predicted"]
    }
    if off:
        worst = max(off, key=lambda label: abs(off[label]))
        yield Target(
            what="measured speedups are within 10 % of those predicted",
            measured=f"at most {off[worst]:+.1%}, of {worst}",
            is_met=abs(off[worst]) <= 0.1,
        )
