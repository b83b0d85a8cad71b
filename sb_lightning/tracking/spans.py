"""Spans: which lane a rank was in from when to when, and how they add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

__all__ = [
    "BUSY_LANES",
    "LANES",
    "HostClock",
    "Span",
    "SpanClock",
    "SpanRecorder",
    "innermost",
    "lane_times",
    "recorder_of",
    "share_recorder",
    "span",
]

LANES = ("data", "forward", "backward", "wait", "broadcast", "optimizer", "plan", "tune")
"""Every lane, in the order of tables and traces."""
BUSY_LANES = frozenset({"data", "forward", "backward"})
"""Lanes whose time is a micro-batch's busy time."""
# Work that a busy lane may contain: it does not interrupt the lane around it.
WORK_INSIDE = frozenset({"plan", "tune"})


class Span(NamedTuple):
    """Time that a rank spent in a lane; spans of different lanes may lie within each other."""

    lane: str
    """One of `LANES`."""
    start: Any
    """A stamp of the clock, or seconds once it is resolved."""
    end: Any
    """A stamp of the clock, or seconds once it is resolved."""


class SpanClock(Protocol):
    """Where stamps come from. Reading a stamp may have to wait until a device has passed it."""

    def stamp(self) -> Any:
        """Return a stamp for now, without waiting."""

    def resolve(self, spans: Sequence[Span]) -> list[Span]:
        """Return spans whose ends are seconds of one clock, waiting for the device if it must."""

    def settles(self) -> bool:
        """Return whether a device gets to what is stamped so far within a moment; never waits for longer."""

    def passed(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans that can be resolved without waiting."""


class HostClock:
    """Stamps that are seconds already.

    Args:
        clock: A monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stamp = clock

    def resolve(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans."""
        return list(spans)

    def settles(self) -> bool:
        """Return True: there is no device."""
        return True

    def passed(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans."""
        return list(spans)


class SpanRecorder:
    """Collects the spans of the micro-batch at hand.

    Args:
        stamp: Returns a stamp for now.
    """

    def __init__(self, stamp: Callable[[], Any]) -> None:
        self._stamp = stamp
        self._open: list[tuple[str, Any]] = []
        self._spans: list[Span] = []
        self.is_paused = False
        """While this is set, nothing is recorded."""

    def begin(self, lane: str) -> None:
        """Enter a lane; lanes nest."""
        if not self.is_paused:
            self._open.append((lane, self._stamp()))

    def end(self, lane: str) -> None:
        """Leave a lane and all that were entered within it; nothing happens if it is not open."""
        if any(name == lane for name, _ in self._open):
            now, name = self._stamp(), ""
            while name != lane:
                name, start = self._open.pop()
                self._spans.append(Span(name, start, now))

    def drop(self, lane: str) -> None:
        """Forget the innermost open span if it is of this lane."""
        if self._open and self._open[-1][0] == lane:
            self._open.pop()

    def is_open(self, lane: str) -> bool:
        """Say whether a lane has been entered and not left."""
        return any(name == lane for name, _ in self._open)

    @contextmanager
    def span(self, lane: str) -> Iterator[None]:
        """Be in a lane for the length of a `with` block."""
        self.begin(lane)
        try:
            yield
        finally:
            self.end(lane)

    def take(self) -> list[Span]:
        """Return what was recorded since the last call, open spans cut off now, and start anew."""
        while self._open:
            self.end(self._open[0][0])
        spans, self._spans = self._spans, []
        return spans

    def clear(self) -> None:
        """Forget what was recorded."""
        self._open, self._spans = [], []


# Where a Trainer keeps its recorder: the two go together, whatever the recorder's clock refers to.
ATTRIBUTE = "_sb_span_recorder"


def share_recorder(owner: Any, recorder: SpanRecorder | None) -> None:
    """Make a recorder known under its Trainer, or forget it.

    Args:
        owner: The Trainer, or whatever else the parts of a run have in common.
        recorder: The recorder; None to forget.
    """
    if recorder is None:
        vars(owner).pop(ATTRIBUTE, None)
    else:
        setattr(owner, ATTRIBUTE, recorder)


def recorder_of(owner: Any) -> SpanRecorder | None:
    """Return the recorder of a Trainer, or None if nobody measures it."""
    recorder: SpanRecorder | None = vars(owner).get(ATTRIBUTE)
    return recorder


@contextmanager
def span(owner: Any, lane: str) -> Iterator[None]:
    """Record the `with` block in a lane of a Trainer's timeline, if somebody measures it.

    Args:
        owner: The Trainer.
        lane: One of `LANES`, such as "plan" or "tune".

    Example::

        with span(trainer, "tune"):
            budgets = choose(...)
    """
    recorder = recorder_of(owner)
    if recorder is None:
        yield
        return
    with recorder.span(lane):
        yield


def innermost(spans: Iterable[Span]) -> list[tuple[Span, bool]]:
    """Cut spans that lie within each other into pieces that do not overlap.

    Args:
        spans: Resolved spans, which lie apart or within each other.

    Returns:
        In order of time, each piece with the innermost lane there, and whether it is busy time: that of the
        busy lanes, including planning and tuning that happens inside one.

    Example:
        >>> [tuple(piece) for piece, _ in innermost([Span("backward", 2.0, 9.0), Span("wait", 6.0, 9.0)])]
        [('backward', 2.0, 6.0), ('wait', 6.0, 9.0)]
    """
    pieces: list[tuple[Span, bool]] = []
    # The lanes around the moment at hand, outermost first, each with its end.
    around: list[tuple[str, float]] = []
    now = 0.0

    def advance(until: float) -> float:
        if around and until > now:
            around_work = next((lane for lane, _ in reversed(around) if lane not in WORK_INSIDE), "")
            pieces.append((Span(around[-1][0], now, until), around_work in BUSY_LANES))
        return max(now, until)

    # Of two spans with the same ends, the one recorded first is the inner one.
    outer_first = list(spans)[::-1]
    for lane, start, end in sorted(outer_first, key=lambda span: (span[1], -span[2])):
        while around and around[-1][1] <= start:
            now = advance(around[-1][1])
            around.pop()
        now = advance(start)
        around.append((lane, min(end, around[-1][1]) if around else end))
    while around:
        now = advance(around[-1][1])
        around.pop()
    return pieces


def lane_times(spans: Iterable[Span]) -> tuple[dict[str, float], float]:
    """Add up the spans of a micro-batch.

    Each moment counts for the innermost lane only, so that lanes add up to the time covered.

    Args:
        spans: Resolved spans, which lie apart or within each other.

    Returns:
        The time of every lane, and the busy time (see `innermost`), in the unit of the spans.

    Example:
        >>> times, busy = lane_times([Span("backward", 2.0, 9.0), Span("wait", 6.0, 9.0)])
        >>> times["backward"], times["wait"], busy
        (4.0, 3.0, 4.0)
    """
    times = dict.fromkeys(LANES, 0.0)
    busy = 0.0
    for (lane, start, end), is_busy in innermost(spans):
        times[lane] += end - start
        busy += end - start if is_busy else 0.0
    return times, busy
