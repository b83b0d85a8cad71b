"""Figures of a comparison, from its measured windows; and the table that shows them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sb_lightning._messages import explain
from sb_lightning.compare.arms import Arm
from sb_lightning.compare.uniform import CoverageCurve
from sb_lightning.tracking.metrics import idle_ms, imbalances, rank_sums

__all__ = ["LEGEND", "ArmWindow", "Round", "show", "spread", "summarize"]

IMBALANCES = ("imbalance", "imbalance_slot", "imbalance_micro_batch", "imbalance_within")
Cells = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ArmWindow:
    """One window as one arm trained it, over all ranks."""

    number: int
    """Of the windows that the arm has trained, from 0."""
    members: str
    """Short name of the set of sequences in it."""
    busy_ms: Cells
    """Measured time of each micro-batch without waits [R, A]; None where a rank ran no such micro-batch."""
    predicted_ms: Cells
    """Predicted time of each micro-batch [R, A]; None where there is none."""
    wall_ms: float
    """Length of the window by the clock."""
    wait_ms: float
    """Waiting for other ranks, mean over ranks."""
    plan_ms: float
    """Planning, mean over ranks."""
    tune_ms: float
    """All that tuning adds, mean over ranks."""
    loss: float | None
    """Mean over the window's target tokens; None if nothing was logged."""
    budget: float
    """Mean over sequences."""
    work_ratio: float
    """Predicted time at the budgets used over that at k0."""
    rows: float
    """Weight of the window's coverage."""
    coverage_change: float
    """Rows x (coverage - coverage at k0), added up."""
    decisions: float
    """Layers that have tuned."""
    infeasible: float
    """Of those, layers that could not meet their time within the tolerance."""

    def busy(self) -> Any:
        """Return the measured times as an array # [R, A]."""
        return _array(self.busy_ms)

    def predicted(self) -> Any:
        """Return the predicted times as an array # [R, A]."""
        return _array(self.predicted_ms)

    @property
    def perfect_ms(self) -> float:
        """How long it would have taken with the same work spread evenly over the ranks."""
        return self.wall_ms - idle_ms(self.busy())


@dataclass(frozen=True, kw_only=True)
class Round:
    """What all arms did in a round."""

    number: int
    order: tuple[str, ...]
    """Arms as they ran."""
    windows: Mapping[str, tuple[ArmWindow, ...]]
    """By arm."""
    curves: Mapping[str, CoverageCurve]
    """By arm, of those with one budget for all."""
    seconds: float
    """How long the round took, all included."""

    def to_dict(self) -> dict[str, Any]:
        """Return the round as JSON can hold it; `decode_round` reads it."""
        return asdict(self)


def summarize(arms: Sequence[Arm], rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Return the figures of every arm, without the first round, which warms up.

    Times of two arms are compared over the same windows only. A speedup is the sum of the one's times over
    the sum of the other's.

    Args:
        arms: What was compared.
        rounds: All rounds, the first one included.

    Returns:
        By name of arm, in order.

    Raises:
        ValueError: An arm is missing in a round, or arms that are compared trained other windows.
    """
    for each in rounds:
        missing = [arm.name for arm in arms if len(each.windows.get(arm.name, ())) == 0]
        if missing:
            raise ValueError(
                explain(
                    f"round {each.number} has no windows of {', '.join(missing)}",
                    "arms are compared over the same windows",
                    "begin the comparison anew in another folder (--output)",
                )
            )
    by_arm = {arm.name: [w for each in rounds[1:] for w in each.windows[arm.name]] for arm in arms}
    return {arm.name: _figures(arm, by_arm) for arm in arms}


def _figures(arm: Arm, by_arm: Mapping[str, Sequence[ArmWindow]]) -> dict[str, Any]:
    windows, base = by_arm[arm.name], by_arm.get(arm.against)
    if not windows:
        return {"label": arm.label, "windows": 0}
    measured = [imbalances(w.busy()) for w in windows]
    planned = [imbalances(w.predicted()) for w in windows]
    rows, decisions = sum(w.rows for w in windows), sum(w.decisions for w in windows)
    spans = [(_makespan(w.predicted()), _makespan(w.busy())) for w in windows]
    known = [(p, b) for p, b in spans if p > 0 and b > 0]
    losses = [w.loss for w in windows if w.loss is not None]
    found = {
        "label": arm.label,
        "windows": len(windows),
        **{name: spread([m[f"balance/{name}"] for m in measured]) for name in IMBALANCES},
        **{
            f"{name}_predicted": spread([m[f"balance/{name}"] for m in planned])["median"]
            for name in IMBALANCES
        },
        "iteration_ms": spread([w.wall_ms for w in windows]),
        "wait_ms": spread([w.wait_ms for w in windows]),
        "plan_ms": spread([w.plan_ms for w in windows]),
        "tune_ms": spread([w.tune_ms for w in windows]),
        "perfect_ms": spread([w.perfect_ms for w in windows]),
        "share_of_perfect": sum(w.perfect_ms for w in windows) / sum(w.wall_ms for w in windows),
        "plan_share": sum(w.plan_ms for w in windows) / sum(w.wall_ms for w in windows),
        "tune_share": sum(w.tune_ms for w in windows) / sum(w.wall_ms for w in windows),
        "work_ratio": statistics.fmean(w.work_ratio for w in windows),
        "budget": statistics.fmean(w.budget for w in windows),
        "coverage_change": sum(w.coverage_change for w in windows) / rows if rows else 0.0,
        "infeasible": sum(w.infeasible for w in windows) / decisions if decisions else 0.0,
        "prediction_error": statistics.fmean(abs(p - b) / b for p, b in known) if known else None,
        "final_loss": statistics.fmean(losses[-4:]) if losses else None,
        "paper_speedup": arm.paper_speedup,
    }
    return {**found, **(_speedups(arm, windows, base) if base else {"speedup": None})}


def _speedups(arm: Arm, windows: Sequence[ArmWindow], base: Sequence[ArmWindow]) -> dict[str, Any]:
    pairs = list(zip(base, windows, strict=True))
    for theirs, ours in pairs:
        if (theirs.number, theirs.members) != (ours.number, ours.members):
            raise ValueError(
                explain(
                    f"window {ours.number} of {arm.name} holds other sequences than that of {arm.against}",
                    "times of different work do not compare",
                    "begin the comparison anew in another folder (--output)",
                )
            )

    def ratio(time: Callable[[ArmWindow], float]) -> float | None:
        total = sum(time(ours) for _, ours in pairs)
        return sum(time(theirs) for theirs, _ in pairs) / total if total > 0 else None

    perfect = sum(w.perfect_ms for w in base)
    return {
        "against": arm.against,
        "speedup": ratio(lambda w: w.wall_ms),
        "speedup_spread": spread([theirs.wall_ms / ours.wall_ms for theirs, ours in pairs]),
        "speedup_busy": ratio(lambda w: _makespan(w.busy())),
        "speedup_predicted": ratio(lambda w: _makespan(w.predicted())),
        "speedup_of_perfect_balance": sum(w.wall_ms for w in base) / perfect,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles.

    Example:
        >>> spread([4.0, 1.0, 2.0, 3.0, 5.0])
        {'median': 3.0, 'q1': 2.0, 'q3': 4.0}
    """
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def show(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures as a Markdown table.

    Args:
        found: As `summarize` returns them.
    """
    heads = [
        "arm",
        "windows",
        "imbalance",
        "slot",
        "micro-batch",
        "within",
        "iteration ms",
        "plan ms",
        "tune ms",
    ]
    heads += ["speedup", "predicted", "of perfect", "work", "coverage", "infeasible", "budget", "loss"]
    has_paper = any(row.get("paper_speedup") for row in found.values())
    heads += ["paper"] if has_paper else []
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in found.values():
        if not row["windows"]:
            lines.append(f"| {row['label']} | 0 |" + " |" * (len(heads) - 2))
            continue
        cells = [row["label"], str(row["windows"])]
        cells += [f"{row[name]['median']:.3f}" for name in IMBALANCES]
        time = row["iteration_ms"]
        cells.append(f"{time['median']:,.0f} ({time['q1']:,.0f}-{time['q3']:,.0f})")
        cells += [f"{row['plan_ms']['median']:.2f}", f"{row['tune_ms']['median']:.1f}"]
        cells += [_or_dash(row["speedup"], ".3f"), _or_dash(row.get("speedup_predicted"), ".3f")]
        cells += [
            f"{row['share_of_perfect']:.1%}",
            f"{row['work_ratio']:.3f}",
            f"{row['coverage_change']:+.4f}",
        ]
        cells += [f"{row['infeasible']:.1%}", f"{row['budget']:.1f}", _or_dash(row["final_loss"], ".4f")]
        cells += [_or_dash(row.get("paper_speedup"), ".2f")] if has_paper else []
        lines.append(f"| {' | '.join(cells)} |")
    for base in dict.fromkeys(row["against"] for row in found.values() if row.get("against")):
        row = found[base]
        cells = [f"perfect balance of {row['label']}", str(row["windows"])]
        cells += ["1.000", "", "", "", f"{row['perfect_ms']['median']:,.0f}", "", ""]
        cells += [f"{row['speedup_of_perfect_balance']:.3f}", "", "100.0%", "1.000", "+0.0000", "", "", ""]
        cells += [""] if has_paper else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


LEGEND = """\
imbalance: max/mean over ranks of the window's busy time; slot, micro-batch, within: the other three of
docs/imbalance.md (medians of windows). iteration ms: the window by the clock, median (quartiles). plan, tune:
medians of what planning and tuning take. speedup: summed time of the arm it is compared to over its own, of
the same windows; predicted: the same by the latency table. of perfect: how long these windows would have
taken with their work spread evenly, over what they took. work: predicted time at the budgets used over that
at k0. coverage: its row-weighted change. infeasible: decisions of layers that could not keep their time.
loss: mean of the last four windows."""


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _makespan(times: Any) -> float:
    return float(rank_sums(times).max())


def _array(cells: Cells) -> Any:
    return np.array([[math.nan if v is None else v for v in row] for row in cells], dtype=np.float64)
