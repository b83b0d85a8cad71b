"""What `sb compare` prints while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from sb_lightning.compare.arms import Arm
from sb_lightning.compare.results import Round
from sb_lightning.compare.schedule import Schedule, rounds_that_fit

__all__ = ["Teller", "counted", "too_short"]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "round"), counted(2, "round")
        ('1 round', '2 rounds')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


class Teller:
    """Prints how far a comparison is.

    Args:
        schedule: Of the comparison.
        arms: What is compared.
        limit_s: What the launch may take.
        started: When it began, by the clock.
        clock: In seconds.
    """

    def __init__(
        self,
        schedule: Schedule,
        arms: Sequence[Arm],
        limit_s: float,
        started: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._schedule, self._arms = schedule, arms
        self._limit_s, self._started, self._clock = limit_s, started, clock
        self._done = 0
        self._round_s: list[float] = []

    def segment(self, number: int, arm: Arm, result: Any) -> None:
        """Show the arm that has run, where there is a terminal."""
        self._done += 1
        if sys.stdout.isatty():
            mean = sum(w.wall_ms for w in result.windows) / len(result.windows)
            place = (self._done - 1) % len(self._arms) + 1
            text = f"round {number}, {place} of {len(self._arms)}: {arm.label} {mean:,.0f} ms per window"
            print(f"\r\x1b[2K{text}", end="", flush=True)

    def round(self, rounds: Sequence[Round]) -> None:
        """Tell about a finished round, and how many more are to come."""
        last, total = rounds[-1], self._schedule.num_rounds
        self._round_s.append(last.seconds)
        means = []
        for arm in self._arms:
            windows = last.windows[arm.name]
            means.append(f"{arm.label} {sum(w.wall_ms for w in windows) / len(windows):,.0f}")
        note = " (warms up, not counted)" if last.number == 0 else ""
        start = "\r\x1b[2K" if sys.stdout.isatty() else ""
        print(
            f"{start}round {last.number} of {total - 1}{note}: ms per window: {', '.join(means)}; "
            f"{last.seconds:.0f} s; {self._outlook(total - len(rounds))}",
            flush=True,
        )

    def _outlook(self, left: int) -> str:
        elapsed_s = self._clock() - self._started
        times = f"{elapsed_s / 60:.1f} of {self._limit_s / 60:g} min"
        if left == 0:
            return f"{times}, the last one"
        fit = rounds_that_fit(elapsed_s=elapsed_s, limit_s=self._limit_s, round_s=self._round_s)
        # The first round of a call is slower than those to come.
        about = "about" if len(self._round_s) > 1 else "at least"
        if fit == 0:
            return f"{times}, no time for another round"
        if fit < left:
            return f"{times}, {about} {counted(fit, 'more round')} in the time left"
        minutes = left * self._round_s[-1] / 60
        about = "about" if len(self._round_s) > 1 else "at most"
        return f"{times}, {counted(left, 'round')} to go, {about} {minutes:.1f} min"


def too_short(minutes: float, elapsed_s: float, round_s: float, num_arms: int) -> tuple[str, str, str]:
    """Return the three parts of what is said where the time was up before a round could count.

    Args:
        minutes: What the call might take.
        elapsed_s: What it took.
        round_s: How long its round took.
        num_arms: Arms of a round.
    """
    # Another round, and some more for what else a call does.
    wanted = max(int((elapsed_s + 1.5 * round_s) / 60), int(minutes)) + 1
    return (
        f"--minutes is {minutes:g}, {elapsed_s / 60:.1f} min are over, and a round of "
        f"{counted(num_arms, 'arm')} takes up to {round_s:,.0f} s",
        "the first round warms up and is not counted, so nothing has been measured yet; the round is kept",
        f"call the same command again, which goes on, or pass --minutes {wanted}",
    )
