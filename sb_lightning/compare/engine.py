"""Runs a comparison: round after round, arm after arm, in one launch, and again where it was broken off."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch import LightningDataModule, LightningModule

from sb_lightning._messages import explain
from sb_lightning.compare.arms import Arm
from sb_lightning.compare.folder import ComparisonFolder
from sb_lightning.compare.meeting import sync_rounds
from sb_lightning.compare.results import Round
from sb_lightning.compare.schedule import Schedule, may_start
from sb_lightning.compare.segment import Segment, SegmentResult, run_segment
from sb_lightning.compare.states import check_state_files
from sb_lightning.compare.uniform import matching_budget

__all__ = ["Comparison", "Listener"]


class Listener(Protocol):
    """Is told how far a comparison is; on rank zero only."""

    def segment(self, number: int, arm: Arm, result: SegmentResult) -> None:
        """An arm has run its windows of a round."""

    def round(self, rounds: Sequence[Round]) -> None:
        """A round is finished and written down."""


@dataclass(kw_only=True)
class Comparison:
    """A comparison, finished or not.

    Every arm has its own weights, optimizer, sampler and callbacks. In each round it goes on from the
    checkpoint that it has left in the round before, as any training is resumed; only what it does between two
    checkpoints is timed.
    """

    arms: Sequence[Arm]
    schedule: Schedule
    folder: ComparisonFolder
    make_module: Callable[[int], LightningModule]
    """Makes a new module with a budget."""
    data: Mapping[str, LightningDataModule]
    """By arm."""
    trainer_options: Mapping[str, Any]
    usual_budget: int
    """k0"""
    seed: int
    limit_s: float
    """What this launch may take."""
    listener: Listener
    clock: Callable[[], float] = time.perf_counter

    def finished(self) -> list[Round]:
        """Read what earlier launches have finished; for rank zero.

        Raises:
            ValueError: A round or a state is gone, damaged or of another comparison.
        """
        rounds = self.folder.rounds()
        for each in rounds:
            self._check_round(each)
        check_state_files(self.folder, rounds)
        return rounds

    def run(
        self, started: float, rounds: Sequence[Round] = (), on_lost: Callable[[], None] | None = None
    ) -> list[Round]:
        """Run rounds until all are done or the time is up; all ranks must call this.

        Args:
            started: When the launch began, by the clock.
            rounds: As rank zero's `finished` returns them; those of other ranks do not count.
            on_lost: Called on rank zero, in a thread, when a rank that it has started ends with an error.

        Returns:
            All finished rounds, those of earlier launches included.
        """
        total = self.schedule.num_rounds
        # Not read by each rank: one may look when another call has just finished a round.
        rounds = list(sync_rounds(self.trainer_options, list(rounds), on_lost, is_done=len(rounds) == total))
        round_s: list[float] = []
        goes_on = True
        while goes_on and len(rounds) < total:
            begun = self.clock()
            finished, last = self._run_round(rounds, begun)
            round_s.append(self.clock() - begun)
            if last.is_global_zero:
                self.folder.finish(finished)
                self.listener.round([*rounds, finished])
            # Each rank has its own clock: that of rank zero decides.
            finished, goes_on = last.broadcast(
                (
                    finished,
                    may_start(
                        elapsed_s=self.clock() - started,
                        limit_s=self.limit_s,
                        round_s=round_s,
                        is_first_of_launch=False,
                    ),
                )
            )
            rounds.append(finished)
        return rounds

    def _check_round(self, found: Round) -> None:
        """Make sure that a round is one of this comparison, in its own place."""
        number, schedule = found.number, self.schedule
        first = schedule.first_window(number)
        wanted = list(range(first, first + schedule.num_windows(number)))
        problem = None
        if list(found.order) != [arm.name for arm in schedule.order(self.arms, number)]:
            problem = f"its arms are, in their order, {', '.join(found.order)}"
        elif [w.number for w in found.windows[found.order[0]]] != wanted:
            problem = f"it holds other windows than those from {first} on"
        elif set(found.curves) != {arm.name for arm in self.arms if arm.same_coverage_as is not None}:
            problem = "it holds the coverage of other arms"
        if problem is not None:
            raise self.folder.damaged(self.folder.round_file(number), problem)

    def _run_round(self, rounds: Sequence[Round], begun: float) -> tuple[Round, SegmentResult]:
        number = len(rounds)
        order = self.schedule.order(self.arms, number)
        results: dict[str, SegmentResult] = {}
        for arm in order:
            results[arm.name] = result = run_segment(
                self._segment(arm, number, rounds),
                self.make_module,
                self.data[arm.name],
                self.trainer_options,
            )
            if result.is_global_zero:
                self.listener.segment(number, arm, result)
        _check_start({name: result.start_weights for name, result in results.items()})
        finished = Round(
            number=number,
            order=tuple(arm.name for arm in order),
            # In the order of the table, whatever ran first.
            windows={arm.name: results[arm.name].windows for arm in self.arms},
            curves={name: result.curve for name, result in results.items() if result.curve is not None},
            seconds=self.clock() - begun,
        )
        return finished, results[order[-1].name]

    def _segment(self, arm: Arm, number: int, rounds: Sequence[Round]) -> Segment:
        return Segment(
            arm=arm,
            budget=self._budget(arm, rounds),
            usual_budget=self.usual_budget,
            first_window=self.schedule.first_window(number),
            num_windows=self.schedule.num_windows(number),
            seed=self.seed + number,
            folder=self.folder.path,
            start=self.folder.state(number - 1, arm.name) if number else None,
            end=self.folder.state(number, arm.name),
        )

    def _budget(self, arm: Arm, rounds: Sequence[Round]) -> int:
        """Return the budget of an arm's next round, the same on all ranks and in every launch."""
        if arm.same_coverage_as is None:
            return self.usual_budget
        tuned = [w for each in rounds for w in each.windows[arm.same_coverage_as]]
        rows = sum(w.rows for w in tuned)
        change = sum(w.coverage_change for w in tuned) / rows if rows else 0.0
        return matching_budget([each.curves[arm.name] for each in rounds], self.usual_budget, change)


def _check_start(weights: Mapping[str, str | None]) -> None:
    """Make sure that all arms have started from the same weights."""
    found = {name: digest for name, digest in weights.items() if digest is not None}
    if len(set(found.values())) > 1:
        raise RuntimeError(
            explain(
                f"the arms start from different weights: {found}",
                "their losses would not compare",
                "make the model depend on seed_everything only",
            )
        )
