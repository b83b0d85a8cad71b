"""A window's figures for the loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from sb_lightning.callbacks.imbalance_table import CELL_COLUMNS, WORST_COLUMNS, cell_rows, worst_rows

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from sb_lightning.tracking.window_record import MeasuredWindow

__all__ = ["log_metrics", "log_tables", "log_worst", "logged_step"]

SHOWN_IN_BAR = "balance/imbalance"


def log_metrics(trainer: Trainer, metrics: Mapping[str, float], *, since: int, always: bool = False) -> bool:
    """Log figures that are equal on all ranks already.

    They go to the loggers, to `trainer.callback_metrics` (for ModelCheckpoint, EarlyStopping), to
    `trainer.logged_metrics` and the first of them to the progress bar, when Lightning's own would. Not by
    `LightningModule.log`: that takes a third of a millisecond per metric and window, more than measuring
    does.

    Args:
        trainer: Whose loggers to use.
        metrics: Values by name; the same names on all ranks.
        since: Steps done when something was logged last. Windows of several steps may step over a multiple
            of `log_every_n_steps`: it is due when one has been passed since then.
        always: Whatever `log_every_n_steps` says.

    Returns:
        Whether the loggers have got them.
    """
    values = torch.tensor(list(metrics.values()), dtype=torch.float32).unbind()
    tensors = dict(zip(metrics, values, strict=True))
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    if SHOWN_IN_BAR in metrics:
        trainer.progress_bar_metrics[SHOWN_IN_BAR] = metrics[SHOWN_IN_BAR]
    step, every = logged_step(trainer), trainer.log_every_n_steps  # type: ignore[attr-defined]
    is_due = every > 0 and ((step + 1) // every > since // every or trainer.should_stop)
    logs = always or is_due or bool(getattr(trainer, "fast_dev_run", False))
    if logs:
        for logger in trainer.loggers:
            logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, step=step)
    return logs


def log_tables(trainer: Trainer, window: MeasuredWindow) -> None:
    """Give Weights & Biases a window as a table, a row per rank and micro-batch."""
    _log_table(trainer, "balance/cells", CELL_COLUMNS, cell_rows(window) if trainer.is_global_zero else [])


def log_worst(trainer: Trainer, summary: dict[str, Any]) -> None:
    """Give Weights & Biases the micro-batches that made others wait longest."""
    _log_table(trainer, "balance/worst_cells", WORST_COLUMNS, worst_rows(summary))


def _log_table(trainer: Trainer, name: str, columns: list[str], rows: list[list[Any]]) -> None:
    for logger in trainer.loggers:
        # Of either package, without importing wandb; on other ranks than zero it does nothing.
        if any(kind.__name__ == "WandbLogger" for kind in type(logger).__mro__):
            logger.log_table(name, columns=columns, data=rows, step=logged_step(trainer))  # type: ignore[attr-defined]


def logged_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs the window at hand: it counts from 0."""
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))
