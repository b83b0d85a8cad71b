"""From samples to the finished table, and what is told and kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sb_lightning._messages import explain
from sb_lightning.latency.profiler.assemble import assemble
from sb_lightning.latency.profiler.conditions import Conditions, shape_of
from sb_lightning.latency.profiler.holdout import evaluate
from sb_lightning.latency.profiler.partial import partial_path
from sb_lightning.latency.profiler.picture import draw
from sb_lightning.latency.profiler.points import Grid
from sb_lightning.latency.profiler.report import doubts, error_table
from sb_lightning.latency.profiler.schedule import Progress
from sb_lightning.latency.profiler.spec import ModelSpec
from sb_lightning.latency.schema import FORMAT
from sb_lightning.latency.table import LatencyModel, LatencyTable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check_output", "publish", "table_from"]

PICTURE = ".png"


def check_output(output: Path) -> None:
    """Make sure that table and picture have places of their own, before anything is measured.

    Args:
        output: File of the table.

    Raises:
        ValueError: It is a folder, has the name of the picture, cannot be made, or is a file of another kind.
    """
    if output.is_dir():
        raise ValueError(
            explain(
                f"the output {output} is a folder",
                "the table is a file",
                f"name a file in it, such as {output / 'table.json'}",
            )
        )
    if output.suffix.lower() == PICTURE:
        raise ValueError(
            explain(
                f"the output is {output}",
                f"the table is JSON, and the picture beside it takes the name with {PICTURE}",
                f"name the table {output.with_suffix('.json')}",
            )
        )
    if output.exists() and not _is_table(output):
        raise ValueError(
            explain(
                f"the output {output} exists and is not a latency table",
                "the table would replace it",
                "name another file, or remove that one",
            )
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            explain(
                f"the output is {output}",
                f"its folder cannot be made ({error})",
                "name a file in a folder that you may write to",
            )
        ) from None


def _is_table(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        return FORMAT.encode() in file.read(4096)


def table_from(progress: Progress, conditions: Conditions, spec: ModelSpec, grid: Grid) -> LatencyTable:
    """Build the table, with its errors on the held-out points in `profile`.

    Args:
        progress: The samples.
        conditions: What the table is for.
        spec: The model that was measured; it may have fewer layers.
        grid: The points.
    """
    fingerprint, records = conditions.fingerprint, progress.records
    small = LatencyModel(assemble(records, grid, measured=spec.layers, layers=spec.layers), "measured")
    found = evaluate(
        records,
        shape_of(fingerprint, spec.layers),
        lambda point: small.micro_batch_ms([point.length], point.budget),
    )
    measurements = assemble(
        records, grid, measured=spec.layers, layers=(fingerprint.layers, fingerprint.dense_layers)
    )
    notes = {
        "settings": conditions.settings,
        "measured_layers": sum(spec.layers),
        "block_size": grid.block_size,
        "seconds": progress.spent_s,
        **found,
    }
    table = LatencyTable(measurements, fingerprint, notes)
    notes["correction"] = {"largest": table.correction, "mean": table.mean_correction}
    return LatencyTable(measurements, fingerprint, notes)


def publish(table: LatencyTable, max_length: int, where: str, output: Path | None, console: Console) -> None:
    """Print the errors; write table and picture, which ends the partial file.

    Args:
        table: The result.
        max_length: Longest sequence that was asked for.
        where: Title of the picture.
        output: File of the table, or None.
        console: Where to print.
    """
    console.print(error_table(table.profile))
    if (warning := doubts(table.profile)) is not None:
        console.print(warning, soft_wrap=True)
    longest = table.measurements.lengths[-1]
    if longest < max_length:
        console.print(
            f"The time sufficed for sequences up to {longest} tokens; longer ones are extrapolated. A larger "
            "budget of seconds measures them.",
            soft_wrap=True,
        )
    if output:
        picture = output.with_suffix(PICTURE)
        table.save(output)
        draw(table.profile, where, picture)
        partial_path(output).unlink(missing_ok=True)
        console.print(f"table: {output}, picture: {picture}", soft_wrap=True, highlight=False)
