"""Spans as a Chrome trace, which https://ui.perfetto.dev opens without sending it anywhere."""

from __future__ import annotations

import math
from typing import Any

from sb_lightning.tracking.span_file import CellRecord, RunSpans
from sb_lightning.tracking.spans import LANES

__all__ = ["chrome_trace"]

COUNTED = ("tokens", "longest", "budget", "predicted_ms")


def chrome_trace(run: RunSpans) -> dict[str, Any]:
    """Return the trace in the Trace Event Format: a process per rank, a thread per lane, counters.

    Counters are the tokens, the longest sequence, the budget, the predicted and the busy time of the
    micro-batch at hand, per rank, and the balance metrics of each window, with rank 0.

    Args:
        run: The spans of all ranks.

    Returns:
        What `json.dump` writes; times in microseconds.
    """
    ranks = sorted({cell.rank for cell in run.cells})
    lanes = [lane for lane in LANES if any(span.lane == lane for cell in run.cells for span in cell.spans)]
    events: list[dict[str, Any]] = []
    for rank in ranks:
        events += [
            _named("process_name", rank, 0, f"rank {rank}"),
            _sorted("process_sort_index", rank, 0, rank),
        ]
        for lane in lanes:
            tid = _thread(lane)
            events += [_named("thread_name", rank, tid, lane), _sorted("thread_sort_index", rank, tid, tid)]
    for cell in run.cells:
        events += _cell_events(cell)
    for end, window, metrics in run.windows:
        for name, value in metrics.items():
            # JSON has no NaN, which stands for what is unknown.
            if name.startswith(("balance/", "throughput/", "predict/")) and math.isfinite(value):
                events.append(_counter(name, 0, end, value))
        events.append(
            {"ph": "i", "s": "g", "name": f"end of window {window}", "pid": 0, "tid": 0, "ts": _us(end)}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"ranks": run.ranks}}


def _cell_events(cell: CellRecord) -> list[dict[str, Any]]:
    args = {"window": cell.window, "micro_batch": cell.micro_batch, "busy_ms": cell.busy_ms, **cell.details}
    events: list[dict[str, Any]] = [
        {
            "ph": "X",
            "name": span.lane,
            "cat": "lane",
            "pid": cell.rank,
            "tid": _thread(span.lane),
            "ts": _us(span.start),
            "dur": round((span.end - span.start) * 1e6, 3),
            "args": args,
        }
        for span in cell.spans
    ]
    counters = {"busy_ms": cell.busy_ms, **{name: cell.details.get(name) for name in COUNTED}}
    events += [
        _counter(name, cell.rank, cell.start, value) for name, value in counters.items() if value is not None
    ]
    return events


def _thread(lane: str) -> int:
    return LANES.index(lane) + 1


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _sorted(kind: str, pid: int, tid: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"sort_index": index}}


def _counter(name: str, pid: int, seconds: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "ts": _us(seconds), "args": {name: value}}
