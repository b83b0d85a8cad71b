"""Spans on disk: one JSONL file per rank, described in docs/imbalance.md."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sb_lightning._messages import explain
from sb_lightning.tracking.spans import LANES, Span

__all__ = ["FOLDER", "FORMAT", "VERSION", "CellRecord", "RunSpans", "SpanWriter", "read_spans", "span_path"]

FORMAT = "sb_lightning.spans"
VERSION = 1
FOLDER = "spans"
"""Name of the folder in that of a run."""


def span_path(folder: Path, rank: int) -> Path:
    """Return where a rank's spans are.

    Args:
        folder: Folder of the run.
        rank: The rank.
    """
    return folder / FOLDER / f"rank_{rank:04d}.jsonl"


class SpanWriter:
    """Appends lines to a rank's file; every call leaves whole lines on the disk.

    Args:
        path: The file; it is continued if it exists.
        header: The session's first line, without `kind`, `format` and `version`.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Set once the header is written, which tells its session itself.
        self._session: dict[str, Any] = {}
        self._file = path.open("ab")
        if self._file.tell() and _last_byte(path) != b"\n":
            # What was killed in the middle of a line.
            self._file.write(b"\n")
        self.write([{"kind": "header", "format": FORMAT, "version": VERSION, **header}])
        self._session = {"session": header["session"]}

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines, each with the session it belongs to, and hand them to the operating system."""
        text = "".join(f"{json.dumps({**line, **self._session}, separators=(',', ':'))}\n" for line in lines)
        self._file.write(text.encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        # What could not be written when it was due is lost.
        with contextlib.suppress(OSError):
            self._file.close()


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


@dataclass(frozen=True, kw_only=True)
class CellRecord:
    """One micro-batch of one rank."""

    session: str
    """Name of the session it ran in."""
    rank: int
    window: int
    """Counts windows over the run."""
    micro_batch: int
    spans: list[Span]
    """Seconds since the run's start, on the clock that all ranks share."""
    busy_ms: float
    details: dict[str, Any]
    """Everything else of the line: tokens, longest, sequences, budget, predicted_ms, ..."""

    @property
    def start(self) -> float:
        """Seconds from the run's start to its first span."""
        return float(min(span.start for span in self.spans))

    @property
    def end(self) -> float:
        """Seconds from the run's start to the end of its last span."""
        return float(max(span.end for span in self.spans))


@dataclass(kw_only=True)
class RunSpans:
    """What the files of all ranks hold."""

    ranks: int
    session_ranks: dict[str, int] = field(default_factory=dict)
    """Ranks of each session: a resumed run may have other ranks."""
    cells: list[CellRecord] = field(default_factory=list)
    windows: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)
    """End in seconds since the run's start, window, metrics."""

    def cells_of(self, window: int) -> list[CellRecord]:
        """Return the micro-batches of a window."""
        return [cell for cell in self.cells if cell.window == window]


def read_spans(folder: Path) -> RunSpans:
    """Read the spans of a run.

    Where sessions ran the same windows (after a resume, or when an unrelated run wrote into the same folder),
    the latest counts: a session replaces all windows of earlier ones from its own first one on. What cannot
    be read is left out, with a warning that names the file: lines that are damaged, and files of ranks that
    are missing.

    Args:
        folder: Folder of the run, or its `spans` folder.

    Raises:
        FileNotFoundError: There are no spans.
        ValueError: They are of a version that this release cannot read, or none is whole.
    """
    inner = folder / FOLDER
    place = inner if inner.is_dir() else folder
    paths = sorted(place.glob("rank_*.jsonl"))
    if not paths:
        raise FileNotFoundError(
            explain(
                f"'{folder}' holds no {FOLDER}/rank_*.jsonl",
                "the picture is drawn from what ImbalanceMonitor writes there",
                "pass the folder of a run (which holds its config.yaml and checkpoints) that had "
                "sb_lightning.callbacks.ImbalanceMonitor among its callbacks",
            )
        )
    files = [_File(path) for path in paths]
    sessions: dict[str, _Session] = {}
    for file in files:
        file.read_headers(sessions)
    cells = [cell for file in files for cell in file.read_cells(sessions)]
    kept = _kept_windows(cells, sessions)
    if not kept:
        raise ValueError(
            explain(
                f"'{place}' holds no whole micro-batch",
                "the run ended before its first window, or the files are damaged",
                "pass the folder of another run",
            )
        )
    start = min(sessions[name].start for name in kept.values())
    session_ranks = {name: sessions[name].ranks for name in kept.values()}
    run = RunSpans(ranks=max(session_ranks.values()), session_ranks=session_ranks)
    # Of one session, but for files that somebody has put together.
    unique = {
        (cell.window, cell.rank, cell.micro_batch): _shifted(cell, sessions[cell.session].start - start)
        for cell in cells
        if kept.get(cell.window) == cell.session
    }
    run.cells = [unique[key] for key in sorted(unique)]
    run.windows = [
        (sessions[session].start - start + end, window, metrics)
        for file in files
        for session, end, window, metrics in file.windows
        if kept.get(window) == session
    ]
    missing = sorted(set(range(run.ranks)) - {file.rank for file in files})
    if missing:
        names = ", ".join(span_path(Path(), rank).name for rank in missing)
        warnings.warn(
            f"{place} lacks {names}: the run had {run.ranks} ranks. What is missing is left out.",
            stacklevel=2,
        )
    return run


def _kept_windows(cells: list[CellRecord], sessions: Mapping[str, _Session]) -> dict[int, str]:
    """Return for each window the session whose cells count."""
    of_session: dict[str, set[int]] = {}
    for cell in cells:
        of_session.setdefault(cell.session, set()).add(cell.window)
    kept: dict[int, str] = {}
    for name in sorted(of_session, key=lambda name: sessions[name].start):
        first = min(of_session[name])
        kept = {window: earlier for window, earlier in kept.items() if window < first}
        kept.update(dict.fromkeys(of_session[name], name))
    return kept


def _shifted(cell: CellRecord, seconds: float) -> CellRecord:
    spans = [Span(lane, start + seconds, end + seconds) for lane, start, end in cell.spans]
    return replace(cell, spans=spans)


@dataclass(frozen=True)
class _Session:
    start: float
    """Wall clock at the barrier, of the first rank that tells: sessions follow each other by it."""
    ranks: int


class _File:
    """The lines of one rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        digits = path.stem.removeprefix("rank_")
        self.rank = int(digits) if digits.isdecimal() else -1
        self.windows: list[tuple[str, float, int, dict[str, float]]] = []
        """Session, end since its start, window, metrics."""
        self._damaged: list[int] = []
        self._entries: list[tuple[int, dict[str, Any]]] = []
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if line.strip():
                try:
                    entry = json.loads(line)
                    str(entry["kind"])
                    self._entries.append((number, entry))
                except (KeyError, TypeError, ValueError):
                    self._damaged.append(number)

    def read_headers(self, sessions: dict[str, _Session]) -> None:
        """Add the sessions that the file tells of."""
        for number, entry in self._entries:
            if entry["kind"] != "header":
                continue
            try:
                _check_version(self.path, entry)
                self.rank = int(entry["rank"])
                session = _Session(float(entry["start_unix_s"]), int(entry["ranks"]))
                # The barrier at the start is one moment on all ranks.
                sessions.setdefault(str(entry["session"]), session)
            except (KeyError, TypeError, ValueError) as error:
                if isinstance(error, _VersionError):
                    raise
                self._damaged.append(number)

    def read_cells(self, sessions: Mapping[str, _Session]) -> list[CellRecord]:
        """Return the cells, in seconds since the start of their session; keep the windows."""
        cells = []
        for number, entry in self._entries:
            try:
                if entry["kind"] not in ("cell", "window"):
                    continue
                # Every line tells its session, so that those after a damaged header are not taken for the
                # session before.
                session = str(entry["session"])
                if session not in sessions:
                    raise ValueError("a session without a header")
                if entry["kind"] == "cell":
                    cells.append(_cell(entry, self.rank, session))
                else:
                    found = (float(entry["end_us"]) / 1e6, int(entry["window"]), dict(entry["metrics"]))
                    self.windows.append((session, *found))
            except (KeyError, TypeError, ValueError, AttributeError):
                self._damaged.append(number)
        if self._damaged:
            count, numbers = len(self._damaged), sorted(self._damaged)
            shown = ", ".join(map(str, numbers[:5])) + (", ..." if count > 5 else "")
            warnings.warn(
                f"{self.path}: {count} damaged line{'s' if count > 1 else ''} left out (line {shown}).",
                stacklevel=4,
            )
        return cells


class _VersionError(ValueError):
    pass


def _check_version(path: Path, header: Mapping[str, Any]) -> None:
    if header["format"] != FORMAT or header["version"] != VERSION:
        raise _VersionError(
            explain(
                f"{path} has format {header['format']!r}, version {header['version']!r}",
                f"this release reads {FORMAT!r}, version {VERSION}",
                "read it with the release that wrote it",
            )
        )


def _cell(entry: dict[str, Any], rank: int, session: str) -> CellRecord:
    spans = [
        Span(lane, start / 1e6, (start + length) / 1e6)
        for lane, start, length in entry["spans"]
        if lane in LANES
    ]
    if not spans:
        raise ValueError("no spans")
    known = ("kind", "session", "window", "micro_batch", "spans", "busy_ms")
    return CellRecord(
        session=session,
        rank=rank,
        window=int(entry["window"]),
        micro_batch=int(entry["micro_batch"]),
        spans=spans,
        busy_ms=float(entry["busy_ms"]),
        details={key: value for key, value in entry.items() if key not in known},
    )
