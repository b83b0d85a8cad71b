"""A static picture of windows: who worked when, and who waited."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sb_lightning._files import replacing
from sb_lightning.tracking.metrics import imbalance
from sb_lightning.tracking.span_file import CellRecord, RunSpans
from sb_lightning.tracking.spans import LANES, innermost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["cell_times", "draw_gantt", "windows_to_show"]

COLORS = {
    "data": "#8c6bb1",
    "forward": "#4292c6",
    "backward": "#08519c",
    "wait": "#fc9272",
    "broadcast": "#fdd0a2",
    "optimizer": "#41ab5d",
    "plan": "#dd3497",
    "tune": "#fec44f",
}
MEANING = {
    "wait": "wait for other ranks",
    "broadcast": "Lightning's broadcast",
}
# More rows than this cannot be told apart on a page.
MAX_RANKS = 32


def cell_times(cells: list[CellRecord]) -> np.ndarray:
    """Return a window's busy times in milliseconds # [R, A], NaN where a rank ran no such micro-batch.

    Args:
        cells: The micro-batches of one window.
    """
    ranks = sorted({cell.rank for cell in cells})
    times = np.full((len(ranks), 1 + max(cell.micro_batch for cell in cells)), np.nan)
    for cell in cells:
        times[ranks.index(cell.rank), cell.micro_batch] = cell.busy_ms
    return times


def windows_to_show(run: RunSpans) -> list[tuple[str, int]]:
    """Return the windows that tell most: the one of median imbalance and the worst, with their titles.

    The first window, which warms up, and windows that lack a rank are left out where others are left.

    Args:
        run: The spans of all ranks.
    """
    ranks = {cell.rank for cell in run.cells}
    of_window: dict[int, list[CellRecord]] = {}
    for cell in run.cells:
        of_window.setdefault(cell.window, []).append(cell)
    first = min(of_window)
    whole = {
        window: cells
        for window, cells in of_window.items()
        if window != first
        and {cell.rank for cell in cells} >= {r for r in ranks if r < run.session_ranks[cells[0].session]}
    }
    ordered = sorted((imbalance(cell_times(cells)), window) for window, cells in (whole or of_window).items())
    median, worst = ordered[(len(ordered) - 1) // 2][1], ordered[-1][1]
    if median == worst:
        return [("only window" if len(of_window) == 1 else "window", worst)]
    return [("median window", median), ("worst window", worst)]


def draw_gantt(run: RunSpans, path: Path, windows: list[tuple[str, int]] | None = None) -> None:
    """Draw windows as bars over time, a row per rank, all panels in the same scale; a whole file or none.

    Args:
        run: The spans of all ranks.
        path: The picture; its suffix chooses the format (.png, .svg, .pdf).
        windows: Titles and windows; None: `windows_to_show`.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        from sb_lightning._messages import explain

        raise RuntimeError(
            explain(
                "the picture needs matplotlib",
                "it is not installed",
                "pip install matplotlib, or pass --no-png",
            )
        ) from error
    panels = [(title, window, run.cells_of(window)) for title, window in windows or windows_to_show(run)]
    rows = max(len(_ranks(cells)) for _, _, cells in panels)
    inches = 0.9 + len(panels) * (0.95 + 0.42 * max(rows, 2))
    figure = Figure(figsize=(11, inches), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    used: set[str] = set()
    for axis, (title, window, cells) in zip(axes, panels, strict=True):
        used |= _draw_window(axis, f"{title} ({window})", cells)
    # One scale for all: that of the longest window.
    axes[-1].set_xlim(0, max(1e3 * _seconds(cells) for _, _, cells in panels))
    axes[-1].set_xlabel("time since the window's start (ms)")
    handles = _legend([lane for lane in LANES if lane in used])
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:])


def _ranks(cells: list[CellRecord]) -> list[int]:
    """Ranks to draw, in order: all, or those that were busy longest."""
    busy: dict[int, float] = {}
    for cell in cells:
        busy[cell.rank] = busy.get(cell.rank, 0.0) + cell.busy_ms
    return sorted(sorted(busy, key=lambda rank: -busy[rank])[:MAX_RANKS])


def _seconds(cells: list[CellRecord]) -> float:
    return max(cell.end for cell in cells) - min(cell.start for cell in cells)


def _draw_window(axis: Axes, title: str, cells: list[CellRecord]) -> set[str]:
    ranks, start = _ranks(cells), min(cell.start for cell in cells)
    times = cell_times(cells)
    busy = np.nansum(times, axis=1)
    straggler = sorted({cell.rank for cell in cells})[int(busy.argmax())]
    used: set[str] = set()
    length = 1e3 * _seconds(cells)
    for cell in cells:
        if cell.rank not in ranks:
            continue
        row = ranks.index(cell.rank)
        for (lane, begin, end), _ in innermost(cell.spans):
            used.add(lane)
            axis.barh(
                row,
                1e3 * (end - begin),
                left=1e3 * (begin - start),
                height=0.72,
                color=COLORS[lane],
                linewidth=0,
            )
        _label(axis, cell, row, start, length)
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axis.set_ylim(len(ranks) - 0.45, -0.55)
    left_out = len(busy) - len(ranks)
    more = f"  ({left_out} less busy ranks not shown)" if left_out else ""
    axis.set_title(
        f"{title}: imbalance {imbalance(times):.2f}, rank {straggler} is the slowest{more}"
        if len(busy) > 1
        else f"{title}: one rank",
        loc="left",
        fontsize=10,
    )
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    return used


def _label(axis: Axes, cell: CellRecord, row: int, start: float, length: float) -> None:
    """Mark where the longest stretch of work starts, and write the tokens there where there is room."""
    pieces = innermost(cell.spans)
    stretches = [list(group) for is_busy, group in groupby(pieces, key=lambda piece: piece[1]) if is_busy]
    if not stretches:
        return
    stretch = max(stretches, key=lambda group: group[-1][0].end - group[0][0].start)
    left, right = 1e3 * (stretch[0][0].start - start), 1e3 * (stretch[-1][0].end - start)
    axis.plot([left, left], [row - 0.36, row + 0.36], color="white", linewidth=1.2, solid_capstyle="butt")
    tokens = cell.details.get("tokens")
    text = f"{tokens:,}" if tokens else ""
    # A character takes some 0.9 % of the width.
    if text and (right - left) > 0.009 * length * (len(text) + 1):
        axis.text((left + right) / 2, row, text, ha="center", va="center", color="white", fontsize=8)


def _legend(lanes: list[str]) -> list[Any]:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLORS[lane], label=MEANING.get(lane, lane)) for lane in lanes]
    return [*handles, Patch(color="none", label="numbers: tokens of a micro-batch")]
