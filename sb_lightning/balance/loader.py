"""The DataLoader that goes with the batch sampler: begins lazily and resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from sb_lightning._messages import explain
from sb_lightning.balance.sampler import SparsityAwareBatchSampler

__all__ = ["BalancedDataLoader"]

STATE_VERSION = 1


class BalancedDataLoader(DataLoader[Any]):
    """DataLoader over a :class:`~sb_lightning.balance.SparsityAwareBatchSampler`.

    Two things differ from its base class. Iteration is lazy: workers start when the first micro-batch is
    asked for, not before, because Lightning creates the iterator before it sets the epoch and a resumed run
    would replay epoch 0 (pytorch-lightning issue 21938). And it has ``state_dict`` and ``load_state_dict``,
    the position counted in micro-batches handed out, which worker processes that read ahead do not disturb.

    Args:
        *args: As for ``torch.utils.data.DataLoader``.
        batch_sampler: The sampler; required.
        begin: Called when an iteration really begins; returns the micro-batch of the epoch to start at.
            Whoever passes it owns the position, and this loader's own state is then empty.
        **kwargs: As for ``torch.utils.data.DataLoader``.
    """

    def __init__(
        self,
        *args: Any,
        batch_sampler: SparsityAwareBatchSampler,
        begin: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, batch_sampler=batch_sampler, **kwargs)  # type: ignore[arg-type, misc]
        self._begin = begin
        self._resume: tuple[int, int] | None = None
        self._delivered = 0

    def __len__(self) -> int:
        """Micro-batches of a whole epoch; the Trainer applies ``limit_train_batches`` to this itself."""
        return self._batches.num_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield collated micro-batches, beginning where the position says."""
        self._delivered = self._first_batch()
        self._batches.start_at(self._delivered)
        for batch in super().__iter__():
            self._delivered += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, micro-batches handed out, and what the order depends on."""
        if self._begin is not None:
            return {"version": STATE_VERSION}
        return {
            "version": STATE_VERSION,
            "epoch": self._batches.epoch,
            "micro_batch": self._delivered,
            **self._batches.fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position, at that very micro-batch.

        Raises:
            ValueError: The position belongs to another order of sequences; the message names what differs.
        """
        if self._begin is not None:
            return
        check_same_order(state_dict, self._batches.fingerprint())
        self._resume = (int(state_dict["epoch"]), int(state_dict["micro_batch"]))

    @property
    def _batches(self) -> SparsityAwareBatchSampler:
        sampler = self.batch_sampler
        assert isinstance(sampler, SparsityAwareBatchSampler)
        return sampler

    def _first_batch(self) -> int:
        if self._begin is not None:
            return self._begin()
        resume, self._resume = self._resume, None
        if resume is None:
            return 0
        epoch, micro_batch = resume
        # A position at the end of an epoch means the start of the next, which set_epoch has chosen already.
        return micro_batch if epoch == self._batches.epoch and micro_batch < len(self._batches) else 0


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
