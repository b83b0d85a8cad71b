"""The run summary as a table for people."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rich.table import Table

__all__ = ["summary_table"]


def summary_table(summary: dict[str, Any]) -> Table:
    """Return the table to print.

    Args:
        summary: What `summary.json` holds.
    """
    is_whole = summary["status"] == "finished"
    title = "Run summary" if is_whole else f"Run summary ({summary['status']})"
    # The losses reach back to the first window ever, the rest does not.
    here = "" if summary["resumed_at"] is None else " (this session)"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    # Paths are copied: fold them rather than cut them.
    table.add_column(overflow="fold")

    def row(name: str, *values: str | None) -> None:
        shown = [value for value in values if value]
        if shown:
            table.add_row(name, "\n".join(shown))

    row("train loss", _change(summary["loss"]))
    row("validation loss", _change(summary["validation_loss"]))
    before = f" (windows {summary['resumed_at'] + 1:,} to {summary['global_step']:,})" if here else ""
    row(f"windows{here}", f"{summary['windows']:,}{before if summary['windows'] else ''}")
    if summary["tokens"]:
        row(f"tokens{here}", f"{summary['tokens']:,} in {summary['sequences']:,} sequences")
    if summary["tokens_per_s"]:
        row(f"tokens/s{here}", f"{summary['tokens_per_s']:,.0f} (without validation and the first window)")
    if times := summary["step_times"]:
        row(
            f"micro-batch time{here}",
            f"measured {times['measured_ms']:.1f} ms, predicted {times['predicted_ms']:.1f} ms, median error "
            f"{times['median_error']:.1%} ({times['micro_batches']:,} micro-batches of rank 0, forward and "
            "backward)",
            f"predicted by {times['latency_model']}",
        )
    found = summary["imbalance"]
    if found and found["ranks"] > 1:
        row(
            f"imbalance{here}",
            f"{found['imbalance']:.3f} (slowest rank / mean of ranks), "
            f"idle {found['idle_share']:.1%} of the time",
        )
    row(f"wall time{here}", str(timedelta(seconds=round(summary["wall_s"]))))
    sparse = summary["sparse"]
    if any(rank["tokens"] for rank in summary["ranks"]):
        row("attention", f"{sparse['budget']} blocks of {sparse['block_size']} keys" if sparse else "dense")
    for rank in summary["ranks"]:
        if rank["attended_pairs"]:
            share = "" if rank["share"] is None else f"{rank['share']:.1%}: "
            row(
                f"work of rank {rank['rank']}{here}",
                f"{share}{rank['attended_pairs']:,} attended pairs, "
                f"{rank['tokens']:,} tokens, {rank['sequences']:,} sequences",
            )
    files = summary["files"]
    row("checkpoint", *files["checkpoints"])
    row("logs", *files["logs"])
    row("config", files["config"])
    row("this table", files["summary"])
    return table


def _change(series: dict[str, float | None]) -> str | None:
    if series["first"] is None or series["last"] is None:
        return None
    return f"{series['first']:.4f} -> {series['last']:.4f}"
