"""The checkpoint to resume from: kept up to date, also when the training is interrupted."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info

from sb_lightning._messages import explain
from sb_lightning.callbacks.window_meetings import WindowMeetings

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["LastCheckpoint"]

STDERR = 2
NOTICE = b"\nInterrupted: finishing this window to save a checkpoint; Ctrl-C again stops at once, unsaved.\n"


class LastCheckpoint(ModelCheckpoint):
    """Keeps `last.ckpt`: written after each validation or epoch, at the end of the training, on Ctrl-C.

    It is only ever written between two windows: from the middle of an accumulation nothing could be resumed
    exactly, because the gradients summed so far are not part of a checkpoint. So Ctrl-C lets the window at
    hand (or the batch of the validation) finish, the file is written, and Lightning shuts down as always,
    with exit code 1. A second Ctrl-C stops at once and writes nothing. With several ranks, rank zero decides
    and the others go on until Lightning ends them, so that none waits in a collective that another one has
    left; a strategy whose checkpoints need all ranks (FSDP, ModelParallel, DeepSpeed) then writes nothing and
    keeps the last regular file.

    Args:
        dirpath: Folder of the file; by default `checkpoints` in the folder of the run.
        every_n_windows: Also write after every so many windows; None leaves this out.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.callbacks import LastCheckpoint
        trainer = Trainer(callbacks=[LastCheckpoint(every_n_windows=500)])
    """

    def __init__(self, dirpath: str | None = None, every_n_windows: int | None = None) -> None:
        if every_n_windows is not None and every_n_windows < 1:
            raise ValueError(
                explain(
                    f"every_n_windows is {every_n_windows}", "it counts windows", "pass 1 or more, or None"
                )
            )
        super().__init__(dirpath=dirpath, filename=self.CHECKPOINT_NAME_LAST, enable_version_counter=False)
        self.every_n_windows = every_n_windows
        self._pid = 0
        self._previous_handler: Any = None
        self._is_training = False
        self._is_requested = False
        self._is_safe = False

    # When to write.

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write if it is time; stop here if Ctrl-C was pressed."""
        if not _is_between_windows(trainer):
            return
        is_due = self.every_n_windows is not None and trainer.global_step % self.every_n_windows == 0
        # A run that stops within an epoch is saved here: at the epoch's end Lightning counts the epoch as
        # done, and a run resumed with more steps would leave out the rest of it.
        is_end = trainer.should_stop or trainer.global_step == trainer.max_steps
        if is_due or (is_end and not trainer.is_last_batch):
            self._write(trainer)
        if self._is_requested and trainer.is_global_zero:
            # Lightning writes them after this hook, which it will not reach.
            _log_window(trainer)
        self._stop_if_requested(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Stop here if Ctrl-C was pressed."""
        if _is_between_windows(trainer):
            self._stop_if_requested(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write, unless a window is open; at the end of an epoch, `on_train_epoch_end` does it."""
        if _is_between_windows(trainer) and not trainer.is_last_batch:
            self._write(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write."""
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what came after the last validation."""
        self._write(trainer)
        self._is_training = False

    def _write(self, trainer: Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self.best_model_path = self.format_checkpoint_name({})
            self._save_checkpoint(trainer, self.best_model_path)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the path of the run that is resumed would be of no use."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take over."""

    # Ctrl-C.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen to Ctrl-C: before the workers of a data loader exist, because they inherit it."""
        super().setup(trainer, pl_module, stage)
        self._is_training = self._is_requested = self._is_safe = False
        is_main_thread = threading.current_thread() is threading.main_thread()
        # Another handler, or a rank that was told to ignore the signal, is left alone.
        if (
            stage == "fit"
            and is_main_thread
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._pid = os.getpid()
            self._previous_handler = signal.signal(signal.SIGINT, self._on_interrupt)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on there is something to save."""
        super().on_train_start(trainer, pl_module)
        self._is_training = True

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A worker of a data loader: the window at hand still needs its data.
            return
        if self._is_safe:
            # The file is being written.
            return
        if self._is_requested or not self._is_training:
            raise KeyboardInterrupt
        self._is_requested = True
        # Not `print`: the handler may have interrupted one.
        os.write(STDERR, NOTICE)

    def _stop_if_requested(self, trainer: Trainer) -> None:
        if self._is_requested and trainer.is_global_zero:
            self._is_safe = True
            self._write_alone(trainer)
            raise KeyboardInterrupt

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write if `WindowMeetings` has ended the training: all ranks are here, and no window is open.

        Otherwise there is nothing to write: between two windows it is written already, and elsewhere a window
        is open.
        """
        meetings = [c for c in trainer.callbacks if isinstance(c, WindowMeetings)]  # type: ignore[attr-defined]
        if self._is_training and any(meeting.has_ended for meeting in meetings):
            self._write(trainer)
            rank_zero_info(
                f"Saved window {trainer.global_step} in {self.best_model_path}; go on with --ckpt_path "
                f"{self.best_model_path}"
            )
        self._is_safe = self._is_training = False

    def _write_alone(self, trainer: Trainer) -> None:
        if getattr(trainer, "fast_dev_run", False):
            return
        if trainer.world_size > 1 and not _rank_zero_saves_alone(trainer):
            rank_zero_info(
                f"No checkpoint written: {type(trainer.strategy).__name__} needs all ranks for it, and they "
                "do not stop at the same window. The last regular checkpoint is kept."
            )
            return
        path = self.best_model_path = self.format_checkpoint_name({})
        if self._last_global_step_saved != trainer.global_step:
            # Not `trainer.save_checkpoint`: the other ranks do not reach its barrier.
            trainer.strategy.save_checkpoint(
                trainer._checkpoint_connector.dump_checkpoint(weights_only=False), path
            )
        rank_zero_info(f"Saved window {trainer.global_step} in {path}; go on with --ckpt_path {path}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop listening to Ctrl-C."""
        if self._previous_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._previous_handler)
        self._previous_handler = None


def _is_between_windows(trainer: Trainer) -> bool:
    # In `on_train_batch_end` and during validation, `processed` already counts the micro-batch that has just
    # run.
    done: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
    return trainer.is_last_batch or done % trainer.accumulate_grad_batches == 0


def _log_window(trainer: Trainer) -> None:
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.log_metrics(connector.metrics["log"])


def _rank_zero_saves_alone(trainer: Trainer) -> bool:
    gathers_optimizer = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in trainer.optimizers)
    return type(trainer.strategy).save_checkpoint is Strategy.save_checkpoint and not gathers_optimizer
