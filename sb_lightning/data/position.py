"""Where training stands in the data: saved with a checkpoint, restored to the first micro-batch of a window.

Lightning 2.6 restores its own counters, but not always to a point from which training goes on as it would
have:

- A checkpoint in mid-window (a time interval, Ctrl-C, an exception) holds no gradients. The micro-batches of
  the window that had run are lost, and what follows would step with half a window.
- With ``max_steps`` set, a checkpoint written at the end of an epoch replays the epoch's end: one stray
  micro-batch or a whole epoch is lost.
- After a stop by ``max_steps`` in mid-epoch, the rest of the epoch would be drawn from the next epoch's
  order.
- A loader's own state is dropped if ``estimated_stepping_batches`` was read (pytorch-lightning issue 20550).

So the position is kept here, and where Lightning's saved counters do not agree with it they are rewound to
what they were after the last micro-batch of the last complete window: the unfinished window runs again from
its start.

With another number of ranks or of micro-batches per step the windows are others. The sequences of the epoch
that complete windows have consumed are then skipped, and the rest is planned anew, in an epoch that is
shorter for once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

from sb_lightning._messages import explain
from sb_lightning.balance import BalancedDataLoader, SparsityAwareBatchSampler
from sb_lightning.balance.loader import STATE_VERSION, check_same_order, order_of, take_up
from sb_lightning.balance.membership import Membership
from sb_lightning.data.settings import describe_differences
from sb_lightning.data.trainer import data_parallel

__all__ = [
    "AlignCheckpoint",
    "OnResize",
    "TrainingPosition",
    "check_on_resize",
    "resized",
    "rewind_loops",
    "training_loaders",
    "window_start",
]

OnResize = Literal["raise", "replan"]
SHAPE = ("ranks", "accumulate")
"""What a resumed run may change."""


def check_on_resize(value: str, name: str) -> OnResize:
    """Return the choice, or name those that there are.

    Args:
        value: What was chosen.
        name: Name of the setting.

    Raises:
        ValueError: There is no such choice.
    """
    if value not in get_args(OnResize):
        raise ValueError(
            explain(f"{name} is {value!r}", "there is no such choice", f"pass one of {get_args(OnResize)}")
        )
    return value  # type: ignore[return-value]


def training_loaders(trainer: Any) -> list[Any]:
    """Return the loaders of a Trainer's training batches; none before it has asked for them."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


class TrainingPosition:
    """Keeps the position of one training run; its state is the same on all ranks.

    Its owner calls `attach` with each sampler that is made, hands `begin` to the loader, and calls `align`,
    `start` and `start_epoch` from the hooks of a callback, as `AlignCheckpoint` does.

    Args:
        trainer: The Trainer whose loops draw from the loader.
        order: What the order of sequences depends on beyond the sampler: which data.
        settings: The data module's settings, saved along: they explain why the data are others.
        on_resize: What happens if a run is resumed with another number of ranks or of micro-batches per step:
            ``raise``, or ``replan`` the rest of the epoch.
        option: Name of the setting `on_resize`, for messages.
    """

    def __init__(
        self,
        trainer: Trainer,
        order: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
        *,
        on_resize: OnResize = "raise",
        option: str = "data.on_resize",
    ) -> None:
        self._trainer = trainer
        self._order = order or {}
        self._settings = settings or {}
        self._on_resize = on_resize
        self._option = option
        self._sampler: SparsityAwareBatchSampler | None = None
        self._restored: dict[str, Any] | None = None
        self._begun_epoch: int | None = None
        # The epoch whose length, which Lightning was told, is not that of the others.
        self._short_epoch: int | None = None

    def attach(self, sampler: SparsityAwareBatchSampler) -> None:
        """Take note of a training sampler; refuse to continue a restored position in another order.

        Raises:
            MisconfigurationException: Names what differs.
        """
        if self._restored is None and self._sampler is not None and self._sampler is not sampler:
            # The loader was made anew: what the sampler before has learnt goes on.
            take_up(sampler, {"sampler": self._sampler.state_dict(), "lag": self._sampler.lag})
        if self._sampler is None:
            self._sampler = sampler
        if self._restored is None:
            return
        saved = self._restored
        current = self._fingerprint(sampler)
        if saved.get("skipped"):
            # Told once the sampler skips as much.
            current.pop("batches_per_epoch")
        try:
            check_same_order(saved, current)
        except ValueError as error:
            different = describe_differences(saved.get("settings", {}), self._settings)
            why = f" In the settings: {', '.join(different)}." if different else ""
            if any(saved.get(key) != current[key] for key in SHAPE):
                why += f" Or set {self._option} to 'replan': the rest of the epoch is then planned anew."
            raise MisconfigurationException(f"{error}{why}") from error

    def start(self) -> None:
        """Bring the sampler, and what Lightning knows of its length, to the restored position.

        Called when the loaders are there and nothing has been drawn.

        Raises:
            MisconfigurationException: The rest of the epoch has another length than it had.
        """
        restored = self._restored
        if restored is None:
            return
        # They have just been made: there is no need to ask for them again before the first epoch.
        self._trainer.fit_loop._last_train_dl_reload_epoch = self._trainer.current_epoch
        epoch = _next_position(restored)[0]
        for sampler in self._training_samplers():
            take_up(sampler, restored)
            sampler.set_epoch(epoch)
            if restored.get("is_resized"):
                sampler.skipped = restored["skipped"]
            if sampler.skipped:
                if len(sampler) != restored["batches_per_epoch"]:
                    raise MisconfigurationException(
                        explain(
                            f"the rest of epoch {epoch} has {len(sampler)} micro-batches per rank, and had "
                            f"{restored['batches_per_epoch']} when the checkpoint was written",
                            "its position would mean other sequences",
                            "resume with the Trainer(limit_train_batches=...) of the checkpoint",
                        )
                    )
                self._short_epoch = epoch
        if self._short_epoch is not None:
            tell_length(self._trainer)

    def start_epoch(self) -> None:
        """Tell Lightning the length of this epoch if the one before was shorter; called when it starts."""
        if self._short_epoch in (None, self._trainer.current_epoch):
            return
        self._short_epoch = None
        tell_length(self._trainer)
        for sampler in self._training_samplers():
            sampler.set_epoch(self._trainer.current_epoch)

    def begin(self, sampler: SparsityAwareBatchSampler) -> int:
        """Return the micro-batch at which an iteration over the sampler begins; called when it really begins.

        Raises:
            RuntimeError: Lightning is about to continue elsewhere than the data.
        """
        if all(known is not sampler for known in self._training_samplers()):
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
                    "resume a checkpoint that this data module or callback has written, or start from the "
                    "weights only",
                )
            )
        self._sampler = sampler
        self._begun_epoch = epoch
        return start

    def state_dict(self) -> dict[str, Any]:
        """Return the position, plain numbers, strings and tensors; empty before there is one."""
        if self._restored is not None:
            return dict(self._restored)
        if self._sampler is None:
            return {}
        sampler = self._sampler
        # Until the first micro-batch of an epoch is drawn, Lightning's counter is that of the epoch before.
        has_begun = self._begun_epoch == sampler.epoch
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return {
            "version": STATE_VERSION,
            "epoch": sampler.epoch,
            "micro_batch": int(progress.processed) if has_begun else 0,
            "skipped": sampler.skipped,
            **self._fingerprint(sampler),
            "settings": dict(self._settings),
            "lag": sampler.lag,
            "sampler": sampler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved position."""
        self._restored = self._settled(state_dict)
        if self._sampler is not None:
            self.attach(self._sampler)

    def align(self, checkpoint: dict[str, Any], position: dict[str, Any] | None) -> None:
        """Rewind the counters in a checkpoint before Lightning restores them.

        Args:
            checkpoint: The checkpoint; changed in place.
            position: The state of this class that the checkpoint holds.
        """
        if not position or position.get("version") != STATE_VERSION or "loops" not in checkpoint:
            return
        loops = checkpoint["loops"]["fit_loop"]
        if (position["epoch"], window_start(position), position["skipped"]) == (0, 0, 0):
            # Nothing has been trained: Lightning starts from fresh counters.
            del checkpoint["loops"]
            return
        module = self._trainer.lightning_module
        steps = checkpoint["global_step"] if module.automatic_optimization else None
        if not _agrees(loops, position):
            rewind_loops(loops, position, steps)
        settled = self._settled(position)
        if settled != position:
            rewind_loops(loops, settled, steps)

    def _settled(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return a saved position as that of this run's windows and of an epoch that is not over."""
        trainer = self._trainer
        if position.get("version") != STATE_VERSION:
            return dict(position)
        shape = {"ranks": data_parallel(trainer)[0], "accumulate": trainer.accumulate_grad_batches}
        if not trainer.lightning_module.automatic_optimization:
            # Who steps by hand says only to the sampler how often.
            shape["accumulate"] = position["accumulate"]
        if self._on_resize == "replan" and any(position[key] != shape[key] for key in SHAPE):
            if trainer.limit_train_batches != 1.0 or position["batches_per_epoch"] < _num_batches(position):
                raise MisconfigurationException(
                    explain(
                        f"{self._option} is 'replan', and an epoch has {position['batches_per_epoch']} of "
                        f"{_num_batches(position)} micro-batches, now with Trainer(limit_train_batches="
                        f"{trainer.limit_train_batches})",
                        "which share of the epoch is left would be another one in the new windows",
                        "resume without limit_train_batches, or with the ranks and accumulate_grad_batches "
                        "of the checkpoint",
                    )
                )
            return resized(position, **shape)
        if position["skipped"] and window_start(position) >= position["batches_per_epoch"]:
            return _next_epoch(position)
        return dict(position)

    def _training_samplers(self) -> list[SparsityAwareBatchSampler]:
        found = training_loaders(self._trainer)
        return [loader.batches for loader in found if isinstance(loader, BalancedDataLoader)]

    def _fingerprint(self, sampler: SparsityAwareBatchSampler) -> dict[str, int | str]:
        return {**order_of(sampler), "batches_per_epoch": len(sampler), **self._order}


class AlignCheckpoint(Callback):
    """Calls a `TrainingPosition` where a Trainer restores and starts; whoever keeps one adds this.

    Args:
        state_key: Key under which the checkpoint holds the position.
        position: The position.
    """

    def __init__(self, state_key: str, position: TrainingPosition) -> None:
        self._data_key = state_key
        self._position = position

    @classmethod
    def add_to(cls, trainer: Any, state_key: str, position: TrainingPosition) -> None:
        """Add it to a Trainer's callbacks, in the place of one that an earlier training has left."""
        trainer.callbacks[:] = [callback for callback in trainer.callbacks if not isinstance(callback, cls)]
        # First: others may ask for the number of batches.
        trainer.callbacks.insert(0, cls(state_key, position))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Rewind ``checkpoint["loops"]`` to the start of the unfinished window."""
        self._position.align(checkpoint, checkpoint.get(self._data_key))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the sampler to the restored position."""
        self._position.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell Lightning how long this epoch is."""
        self._position.start_epoch()


def tell_length(trainer: Any) -> None:
    """Let Lightning ask its loaders again how many batches they have; it asks only once in a run.

    Args:
        trainer: The Trainer, before an epoch; all ranks must call this.
    """
    loop = trainer.fit_loop
    source, combined = loop._data_source, loop._combined_loader
    # The loaders at hand, not new ones from a hook.
    loop._data_source, loop._combined_loader = replace(source, instance=combined), None
    try:
        loop.setup_data()
    finally:
        loop._data_source = source


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


def resized(position: dict[str, Any], *, ranks: int, accumulate: int) -> dict[str, Any]:
    """Return a position in windows of another size: after the sequences of the windows that are complete.

    Args:
        position: A saved position.
        ranks: Data-parallel ranks of the run that goes on.
        accumulate: Its micro-batches per rank and optimizer step.

    Example:
        >>> old = {"epoch": 2, "micro_batch": 5, "skipped": 0, "ranks": 2, "accumulate": 2, "sequences": 18,
        ...        "sequences_per_micro_batch": 1, "tail": "partial", "seed": 0, "batches_per_epoch": 9}
        >>> new = resized(old, ranks=1, accumulate=2)
        >>> new["epoch"], new["micro_batch"], new["skipped"], new["batches_per_epoch"]
        (2, 0, 8, 10)
    """
    new = {**position, "ranks": ranks, "accumulate": accumulate, "is_resized": True}
    done = window_start(position)
    if done >= position["batches_per_epoch"]:
        return _next_epoch(new)
    per_micro_batch = int(position["ranks"]) * int(position["sequences_per_micro_batch"])
    new.update(micro_batch=0, skipped=int(position["skipped"]) + done * per_micro_batch)
    new["batches_per_epoch"] = _num_batches(new)
    # What is left may be too little for a window, where such are dropped.
    return new if new["batches_per_epoch"] else _next_epoch(new)


def _next_epoch(position: dict[str, Any]) -> dict[str, Any]:
    new = {**position, "epoch": int(position["epoch"]) + 1, "micro_batch": 0, "skipped": 0}
    return {**new, "batches_per_epoch": _num_batches(new)}


def _num_batches(position: dict[str, Any]) -> int:
    """Return the micro-batches per rank of the position's epoch, without a limit."""
    shape = {key: position[key] for key in (*SHAPE, "sequences_per_micro_batch", "tail", "seed")}
    epoch, num_sequences = int(position["epoch"]), int(position["sequences"])
    skipped = (epoch, int(position["skipped"]))
    return Membership(num_sequences=num_sequences, skipped=skipped, **shape).num_batches(epoch)


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
        # The end of the epoch before is the start of this one. Where sequences of epoch 0 are skipped, that
        # is epoch -1: Lightning counts on from there as well.
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
