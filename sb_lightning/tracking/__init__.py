"""What a run measures about itself: spans of each rank, imbalance metrics, traces and pictures."""

from sb_lightning.tracking.metrics import (
    idle_ms,
    imbalance,
    imbalance_micro_batch,
    imbalance_slot,
    imbalance_within,
    imbalances,
    prediction_error_pct,
)
from sb_lightning.tracking.span_file import CellRecord, RunSpans, SpanWriter, read_spans
from sb_lightning.tracking.spans import LANES, Span, SpanRecorder, innermost, lane_times, recorder_of, span
from sb_lightning.tracking.trace import chrome_trace

__all__ = [
    "LANES",
    "CellRecord",
    "RunSpans",
    "Span",
    "SpanRecorder",
    "SpanWriter",
    "chrome_trace",
    "idle_ms",
    "imbalance",
    "imbalance_micro_batch",
    "imbalance_slot",
    "imbalance_within",
    "imbalances",
    "innermost",
    "lane_times",
    "prediction_error_pct",
    "read_spans",
    "recorder_of",
    "span",
]
