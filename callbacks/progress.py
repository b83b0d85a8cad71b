"""The progress bar: one line for the whole training, counted in windows."""

from __future__ import annotations

import math
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ProgressBar
from rich import get_console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from sb_lightning._messages import explain
from sb_lightning.balance.window_sync import SyncPart, WindowSync
from sb_lightning.callbacks.windows import Clock, WindowMeter, loss_of_window
from sb_lightning.data.trainer import data_parallel

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from rich.console import Console

__all__ = ["TrainingProgress"]


class TrainingProgress(ProgressBar):
    """One bar for the whole fit, with loss, tokens per second over all ranks and the time left.

    Validation is shown below it. Where the output is not a terminal, a plain line is printed instead. Works
    in any Lightning project: without sequence lengths in the batch (see `length_source`) tokens per second
    are left out, without a logged loss the one that `training_step` returned is shown; what is logged with
    `prog_bar=True` is added, and the imbalance where an `ImbalanceMonitor` measures it. The ranks
    bring their tokens together once per window, in the gather that they share with other callbacks
    (:class:`~sb_lightning.balance.WindowSync`); rank zero draws.

    Throughput is that of the last 20 windows. It leaves out validation, and the first window, which warms up.
    The time left is by the clock, validation included.

    Args:
        refresh_every: Windows between two plain lines where the output is not a terminal.
        loss_name: The logged loss of a window.
        validation_loss_name: The logged loss of a validation run.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.callbacks import TrainingProgress
        trainer = Trainer(callbacks=[TrainingProgress(refresh_every=20)])
    """

    clock: Clock = staticmethod(time.perf_counter)
    """Replaced in tests."""

    def __init__(
        self, refresh_every: int = 10, loss_name: str = "train/loss", validation_loss_name: str = "val/loss"
    ) -> None:
        super().__init__()
        if refresh_every < 1:
            raise ValueError(
                explain(f"refresh_every is {refresh_every}", "it counts windows", "pass refresh_every >= 1")
            )
        self.refresh_every = refresh_every
        self.loss_name = loss_name
        self.validation_loss_name = validation_loss_name
        self.console: Console | None = None
        """Where to draw; rich's global console if None."""
        self._enabled = True
        self._bar: Progress | None = None
        self._main: TaskID | None = None
        self._below: TaskID | None = None
        self._meter = WindowMeter()
        self._part: SyncPart | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)
        self._total: int | None = None
        self._done = 0
        self._windows = 0
        self._warm_at = 0.0
        self._loss: float | None = None
        self._validation_loss: float | None = None

    # Switches that the Trainer uses.

    def disable(self) -> None:
        """Stop drawing; called by Lightning on every rank but zero and while it tunes."""
        self._enabled = False
        self._close()

    def enable(self) -> None:
        """Draw again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._enabled:
            self._console.print(*args, **kwargs)

    @property
    def _console(self) -> Console:
        return self.console or get_console()

    @property
    def _is_live(self) -> bool:
        return self._console.is_jupyter or (self._console.is_terminal and not self._console.is_dumb_terminal)

    # Training.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar; a resumed run starts where it stopped."""
        self._meter = WindowMeter(self.clock, trainer.global_step)
        self._part = WindowSync.of(trainer).register("progress", ints=1, fill=self._fill)
        self._recent.clear()
        self._windows = 0
        self._done = trainer.global_step
        total = trainer.estimated_stepping_batches
        self._total = int(total) if math.isfinite(total) and total >= 0 else None
        self._open("Training", self._total, self._done, self._main_text(trainer))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count time."""
        self._meter.start(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count tokens; advance the bar when the optimizer has stepped."""
        self._meter.add(batch)
        if trainer.global_step == self._done:
            return
        tokens = self.sync_tokens(trainer)
        window = self._meter.close(trainer)
        assert window is not None
        self._windows += 1
        self._done = trainer.global_step
        if self._windows == 1:
            self._warm_at = self.clock()
        else:
            self._recent.append((tokens, window.seconds))
        if self._enabled:
            self._loss = loss_of_window(trainer, outputs, self.loss_name)
            self._show_window(trainer)

    def _fill(self, global_step: int) -> tuple[list[float], list[int]]:
        # Another callback may ask for the gather before this one has seen the micro-batch's end: the meter
        # counts the one at hand.
        return [], [self._meter.tokens]

    def sync_tokens(self, trainer: Trainer) -> int:
        """Return the window's tokens over all ranks; all ranks must call this."""
        assert self._part is not None
        total = int(self._part.collect(trainer.global_step).ints.sum())
        # Ranks that share one batch (tensor parallel) have counted it several times.
        return total * data_parallel(trainer)[0] // trainer.world_size

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out what lies between two epochs."""
        self._meter.pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the finished bar on the screen."""
        if self._main is not None and self._bar is not None:
            self._bar.update(self._main, info=self._main_text(trainer))
        self._close()

    # Validation, in a fit and alone; test and predict.

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what happens before the training."""
        self._open("Sanity check", None, 0, "")

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make room for the training's bar."""
        self._close(keep=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show validation below the training's bar."""
        self._meter.pause()
        self._evaluate(
            "Validation",
            trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches,
        )

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Advance."""
        self._advance()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hide the line of the validation and keep its loss."""
        if trainer.sanity_checking:
            return
        value = trainer.callback_metrics.get(self.validation_loss_name)
        self._validation_loss = self._validation_loss if value is None else float(value)
        self._end_below()
        if trainer.state.fn != "fit":
            self._close()
        elif self._enabled and self._bar is not None and self._main is not None:
            self._bar.update(self._main, info=self._main_text(trainer))
            self._bar.refresh()
        elif self._enabled and value is not None:
            self._line(f"validation after window {self._done}  loss {_number(float(value))}")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open a bar."""
        self._evaluate("Test", trainer.num_test_batches)

    def on_test_batch_end(self, *_: Any, **__: Any) -> None:
        """Advance."""
        self._advance()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open a bar."""
        self._evaluate("Predict", trainer.num_predict_batches)

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        """Advance."""
        self._advance()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back, so that the message is readable."""
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._leave()

    def _leave(self) -> None:
        self._close()
        if self._part is not None:
            self._part.remove()
            self._part = None

    # Drawing.

    def _show_window(self, trainer: Trainer) -> None:
        if self._bar is not None and self._main is not None:
            self._bar.update(self._main, completed=self._done, info=self._main_text(trainer))
            self._bar.refresh()
        elif self._windows == 1 or self._done % self.refresh_every == 0 or self._done == self._total:
            self._line(f"window {self._main_text(trainer)}")

    def _main_text(self, trainer: Trainer) -> str:
        parts = [f"{self._done}/{'?' if self._total is None else self._total}"]
        if self._loss is not None:
            parts.append(f"loss {_number(self._loss)}")
        if self._validation_loss is not None:
            parts.append(f"val {_number(self._validation_loss)}")
        if rate := self._tokens_per_s():
            parts.append(f"{rate:,.0f} tok/s")
        shown = {self.loss_name, self.validation_loss_name}
        metrics = trainer.progress_bar_metrics if self._windows else {}
        parts.extend(
            f"{name.removeprefix('balance/')} {_number(value)}"
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and name not in shown
        )
        if (left := self._seconds_left()) is not None:
            parts.append(f"ETA {timedelta(seconds=round(left))}")
        return "  ".join(parts)

    def _tokens_per_s(self) -> float | None:
        seconds = sum(seconds for _, seconds in self._recent)
        tokens = sum(tokens for tokens, _ in self._recent)
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    def _seconds_left(self) -> float | None:
        if self._total is None or self._windows < 2 or self._done >= self._total:
            return None
        per_window = (self.clock() - self._warm_at) / (self._windows - 1)
        return per_window * (self._total - self._done)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _open(self, title: str, total: int | None, done: int, info: str) -> None:
        self._close(keep=False)
        if not self._enabled or not self._is_live:
            return
        # No refresh thread: on a machine whose cores are all in use it would take time from the training.
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[info]}", markup=False),
            console=self._console,
            auto_refresh=False,
            expand=True,
        )
        self._bar.start()
        self._main = self._bar.add_task(title, total=total, completed=done, info=info)
        self._bar.refresh()

    def _evaluate(self, title: str, num_batches: list[int | float] | int | float) -> None:
        batches = sum(num_batches) if isinstance(num_batches, list) else num_batches
        total = int(batches) if math.isfinite(batches) else None
        info = f"0/{'?' if total is None else total}"
        if self._bar is None:
            self._open(title, total, 0, info)
            self._below, self._main = self._main, None
        else:
            self._below = self._bar.add_task(f"  {title}", total=total, info=info)
            self._bar.refresh()

    def _advance(self) -> None:
        if self._bar is None or self._below is None:
            return
        self._bar.advance(self._below)
        task = next(task for task in self._bar.tasks if task.id == self._below)
        self._bar.update(
            self._below, info=f"{int(task.completed)}/{'?' if task.total is None else int(task.total)}"
        )
        self._bar.refresh()

    def _end_below(self) -> None:
        if self._bar is not None and self._below is not None and self._main is not None:
            self._bar.remove_task(self._below)
        self._below = None

    def _close(self, keep: bool = True) -> None:
        if self._bar is not None:
            self._bar.live.transient = not keep
            self._bar.stop()
        self._bar = self._main = self._below = None


def _number(value: float) -> str:
    return f"{value:.4g}" if value and not 1e-3 <= abs(value) < 1e4 else f"{value:.3f}"
