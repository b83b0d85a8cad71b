"""The measured imbalance as tables: for people, and for Weights & Biases."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from sb_lightning.tracking.spans import LANES
from sb_lightning.tracking.window_record import MeasuredWindow

__all__ = ["CELL_COLUMNS", "WORST_COLUMNS", "cell_rows", "imbalance_table", "name_sequences", "worst_rows"]

CELL_COLUMNS = [
    "window", "rank", "micro_batch", "tokens", "longest", "sequences", "budget",
    "predicted_ms", "measured_ms", "wait_ms",
]  # fmt: skip
WORST_COLUMNS = ["window", "rank", "micro_batch", "tokens", "sequences", "measured_ms", "idle_ms"]


def name_sequences(sequences: Any, num_sequences: int) -> str:
    """Return the longest sequences of a cell as "id (length)", and how many more there are.

    Args:
        sequences: Pairs of id (-1 if unknown) and length, longest first.
        num_sequences: Sequences of the cell.

    Example:
        >>> name_sequences([(812, 8192), (3, 40)], 5)
        '812 (8,192 tokens), 3 (40 tokens), 3 more'
    """
    parts = [f"{'' if i < 0 else f'{i} '}({length:,} tokens)" for i, length in sequences]
    rest = num_sequences - len(parts)
    return ", ".join([*parts, *([f"{rest} more"] if rest > 0 and parts else [])])


def cell_rows(window: MeasuredWindow) -> list[list[Any]]:
    """Return a window as rows of `CELL_COLUMNS`, one per rank and micro-batch; what is unknown is None."""
    return [
        [
            window.index,
            rank,
            micro_batch,
            cell.tokens or None,
            cell.longest or None,
            name_sequences(cell.sequences, cell.num_sequences),
            _known(cell.budget),
            _known(cell.predicted_ms),
            cell.compute_ms,
            cell.lanes_ms[LANES.index("wait")],
        ]
        for rank, cells in enumerate(window.cells)
        for micro_batch, cell in enumerate(cells)
    ]


def worst_rows(summary: dict[str, Any]) -> list[list[Any]]:
    """Return the worst cells of a run's summary as rows of `WORST_COLUMNS`."""
    return [
        [
            worst["window"],
            worst["rank"],
            worst["micro_batch"],
            worst["tokens"] or None,
            name_sequences(worst["sequences"], worst["num_sequences"]),
            worst["busy_ms"],
            worst["idle_ms"],
        ]
        for worst in summary["worst_cells"]
    ]


def imbalance_table(summary: dict[str, Any], spans: str | None = None) -> Table:
    """Return the table to print at the end of a run.

    Args:
        summary: As `RunImbalance.summary` returns it.
        spans: Folder of the run if it has spans.
    """
    table = Table(title="Imbalance", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    is_parallel = summary["ranks"] > 1
    table.add_row("windows", f"{summary['windows']:,} (without the first), {_ms(summary['window_ms'])} each")
    if is_parallel:
        table.add_row(
            "imbalance",
            f"{summary['imbalance']:.3f} max/mean over ranks "
            f"(median {summary['imbalance_median']:.3f}, worst {summary['imbalance_max']:.3f})",
        )
        table.add_row("of a slot", f"{summary['imbalance_slot']:.3f} max/mean over ranks")
    table.add_row("of micro-batches", f"{summary['imbalance_micro_batch']:.3f} max/mean over the window")
    if is_parallel:
        table.add_row(
            "idle", f"{_ms(summary['idle_ms'])} per window and rank, {summary['idle_share']:.1%} of the time"
        )
        lost = summary["time_ms"]["wait"] + summary["time_ms"]["broadcast"]
        share = lost / summary["window_ms"] if summary["window_ms"] else 0.0
        table.add_row("lost waiting", f"{_ms(lost)} per window and rank, {share:.1%} of the time")
        shares = [f"rank {rank} in {share:.0%}" for rank, share in summary["straggler_share"].items()]
        table.add_row(
            "slowest", f"{', '.join(shares[:8])}{', ...' if len(shares) > 8 else ''} of the windows"
        )
    times = {name: time for name, time in summary["time_ms"].items() if time >= 0.05}
    table.add_row("time of a window", ", ".join(f"{name} {_ms(time)}" for name, time in times.items()))
    if is_parallel:
        for number, worst in enumerate(summary["worst_cells"][:3]):
            named = name_sequences(worst["sequences"], worst["num_sequences"])
            table.add_row(
                "worst cells" if number == 0 else "",
                f"window {worst['window']}, rank {worst['rank']}, micro-batch {worst['micro_batch']}: "
                f"{_ms(worst['busy_ms'])}"
                + (f"; sequence {named}" if named else "")
                + f"; others idle {_ms(worst['idle_ms'])}",
            )
    met = f", and {_ms(summary['sync_ms'])} until the ranks have met" if is_parallel else ""
    table.add_row(
        "cost of measuring",
        f"{_ms(summary['monitor_ms'])} per window, {summary['monitor_share']:.2%}{met}",
    )
    if spans is not None:
        table.add_row("timeline", f"sb trace {spans}")
    return table


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1e4 else f"{value:.1f} ms"
