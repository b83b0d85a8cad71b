"""Where training stands in the data: saved with a checkpoint, restored to the first micro-batch of a window.

Lightning 2.6 restores its own counters, but not always to a point from which training goes on as it would
have:

- A checkpoint in mid-window (a time interval, Ctrl-C, an exception) holds no gradients. The micro-batches of
  the window that had run are lost, and what follows would step with half a window.
- With ``max_steps`` set, a checkpoint written at the end of an epoch replays the epoch's end: one stray
  micro-batch or a whole epoch is lost.
- After a stop by ``max_steps`` in mid-epoch, the rest of the epoch would be drawn from the next epoch's
  order.

So the position is kept here, and where Lightning's saved counters do not agree with it they are rewound to
what they were after the last micro-batch of the last complete window: the unfinished window runs again from
its start.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

from sb_lightning._messages import explain
from sb_lightning.balance import BalancedDataLoader, SparsityAwareBatchSampler
from sb_lightning.balance.loader import STATE_VERSION, check_same_order
from sb_lightning.data.settings import describe_differences

__all__ = ["AlignCheckpoint", "TrainingPosition", "rewind_loops", "window_start"]


class TrainingPosition:
    """Keeps the position of one training run; its state is the same on all ranks.

    Args:
        trainer: The Trainer whose loops draw from the loader.
        order: What the order of sequences depends on beyond the sampler's arguments: which data.
        settings: The data module's settings, saved along: they explain why the data are others.
    """

    def __init__(
        self, trainer: Trainer, order: dict[str, str], settings: dict[str, Any] | None = None
    ) -> None:
        self._trainer = trainer
        self._order = order
        self._settings = settings or {}
        self._sampler: SparsityAwareBatchSampler | None = None
        self._restored: dict[str, Any] | None = None
        self._begun_epoch: int | None = None

    def attach(self, sampler: SparsityAwareBatchSampler) -> None:
        """Take note of a training sampler; refuse to continue a restored position in another order.

        Raises:
            MisconfigurationException: Names what differs.
        """
        if self._sampler is None:
            self._sampler = sampler
        if self._restored is None:
            return
        try:
            check_same_order(self._restored, self._fingerprint(sampler))
        except ValueError as error:
            different = describe_differences(self._restored.get("settings", {}), self._settings)
            why = f" In the settings: {', '.join(different)}." if different else ""
            raise MisconfigurationException(f"{error}{why}") from error

    def begin(self, sampler: SparsityAwareBatchSampler) -> int:
        """Return the micro-batch at which an iteration over the sampler begins; called when it really begins.

        Raises:
            RuntimeError: Lightning is about to continue elsewhere than the data.
        """
        loader = self._trainer.train_dataloader
        if isinstance(loader, BalancedDataLoader) and loader.batch_sampler is not sampler:
            # Somebody looks at the data beside the training loop.
            return 0
        restored, self._restored = self._restored, None
        epoch, start = (sampler.epoch, 0) if restored is None else _next_position(restored)
        ready = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if (epoch, start) != (sampler.epoch, ready):
            raise RuntimeError(
                explain(
                    f"the data stand at micro-batch {start} of epoch {epoch} and the Trainer at {ready} of "
                    f"{sampler.epoch}",
                    "sequences would be lost or trained on twice",
                    "resume a checkpoint that this data module has written, or start from the weights only",
                )
            )
        self._sampler = sampler
        self._begun_epoch = epoch
        return start

    def state_dict(self) -> dict[str, Any]:
        """Return the position, plain numbers and strings; empty before there is one."""
        if self._restored is not None:
            return dict(self._restored)
        if self._sampler is None:
            return {}
        # Until the first micro-batch of an epoch is drawn, Lightning's counter is that of the epoch before.
        has_begun = self._begun_epoch == self._sampler.epoch
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return {
            "version": STATE_VERSION,
            "epoch": self._sampler.epoch,
            "micro_batch": int(progress.processed) if has_begun else 0,
            **self._fingerprint(self._sampler),
            "settings": dict(self._settings),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved position."""
        self._restored = dict(state_dict)
        if self._sampler is not None:
            self.attach(self._sampler)

    def _fingerprint(self, sampler: SparsityAwareBatchSampler) -> dict[str, int | str]:
        return {**sampler.fingerprint(), "batches_per_epoch": len(sampler), **self._order}


class AlignCheckpoint(Callback):
    """Rewinds Lightning's counters in a checkpoint before it restores them; the data module adds it.

    Args:
        state_key: Key under which the checkpoint holds the data module's state.
    """

    def __init__(self, state_key: str) -> None:
        self._data_key = state_key

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Rewind ``checkpoint["loops"]`` to the start of the unfinished window."""
        position = checkpoint.get(self._data_key)
        if not position or position.get("version") != STATE_VERSION or "loops" not in checkpoint:
            return
        loops = checkpoint["loops"]["fit_loop"]
        if _agrees(loops, position):
            return
        if (position["epoch"], window_start(position)) == (0, 0):
            # Nothing has been trained: Lightning starts from fresh counters.
            del checkpoint["loops"]
            return
        steps = checkpoint["global_step"] if pl_module.automatic_optimization else None
        rewind_loops(loops, position, steps)


def window_start(position: dict[str, Any]) -> int:
    """Return the micro-batch of the epoch at which the position's unfinished window begins.

    Example:
        >>> order = {"accumulate": 4, "batches_per_epoch": 10}
        >>> [window_start({"micro_batch": b, **order}) for b in (3, 8, 9, 10)]
        [0, 8, 8, 10]
    """
    done = int(position["micro_batch"])
    if done >= position["batches_per_epoch"]:
        return done
    return done - done % int(position["accumulate"])


def _next_position(position: dict[str, Any]) -> tuple[int, int]:
    start, epoch = window_start(position), int(position["epoch"])
    return (epoch + 1, 0) if start >= position["batches_per_epoch"] else (epoch, start)


def _agrees(loops: dict[str, Any], position: dict[str, Any]) -> bool:
    """Return whether Lightning goes on at the position by itself: after a whole window, in this epoch."""
    done, epoch = position["micro_batch"], position["epoch"]
    batch, epochs = loops["epoch_loop.batch_progress"]["current"], loops["epoch_progress"]["current"]
    return bool(
        0 < done == window_start(position)
        and batch["ready"] == batch["started"] == batch["processed"] == done
        and epochs["ready"] == epochs["started"] == epoch + 1
        and epochs["processed"] == epochs["completed"] == epoch
    )


def rewind_loops(loops: dict[str, Any], position: dict[str, Any], num_steps: int | None) -> None:
    """Set a fit loop's saved counters to what they were after the last micro-batch of the last whole window.

    That is the moment of ``on_train_batch_end``: from there Lightning goes on rightly in mid-epoch and at its
    end, with ``max_steps`` and with ``max_epochs``.

    Args:
        loops: ``checkpoint["loops"]["fit_loop"]``; changed in place.
        position: The data module's state.
        num_steps: Optimizer steps taken; None under manual optimization, where every micro-batch is a window.
    """
    epoch, start = int(position["epoch"]), window_start(position)
    batches = loops["epoch_loop.batch_progress"]
    total = batches["total"]["processed"] - (position["micro_batch"] - start)
    if start == 0:
        # The end of the epoch before is the start of this one.
        epoch, start = epoch - 1, int(position["batches_per_epoch"])
    batches["current"] = {"ready": start, "started": start, "processed": start, "completed": start - 1}
    batches["total"] = {"ready": total, "started": total, "processed": total, "completed": total - 1}
    batches["is_last_batch"] = start >= position["batches_per_epoch"]
    for count in loops["epoch_progress"].values():
        count.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
    # A validation that was under way runs again when training reaches it.
    for count in (v for v in loops["epoch_loop.val_loop.batch_progress"].values() if isinstance(v, dict)):
        count.update(ready=count["completed"], started=count["completed"], processed=count["completed"])
    # Counts windows for the loggers, and is raised after on_train_batch_end.
    windows = total if num_steps is None else num_steps
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = windows - 1
