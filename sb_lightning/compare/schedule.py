"""In what order arms run: rounds of a few windows each, in which every arm trains the same windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["WINDOWS_PER_ROUND", "Schedule", "may_start", "rounds_that_fit"]

ItemT = TypeVar("ItemT")
WINDOWS_PER_ROUND = 4


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rounds of a comparison: in each, every arm runs the round's windows, then the next begins.

    Arms thus run close to each other in time, and a machine that gets slower slows all of them. The first
    round warms up and is not counted.
    """

    windows: int
    """Windows that each arm trains in all."""
    windows_per_round: int = WINDOWS_PER_ROUND
    """Windows that an arm trains before the next arm does."""

    @property
    def num_rounds(self) -> int:
        """Rounds in all; the last one may be short."""
        return -(-self.windows // self.windows_per_round)

    def first_window(self, number: int) -> int:
        """Return the first window of a round."""
        return number * self.windows_per_round

    def num_windows(self, number: int) -> int:
        """Return how many windows a round has.

        Example:
            >>> [Schedule(windows=10).num_windows(n) for n in range(3)]
            [4, 4, 2]
        """
        return min(self.windows_per_round, self.windows - self.first_window(number))

    @staticmethod
    def order(arms: Sequence[ItemT], number: int) -> list[ItemT]:
        """Return the arms in the order of a round: it rotates, so that none always comes after the same rest.

        Example:
            >>> Schedule.order("abc", 1)
            ['b', 'c', 'a']
        """
        start = number % len(arms)
        return [*arms[start:], *arms[:start]]


def may_start(
    *, elapsed_s: float, limit_s: float, round_s: Sequence[float], is_first_of_launch: bool
) -> bool:
    """Return whether another round would end in time.

    Args:
        elapsed_s: Since the launch.
        limit_s: What the launch may take.
        round_s: How long the rounds of this launch took.
        is_first_of_launch: A launch always runs one round, so that calling it again always goes on.

    Example:
        >>> may_start(elapsed_s=500, limit_s=600, round_s=[90, 110], is_first_of_launch=False)
        False
    """
    return is_first_of_launch or rounds_that_fit(elapsed_s=elapsed_s, limit_s=limit_s, round_s=round_s) >= 1


def rounds_that_fit(*, elapsed_s: float, limit_s: float, round_s: Sequence[float]) -> int:
    """Return how many more rounds would end in time.

    Args:
        elapsed_s: Since the launch.
        limit_s: What the launch may take.
        round_s: How long the rounds of this launch took. The first is slower, since everything is new then:
            it is not counted where there is another.

    Example:
        >>> rounds_that_fit(elapsed_s=300, limit_s=600, round_s=[200, 90, 100])
        3
    """
    longest = max(round_s[1:] or round_s, default=0.0)
    return max(0, int((limit_s - elapsed_s) / max(longest, 1e-3)))
