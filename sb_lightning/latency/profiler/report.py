"""What a profile prints: the plan, a progress bar, and the errors in the end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sb_lightning.latency.profiler.holdout import PREDICTORS
from sb_lightning.latency.profiler.schedule import FEWEST_ROUNDS, LARGEST_SHARE, Schedule

__all__ = ["doubts", "error_table", "progress_bar", "say_plan"]

DRAW_EVERY_S = 0.2


def say_plan(console: Console, schedule: Schedule, where: str) -> None:
    """Say what will be measured and how long it will take.

    Args:
        console: Where to.
        schedule: Its first estimates.
        where: The machine.
    """
    grid = schedule.grid
    coarse, fine = len(grid.levels[0]), len(grid.levels[-1])
    console.print(f"profile: {where}", highlight=False, soft_wrap=True)
    done = len(schedule.progress.records)
    resumed = f"; {done} points measured before are kept" if done else ""
    console.print(
        f"plan: sequences of {grid.shortest} to {grid.max_length} tokens, {coarse} points "
        f"refined up to {fine}, a fifth held out; one round takes about {schedule.round_s(0):.1f} s (coarse) "
        f"to {schedule.round_s(len(grid.levels) - 1):.1f} s (fine); at most {max(0.0, schedule.left_s):.0f} s"
        f" of measuring{resumed}",
        highlight=False,
        soft_wrap=True,
    )
    if (short := _too_few_seconds(schedule)) is not None:
        console.print(short, highlight=False, soft_wrap=True)


def _too_few_seconds(schedule: Schedule) -> str | None:
    """Return what is left out where the seconds do not suffice for one round of the coarse grid."""
    points = [point for point in schedule.grid.levels[0] if point not in schedule.progress.records]
    costs = sorted((schedule.estimate_ms(point) / 1000.0, point.length) for point in points)
    spent_s = needed_s = 0.0
    missing = []
    for cost_s, length in costs:
        # A point is not begun that would take more than a share of what is left then.
        wanted_s = spent_s + cost_s / LARGEST_SHARE
        needed_s = max(needed_s, wanted_s)
        if wanted_s > schedule.left_s:
            missing.append(length)
        spent_s += cost_s
    if not missing:
        return None
    total_s = schedule.progress.spent_s + max(needed_s, FEWEST_ROUNDS * schedule.round_s(0))
    return (
        f"{schedule.budget_s:.3g} s do not suffice for one round: about {len(missing)} of {len(points)} "
        f"points, with sequences of {min(missing)} tokens and more, are left out, and such times extrapolated"
        f". {math.ceil(total_s)} s would do (budget_seconds)."
    )


@contextlib.contextmanager
def progress_bar(console: Console, schedule: Schedule) -> Iterator[Callable[[], None]]:
    """Show the seconds spent and what is known; yields a function that updates it.

    Args:
        console: Where to; nothing is drawn on one that is not a terminal.
        schedule: Read at each update.
    """
    bar = Progress(
        TextColumn("measuring"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # Its thread would run in the process that is timed.
        auto_refresh=False,
        disable=not console.is_terminal,
    )

    def describe() -> str:
        records = schedule.progress.records
        settled = sum(record.is_settled for record in records.values())
        return f"level {schedule.level + 1}: {len(records)} points, {settled} settled"

    drawn_s = schedule.progress.spent_s
    with bar:
        task = bar.add_task(describe(), total=schedule.budget_s)
        bar.update(task, completed=drawn_s, refresh=True)

        def show() -> None:
            nonlocal drawn_s
            spent_s = schedule.progress.spent_s
            if spent_s - drawn_s >= DRAW_EVERY_S:
                drawn_s = spent_s
                bar.update(task, completed=spent_s, description=describe(), refresh=True)

        yield show


FEWEST_HELD_OUT = 5
MOST_NOISE = 0.1


def doubts(profile: dict[str, Any]) -> str | None:
    """Return why a table may be wrong and what to do, or None.

    Args:
        profile: What a table keeps in `profile`.
    """
    found = []
    count = sum(point["held_out"] for point in profile["points"])
    if count < FEWEST_HELD_OUT:
        found.append(f"{count} held-out points are too few to judge it")
    spread, error = profile["noise"]["spread"], profile["noise"]["held_out_error"]
    if spread is None:
        found.append("no point was measured twice")
    elif spread > MOST_NOISE or (error or 0.0) > MOST_NOISE / 2:
        found.append("the machine was busy")
    medians = {name: values["median"] for name, values in profile["errors"].items()}
    own = medians.pop("table")
    if own is not None and any(other is not None and other < own for other in medians.values()):
        found.append("a simple predictor did better")
    if not found:
        return None
    return f"This table may be wrong: {', '.join(found)}. Measure again with more seconds on an idle machine."


def error_table(profile: dict[str, Any]) -> Table:
    """Return the hold-out errors as a table.

    Args:
        profile: What a table keeps in `profile`.
    """
    count = sum(point["held_out"] for point in profile["points"])
    title = f"Errors on {count} held-out points of {len(profile['points'])}"
    noise = profile["noise"]
    caption = "Noise: unknown, each point was measured once."
    if noise["spread"] is not None:
        caption = f"Noise: a single step varies by {noise['spread']:.1%}"
        error = noise["held_out_error"]
        caption += "." if error is None else f"; the held-out medians are known within {error:.1%}."
    if noise["interrupted"] > 0:
        caption += f" Other programs interrupted {noise['interrupted']:.0%} of the steps, which do not count."
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("predictor")
    table.add_column("median error", justify="right")
    table.add_column("worst error", justify="right")
    for name, label in PREDICTORS.items():
        errors = profile["errors"][name]
        table.add_row(label, *("-" if value is None else f"{value:.1%}" for value in errors.values()))
    return table
