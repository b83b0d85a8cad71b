"""The DataLoader that goes with the batch sampler: begins lazily, resumes exactly, and is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import default_collate

from sb_lightning._messages import explain
from sb_lightning.balance.arguments import digest
from sb_lightning.balance.batch_place import CellDataset, with_place
from sb_lightning.balance.rank_loader import RankDataLoader
from sb_lightning.balance.sampler import SparsityAwareBatchSampler

__all__ = ["BalancedDataLoader", "check_same_order", "order_of", "take_up"]

STATE_VERSION = 1
ELSEWHERE = "kept_elsewhere"
"""Marks the state of a loader whose position somebody else keeps."""


class BalancedDataLoader(RankDataLoader):
    """DataLoader over a :class:`~sb_lightning.balance.SparsityAwareBatchSampler`.

    Three things differ from its base class:

    - Iteration is lazy: workers start when the first micro-batch is asked for, not before, because Lightning
      creates the iterator before it sets the epoch and a resumed run would replay epoch 0 (pytorch-lightning
      issue 21938).
    - It has ``state_dict`` and ``load_state_dict``, the position counted in micro-batches handed out, which
      worker processes that read ahead do not disturb. Set the epoch before each iteration, and continue with
      ``loader.batch_sampler.epoch`` after ``load_state_dict``. Under a Lightning Trainer,
      :class:`~sb_lightning.callbacks.BalancedSampling` keeps the position, because Lightning does not always
      hand the loader's own back.
    - Its ``sampler`` is a ``DistributedSampler``, so that neither ``Trainer`` nor ``Fabric`` replaces it: no
      ``use_distributed_sampler=False`` is needed.

    Args:
        dataset: As for ``torch.utils.data.DataLoader``.
        *args: As for ``torch.utils.data.DataLoader``.
        batch_sampler: The sampler; required.
        begin: Called when an iteration really begins; returns the micro-batch of the epoch to start at.
            Whoever passes it owns the position, and this loader's own state is then empty.
        add_plan: Add to each batch, which must be a dict, its place in the plan: ``window``, ``micro_batch``,
            ``target_tokens``, ``window_target_tokens``, ``is_padding``, ``predicted_ms``, ``plan_gap``, and
            ``budget`` where there is one. The loss needs the second pair, ``ImbalanceMonitor`` the rest.
        **kwargs: As for ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: The batch sampler is another one.
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        batch_sampler: SparsityAwareBatchSampler,
        begin: Callable[[], int] | None = None,
        add_plan: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(batch_sampler, SparsityAwareBatchSampler):
            raise TypeError(
                explain(
                    f"batch_sampler is a {type(batch_sampler).__name__}",
                    "the loader resumes by windows, which only a SparsityAwareBatchSampler has",
                    "pass batch_sampler=SparsityAwareBatchSampler(...), or use torch.utils.data.DataLoader",
                )
            )
        if add_plan:
            kwargs["collate_fn"] = with_place(kwargs.get("collate_fn") or default_collate)
            dataset = CellDataset(dataset)
        super().__init__(dataset, *args, batch_sampler=batch_sampler, **kwargs)
        self._begin = begin
        self._resume: dict[str, Any] | None = None
        # Epoch of the last iteration, and what it has handed out.
        self._delivered = (0, 0)
        self._keep_versions()

    @property
    def batches(self) -> SparsityAwareBatchSampler:
        """The batch sampler, by its type."""
        sampler = self.batch_sampler
        assert isinstance(sampler, SparsityAwareBatchSampler)
        return sampler

    def __len__(self) -> int:
        """Micro-batches of a whole epoch; the Trainer applies ``limit_train_batches`` to this itself."""
        return self.batches.num_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield collated micro-batches, beginning where the position says.

        Raises:
            RuntimeError: The sampler was made before the ranks were known, or the epoch is not that of the
                position.
        """
        self._check_ranks()
        start = self._first_batch() if self._begin is None else self._begin()
        self._delivered = (self.batches.epoch, start)
        self.batches.start_at(start)
        for batch in super().__iter__():
            self._delivered = (self._delivered[0], self._delivered[1] + 1)
            yield batch

    def leave_position(self, begin: Callable[[], int]) -> dict[str, Any] | None:
        """Let somebody else keep the position from now on.

        Args:
            begin: See the argument of the class.

        Returns:
            The position that ``load_state_dict`` got and no iteration has used yet.
        """
        self._begin = begin
        resume, self._resume = self._resume, None
        return None if resume is None or ELSEWHERE in resume else resume

    def take_position(self) -> None:
        """Keep the position itself again."""
        self._begin = None

    @property
    def is_position_kept_elsewhere(self) -> bool:
        """Whether somebody else keeps the position."""
        return self._begin is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks: epoch, micro-batches handed out, what plans depend on."""
        if self._begin is not None:
            return {"version": STATE_VERSION, ELSEWHERE: True}
        if self._resume is not None:
            return dict(self._resume)
        batches = self.batches
        epoch, delivered = self._delivered
        return {
            "version": STATE_VERSION,
            "epoch": batches.epoch,
            "micro_batch": delivered if epoch == batches.epoch else 0,
            "batches_per_epoch": len(batches),
            **order_of(batches),
            "lag": batches.lag,
            "sampler": batches.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position, at that very micro-batch; the sampler's epoch is set to it.

        Raises:
            ValueError: The position belongs to another order of sequences; the message names what differs.
        """
        if self._begin is not None:
            return
        if ELSEWHERE not in state_dict:
            batches = self.batches
            check_same_order(state_dict, order_of(batches))
            take_up(batches, state_dict)
            batches.set_epoch(_next_position(state_dict)[0])
        self._resume = dict(state_dict)

    def _first_batch(self) -> int:
        resume, self._resume = self._resume, None
        if resume is None:
            return 0
        if ELSEWHERE in resume:
            raise RuntimeError(
                explain(
                    "the checkpoint was saved by a run with a BalancedSampling callback (or a TextDataModule)"
                    ", and this run has none",
                    "where to go on in the data is written in that callback's part of the checkpoint, which "
                    "nothing else reads",
                    "add sb_lightning.callbacks.BalancedSampling() to the Trainer's callbacks",
                )
            )
        epoch, start = _next_position(resume)
        if epoch != self.batches.epoch:
            raise RuntimeError(
                explain(
                    f"the data stand at micro-batch {start} of epoch {epoch}, and epoch {self.batches.epoch} "
                    "is to be run",
                    "sequences would be lost or trained on twice",
                    f"call set_epoch({epoch}) on loader.sampler before iterating; under a Lightning Trainer, "
                    "add sb_lightning.callbacks.BalancedSampling to its callbacks",
                )
            )
        return start

    def _check_ranks(self) -> None:
        batches = self.batches
        if batches.has_own_ranks or not (dist.is_available() and dist.is_initialized()):
            return
        found = (dist.get_world_size(), dist.get_rank())
        if found != (batches.ranks, batches.rank):
            raise RuntimeError(
                explain(
                    f"the sampler was made for rank {batches.rank} of {batches.ranks}, and this is rank "
                    f"{found[1]} of {found[0]}",
                    "it was made before torch.distributed was initialised, and the ranks would train on the "
                    "same sequences",
                    "make sampler and loader in train_dataloader(), or pass ranks= and rank= to "
                    "SparsityAwareBatchSampler",
                )
            )

    def _keep_versions(self) -> None:
        """Let plans use what was known before the workers, who draw ahead, could draw their first cell."""
        ahead = self.num_workers * (self.prefetch_factor or 0)
        keep_lag(self.batches, 1 + -(-ahead // self.batches.accumulate))


def keep_lag(batches: SparsityAwareBatchSampler, lag: int) -> None:
    """Let the plans of a sampler use a version of its store that is at least so many windows old."""
    batches.lag = max(batches.lag, lag)
    batches.store.keep(batches.lag + 1)


def order_of(batches: SparsityAwareBatchSampler) -> dict[str, int | str]:
    """Return what must be equal on resume for the windows to hold the same sequences."""
    return {**batches.fingerprint(), "lengths": digest(batches.lengths)}


def take_up(batches: SparsityAwareBatchSampler, state: dict[str, Any]) -> None:
    """Give a sampler what a saved position says about its store."""
    if "sampler" in state:
        batches.load_state_dict(state["sampler"])
    keep_lag(batches, int(state.get("lag", 1)))


def _next_position(position: dict[str, Any]) -> tuple[int, int]:
    """Return epoch and micro-batch to go on at; the end of an epoch means the start of the next."""
    epoch, micro_batch = int(position["epoch"]), int(position["micro_batch"])
    return (epoch + 1, 0) if micro_batch >= position["batches_per_epoch"] else (epoch, micro_batch)


def check_same_order(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse a saved position that belongs to another order of sequences.

    Raises:
        ValueError: Names every setting that differs.
    """
    if saved.get("version") != STATE_VERSION:
        raise ValueError(
            explain(
                f"the checkpoint's data position has version {saved.get('version')!r}",
                f"this release reads version {STATE_VERSION}",
                "resume with the release that wrote it, or start from the weights only",
            )
        )
    different = [
        f"{key} {saved.get(key)!r} -> {current[key]!r}" for key in current if saved.get(key) != current[key]
    ]
    if different:
        raise ValueError(
            explain(
                "the checkpoint was written with other settings: " + ", ".join(different),
                "its position in the epoch would mean other sequences",
                "resume with the settings of the checkpoint, or start from its weights only",
            )
        )
