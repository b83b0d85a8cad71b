"""One rank's measuring: from spans of micro-batches to the payload of a window."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sb_lightning.callbacks.imbalance_batch import BatchFacts, Lengths
from sb_lightning.callbacks.windows import Clock, Stopwatch
from sb_lightning.tracking.spans import LANES, Span, SpanClock, SpanRecorder, lane_times
from sb_lightning.tracking.window_record import MeasuredCell, encode_window

__all__ = ["RankMeasure"]


@dataclass(frozen=True, kw_only=True)
class _RanWindow:
    """A window that has run on this rank and is not read yet."""

    index: int
    step: int
    epoch: int
    wall_s: float
    micro_batches: list[tuple[list[Span], BatchFacts]]


class RankMeasure:
    """Collects the micro-batches of a window, and reads them when it is over, or one window later.

    Args:
        clock: Host clock in seconds.
        stamps: Where spans get their stamps.
        is_late: Read a window when the next one is over, so that nothing waits for a device.
        capacity: Micro-batches of a rank in a window that there is room for.
        first_window: Number of the first window.
        keep_lines: Keep a line of the span file per micro-batch.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        stamps: SpanClock,
        is_late: bool,
        capacity: int,
        first_window: int,
        keep_lines: bool,
    ) -> None:
        self.recorder = SpanRecorder(stamps.stamp)
        self.watch = Stopwatch(clock)
        self.own_s = 0.0
        """Time the monitor itself has taken since the last window; `fill` adds its own."""
        self.sync_s = 0.0
        """Time in the ranks' meeting after the last window."""
        self.end_us = 0
        """End of the last window that was read, since the start of the run."""
        self.lines: list[dict[str, Any]] = []
        """Lines of the span file that are not written yet."""
        self._stamps = stamps
        self._is_late = is_late
        self._capacity = capacity
        self._keeps_lines = keep_lines
        self._origin_s = clock()
        self._next = first_window
        self._epoch = 0
        self._facts: BatchFacts | None = None
        self._notes: dict[str, float] = {}
        self._ran: list[tuple[list[Span], BatchFacts]] = []
        self._late: _RanWindow | None = None

    @property
    def has_rest(self) -> bool:
        """Whether micro-batches have run that belong to no window yet."""
        return bool(self._ran)

    def start(self, batch: Any, lengths: Lengths | None, budget: float, epoch: int) -> None:
        """Begin a micro-batch."""
        self.watch.resume()
        self._facts, self._epoch = BatchFacts(batch, lengths, budget), epoch

    def note(self, numbers: Mapping[str, float]) -> None:
        """Take over what somebody knows of the micro-batch at hand."""
        self._notes.update(numbers)

    @property
    def num_windows(self) -> int:
        """Windows that have ended since the run's first training began."""
        return self._next

    def skip(self) -> None:
        """Forget a micro-batch that has started and not ended: the epoch was cut short."""
        self._facts, self._notes = None, {}
        self.recorder.clear()

    def finish(self) -> None:
        """End the micro-batch at hand, if there is one."""
        if self._facts is not None:
            self._facts.update(self._notes)
            self._ran.append((self.recorder.take(), self._facts))
            self._facts, self._notes = None, {}

    def fill(self, global_step: int) -> tuple[list[float], list[int]]:
        """Return the payload of the window that is over (or of the one before it, or of none)."""
        start = time.perf_counter()
        try:
            return self._fill(global_step)
        finally:
            # Whoever asked for the gather.
            self.own_s += time.perf_counter() - start

    def _fill(self, global_step: int) -> tuple[list[float], list[int]]:
        self.finish()
        window = self._end_window(global_step)
        if self._is_late:
            window, self._late = self._late, window
        cells = [] if window is None else self._read(window)
        # That of this very window's end counts with the next.
        own_s, self.own_s = self.own_s, 0.0
        sync_s, self.sync_s = self.sync_s, 0.0
        return encode_window(
            cells,
            capacity=self._capacity,
            index=window.index if window else 0,
            step=window.step if window else 0,
            wall_s=window.wall_s if window else 0.0,
            monitor_ms=1e3 * own_s,
            sync_ms=1e3 * sync_s,
        )

    def read_rest(self, global_step: int) -> None:
        """Read what has run, without the other ranks: the run has broken off.

        The device may be stuck, such as behind an all-reduce that another rank has left. Then what it has
        passed is read, and nothing waits for it.
        """
        self.finish()
        windows = [w for w in (self._late, self._end_window(global_step)) if w is not None]
        self._late = None
        if not self._stamps.settles():
            windows = [self._without_waiting(window) for window in windows]
        for window in windows:
            self._read(window)

    def _without_waiting(self, window: _RanWindow) -> _RanWindow:
        kept = []
        for spans, facts in window.micro_batches:
            facts.forget_device()
            kept.append((self._stamps.passed(spans), facts))
        return replace(window, micro_batches=kept)

    def _end_window(self, global_step: int) -> _RanWindow | None:
        if not self._ran:
            return None
        micro_batches, self._ran = self._ran, []
        index, self._next = self._next, self._next + 1
        return _RanWindow(
            index=index,
            step=global_step,
            epoch=self._epoch,
            wall_s=self.watch.lap(),
            micro_batches=micro_batches,
        )

    def _read(self, window: _RanWindow) -> list[MeasuredCell]:
        resolved = iter(self._stamps.resolve([span for spans, _ in window.micro_batches for span in spans]))
        cells = []
        for number, (spans, facts) in enumerate(window.micro_batches):
            own = [next(resolved) for _ in spans]
            times, busy = lane_times(own)
            cell = facts.measured([1e3 * times[lane] for lane in LANES], 1e3 * busy)
            cells.append(cell)
            if own:
                self.end_us = _us(max(span.end for span in own) - self._origin_s)
                if self._keeps_lines:
                    self.lines.append(self._line(window, number, cell, own))
        return cells

    def _line(
        self, window: _RanWindow, number: int, cell: MeasuredCell, spans: Sequence[Span]
    ) -> dict[str, Any]:
        line: dict[str, Any] = {
            "kind": "cell",
            "window": window.index,
            "step": window.step,
            "epoch": window.epoch,
            "micro_batch": number,
            "busy_ms": round(cell.busy_ms, 4),
        }
        if cell.num_sequences:
            line |= {
                "tokens": cell.tokens,
                "longest": cell.longest,
                "num_sequences": cell.num_sequences,
                "sequences": cell.sequences,
            }
        for name in ("predicted_ms", "budget"):
            value = getattr(cell, name)
            if not math.isnan(value):
                line[name] = value
        if cell.is_padding:
            line["is_padding"] = True
        line["spans"] = [[lane, _us(start - self._origin_s), _us(end - start)] for lane, start, end in spans]
        return line


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
