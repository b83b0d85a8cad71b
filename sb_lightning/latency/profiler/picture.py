"""The picture of a profile: measured against predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sb_lightning._files import replacing
from sb_lightning.latency.profiler.holdout import PREDICTORS

__all__ = ["draw"]


def draw(profile: dict[str, Any], title: str, path: Path) -> None:
    """Draw the three predictors side by side, with the same axes, as a PNG.

    The analogue of Fig. 6 of the paper (arXiv 2604.13847): large points are held out, small ones made the
    table and the fits; the colour is the share of its blocks that a sequence attends.

    Args:
        profile: What `evaluate` returned, with `block_size`.
        title: Where it was measured.
        path: The file; replaced whole or not at all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    points = profile["points"]
    measured = [point["measured_ms"] for point in points]
    low, high = min(measured) / 1.6, max(measured) * 1.6
    figure = Figure(figsize=(12, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PREDICTORS), sharex=True, sharey=True)
    for panel, (name, label) in zip(panels, PREDICTORS.items(), strict=True):
        panel.plot([low, high], [low, high], color="0.35", linewidth=1, label="predicted = measured")
        panel.fill_between(
            [low, high],
            [low / 1.1, high / 1.1],
            [low * 1.1, high * 1.1],
            color="0.9",
            zorder=0,
            label="within 10 %",
        )
        for is_held_out, size, edge in ((False, 12, "none"), (True, 42, "black")):
            chosen = [point for point in points if point["held_out"] == is_held_out]
            error = profile["errors"][name]["median"]
            text = "points of table and fits"
            if is_held_out:
                text = "held out" if error is None else f"held out: median error {error:.1%}"
            colours = panel.scatter(
                [point["measured_ms"] for point in chosen],
                # A fit may fall below zero; the axis has no place for that.
                [min(max(point["predicted_ms"][name], low), high) for point in chosen],
                c=[_share(point, profile["block_size"]) for point in chosen],
                cmap="viridis_r", vmin=0, vmax=1, s=size, edgecolors=edge, linewidths=0.7, label=text,
                zorder=3,
            )  # fmt: skip
        panel.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=label)
        panel.set_aspect("equal")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
            axis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("measured forward + backward (ms)")
        panel.grid(visible=True, which="major", color="0.93")
        legend = panel.legend(loc="upper left", fontsize=8, framealpha=0.9)
        for handle in legend.legend_handles[2:]:
            handle.set_facecolor("0.5")
    panels[0].set_ylabel("predicted forward + backward (ms)")
    figure.colorbar(colours, ax=panels, label="share of blocks attended", pad=0.01)
    figure.suptitle(title, fontsize=10)
    with replacing(path) as part:
        figure.savefig(part, format="png")


def _share(point: dict[str, Any], block_size: int) -> float:
    return min(1.0, float(point["budget"]) * block_size / float(point["length"]))
