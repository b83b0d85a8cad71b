"""The sampler of balanced windows in any Lightning project: settings that fit, equal plans, exact resume."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback

from sb_lightning._messages import explain
from sb_lightning.balance import BalancedDataLoader, SparsityAwareBatchSampler, SyncPart, WindowSync
from sb_lightning.data.position import OnResize, TrainingPosition, check_on_resize, training_loaders
from sb_lightning.data.trainer import check_accumulation, data_parallel, max_batches
from sb_lightning.tracking import span

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["BalancedSampling"]

NAME = "plan"
FINE = "fine"


class BalancedSampling(Callback):
    """Looks after a `SparsityAwareBatchSampler` in a Lightning project that has its own data.

    - The sampler and the Trainer must mean the same windows: ranks, `accumulate_grad_batches`,
      `limit_train_batches` (which the sampler is told). What differs is named before anything is trained.
    - All ranks must plan alike. What plans are made of is compared when the training starts and after each
      window; where it differs, every rank raises and names the first difference.
    - A checkpoint, written at any moment, resumes exactly: the same sequences, none twice and none lost. One
      from the middle of a window goes back to the window's start, also where manual optimization has stepped
      since: those steps are taken again. Lightning alone does not always hand the
      loader's own position back, see docs/sampler.md.

    `TextDataModule` does this by itself. Works with `lightning.pytorch.Trainer` and
    `pytorch_lightning.Trainer`, and with the callbacks that share its gather, such as `ImbalanceMonitor`.

    Args:
        sampler: The sampler, where the Trainer's loader does not show it. Only a `BalancedDataLoader` can be
            resumed.
        on_resize: What happens if a run is resumed with another number of ranks or of micro-batches per
            optimizer step: `raise`, or `replan` what is left of the epoch.

    Raises:
        ValueError: There is no such choice.
        TypeError: The sampler is another one.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.balance import BalancedDataLoader, SparsityAwareBatchSampler
        from sb_lightning.callbacks import BalancedSampling

        class Project(LightningModule):
            def train_dataloader(self):
                sampler = SparsityAwareBatchSampler(lengths, accumulate=4, latency="table.json")
                return BalancedDataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=2)

        trainer = Trainer(accumulate_grad_batches=4, devices=2, callbacks=[BalancedSampling()])
    """

    def __init__(
        self, sampler: SparsityAwareBatchSampler | None = None, on_resize: OnResize = "raise"
    ) -> None:
        if not isinstance(sampler, (SparsityAwareBatchSampler, type(None))):
            raise TypeError(
                explain(
                    f"sampler is a {type(sampler).__name__}",
                    "BalancedSampling looks after a SparsityAwareBatchSampler",
                    "pass one as sampler, such as the batch_sampler of a BalancedDataLoader, or leave it out "
                    "where the training loader shows it",
                )
            )
        self.sampler = sampler
        self.on_resize = check_on_resize(on_resize, "on_resize")
        self._position: TrainingPosition | None = None
        self._training: SparsityAwareBatchSampler | None = None
        self._loader: BalancedDataLoader | None = None
        self._is_resumed = self._has_state = False
        # A sampler, and the limit that it was told.
        self._told: tuple[SparsityAwareBatchSampler, int | None] | None = None
        self._part: SyncPart | None = None
        self._sync: WindowSync | None = None
        self._step = 0
        # Added by a data module; the Trainer may be given other data later.
        self._is_automatic = False

    @classmethod
    def add_to(cls, trainer: Any, on_resize: OnResize) -> None:
        """Add one to a Trainer's callbacks on behalf of a data module, which keeps the position itself.

        Raises:
            MisconfigurationException: There is one, and it would replan where the data module would not.
        """
        found = next((callback for callback in trainer.callbacks if isinstance(callback, cls)), None)
        if found is None:
            found = cls()
            found._is_automatic = True
            trainer.callbacks.append(found)
        elif found.on_resize != "raise" and found.on_resize != on_resize:
            raise MisconfigurationException(
                explain(
                    f"BalancedSampling(on_resize='{found.on_resize}') beside data.on_resize={on_resize}",
                    "the data module keeps the position, and its setting counts",
                    "set data.on_resize, and leave BalancedSampling out: the data module adds it",
                )
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what no sampler could follow.

        Raises:
            MisconfigurationException: Names the setting to change.
        """
        if stage != "fit":
            return
        self._release()
        check_accumulation(trainer)
        self._is_resumed = self._has_state = False
        self._position = TrainingPosition(
            trainer, on_resize=self.on_resize, option="BalancedSampling's on_resize"
        )
        if self.sampler is not None:
            self._check(trainer, pl_module, self.sampler)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Rewind Lightning's counters to the start of the unfinished window."""
        if self._position is not None and trainer.state.fn == "fit":
            self._is_resumed = True
            self._position.align(checkpoint, checkpoint["callbacks"].get(self.state_key))

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands in the data: equal on all ranks, plain values and tensors."""
        return {} if self._position is None else self._position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position."""
        if self._position is not None:
            self._has_state = True
            self._position.load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the loader, bring it to the restored position, and meet the other ranks.

        Raises:
            MisconfigurationException: The sampler and the Trainer disagree; names the argument to change.
            RuntimeError: On every rank, if ranks would plan different windows, or another has raised.
        """
        assert self._position is not None
        self._leave()
        self._sync = WindowSync.of(trainer)
        self._sync_join(trainer, pl_module)
        if self._loader is not None:
            self._position.start()
        self._step = trainer.global_step
        self._part = self._sync.register(NAME, fill=lambda step: ([], []))
        self._sync.watch(NAME, partial(self._inputs, trainer))
        self._sync.sync_inputs()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join a loader that was made anew, and tell Lightning how long this epoch is."""
        before = self._training
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            self._sync_join(trainer, pl_module)
        if self._training is not before and self._sync is not None:
            self._sync.sync_inputs()
        assert self._position is not None
        if self._loader is not None:
            self._position.start_epoch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the ranks after an optimizer step.

        Raises:
            RuntimeError: On every rank, if they plan different windows, or are at different ones.
        """
        if self._part is not None and trainer.global_step != self._step:
            self._step = trainer.global_step
            self._part.collect(self._step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the meeting of the ranks."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the meeting of the ranks; the position stays, for those who save a checkpoint now."""
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the loader back; the position stays, for a checkpoint that is saved after the end."""
        self._release()

    def _leave(self) -> None:
        if self._part is not None:
            self._part.remove()
        if self._sync is not None:
            self._sync.unwatch(NAME)
        self._part = self._sync = None

    def _release(self) -> None:
        self._leave()
        if self._loader is not None:
            self._loader.take_position()
        self._loader = self._training = None

    def _sync_join(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join on all ranks or on none: nobody waits for one that has refused its sampler."""
        assert self._sync is not None
        refused = None
        try:
            self._join(trainer, pl_module)
        except MisconfigurationException as error:
            refused = error
        said = self._sync.gather_texts(FINE if refused is None else str(refused))
        if refused is not None:
            raise refused
        for rank, text in enumerate(said):
            if text != FINE:
                # The text has the three parts of an error.
                raise RuntimeError(f"The ranks go on together or not at all, and rank {rank} refuses: {text}")

    def _join(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = training_loaders(trainer)
        ours = [x for x in found if isinstance(getattr(x, "batch_sampler", None), SparsityAwareBatchSampler)]
        if not ours and self._is_automatic:
            return
        if not ours and self.sampler is None:
            raise MisconfigurationException(
                explain(
                    f"the training loader is a {', '.join(type(x).__name__ for x in found)} without a "
                    "SparsityAwareBatchSampler",
                    "BalancedSampling has nothing to look after",
                    "return a sb_lightning.balance.BalancedDataLoader from train_dataloader(), pass "
                    "BalancedSampling(sampler=...), or remove the callback",
                )
            )
        if ours and len(found) > 1:
            raise MisconfigurationException(
                explain(
                    f"the Trainer draws from {len(found)} training loaders",
                    "a window is one optimizer step of one sampler",
                    "train from one BalancedDataLoader",
                )
            )
        loader = ours[0] if ours else None
        sampler = self.sampler if loader is None else loader.batch_sampler
        assert sampler is not None
        if sampler is self._training:
            return
        self._check(trainer, pl_module, sampler, is_eager=not isinstance(loader, BalancedDataLoader))
        self._training = sampler
        sampler.plan_span = partial(span, trainer, "plan")
        if self._loader is not None:
            self._loader.take_position()
        self._loader = None
        if isinstance(loader, BalancedDataLoader) and not loader.is_position_kept_elsewhere:
            self._keep(loader)
        elif self._is_resumed and not isinstance(loader, BalancedDataLoader):
            raise MisconfigurationException(
                explain(
                    f"a run is resumed with a {type(loader).__name__} over a SparsityAwareBatchSampler",
                    "it has drawn its first batches before the position is known",
                    "use sb_lightning.balance.BalancedDataLoader in its place",
                )
            )

    def _keep(self, loader: BalancedDataLoader) -> None:
        position, self._loader = self._position, loader
        assert position is not None
        own = loader.leave_position(partial(position.begin, loader.batches))
        if own is not None and not self._has_state:
            # A checkpoint from before this callback was added.
            position.load_state_dict({"skipped": 0, **own})
        position.attach(loader.batches)

    def _check(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        sampler: SparsityAwareBatchSampler,
        is_eager: bool = False,
    ) -> None:
        """Refuse a sampler whose windows are not the Trainer's, and tell it where an epoch is cut."""
        ranks, rank = data_parallel(trainer)
        if (sampler.ranks, sampler.rank) != (ranks, rank):
            raise MisconfigurationException(
                explain(
                    f"the SparsityAwareBatchSampler was made for rank {sampler.rank} of {sampler.ranks}, and "
                    f"this is data-parallel rank {rank} of {ranks}",
                    "ranks would train on the same sequences, or leave some out",
                    f"make it in train_dataloader(), where the ranks are known, or pass ranks={ranks} and "
                    "rank= to it",
                )
            )
        accumulate = trainer.accumulate_grad_batches
        if pl_module.automatic_optimization and sampler.accumulate != accumulate:
            raise MisconfigurationException(
                explain(
                    f"SparsityAwareBatchSampler(accumulate={sampler.accumulate}) and "
                    f"Trainer(accumulate_grad_batches={accumulate})",
                    "a window would not be one optimizer step",
                    f"pass accumulate={accumulate} to the sampler, or change accumulate_grad_batches",
                )
            )
        limit = max_batches(sampler.num_batches, trainer.limit_train_batches)
        if sampler.max_batches == limit:
            return
        was_told = self._told == (sampler, sampler.max_batches)
        if sampler.max_batches is not None and not was_told:
            raise MisconfigurationException(
                explain(
                    f"SparsityAwareBatchSampler(max_batches={sampler.max_batches}) and "
                    f"Trainer(limit_train_batches={trainer.limit_train_batches})",
                    "they stop an epoch at different places",
                    "leave max_batches out: BalancedSampling sets it",
                )
            )
        if is_eager:
            raise MisconfigurationException(
                explain(
                    f"Trainer(limit_train_batches={trainer.limit_train_batches}) and a loader that is no "
                    "BalancedDataLoader",
                    "it may have drawn batches that count sequences of micro-batches which will not run",
                    f"use a sb_lightning.balance.BalancedDataLoader, or pass max_batches={limit} to the "
                    "sampler",
                )
            )
        sampler.max_batches = limit
        self._told = (sampler, limit)

    def _inputs(self, trainer: Trainer) -> dict[str, Any]:
        """Return what the plans of this rank are made of, and the plan of the window at hand."""
        sampler = self._training
        assert sampler is not None
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        window = min(-(-done // sampler.accumulate), sampler.num_windows) - 1
        plan = None if window < 0 else sampler.plan_digest(sampler.epoch, window)
        # What differs first is named: the causes come before the plan.
        return {**sampler.plan_inputs(), "window": window, "cells": plan}
