"""Stamps on a CUDA stream: events that the device passes in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sb_lightning.tracking.spans import Span

__all__ = ["CudaClock"]

# A device that does not get to an event within a second may be stuck.
NUM_LOOKS, LOOK_S = 200, 0.005


class CudaClock:
    """Stamps are CUDA events on the stream at hand; they are read when their window is over.

    Recording one costs the host a few microseconds and never waits. A span between two events is the time
    that passed on the device: host work that the device did not have to wait for (loading data ahead of it)
    has no length. Reading waits for the last event only, and whoever reads one window late does not wait.

    Event times are single-precision milliseconds since another event, so they are chained: each call of
    `resolve` starts from the last event of the one before.

    Args:
        clock: Host clock in seconds, to place the first event.
        event: Makes an event; replaced in tests.
        synchronize: Waits for the device, once, before the first event; replaced in tests.
        sleep: Lets seconds pass between two looks at the device; replaced in tests.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        event: Callable[[], Any] | None = None,
        synchronize: Callable[[], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if event is None or synchronize is None:
            import torch

            event = event or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            synchronize = synchronize or torch.cuda.synchronize
        self._event, self._sleep = event, sleep
        synchronize()
        self._base = self.stamp()
        self._base_s = clock()

    def stamp(self) -> Any:
        """Record an event on the current stream."""
        event = self._event()
        event.record()
        return event

    def resolve(self, spans: Sequence[Span]) -> list[Span]:
        """Return spans in seconds of the host clock; waits until the device has passed them all.

        Args:
            spans: Spans of one window, and each window once, in order.
        """
        if not spans:
            return []
        for span in spans:
            # All have been passed by the time one window later, and then this costs a look only.
            span.end.synchronize()
        # From the earliest event on, so that lengths are exact however long ago the last window was.
        self._rebase(min((span.start for span in spans), key=self._seconds))
        seconds = [Span(lane, self._seconds(start), self._seconds(end)) for lane, start, end in spans]
        last = max(range(len(spans)), key=lambda i: seconds[i].end)
        self._rebase(spans[last].end)
        return seconds

    def settles(self) -> bool:
        """Return whether the device gets to this moment within a second.

        Never waits for longer, so that it can be asked of a device that may be stuck, such as behind an
        all-reduce that another rank has left.
        """
        now = self.stamp()
        for _ in range(NUM_LOOKS):
            if now.query():
                return True
            self._sleep(LOOK_S)
        return False

    def passed(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans that the device has passed; never waits."""
        return [span for span in spans if span.start.query() and span.end.query()]

    def _rebase(self, event: Any) -> None:
        self._base, self._base_s = event, self._seconds(event)

    def _seconds(self, event: Any) -> float:
        return self._base_s + float(self._base.elapsed_time(event)) / 1e3
