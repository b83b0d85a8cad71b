"""What `sb plan` prints and writes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sb_lightning import __version__
from sb_lightning._files import write_whole
from sb_lightning._messages import explain
from sb_lightning.tracking.plan_picture import PlannedWindow, draw_plans

if TYPE_CHECKING:
    from sb_lightning.balance import SparsityAwareBatchSampler
    from sb_lightning.balance.figures import Explanation

__all__ = [
    "check_folder",
    "describe_lengths",
    "draw",
    "histogram",
    "plan_document",
    "progress_of_plans",
    "write_document",
]

FORMAT, VERSION = "sb_lightning plan", 1
POINTS = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
BAR = 40
FEW_BINS, FINEST = 6, 8
SAY_EVERY_S = 10.0
SHOW_EVERY_S = 0.1


def describe_lengths(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Return how many sequences and tokens there are, and how long the sequences are."""
    points = {name: int(np.percentile(lengths, point, method="lower")) for name, point in POINTS.items()}
    return {"sequences": len(lengths), "tokens": int(lengths.sum()), **points}


def histogram(lengths: NDArray[np.int64]) -> str:
    """Return the lengths as bars of text, in logarithmic bins, with the share of the tokens beside each.

    Args:
        lengths: Tokens of each sequence # [N], at least one.
    """
    edges = _edges(int(lengths.min()), int(lengths.max()))
    place = np.searchsorted(edges, lengths, side="right") - 1
    count = np.bincount(place, minlength=len(edges) - 1)
    tokens = np.bincount(place, weights=lengths, minlength=len(edges) - 1)
    width = len(f"{edges[-1] - 1:,}")
    head = f"{'tokens':>{2 * width + 3}}  sequences{'':{BAR - 5}}of all tokens"
    lines = [
        f"{low:>{width},} - {high - 1:>{width},}  {n / len(lengths):>6.1%} "
        f"{'#' * max(round(BAR * n / count.max()), int(n > 0)):<{BAR}} {share / max(tokens.sum(), 1):>6.1%}"
        for low, high, n, share in zip(edges[:-1], edges[1:], count, tokens, strict=True)
    ]
    return "\n".join([head, *lines])


def _edges(least: int, most: int) -> NDArray[np.int64]:
    """Bounds of bins that have one ratio, of an octave or less; the last bound is above all lengths."""
    per_octave = 1
    while True:
        first = math.floor(per_octave * math.log2(max(least, 1)))
        last = math.floor(per_octave * math.log2(max(most, 1))) + 1
        edges = np.unique(np.ceil(2.0 ** (np.arange(first, last + 1) / per_octave)).astype(np.int64))
        edges = np.concatenate([[least], edges[(edges > least) & (edges <= most)], [most + 1]])
        if len(edges) > FEW_BINS or per_octave >= FINEST:
            return edges
        per_octave *= 2


def plan_document(explanation: Explanation, lengths: NDArray[np.int64], description: str) -> dict[str, Any]:
    """Return what `--json` writes.

    Args:
        explanation: The figures.
        lengths: Tokens of each sequence # [N].
        description: Where they come from.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "sb_lightning": __version__,
        "data": {"source": description, **describe_lengths(lengths)},
        **explanation.to_dict(),
    }


def draw(sampler: SparsityAwareBatchSampler, explanation: Explanation, description: str, path: Path) -> None:
    """Draw a median window, the same for all policies, and the worst of each policy.

    Args:
        sampler: Plans them again.
        explanation: Tells which windows.
        description: Where the lengths come from.
        path: The picture.
    """
    figures = explanation.figures
    shared = figures.get("random") or next(iter(figures.values()))
    rows = []
    for policy, found in figures.items():
        windows = (("median window", shared.median_window), ("window that loses most", found.worst_window))
        rows.append([_panel(sampler, policy, f"{policy}: {name}", window) for name, window in windows])
    heading = (
        f"{description.partition(' (')[0]}: {explanation.ranks} ranks x {explanation.accumulate} micro-"
        f"batches, objective {explanation.objective}; times: {explanation.latency}"
    )
    draw_plans(rows, path, objective=explanation.objective, heading=heading, time_unit=explanation.time_unit)


def _panel(sampler: SparsityAwareBatchSampler, policy: str, title: str, window: int) -> PlannedWindow:
    plan = sampler.plan(sampler.epoch, window, policy=policy)  # type: ignore[arg-type]
    lengths = sampler.lengths[sampler.members(sampler.epoch, window)]
    # Where the epoch has no full window at all, or none was planned.
    short = ", short" if len(lengths) < sampler.window_size else ""
    return PlannedWindow(
        title=f"{title} ({window}{short})",
        times=np.asarray(plan.predicted_ms, dtype=np.float64),
        tokens=np.array([[int(lengths[list(cell)].sum()) for cell in row] for row in plan.cells]),
        is_padding=np.array(plan.is_padding),
    )


def check_folder(folder: Path, option: str) -> None:
    """Make sure that a folder is there, and that files can be written to it.

    Args:
        folder: The folder; made if it is not there.
        option: What the user calls it.

    Raises:
        ValueError: It cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".sb-plan-{time.time_ns()}.tmp"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ValueError(
            explain(
                f"{option} is '{folder}'",
                f"nothing can be written there ({error.strerror or error})",
                f"pass as {option} a place that you may write to",
            )
        ) from error


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write the JSON, whole or not at all."""
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


@contextmanager
def progress_of_plans(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show on standard error how many plans are made: a bar on a terminal, a line now and then elsewhere.

    Args:
        title: What is planned.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    begin = said = time.monotonic()
    if not console.is_terminal:

        def tell(done: int, total: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= SAY_EVERY_S and done < total:
                said = now
                left = (now - begin) * (total - done) / done
                console.print(
                    f"{title}: {done:,} of {total:,} plans, about {left:.0f} s left", highlight=False
                )

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(done: int, total: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= SHOW_EVERY_S or done == total:
                said = now
                bar.update(task, completed=done, total=total)

        yield show
