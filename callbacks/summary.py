"""The summary after a training: losses, throughput, work of each rank, where the files are."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from rich import get_console

from sb_lightning._messages import explain
from sb_lightning.attention.pairs import attended_pairs, causal_pairs
from sb_lightning.callbacks.imbalance_monitor import ImbalanceMonitor
from sb_lightning.callbacks.run_files import files_of_run, run_directory, write_json
from sb_lightning.callbacks.step_times import StepTimes, analytic_cost
from sb_lightning.callbacks.summary_table import summary_table
from sb_lightning.callbacks.windows import Clock, WindowMeter, loss_of_window
from sb_lightning.latency.marks import TIMED_DEVICES, marks_for

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import LightningModule, Trainer
    from rich.console import Console

    from sb_lightning.latency import LatencyModel

__all__ = ["RunSummary"]

# Attends every block of any sequence.
MOST_BUDGET = 2**31 - 1


class RunSummary(Callback):
    """Prints a table when the training is over, and writes it as `summary.json` into the run's folder.

    The work of a rank is the number of (query, key) pairs its attention visits, by closed form, for one query
    head of one layer: block-sparse if the module has `sparse_settings` (with `block_size` and `budget`), else
    dense. Tokens per second leave out validation and the first window. Losses "first" are those of the first
    window and the first validation ever, also after a resume; everything else is about this session, and its
    rows say so where there was an earlier one. Works in any Lightning project; what cannot be known is left
    out. The ranks meet once, at the end. After Ctrl-C they no longer can: the table then has the work of rank
    zero only, and `status` is "interrupted" in place of "finished". Rank zero also compares the time of its
    micro-batches with what a latency table predicts for the budget of `sparse_settings`.

    Args:
        loss_name: The logged loss of a window.
        validation_loss_name: The logged loss of a validation run.
        latency_table: Path of a table that `sb profile` wrote; without one, predicted times come from counted
            operations where the module's model is known, scaled to the run.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.callbacks import RunSummary
        trainer = Trainer(callbacks=[RunSummary()])
    """

    clock: Clock = staticmethod(time.perf_counter)
    """Replaced in tests."""

    def __init__(
        self,
        loss_name: str = "train/loss",
        validation_loss_name: str = "val/loss",
        latency_table: str | None = None,
    ) -> None:
        self.latency: LatencyModel | None = None
        """Where predicted times come from."""
        if latency_table is not None:
            from sb_lightning.latency import LatencyTable

            self.latency = LatencyTable.load(latency_table)
            self.latency.label = f"{latency_table}, {self.latency.label}"
        self.loss_name = loss_name
        self.validation_loss_name = validation_loss_name
        self.console: Console | None = None
        """Where to print; rich's global console if None."""
        self.summary: dict[str, Any] | None = None
        """What was printed, on rank zero, once the training is over."""
        self._loss: dict[str, float | None] = {"first": None, "last": None}
        self._validation: dict[str, float | None] = {"first": None, "last": None}
        self._meter = WindowMeter()
        self._times: StepTimes | None = None
        self._reset()

    def _reset(self) -> None:
        self._started = 0.0
        self._is_open = False
        self._first_step = 0
        self._windows = 0
        self._seconds = 0.0
        # Attended pairs, tokens, sequences, tokens of the windows whose time counts.
        self._work = [0, 0, 0, 0]
        self._ranks: list[list[int]] = []
        self.summary = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._reset()
        self._is_open = True
        self._started = self.clock()
        self._first_step = trainer.global_step
        self._meter = WindowMeter(self.clock, trainer.global_step)
        self._times = None
        device = trainer.strategy.root_device
        if trainer.is_global_zero and device.type in TIMED_DEVICES:
            self._times = StepTimes(marks_for(device, self.clock), exchanges=trainer.world_size > 1)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count time."""
        self._meter.resume()
        if self._times:
            self._times.begin()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the time of forward and backward."""
        if self._times:
            self._times.backward_done()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Note that the ranks have met in this micro-batch."""
        if self._times:
            self._times.optimizer_steps()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the work of this rank."""
        self._meter.add(batch)
        if self._times:
            self._times.finish(batch)
        window = self._meter.close(trainer)
        if window is None:
            return
        if self._times:
            self._times.close_window()
        self._windows += 1
        self._work[0] += self._pairs(pl_module, window.lengths)
        self._work[1] += window.tokens
        self._work[2] += len(window.lengths)
        if self._windows > 1:
            self._work[3] += window.tokens
            self._seconds += window.seconds
        _note(self._loss, loss_of_window(trainer, outputs, self.loss_name))

    @staticmethod
    def _pairs(pl_module: LightningModule, lengths: list[int]) -> int:
        settings = getattr(pl_module, "sparse_settings", None)
        if settings is None:
            return causal_pairs(lengths)
        return attended_pairs(lengths, settings.budget, settings.block_size)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the time of validation."""
        self._meter.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the validation's loss."""
        value = trainer.callback_metrics.get(self.validation_loss_name)
        if not trainer.sanity_checking and value is not None:
            _note(self._validation, float(value))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out what lies between two epochs."""
        self._meter.pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the work of all ranks together."""
        self._ranks = self.gather_work(trainer)

    def gather_work(self, trainer: Trainer) -> list[list[int]]:
        """Return each rank's four counts; all ranks must call this."""
        rows = torch.zeros(
            trainer.world_size, len(self._work), dtype=torch.int64, device=trainer.strategy.root_device
        )
        rows[trainer.global_rank] = torch.tensor(self._work)
        if trainer.world_size > 1:
            reduced = trainer.strategy.reduce(rows, reduce_op="sum")
            assert isinstance(reduced, torch.Tensor)
            rows = reduced
        return [[int(count) for count in row] for row in rows.tolist()]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table and write the file; by now every checkpoint has been written."""
        if not trainer.is_global_zero:
            return
        if not self._windows and (limit := _reached_limit(trainer)):
            rank_zero_warn(
                explain(
                    f"nothing was left to do after window {trainer.global_step} of the checkpoint",
                    f"{limit} has been reached already",
                    f"raise {limit.split('=')[0]}",
                )
            )
        elif self._ranks:
            self._publish(trainer, pl_module, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """After Ctrl-C, print and write what rank zero knows; the other ranks are on their way out."""
        is_open, self._is_open = self._is_open, False
        if is_open and isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
            self._ranks = [list(self._work)]
            self._publish(trainer, pl_module, "interrupted")

    def _publish(self, trainer: Trainer, pl_module: LightningModule, status: str) -> None:
        self._is_open = False
        directory = run_directory(trainer)
        writes = not getattr(trainer, "fast_dev_run", False)
        self.summary = {
            "version": 1,
            "status": status,
            **self._build(trainer, pl_module, directory if writes else None, waits=status == "finished"),
        }
        if writes:
            write_json(directory / "summary.json", self.summary)
        (self.console or get_console()).print(summary_table(self.summary))

    def _build(
        self, trainer: Trainer, pl_module: LightningModule, directory: Path | None, *, waits: bool
    ) -> dict[str, Any]:
        settings = getattr(pl_module, "sparse_settings", None)
        pairs, tokens, sequences, timed = (sum(column) for column in zip(*self._ranks, strict=True))
        # Ranks that share one batch (tensor parallel) have counted it several times.
        replicas = (getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas")
        share = (replicas or trainer.world_size) / trainer.world_size
        # After Ctrl-C, what the other ranks have done is not known.
        is_whole = len(self._ranks) == trainer.world_size
        rate = timed * share / self._seconds if timed and self._seconds > 0 else None
        return {
            "loss": _finite(self._loss),
            "validation_loss": _finite(self._validation),
            "windows": self._windows,
            "global_step": trainer.global_step,
            "resumed_at": self._first_step or None,
            "tokens": round(tokens * share) if is_whole else None,
            "sequences": round(sequences * share) if is_whole else None,
            "tokens_per_s": rate if is_whole else None,
            "training_s": self._seconds,
            "wall_s": self.clock() - self._started,
            "step_times": self._compare(pl_module, waits=waits),
            "imbalance": _measured_imbalance(trainer),
            "sparse": settings and {"block_size": int(settings.block_size), "budget": int(settings.budget)},
            "ranks": [
                {
                    "rank": rank,
                    "attended_pairs": row[0],
                    "share": row[0] / pairs if pairs and is_whole else None,
                    "tokens": row[1],
                    "sequences": row[2],
                }
                for rank, row in enumerate(self._ranks)
            ],
            "files": files_of_run(trainer, directory),
        }

    def _compare(self, pl_module: LightningModule, *, waits: bool) -> dict[str, Any] | None:
        model = self.latency or analytic_cost(pl_module)
        if model is None or self._times is None:
            return None
        settings = getattr(pl_module, "sparse_settings", None)
        budget = MOST_BUDGET if settings is None else int(settings.budget)
        return self._times.compare(model, budget, waits=waits)

    def state_dict(self) -> dict[str, Any]:
        """Return the first losses: the same on all ranks, and what a resumed run cannot find out."""
        return {"version": 1, "loss": self._loss["first"], "validation_loss": self._validation["first"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the first losses over."""
        self._loss = {"first": state_dict.get("loss"), "last": None}
        self._validation = {"first": state_dict.get("validation_loss"), "last": None}


def _note(series: dict[str, float | None], value: float | None) -> None:
    if value is not None:
        series["last"] = value
        if series["first"] is None:
            series["first"] = value


def _finite(series: dict[str, float | None]) -> dict[str, float | None]:
    return {
        key: value if value is not None and math.isfinite(value) else None for key, value in series.items()
    }


def _measured_imbalance(trainer: Trainer) -> dict[str, Any] | None:
    callbacks: list[Any] = list(trainer.callbacks)  # type: ignore[attr-defined]
    return next((c.summary for c in callbacks if isinstance(c, ImbalanceMonitor)), None)


def _reached_limit(trainer: Trainer) -> str | None:
    if 0 < trainer.max_steps <= trainer.global_step:
        return f"trainer.max_steps={trainer.max_steps}"
    epochs = trainer.max_epochs
    if epochs is not None and 0 < epochs <= trainer.current_epoch:
        return f"trainer.max_epochs={epochs}"
    return None
