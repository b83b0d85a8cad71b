"""The latency table of a comparison: one for all calls, also where the configuration has changed since."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from sb_lightning._messages import explain
from sb_lightning.compare.folder import ANEW, ComparisonFolder, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sb_lightning.cli.latency import LatencySettings
    from sb_lightning.latency import LatencyTable

__all__ = ["describe_table", "table_error", "table_of_comparison"]


def table_of_comparison(
    folder: ComparisonFolder,
    settings: LatencySettings,
    measure: Callable[[], LatencyTable | None],
    *,
    has_rounds: bool,
) -> LatencyTable | None:
    """Return the table that the comparison has begun with, or the one that the configuration asks for.

    Args:
        folder: Of the comparison.
        settings: The `latency` keys of this call.
        measure: Finds the table that they ask for; it may be measured now.
        has_rounds: Whether rounds are finished, all of which have gone by the table that is there.

    Raises:
        ValueError: Rounds are there, and their table is gone or damaged.
    """
    wanted, begun = asdict(settings), folder.latency
    if has_rounds:
        has_table = folder.table.exists() if begun is None else begun.get("has_table", True)
        _tell_ignored(folder, wanted, begun or {})
        return _load(folder) if has_table else None
    if begun is not None and folder.table.exists() and all(begun.get(k) == v for k, v in wanted.items()):
        try:
            return _load(folder)
        except ValueError as error:
            rank_zero_warn(f"No round has gone by it yet, so the latency table is found anew: {error}")
    table = measure()
    with writing(folder.path):
        if table is None:
            folder.table.unlink(missing_ok=True)
        else:
            table.save(folder.table)
    folder.note_latency({**wanted, "has_table": table is not None})
    return table


def table_error(table: LatencyTable | None) -> float | None:
    """Return the table's median error on its held-out points; None where it is not known."""
    if table is None:
        return None
    try:
        error = table.profile["errors"]["table"]["median"]
    except (KeyError, TypeError):
        # Written by something else than the profiler.
        return None
    return float(error) if isinstance(error, (int, float)) else None


def describe_table(table: LatencyTable | None) -> str:
    """Return where predicted times come from, in one line."""
    if table is None:
        return "none: counted operations"
    error = table_error(table)
    known = "hold-out error not known" if error is None else f"median hold-out error {error:.1%}"
    return f"table.json, {known}"


def _load(folder: ComparisonFolder) -> LatencyTable:
    from sb_lightning.latency import LatencyTable

    if not folder.table.exists():
        raise ValueError(
            explain(
                f"{folder.table} is gone",
                "the rounds that are there were planned by it, and those to come would be by another",
                ANEW,
            )
        )
    try:
        return LatencyTable.load(folder.table)
    except (OSError, ValueError) as error:
        raise folder.damaged(folder.table, str(error).split(". To fix it, ")[0]) from error


def _tell_ignored(folder: ComparisonFolder, wanted: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    changed = [f"latency.{key}={wanted[key]}" for key in wanted if key in begun and begun[key] != wanted[key]]
    if changed:
        rank_zero_warn(
            f"{', '.join(changed)}: ignored; the comparison goes on by the latency table that it has begun "
            f"with. For another one, begin anew in another folder (--output) than {folder.path}."
        )
