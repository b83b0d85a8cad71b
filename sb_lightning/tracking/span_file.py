"""Spans on disk: one JSONL file per rank, described in docs/imbalance.md."""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
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
# What a line may hold; nothing that was measured comes near these.
LIMIT = 2**64
MOST_RANKS = MOST_MICRO_BATCHES = 1_000_000
MOST_UNIX_S = 1e11
MOST_DEPTH = 8
# Missing files that a warning names.
MOST_NAMED = 8


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
    be read is left out, with a warning that names the file: lines that are damaged (a number that is not
    finite counts as damage, but for metrics that are NaN), and files of ranks that are missing.

    Args:
        folder: Folder of the run, or its `spans` folder.

    Raises:
        FileNotFoundError: There are no spans.
        OSError: A file of them cannot be read.
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
        names = ", ".join(span_path(Path(), rank).name for rank in missing[:MOST_NAMED])
        if len(missing) > MOST_NAMED:
            names += f" and {len(missing) - MOST_NAMED} more"
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
        for number, line in enumerate(_content(path).split(b"\n"), start=1):
            if line.strip():
                try:
                    entry = json.loads(line)
                    _check(path, entry)
                except _VersionError:
                    raise
                except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
                    self._damaged.append(number)
                else:
                    self._entries.append((number, entry))

    def read_headers(self, sessions: dict[str, _Session]) -> None:
        """Add the sessions that the file tells of."""
        for _, entry in self._entries:
            if entry["kind"] == "header":
                self.rank = entry["rank"]
                # The barrier at the start is one moment on all ranks.
                sessions.setdefault(entry["session"], _Session(float(entry["start_unix_s"]), entry["ranks"]))

    def read_cells(self, sessions: Mapping[str, _Session]) -> list[CellRecord]:
        """Return the cells, in seconds since the start of their session; keep the windows."""
        cells = []
        for number, entry in self._entries:
            if entry["kind"] not in ("cell", "window"):
                continue
            # Every line tells its session, so that those after a damaged header are not taken for the
            # session before.
            if entry["session"] not in sessions:
                self._damaged.append(number)
            elif entry["kind"] == "cell":
                cells.append(_cell(entry, self.rank))
            else:
                metrics = {name: float(value) for name, value in entry["metrics"].items()}
                self.windows.append((entry["session"], entry["end_us"] / 1e6, entry["window"], metrics))
        if self._damaged:
            count, numbers = len(self._damaged), sorted(self._damaged)
            shown = ", ".join(map(str, numbers[:5])) + (", ..." if count > 5 else "")
            warnings.warn(
                f"{self.path}: {count} damaged line{'s' if count > 1 else ''} left out (line {shown}).",
                stacklevel=4,
            )
        return cells


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OSError(
            explain(
                f"{path} cannot be read ({error.strerror or error})",
                "the spans of a rank are a file of lines that this user may read",
                f"move it away or mend it, or pass another run's folder than '{path.parent}'",
            )
        ) from error


class _VersionError(ValueError):
    pass


def _check_version(path: Path, header: Mapping[str, Any]) -> None:
    found, version = header["format"], header["version"]
    _text(found)
    _whole(version)
    if found != FORMAT or version != VERSION:
        raise _VersionError(
            explain(
                f"{path} has format {found!r}, version {version!r}",
                f"this release reads {FORMAT!r}, version {VERSION}",
                "read it with the release that wrote it",
            )
        )


def _check(path: Path, entry: Any) -> None:
    """Raise an error unless a line is as docs/imbalance.md describes it; kinds that are unknown pass."""
    kind = entry["kind"]
    _text(kind)
    if kind == "header":
        _check_version(path, entry)
    for name, check in REQUIRED.get(kind, {}).items():
        check(entry[name])
    if kind == "header":
        _whole(entry["rank"], high=entry["ranks"] - 1)
    elif kind == "cell":
        for name in entry.keys() - REQUIRED[kind].keys():
            OPTIONAL.get(name, _plain)(entry[name])


def _number(value: Any, low: float = -LIMIT, high: float = LIMIT) -> None:
    # NaN is in no range, and a bool is no number.
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError("not a finite number in its range")


def _whole(value: Any, low: float = 0, high: float = LIMIT) -> None:
    _number(value, low, high)
    if type(value) is not int:
        raise ValueError("not an integer")


def _text(value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError("not a text")


def _truth(value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError("not true or false")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def _check_spans(value: Any) -> None:
    for lane, start, length in map(_list, _list(value)):
        _text(lane)
        _number(start)
        _number(length, low=0)
    if not any(lane in LANES for lane, _, _ in value):
        raise ValueError("no spans")


def _check_sequences(value: Any) -> None:
    for name, length in map(_list, _list(value)):
        _whole(name, low=-LIMIT)
        _whole(length)


def _check_metrics(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    for metric in value.values():
        # A metric may be unknown.
        if not (isinstance(metric, float) and math.isnan(metric)):
            _number(metric)


def _plain(value: Any, depth: int = MOST_DEPTH) -> None:
    """Check a field that this release does not know: it must fit into a trace."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError("too deep")
        for item in value.values() if isinstance(value, dict) else value:
            _plain(item, depth - 1)
    elif value is not None and not isinstance(value, bool | str):
        _number(value)


REQUIRED: dict[str, dict[str, Callable[[Any], None]]] = {
    "header": {
        "session": _text,
        "ranks": lambda value: _whole(value, 1, MOST_RANKS),
        "rank": _whole,
        "start_unix_s": lambda value: _number(value, -MOST_UNIX_S, MOST_UNIX_S),
    },
    "cell": {
        "kind": _text,
        "session": _text,
        "window": _whole,
        "micro_batch": lambda value: _whole(value, high=MOST_MICRO_BATCHES),
        "busy_ms": _number,
        "spans": _check_spans,
    },
    "window": {"session": _text, "window": _whole, "end_us": _number, "metrics": _check_metrics},
}
OPTIONAL: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(("step", "epoch", "tokens", "longest", "num_sequences"), _whole),
    **dict.fromkeys(("predicted_ms", "budget"), _number),
    "sequences": _check_sequences,
    "is_padding": _truth,
}


def _cell(entry: dict[str, Any], rank: int) -> CellRecord:
    return CellRecord(
        session=entry["session"],
        rank=rank,
        window=entry["window"],
        micro_batch=entry["micro_batch"],
        spans=[
            Span(lane, start / 1e6, (start + length) / 1e6)
            for lane, start, length in entry["spans"]
            if lane in LANES
        ],
        busy_ms=float(entry["busy_ms"]),
        details={key: value for key, value in entry.items() if key not in REQUIRED["cell"]},
    )
