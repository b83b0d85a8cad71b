"""What a comparison prints while it runs, and when its time was too short."""

from __future__ import annotations

import pytest
from compare_cases import rounds_of, window

from sb_lightning.cli.compare_progress import Teller, too_short
from sb_lightning.compare.arms import select_arms
from sb_lightning.compare.results import Round
from sb_lightning.compare.schedule import Schedule


def timed(seconds, first=0):
    """Rounds of two windows that took so many seconds."""
    made = rounds_of({"baseline": [window(n) for n in range(2 * len(seconds))]})
    return [Round(**{**vars(each), "seconds": s}) for each, s in zip(made, seconds, strict=True)]


def told(capsys, seconds, *, limit_s, num_rounds):
    now = 0.0
    schedule = Schedule(windows=2 * num_rounds, windows_per_round=2)
    teller = Teller(schedule, select_arms("table2", ["baseline"]), limit_s, 0.0, clock=lambda: now)
    rounds = timed(seconds)
    for number, each in enumerate(rounds):
        now += each.seconds
        teller.round(rounds[: number + 1])
    return capsys.readouterr().out.splitlines()


def test_each_round_says_how_many_more_there_will_be(capsys):
    first, second, third = told(capsys, [60.0, 30.0, 30.0], limit_s=600, num_rounds=50)
    assert first.startswith("round 0 of 49 (warms up, not counted): ms per window: Baseline 100; 60 s; ")
    # The first round is slower than those to come: nine of its kind would fit.
    assert first.endswith("1.0 of 10 min, at least 9 more rounds in the time left")
    assert second.endswith("1.5 of 10 min, about 17 more rounds in the time left")
    assert third.endswith("2.0 of 10 min, about 16 more rounds in the time left")


def test_where_all_rounds_fit_the_time_to_the_end_is_told(capsys):
    lines = told(capsys, [60.0, 30.0, 30.0, 30.0], limit_s=6000, num_rounds=4)
    assert lines[0].endswith("1.0 of 100 min, 3 rounds to go, at most 3.0 min")
    assert lines[1].endswith("1.5 of 100 min, 2 rounds to go, about 1.0 min")
    assert lines[2].endswith("1 round to go, about 0.5 min")
    assert lines[3].endswith("2.5 of 100 min, the last one")


def test_no_more_time_is_told(capsys):
    assert told(capsys, [60.0], limit_s=90, num_rounds=9)[0].endswith(
        "1.0 of 1.5 min, no time for another round"
    )


@pytest.mark.parametrize(
    ("minutes", "elapsed_s", "round_s"), [(2, 130, 28), (0.01, 40, 30), (15, 2000, 1900)]
)
def test_minutes_that_were_too_few_get_more_that_are_enough(minutes, elapsed_s, round_s):
    found, why, change = too_short(minutes, elapsed_s, round_s, 1)
    assert f"--minutes is {minutes:g}, {elapsed_s / 60:.1f} min are over, and a round of 1 arm" in found
    assert "the round is kept" in why
    proposed = int(change.split("--minutes ")[1])
    assert proposed > minutes
    assert 60 * proposed > elapsed_s + round_s
