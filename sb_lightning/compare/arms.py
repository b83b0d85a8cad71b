"""What is compared: the arms of each study."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sb_lightning._messages import explain

__all__ = ["STUDIES", "Arm", "Study", "select_arms"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: how windows are dealt, and how budgets are tuned."""

    name: str
    """In options, files and JSON."""
    label: str
    """In tables and pictures."""
    policy: Literal["random", "length", "latency"]
    """Of the batch sampler: as usual, by length (LBB), by predicted latency (SAB)."""
    anchor: Literal["min", "mean", "max", "slack"] | None = None
    """Of `SparseBalanceCallback` (DST); None tunes nothing."""
    tolerance: float = 0.1
    """Largest change of coverage that tuning may make, p."""
    same_coverage_as: str | None = None
    """Name of a tuned arm. This one is not tuned: all sequences have one budget, which is chosen round by
    round so that coverage changes by as much as in that arm."""
    sequences: int | None = None
    """Sequences per micro-batch; None: as configured."""
    against: str = "baseline"
    """Name of the arm that the speedup is over; it trains the same windows."""
    paper_speedup: float | None = None
    """Of SparseBalance (arXiv 2604.13847), Table II."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A set of arms and what it shows."""

    title: str
    arms: tuple[Arm, ...]


def _table2() -> tuple[Arm, ...]:
    return (
        Arm(name="baseline", label="Baseline", policy="random", paper_speedup=1.0),
        Arm(name="dst", label="+DST", policy="random", anchor="mean", paper_speedup=1.08),
        Arm(name="sab", label="+SAB", policy="latency", paper_speedup=1.21),
        Arm(name="lbb", label="+LBB", policy="length", paper_speedup=1.23),
        Arm(name="sab_dst", label="+SAB+DST", policy="latency", anchor="mean", paper_speedup=1.35),
        Arm(name="lbb_dst", label="+LBB+DST", policy="length", anchor="mean", paper_speedup=1.28),
        Arm(name="sab_dst_slack", label="+SAB+DST(slack)", policy="latency", anchor="slack"),
        Arm(name="sab_uniform", label="+SAB, uniform k", policy="latency", same_coverage_as="sab_dst"),
        Arm(
            name="sab_uniform_slack",
            label="+SAB, uniform k (slack)",
            policy="latency",
            same_coverage_as="sab_dst_slack",
        ),
    )


def _fig8() -> tuple[Arm, ...]:
    anchors: tuple[Literal["min", "mean", "max"], ...] = ("min", "mean", "max")
    tuned = (
        Arm(
            name=f"{anchor}_{tolerance}",
            label=f"{anchor}, p {tolerance}",
            policy="latency",
            anchor=anchor,
            tolerance=tolerance,
        )
        for anchor in anchors
        for tolerance in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
    )
    return (Arm(name="baseline", label="Baseline", policy="random"), *tuned)


def _fig9() -> tuple[Arm, ...]:
    arms: list[Arm] = []
    for count in (1, 2, 3, 4):
        base = f"baseline_{count}"
        arms += [
            Arm(name=base, label=f"Baseline, {count}", policy="random", sequences=count, against=base),
            Arm(name=f"sab_{count}", label=f"+SAB, {count}", policy="latency", sequences=count, against=base),
            Arm(
                name=f"sab_dst_{count}",
                label=f"+SAB+DST, {count}",
                policy="latency",
                anchor="mean",
                sequences=count,
                against=base,
            ),
        ]
    return tuple(arms)


def _fig10() -> tuple[Arm, ...]:
    anchors: tuple[Literal["min", "mean"], ...] = ("min", "mean")
    tuned = (
        Arm(
            name=f"{anchor}_{tolerance}",
            label=f"{anchor}, p {tolerance}",
            policy="latency",
            anchor=anchor,
            tolerance=tolerance,
        )
        for anchor in anchors
        for tolerance in (0.1, 0.2)
    )
    return (Arm(name="baseline", label="Baseline", policy="random"), *tuned)


STUDIES: dict[str, Study] = {
    "table2": Study(title="Ablation: batching and tuning, apart and together", arms=_table2()),
    "fig8": Study(title="Speedup by anchor and tolerance", arms=_fig8()),
    "fig9": Study(title="Speedup by sequences per micro-batch", arms=_fig9()),
    "fig10": Study(title="Loss with tuning and without", arms=_fig10()),
}
"""The studies by name, after the table and the figures of SparseBalance (arXiv 2604.13847)."""


def select_arms(study: str, names: Sequence[str] | None = None) -> tuple[Arm, ...]:
    """Return the arms of a study, or some of them, in the study's order.

    Args:
        study: A key of `STUDIES`.
        names: Names of arms; None for all.

    Raises:
        ValueError: There is no such study or arm, or an arm is asked for without the one it depends on.

    Example:
        >>> [arm.label for arm in select_arms("table2", ["sab", "baseline"])]
        ['Baseline', '+SAB']
    """
    if study not in STUDIES:
        raise ValueError(
            explain(f"--study is '{study}'", "there is no such study", f"pass one of {', '.join(STUDIES)}")
        )
    arms = STUDIES[study].arms
    if names is None:
        return arms
    known = [arm.name for arm in arms]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                explain(
                    f"--arms names '{name}'{hint}",
                    f"study {study} has no such arm",
                    f"pass some of {','.join(known)}",
                )
            )
    chosen = tuple(arm for arm in arms if arm.name in names)
    if not chosen:
        raise ValueError(
            explain("--arms is empty", "there is nothing to compare", f"pass some of {','.join(known)}")
        )
    for arm in chosen:
        if arm.same_coverage_as is not None and arm.same_coverage_as not in names:
            raise ValueError(
                explain(
                    f"--arms names {arm.name} and not {arm.same_coverage_as}",
                    "its budget is chosen by what that arm does to coverage",
                    f"add {arm.same_coverage_as} to --arms, or leave {arm.name} out",
                )
            )
    return chosen
