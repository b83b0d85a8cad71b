"""Rounds: every arm in each, in an order that rotates; and when to stop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sb_lightning.compare.schedule import Schedule, may_start, rounds_that_fit


@given(st.integers(1, 50), st.integers(1, 6))
def test_rounds_cover_every_window_once(windows, per_round):
    schedule = Schedule(windows=windows, windows_per_round=per_round)
    covered = [
        schedule.first_window(n) + i
        for n in range(schedule.num_rounds)
        for i in range(schedule.num_windows(n))
    ]
    assert covered == list(range(windows))


@given(st.integers(1, 9))
def test_every_arm_runs_once_in_each_round_and_is_first_equally_often(count):
    arms = [f"arm {n}" for n in range(count)]
    orders = [Schedule.order(arms, number) for number in range(2 * count)]
    assert all(sorted(order) == sorted(arms) for order in orders)
    assert sorted(order[0] for order in orders) == sorted(2 * arms)


def test_a_round_starts_only_if_it_would_end_in_time():
    times = {"limit_s": 100.0, "round_s": [90.0, 40.0, 30.0], "is_first_of_launch": False}
    assert may_start(elapsed_s=60.0, **times)
    assert not may_start(elapsed_s=60.1, **times)
    assert may_start(elapsed_s=1e9, **{**times, "is_first_of_launch": True})


def test_the_first_round_of_a_launch_is_no_measure_where_there_is_another():
    times = {"elapsed_s": 20.0, "limit_s": 100.0}
    assert rounds_that_fit(**times, round_s=[80.0]) == 1
    assert rounds_that_fit(**times, round_s=[80.0, 20.0, 26.0]) == 3
    assert rounds_that_fit(elapsed_s=101.0, limit_s=100.0, round_s=[1.0]) == 0
