"""A picture of plans: what each rank would run when, and how long it would wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sb_lightning._files import replacing
from sb_lightning.tracking.metrics import rank_sums

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm

__all__ = ["PlannedWindow", "draw_plans", "starts_of"]

COLOURS = "viridis_r"
WAIT = "#fc9272"
PAD = "#bbbbbb"
# More rows than this cannot be told apart on a page.
MAX_RANKS = 24
PANEL_INCHES = 7.0
# What a character of a label takes.
LETTER_INCHES = 0.072
MANY_MS = 20_000.0


@dataclass(frozen=True, kw_only=True)
class PlannedWindow:
    """One panel of the picture."""

    title: str
    """What the window is."""
    times: NDArray[np.float64]
    """Predicted milliseconds of each cell [R, A]."""
    tokens: NDArray[np.int64]
    """Tokens of each cell [R, A]."""
    is_padding: NDArray[np.bool_]
    """Cells that only keep the ranks alike [R, A]."""


def starts_of(times: NDArray[np.float64], objective: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when each cell starts, and when the next thing after it does # [R, A] each, milliseconds.

    Args:
        times: Milliseconds of each cell # [R, A].
        objective: `ddp`: ranks meet at the end of the window; `fsdp`: after every slot.

    Example:
        >>> starts, ends = starts_of(np.array([[1.0, 2.0], [3.0, 1.0]]), "fsdp")
        >>> starts.tolist(), ends.tolist()
        ([[0.0, 3.0], [0.0, 3.0]], [[3.0, 5.0], [3.0, 5.0]])
    """
    steps = np.broadcast_to(times.max(axis=0), times.shape) if objective == "fsdp" else times
    ends = np.cumsum(steps, axis=1)
    starts = ends - steps
    if objective != "fsdp":
        ends = ends.copy()
        ends[:, -1] = ends[:, -1].max()
    return starts, ends


def draw_plans(
    rows: Sequence[Sequence[PlannedWindow]],
    path: Path,
    *,
    objective: str,
    heading: str = "",
    time_unit: tuple[str, float] | None = None,
) -> None:
    """Draw plans as bars over time, a row per rank; panels in one column share their scale.

    Args:
        rows: A row of panels for each policy, all of the same number of panels.
        path: The picture; its suffix chooses the format (.png, .svg, .pdf). Written whole or not at all.
        objective: How ranks meet, see `starts_of`.
        heading: Above all.
        time_unit: In which times are shown, and its milliseconds; None: what fits them.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        from sb_lightning._messages import explain

        raise RuntimeError(
            explain(
                "the picture needs matplotlib",
                "it is not installed",
                "pip install matplotlib, or pass --no-png",
            )
        ) from error
    rows = [list(row) for row in rows]
    if time_unit is None:
        longest_ms = max(float(panel.times.sum(axis=1).max()) for row in rows for panel in row)
        time_unit = ("s", 1e3) if longest_ms >= MANY_MS else ("ms", 1.0)
    unit, ms = time_unit
    rows = [[replace(panel, times=panel.times / ms) for panel in row] for row in rows]
    panels = [panel for row in rows for panel in row]
    tallest = min(max(len(panel.times) for panel in panels), MAX_RANKS)
    bar = min(max(2.2 / tallest, 0.11), 0.34)
    columns = len(rows[0])
    figure = Figure(
        figsize=(PANEL_INCHES * columns, 1.5 + len(rows) * (0.62 + bar * tallest)),
        layout="constrained",
        dpi=130,
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), columns, sharex="col", squeeze=False)
    tokens = np.concatenate([panel.tokens.ravel() for panel in panels])
    low, high = max(int(tokens.min()), 1), max(int(tokens.max()), 2)
    norm = LogNorm(low if low < high else high / 2, high)
    for axes, row in zip(grid, rows, strict=True):
        for axis, panel in zip(axes, row, strict=True):
            _draw_panel(axis, panel, objective, norm, colormaps[COLOURS], bar, unit)
    for column, axis in enumerate(grid[-1]):
        ends = [starts_of(row[column].times, objective)[1].max() for row in rows]
        longest = float(max(ends))
        axis.set_xlim(0, 1.01 * longest if longest > 0 else 1)
        axis.set_xlabel(f"predicted time since the window's start ({unit})")
        for row, panel in zip(rows, grid[:, column], strict=True):
            _write_tokens(panel, row[column], objective, norm, colormaps[COLOURS], bar, longest)
    if heading:
        figure.suptitle(heading, fontsize=11, x=0.01, ha="left")
    handles: list[Any] = [
        Patch(facecolor="white", edgecolor=WAIT, hatch="/////", linewidth=0, label="waits for other ranks"),
        Line2D([], [], color="black", linestyle=":", label="mean load: perfect balance would end here"),
    ]
    if any(panel.is_padding.any() for panel in panels):
        handles.append(Patch(facecolor=PAD, label="pad micro-batch"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    bar_axis = figure.colorbar(
        ScalarMappable(norm, COLOURS), ax=grid[:, -1].tolist(), shrink=min(1.0, 4.0 / figure.get_figheight()),
        aspect=28, pad=0.015, label="tokens of a micro-batch",
    )  # fmt: skip
    bar_axis.outline.set_visible(False)  # type: ignore[operator]
    bar_axis.ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    bar_axis.ax.yaxis.set_minor_formatter(lambda value, _: "")
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:])


def _shown(times: NDArray[np.float64]) -> list[int]:
    """Ranks to draw: all, or some evenly spread, always with the one that takes longest."""
    ranks = len(times)
    if ranks <= MAX_RANKS:
        return list(range(ranks))
    some = {i * ranks // (MAX_RANKS - 1) for i in range(MAX_RANKS - 1)}
    return sorted(some | {int(rank_sums(times).argmax())})


def _draw_panel(
    axis: Axes, panel: PlannedWindow, objective: str, norm: LogNorm, colours: Any, bar: float, unit: str
) -> None:
    times = panel.times
    ranks = _shown(times)
    starts, ends = starts_of(times, objective)
    for row, rank in enumerate(ranks):
        faces = colours(norm(np.maximum(panel.tokens[rank], 1)))
        faces = [PAD if pad else face for pad, face in zip(panel.is_padding[rank], faces, strict=True)]
        place = (row - 0.41, 0.82)
        axis.broken_barh(
            list(zip(starts[rank], times[rank], strict=True)), place, facecolors=faces, edgecolors="white",
            linewidth=0.6 if times.shape[1] <= 32 else 0.2,
        )  # fmt: skip
        finish = starts[rank] + times[rank]
        idle = [(a, b - a) for a, b in zip(finish, ends[rank], strict=True) if b - a > 1e-9]
        axis.broken_barh(idle, place, facecolors="white", edgecolors=WAIT, hatch="/////", linewidth=0)
    mean = float(times.sum()) / len(times)
    axis.axvline(mean, color="black", linestyle=":", linewidth=1.2)
    axis.set_ylim(len(ranks) - 0.45, -0.55)
    thin = range(0, len(ranks), 1 if bar >= 0.15 else 2)
    axis.set_yticks(list(thin), [f"rank {ranks[row]}" for row in thin], fontsize=8 if bar >= 0.2 else 6.5)
    total = float(ends.max())
    lost = 1 - mean / total if total > 0 else 0.0
    left_out = f"; {len(ranks)} of {len(times)} ranks shown" if len(ranks) < len(times) else ""
    axis.set_title(
        f"{panel.title}: {total:,.1f} {unit}, {lost:.0%} waiting{left_out}", loc="left", fontsize=10
    )
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelbottom=True, labelsize=8)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.7g}")
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def _write_tokens(
    axis: Axes, panel: PlannedWindow, objective: str, norm: LogNorm, colours: Any, bar: float, longest: float
) -> None:
    """Write the tokens of a micro-batch where there is room."""
    if bar < 0.15 or longest <= 0:
        return
    starts, _ = starts_of(panel.times, objective)
    inches = 0.85 * PANEL_INCHES / longest
    for row, rank in enumerate(_shown(panel.times)):
        for start, length, tokens in zip(starts[rank], panel.times[rank], panel.tokens[rank], strict=True):
            text = f"{tokens:,}"
            if length * inches < LETTER_INCHES * (len(text) + 1):
                continue
            red, green, blue, _ = colours(norm(max(tokens, 1)))
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            axis.text(
                start + length / 2, row, text, ha="center", va="center_baseline", fontsize=7.5,
                color="white" if is_dark else "black",
            )  # fmt: skip
