"""Which point to measure next: interleaved, coarse grid first, within a number of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from sb_lightning.latency.profiler.points import Grid, Point
from sb_lightning.latency.profiler.samples import MEDIAN_ERROR, Record, Sample

__all__ = ["Progress", "Schedule"]

VISIT_MS = 20.0
"""A turn at a point takes about this long, or one step."""
MOST_STEPS = 5
FEWEST_ROUNDS, MOST_ROUNDS = 2, 6
WANTED_ERROR = 0.02
"""The finest level begins when what is left suffices for medians known so well, within these rounds."""
LARGEST_SHARE = 0.5
"""A point that would take more than this share of the time left is not begun."""
SURE_LENGTHS = 3
"""The shortest lengths of the coarse grid are measured whatever the seconds: a table needs them."""


@dataclass
class Progress:
    """What is known so far: enough to go on after an interruption."""

    records: dict[Point, Record] = field(default_factory=dict)
    spent_s: float = 0.0


class Schedule:
    """Visits the points of a grid until the time is up or all medians are settled.

    The next point is the one with the fewest visits (in a random but fixed order within a round), so that a
    machine that becomes slower for a while slows all points alike. It depends on nothing but the progress:
    a schedule that is interrupted goes on as it would have. The first round of the coarse grid goes from
    cheap to dear; where the time does not suffice, long sequences are missing rather than short ones.

    Args:
        grid: The points.
        expected_ms: Rough time of a point before anything was measured; only its shape counts.
        budget_s: Seconds to spend on measuring, those of `progress` included.
        progress: Where an earlier run stopped.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self,
        grid: Grid,
        expected_ms: Callable[[Point], float],
        *,
        budget_s: float,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.grid = grid
        self.budget_s = budget_s
        self.progress = progress or Progress()
        self._clock = clock
        self._level_of = {point: grid.level_of(point) for point in grid.levels[-1]}
        self._number = {point: number for number, point in enumerate(grid.levels[-1])}
        self._scale = 1.0
        self._expected = {point: expected_ms(point) for point in self._level_of}
        sure = sorted({point.length for point in grid.levels[0] if not point.is_held_out})[:SURE_LENGTHS]
        self._sure = {point for point in grid.levels[0] if point.length in sure and not point.is_held_out}

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.budget_s - self.progress.spent_s

    @property
    def level(self) -> int:
        """The finest level that has begun."""
        return max((self._level_of[point] for point in self.progress.records), default=0)

    def run(
        self,
        measure: Callable[[Point], Sample],
        after_visit: Callable[[Point], None] = lambda point: None,
    ) -> Progress:
        """Measure until there is nothing left to do.

        Args:
            measure: Runs one step at a point.
            after_visit: Called after each turn, for a progress bar or to save.
        """
        while (point := self.next_point()) is not None:
            start = self._clock()
            steps = max(1, min(MOST_STEPS, round(VISIT_MS / max(self.estimate_ms(point), 1e-3))))
            samples = [measure(point) for _ in range(steps)]
            # A turn counts whole or not at all.
            record = self.progress.records.setdefault(point, Record())
            record.add(samples)
            self.progress.spent_s += self._clock() - start
            after_visit(point)
        return self.progress

    def next_point(self) -> Point | None:
        """Return the point to measure next; None at the end."""
        level, records = self.level, self.progress.records
        open_points = self._open_points(level)
        if level + 1 < len(self.grid.levels) and not any(point not in records for point in open_points):
            finer = self._open_points(level + 1)
            needed_s = self._rounds_wanted(level + 1) * sum(map(self.estimate_ms, finer)) / 1000.0
            # Where all is settled, part of a finer grid is better than nothing.
            fits = needed_s <= self.left_s or not open_points
            if fits and any(point not in records for point in finer):
                open_points = finer
        return min(open_points, key=self._order, default=None)

    def estimate_ms(self, point: Point) -> float:
        """Return what a step at a point takes: measured, or scaled from the point nearest in work."""
        records = self.progress.records
        if point in records:
            return records[point].whole_ms
        expected = self._expected[point]
        if not records:
            return expected * self._scale
        nearest = min(records, key=lambda known: abs(self._expected[known] - expected))
        return expected * records[nearest].whole_ms / self._expected[nearest]

    def calibrate(self, point: Point, measured_ms: float) -> None:
        """Scale the first estimates by one measured step, which is not kept."""
        self._scale = measured_ms / self._expected[point]

    def round_s(self, level: int) -> float:
        """Return what one visit of each point of a level takes."""
        return sum(map(self.estimate_ms, self.grid.levels[level])) / 1000.0

    def _rounds_wanted(self, level: int) -> int:
        """Return the samples that a level asks for: the finest one more of them where there is noise."""
        spreads = [record.spread for record in self.progress.records.values() if record.spread is not None]
        if not spreads or level + 1 < len(self.grid.levels):
            return FEWEST_ROUNDS
        wanted = (MEDIAN_ERROR * median(spreads) / WANTED_ERROR) ** 2
        return max(FEWEST_ROUNDS, min(MOST_ROUNDS, round(wanted)))

    def _open_points(self, level: int) -> list[Point]:
        records = self.progress.records
        return [
            point
            for point in self.grid.levels[level]
            if not (point in records and records[point].is_settled) and self._affords(point)
        ]

    def _affords(self, point: Point) -> bool:
        if point in self._sure and point not in self.progress.records:
            return True
        return self.left_s > 0 and self.estimate_ms(point) / 1000.0 <= LARGEST_SHARE * self.left_s

    def _order(self, point: Point) -> tuple[int, int, float, int]:
        record = self.progress.records.get(point)
        visits = record.visits if record else 0
        cheap_first = self._expected[point] if visits == 0 and self._level_of[point] == 0 else 0.0
        # The hash of whole numbers is the same in every process.
        shuffled = hash((visits, self._number[point]))
        return visits, self._level_of[point] if visits == 0 else 0, cheap_first, shuffled
