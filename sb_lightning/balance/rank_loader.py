"""A DataLoader whose batch sampler knows the ranks, and which Lightning therefore leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, DistributedSampler

__all__ = ["RankBatches", "RankDataLoader", "RankIndices"]


class RankBatches(Protocol):
    """A batch sampler that yields the batches of one rank."""

    rank: int

    @property
    def ranks(self) -> int:
        """Ranks that share the data set."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches."""

    def __len__(self) -> int:
        """Batches of this rank."""


class RankIndices(DistributedSampler[int]):
    """What a loader shows as its ``sampler``: the indices of this rank, batch after batch.

    Lightning and Fabric leave a loader alone whose sampler is a ``DistributedSampler``, and call its
    ``set_epoch``; any other they would replace. Its length is that of a ``DistributedSampler`` too: this
    rank's share of the data set, rounded up.

    Args:
        dataset: The loader's data set.
        batches: Where the indices come from.
    """

    def __init__(self, dataset: Any, batches: RankBatches) -> None:
        super().__init__(dataset, num_replicas=batches.ranks, rank=batches.rank)
        self._batches = batches

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank's batches, one after the other."""
        for batch in self._batches:
            yield from batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is used."""
        super().set_epoch(epoch)
        set_epoch = getattr(self._batches, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


class RankDataLoader(DataLoader[Any]):
    """DataLoader over a batch sampler that has dealt the data over the ranks already.

    Neither a Lightning ``Trainer`` nor ``Fabric`` replaces its sampler, whatever ``use_distributed_sampler``
    says.

    Args:
        dataset: As for ``torch.utils.data.DataLoader``.
        *args: As for ``torch.utils.data.DataLoader``.
        batch_sampler: Yields this rank's batches.
        **kwargs: As for ``torch.utils.data.DataLoader``.
    """

    def __init__(self, dataset: Any, *args: Any, batch_sampler: RankBatches, **kwargs: Any) -> None:
        # Before the base class assigns to it.
        self._indices = RankIndices(dataset, batch_sampler)
        super().__init__(dataset, *args, batch_sampler=batch_sampler, **kwargs)  # type: ignore[misc]

    @property  # type: ignore[override]
    def sampler(self) -> RankIndices:
        """This rank's indices; a ``DistributedSampler``, which Lightning leaves alone."""
        return self._indices

    @sampler.setter
    def sampler(self, _: Any) -> None:
        # The base class assigns the one that it would use without a batch sampler.
        pass
