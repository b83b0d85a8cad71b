from __future__ import annotations

import gc
import math
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb_lightning.tracking import recorder_of, span
from sb_lightning.tracking.cuda_clock import CudaClock
from sb_lightning.tracking.spans import (
    BUSY_LANES,
    LANES,
    HostClock,
    Span,
    SpanRecorder,
    innermost,
    lane_times,
    share_recorder,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def recorder(clock=None):
    return SpanRecorder(clock or Clock())


@st.composite
def nested(draw):
    """Spans on whole seconds that lie apart or within each other, as `with` blocks would record them."""
    clock = Clock()
    taken = recorder(clock)

    def block(depth):
        for _ in range(draw(st.integers(0, 3))):
            clock.now += draw(st.integers(0, 3))
            with taken.span(draw(st.sampled_from(LANES))):
                clock.now += draw(st.integers(0, 3))
                if depth < 3:
                    block(depth + 1)
                clock.now += draw(st.integers(0, 2))

    block(0)
    return taken.take()


@given(nested())
def test_each_second_counts_for_the_innermost_lane(spans):
    end = int(max((s.end for s in spans), default=0))
    expected, busy = dict.fromkeys(LANES, 0.0), 0.0
    for second in range(end):
        # Spans are recorded when they end: of those around a moment, the first recorded is the innermost.
        around = [s.lane for s in spans if s.start <= second < s.end]
        if around:
            expected[around[0]] += 1
            busy += next((lane for lane in around if lane not in ("plan", "tune")), "") in BUSY_LANES
    times, found = lane_times(spans)
    assert times == expected
    assert found == busy
    pieces = [piece for piece, _ in innermost(spans)]
    assert all(a.end <= b.start for a, b in pairwise(pieces))


def test_tuning_inside_the_forward_is_busy_and_outside_it_is_not():
    times, busy = lane_times([Span("tune", 0, 1), Span("forward", 2, 10), Span("tune", 4, 7)])
    assert (times["tune"], times["forward"], busy) == (4, 5, 8)


def test_an_optimizer_step_inside_the_training_step_is_not_busy():
    spans = [Span("forward", 0, 10), Span("backward", 2, 5), Span("wait", 4, 5), Span("optimizer", 6, 9)]
    times, busy = lane_times(spans)
    assert (times["forward"], times["backward"], times["wait"], times["optimizer"]) == (4, 2, 1, 3)
    assert busy == 6


def test_leaving_a_lane_leaves_what_was_entered_within():
    clock = Clock()
    taken = recorder(clock)
    taken.begin("backward")
    clock.now = 3.0
    taken.begin("wait")
    clock.now = 5.0
    taken.end("backward")
    taken.end("optimizer")
    assert taken.take() == [Span("wait", 3.0, 5.0), Span("backward", 0.0, 5.0)]
    assert taken.take() == []


def test_taking_cuts_off_what_is_open():
    clock = Clock()
    taken = recorder(clock)
    taken.begin("optimizer")
    clock.now = 2.0
    assert taken.take() == [Span("optimizer", 0.0, 2.0)]
    assert not taken.is_open("optimizer")


def test_nothing_is_recorded_in_a_pause_nor_after_a_drop():
    taken = recorder()
    taken.is_paused = True
    with taken.span("data"):
        pass
    taken.is_paused = False
    taken.begin("wait")
    taken.drop("forward")
    assert taken.is_open("wait")
    taken.drop("wait")
    taken.begin("data")
    taken.clear()
    assert taken.take() == []


def test_the_lane_of_a_callback_is_recorded_only_where_somebody_measures():
    owner, clock = SimpleNamespace(), Clock()
    owner = type("Owner", (), {})()
    with span(owner, "tune"):
        clock.now += 1
    taken = recorder(clock)
    share_recorder(owner, taken)
    assert recorder_of(owner) is taken

    def plan():
        with span(owner, "plan"):
            clock.now += 2
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        plan()
    assert taken.take() == [Span("plan", 1.0, 3.0)]
    share_recorder(owner, None)
    share_recorder(owner, None)
    assert recorder_of(owner) is None


def test_a_trainer_that_is_gone_leaves_no_recorder():
    owner = type("Owner", (), {})()

    def clock(owner=owner):
        return 0.0

    # Its clock leads back to the Trainer.
    share_recorder(owner, recorder(clock))
    gone = weakref.ref(owner)
    del owner, clock
    gc.collect()
    assert gone() is None


def test_a_host_clock_reads_at_once():
    assert HostClock(lambda: 4.0).stamp() == 4.0
    assert HostClock(Clock()).resolve([Span("data", 1.0, 2.0)]) == [Span("data", 1.0, 2.0)]


class Device:
    """A stream that passes events when it gets to them; `single` rounds as CUDA's float milliseconds do."""

    def __init__(self):
        self.host = Clock()
        self.busy_until = 0.0
        self.waits = 0

    def event(self):
        device = self

        class Event:
            passed: float

            def record(self):
                self.passed = max(device.host.now, device.busy_until)

            def elapsed_time(self, other):
                import numpy as np

                assert device.host.now >= other.passed, "read before the device got there"
                return np.float32(1e3 * (other.passed - self.passed))

            def query(self):
                return device.host.now >= self.passed

            def synchronize(self):
                assert self.passed < math.inf, "the device is stuck"
                device.waits += device.host.now < self.passed
                device.host.now = max(device.host.now, self.passed)

        return Event()

    def launch(self, seconds):
        self.busy_until = max(self.busy_until, self.host.now) + seconds

    def clock(self):
        return CudaClock(self.host, self.event, lambda: None, self.sleep)

    def sleep(self, seconds):
        self.host.now += seconds


def test_events_show_the_time_of_the_device_and_hide_what_it_did_not_wait_for():
    device = Device()
    device.host.now = 50.0
    clock = device.clock()
    taken = SpanRecorder(clock.stamp)
    with taken.span("forward"):
        device.launch(3.0)
    # The host loads ahead for 1 s while the device is still busy: nobody waits for that.
    with taken.span("data"):
        device.host.now += 1.0
    with taken.span("forward"):
        device.launch(2.0)
    # Now for 9 s, of which the device waits 5.
    with taken.span("data"):
        device.host.now += 9.0
    spans = taken.take()
    assert device.waits == 0
    lengths = [(s.lane, round(s.end - s.start, 3)) for s in clock.resolve(spans)]
    assert lengths == [("forward", 3.0), ("data", 0.0), ("forward", 2.0), ("data", 5.0)]


def test_a_device_that_is_stuck_is_not_waited_for():
    device = Device()
    clock = device.clock()
    taken = SpanRecorder(clock.stamp)
    with taken.span("forward"):
        device.launch(0.25)
    with taken.span("backward"):
        device.launch(0.25)
    spans = taken.take()
    assert clock.passed(spans) == []
    assert clock.settles()
    assert 0.5 <= device.host.now < 0.6
    assert clock.passed(spans) == spans
    with taken.span("wait"):
        device.launch(math.inf)
    spans += taken.take()
    assert not clock.settles()
    assert device.host.now < 2.0
    assert [s.lane for s in clock.passed(spans)] == ["forward", "backward"]


def test_events_stay_exact_over_days_because_they_are_chained():
    device = Device()
    clock = device.clock()
    late: list[Span] = []
    for _ in range(40):
        taken = SpanRecorder(clock.stamp)
        with taken.span("forward"):
            device.launch(1.0001)
        # Two hours per window.
        device.host.now += 7200.0
        if late:
            (span,) = clock.resolve(late)
            assert span.end - span.start == pytest.approx(1.0001, abs=1e-6)
        late = taken.take()
    assert device.waits == 0
    (span,) = clock.resolve(late)
    assert span.start == pytest.approx(39 * 7200.0, abs=0.1)
    assert clock.resolve([]) == []
