"""The file that an interrupted profile goes on from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sb_lightning._files import write_whole
from sb_lightning._messages import explain
from sb_lightning.latency.fingerprint import Fingerprint
from sb_lightning.latency.profiler.points import Point
from sb_lightning.latency.profiler.samples import Record
from sb_lightning.latency.profiler.schedule import Progress

__all__ = ["load_partial", "partial_path", "save_partial"]

VERSION = 1


def partial_path(output: Path) -> Path:
    """Return where the samples of an unfinished table are kept."""
    return output.with_name(output.name + ".partial.json")


def save_partial(path: Path, progress: Progress, fingerprint: Fingerprint, settings: dict[str, Any]) -> None:
    """Write what was measured; the file is replaced whole or not at all."""
    document = {
        "version": VERSION,
        "fingerprint": asdict(fingerprint),
        "settings": settings,
        "spent_s": progress.spent_s,
        "points": [
            {**asdict(point), "visits": record.visits, "samples": record.to_rows()}
            for point, record in progress.records.items()
        ],
    }
    write_whole(path, json.dumps({**document, "digest": _digest(document)}, allow_nan=False) + "\n")


def load_partial(path: Path, fingerprint: Fingerprint, settings: dict[str, Any]) -> Progress | None:
    """Read what an interrupted profile has measured; None if there is no such file.

    Raises:
        ValueError: The file is damaged, or was measured under other conditions.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    again = f"delete {path} to measure from the start, or profile as it was begun"
    try:
        document = json.loads(content)
        # Samples that were changed by hand or by a bad disk would go into the table unseen.
        if document.pop("digest") != _digest(document) or document["version"] != VERSION:
            raise ValueError("its digest or version is another")
        found = Fingerprint(**document["fingerprint"])
        began = document["settings"]
        records = {}
        for row in document["points"]:
            record = Record.from_rows(row.pop("samples"), int(row.pop("visits")))
            records[Point(**row)] = record
        progress = Progress(records, float(document["spent_s"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            explain(
                f"{path} cannot be read ({type(error).__name__}: {error})",
                "it would hold the samples of an interrupted profile",
                f"delete {path} to measure from the start",
            )
        ) from None
    differences = [str(difference) for difference in found.differences(fingerprint)]
    differences += [
        f"{key} ({began.get(key)} in the file, {value} here)"
        for key, value in settings.items()
        if began.get(key) != value
    ]
    if differences:
        raise ValueError(
            explain(
                f"{path} was measured with another {', '.join(differences)}",
                "its samples do not belong to this table",
                again,
            )
        )
    return progress


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
