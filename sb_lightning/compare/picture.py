"""The picture of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sb_lightning._files import replacing
from sb_lightning._messages import explain
from sb_lightning.compare.arms import Arm
from sb_lightning.compare.results import Round

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

BUSY, WAIT, PERFECT = "#4292c6", "#fc9272", "#222222"
SMOOTH = 9
"""Windows that a point of a loss curve is the mean of."""


def draw(
    study: str,
    arms: Sequence[Arm],
    rounds: Sequence[Round],
    found: Mapping[str, Mapping[str, Any]],
    path: Path,
    *,
    heading: str,
) -> None:
    """Draw the figures of a study; the file is written whole or not at all.

    Args:
        study: A key of `STUDIES`.
        arms: What was compared.
        rounds: All rounds.
        found: As `summarize` returns them.
        path: The picture.
        heading: Above all.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            explain(
                "the picture needs matplotlib",
                "it is not installed",
                "pip install matplotlib, or pass --no-png",
            )
        ) from error
    tall = 1.9 + 0.36 * len(arms)
    figure = Figure(figsize=(11, tall if study in ("table2", "fig9") else 5.2), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    if study == "fig8":
        _draw_lines(figure.subplots(), arms, found)
    elif study == "fig10":
        _draw_losses(figure.subplots(), arms, rounds)
    else:
        _draw_bars(figure, arms, found)
    figure.suptitle(heading, fontsize=11, x=0.01, ha="left")
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:])


def _draw_bars(figure: Figure, arms: Sequence[Arm], found: Mapping[str, Mapping[str, Any]]) -> None:
    times, imbalances = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    rows = [found[arm.name] for arm in arms]
    places = np.arange(len(rows))
    middle = np.array([row["iteration_ms"]["median"] for row in rows])
    low = np.array([row["iteration_ms"]["q1"] for row in rows])
    high = np.array([row["iteration_ms"]["q3"] for row in rows])
    perfect = np.minimum([row["perfect_ms"]["median"] for row in rows], middle)
    times.barh(places, perfect, color=BUSY, label="with the work spread evenly", height=0.66)
    times.barh(places, middle - perfect, left=perfect, color=WAIT, label="lost to imbalance", height=0.66)
    times.errorbar(
        middle, places, xerr=[middle - low, high - middle], fmt="none", color=PERFECT, capsize=3, linewidth=1,
        label="quartiles of windows",
    )  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        if row.get("speedup"):
            times.text(
                0.01 * high.max(), place, f"{row['speedup']:.2f}x", va="center", color="white", fontsize=9
            )
    times.set_yticks(places, [row["label"] for row in rows])
    times.invert_yaxis()
    times.set_xlabel("window, median (ms); number: speedup over the same windows")
    times.set_xlim(0, 1.03 * high.max())
    times.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    imbalances.barh(places, [row["imbalance"]["median"] - 1 for row in rows], left=1, color=WAIT, height=0.66)
    for place, row in zip(places, rows, strict=True):
        imbalances.text(
            row["imbalance"]["median"], place, f" {row['imbalance']['median']:.2f}", va="center", fontsize=8
        )
    imbalances.set_xlabel("imbalance (max/mean over ranks)")
    imbalances.margins(x=0.25)
    for axis in (times, imbalances):
        _clean(axis)


def _draw_lines(axis: Axes, arms: Sequence[Arm], found: Mapping[str, Mapping[str, Any]]) -> None:
    for anchor in dict.fromkeys(arm.anchor for arm in arms if arm.anchor is not None):
        line = [arm for arm in arms if arm.anchor == anchor]
        speedups = [found[arm.name]["speedup"] or np.nan for arm in line]
        axis.plot([arm.tolerance for arm in line], speedups, marker="o", label=f"anchor {anchor}")
        for arm, speedup in zip(line, speedups, strict=True):
            axis.annotate(
                f"{found[arm.name]['coverage_change']:+.3f}", (arm.tolerance, speedup), fontsize=7,
                xytext=(0, 5), textcoords="offset points", ha="center",
            )  # fmt: skip
    axis.set_xlabel("tolerance p; small numbers: change of coverage")
    axis.set_ylabel("speedup over Baseline")
    axis.legend(frameon=False)
    _clean(axis)


def _draw_losses(axis: Axes, arms: Sequence[Arm], rounds: Sequence[Round]) -> None:
    for arm in arms:
        losses = [
            np.nan if w.loss is None else w.loss for each in rounds for w in each.windows[arm.name]
        ]  # Of all rounds: a loss does not warm up.
        width = min(SMOOTH, len(losses))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axis.plot(np.arange(len(smooth)) + width // 2, smooth, label=arm.label, linewidth=1.2)
    axis.set_xlabel(f"window (mean of {SMOOTH})")
    axis.set_ylabel("loss")
    axis.legend(frameon=False)
    _clean(axis)


def _clean(axis: Axes) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.grid(axis="both", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
