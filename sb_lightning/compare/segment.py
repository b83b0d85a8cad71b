"""The windows of one arm in one round: an ordinary training that goes on from the arm's own checkpoint."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from rich.console import Console

from sb_lightning._messages import explain
from sb_lightning.balance import SparsityAwareBatchSampler
from sb_lightning.balance.arguments import digest
from sb_lightning.callbacks import ImbalanceMonitor, SparseBalanceCallback, WindowMeetings
from sb_lightning.callbacks.windows import loss_of_window
from sb_lightning.compare.arms import Arm
from sb_lightning.compare.probe import CoverageProbe
from sb_lightning.compare.results import ArmWindow, Cells
from sb_lightning.compare.states import StateIO
from sb_lightning.compare.uniform import CoverageCurve
from sb_lightning.tracking.spans import LANES

if TYPE_CHECKING:
    from sb_lightning.callbacks.sparse_balance_window import WindowOutcome
    from sb_lightning.tracking.window_record import MeasuredWindow

__all__ = ["Segment", "run_segment"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What is to be run."""

    arm: Arm
    budget: int
    """Of all sequences that nothing tunes."""
    usual_budget: int
    """k0"""
    first_window: int
    """Windows that the arm has trained before."""
    num_windows: int
    seed: int
    folder: Path
    """Of the comparison, for what is said where the state cannot be written."""
    start: Path | None
    """State to go on from; None for the start weights."""
    end: Path
    """Where the state is left."""


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """What was measured, equal on all ranks."""

    windows: tuple[ArmWindow, ...]
    curve: CoverageCurve | None
    start_weights: str | None
    """Short name of the weights before the first step; None if the arm went on."""
    broadcast: Callable[[Any], Any]
    """Hands an object of rank zero to all ranks."""
    is_global_zero: bool


def run_segment(
    segment: Segment,
    make_module: Callable[[int], LightningModule],
    data: LightningDataModule,
    trainer_options: Mapping[str, Any],
) -> SegmentResult:
    """Train a few windows of an arm, and measure them; all ranks must call this.

    Everything that differs between arms, and all that they have learnt, is made for this segment or comes
    from the arm's checkpoint: arms cannot touch each other.

    Args:
        segment: What is to be run.
        make_module: Makes a new module with a budget.
        data: Deals windows as the arm does.
        trainer_options: Of the Trainer.

    Raises:
        RuntimeError: The training has ended before its windows were run.
    """
    # Whatever is random in a segment is the same for all arms, whichever ran before.
    seed_everything(segment.seed, verbose=False)
    arm = segment.arm
    module = make_module(segment.budget)
    monitor = ImbalanceMonitor(table_every_n_windows=0, spans=False)
    monitor.console = Console(file=io.StringIO())
    tuning = None
    if arm.anchor is not None:
        tuning = SparseBalanceCallback(anchor=arm.anchor, tolerance=arm.tolerance)
    recorder = _Recorder(segment, monitor, tuning)
    # Those whose meeting must be over come before the recorder.
    callbacks: list[Callback] = [monitor, WindowMeetings(), *([tuning] if tuning else []), recorder]
    trainer = Trainer(
        **trainer_options,
        callbacks=callbacks,
        plugins=[StateIO(segment.folder)],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        max_epochs=-1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=None if segment.start is None else str(segment.start))
    recorder.collect()
    if len(recorder.measured) != segment.num_windows:
        raise RuntimeError(
            explain(
                f"{arm.name} has trained {len(recorder.measured)} of {segment.num_windows} windows",
                "its state was at or past trainer.max_steps, or something has ended the training",
                "begin anew in another folder (--output)",
            )
        )
    return SegmentResult(
        windows=recorder.windows(),
        curve=recorder.curve,
        start_weights=recorder.start_weights,
        broadcast=trainer.strategy.broadcast,
        is_global_zero=trainer.is_global_zero,
    )


class _Recorder(Callback):
    """Keeps what the callbacks before it say of each window, saves the state, and ends the segment."""

    def __init__(
        self, segment: Segment, monitor: ImbalanceMonitor, tuning: SparseBalanceCallback | None
    ) -> None:
        self.segment = segment
        self.monitor = monitor
        self.tuning = tuning
        self.measured: list[MeasuredWindow] = []
        self.tuned: list[WindowOutcome | None] = []
        self.losses: list[float | None] = []
        self.members: list[str] = []
        self.work: list[float] = []
        self.curve: CoverageCurve | None = None
        self.start_weights: str | None = None
        self._batches: list[Any] = []
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sure that the arm stands where it should."""
        self._step = trainer.global_step
        if self._step != self.segment.first_window:
            raise RuntimeError(
                explain(
                    f"the state of {self.segment.arm.name} is at window {self._step}, not at "
                    f"{self.segment.first_window}",
                    "it belongs to another round",
                    "begin anew in another folder (--output)",
                )
            )
        if self._step == 0:
            weights = [p.detach().double().sum().item() for p in pl_module.parameters()]
            self.start_weights = digest(np.array(weights))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the micro-batch where coverage is looked up afterwards."""
        if self.segment.arm.same_coverage_as is not None:
            self._batches.append(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take in a window that is over."""
        self.collect()
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.tuned.append(None if self.tuning is None else self.tuning.window)
        self.losses.append(loss_of_window(trainer, outputs, "train/loss"))
        sampler: Any = trainer.train_dataloader.batch_sampler  # type: ignore[union-attr]
        assert isinstance(sampler, SparsityAwareBatchSampler)
        members = sampler.members(sampler.epoch, batch_idx // sampler.accumulate)
        self.members.append(digest(np.sort(sampler.sequence_ids[members])))
        self.work.append(_work(sampler, members, self.segment))
        if len(self.members) < self.segment.num_windows:
            return
        trainer.save_checkpoint(self.segment.end)
        trainer.should_stop = True
        if self.segment.arm.same_coverage_as is not None:
            probe = CoverageProbe(pl_module, self.segment.budget)
            probe.run(self._batches)
            self._batches.clear()
            self.curve = probe.sync_curve(trainer, self.segment.usual_budget)

    def collect(self) -> None:
        """Take what the monitor has measured, which on CUDA comes one window late."""
        window = self.monitor.window
        if window is not None and (not self.measured or self.measured[-1] is not window):
            self.measured.append(window)

    def windows(self) -> tuple[ArmWindow, ...]:
        """Return the windows of the segment."""
        found = zip(self.measured, self.tuned, self.losses, self.members, self.work, strict=True)
        segment, curve = self.segment, self.curve
        return tuple(
            _window(segment.first_window + i, *each, segment=segment, curve=curve)
            for i, each in enumerate(found)
        )


def _window(
    number: int,
    measured: MeasuredWindow,
    tuned: WindowOutcome | None,
    loss: float | None,
    members: str,
    work: float,
    *,
    segment: Segment,
    curve: CoverageCurve | None,
) -> ArmWindow:
    lanes = np.nan_to_num(measured.times[..., : len(LANES)]).sum(axis=1).mean(axis=0)
    lane = {name: float(lanes[i]) for i, name in enumerate(LANES)}
    figures = {} if tuned is None else tuned.metrics()
    sums = {} if tuned is None else tuned.sums
    rows, change = sums.get("rows", 0.0), sums.get("coverage", 0.0) - sums.get("base_coverage", 0.0)
    if curve is not None:
        # Known for all windows of the segment together.
        rows = curve.rows / segment.num_windows
        change = curve.change(segment.budget) / segment.num_windows
    return ArmWindow(
        number=number,
        members=members,
        busy_ms=_cells(measured.busy_ms),
        predicted_ms=_cells(measured.predicted_ms),
        wall_ms=1e3 * measured.wall_s,
        wait_ms=lane["wait"] + lane["broadcast"],
        plan_ms=lane["plan"],
        tune_ms=figures.get("time/tune_ms", 0.0),
        loss=loss if loss is not None and math.isfinite(loss) else None,
        budget=figures.get("sparsity/budget_mean", float(segment.budget)),
        work_ratio=figures.get("balance/work_ratio", work),
        rows=rows,
        coverage_change=change,
        decisions=sums.get("decisions", 0.0),
        infeasible=sums.get("infeasible", 0.0),
    )


def _work(sampler: SparsityAwareBatchSampler, members: Any, segment: Segment) -> float:
    """Return the predicted time of a window's sequences at their one budget over that at k0."""
    if segment.budget == segment.usual_budget:
        return 1.0
    lengths, table = sampler.lengths[members].tolist(), sampler.costs.table
    times = [int(table.predict_many_us(lengths, k).sum()) for k in (segment.budget, segment.usual_budget)]
    return times[0] / times[1] if times[1] else 1.0


def _cells(times: Any) -> Cells:
    return tuple(tuple(None if math.isnan(v) else v for v in row) for row in times.tolist())
