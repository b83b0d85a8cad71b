"""Which sequences form which window of an epoch: the same for every policy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sb_lightning.balance.window import Tail, epoch_permutation, num_micro_batches

__all__ = ["Membership"]


@dataclass(kw_only=True)
class Membership:
    """The windows of every epoch as data-set indices.

    Window w of an epoch holds the w-th ``window_size`` sequences of what a shuffled ``DistributedSampler``
    permutes, so that policies and runs can be compared on the same optimizer steps.
    """

    num_sequences: int
    """Sequences of the data set."""
    ranks: int
    """Data-parallel ranks."""
    accumulate: int
    """Micro-batches per rank of a full window."""
    sequences_per_micro_batch: int
    """Sequences of a cell of a full window, on average."""
    tail: Tail
    """What happens to the short last window."""
    seed: int
    """Seed of the shuffle; epoch e uses ``seed + e``."""
    max_batches: int | None = None
    """Micro-batches per rank after which an epoch stops; None: none."""
    skipped: tuple[int, int] = (0, 0)
    """An epoch, and how many of its sequences were trained on before, in windows of another size."""
    _order: tuple[int, NDArray[np.int64]] | None = field(default=None, repr=False, compare=False)

    @property
    def window_size(self) -> int:
        """Sequences of a full window."""
        return self.ranks * self.accumulate * self.sequences_per_micro_batch

    def skipped_in(self, epoch: int) -> int:
        """Return how many sequences of an epoch are not to be trained on again."""
        return self.skipped[1] if self.skipped[0] == epoch else 0

    def num_batches(self, epoch: int) -> int:
        """Return the micro-batches per rank of an epoch, before ``max_batches``."""
        return self._batches_of(max(self.num_sequences - self.skipped_in(epoch), 0))

    @property
    def num_full_windows(self) -> int:
        """Windows of an epoch of which nothing is skipped, before ``max_batches``."""
        return -(-self._batches_of(self.num_sequences) // self.accumulate)

    def num_windows(self, epoch: int) -> int:
        """Return the windows of an epoch that run."""
        batches = self.num_batches(epoch)
        if self.max_batches is not None:
            batches = min(batches, self.max_batches)
        return -(-batches // self.accumulate)

    def members(self, epoch: int, window: int) -> tuple[NDArray[np.int64], int]:
        """Return what runs in a window, and its micro-batches per rank; outside the epoch nothing, and 0.

        Of a window that ``max_batches`` cuts, the sequences run that a ``DistributedSampler`` would deal into
        the micro-batches that are left.
        """
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_permutation(self.seed, epoch, self.num_sequences))
        order = self._order[1]
        if window < 0:
            return order[:0], 0
        begin = self.skipped_in(epoch) + window * self.window_size
        members = order[begin : begin + self.window_size]
        micro_batches = self._micro_batches(len(members))
        if self.max_batches is not None:
            runs = max(self.max_batches - window * self.accumulate, 0)
            if runs < micro_batches:
                micro_batches = runs
                members = members[: self.ranks * runs * self.sequences_per_micro_batch]
        return members[: len(members) if micro_batches else 0], micro_batches

    def _batches_of(self, num_sequences: int) -> int:
        full, rest = divmod(num_sequences, self.window_size)
        return full * self.accumulate + self._micro_batches(rest)

    def _micro_batches(self, num_items: int) -> int:
        return num_micro_batches(
            num_items,
            ranks=self.ranks,
            accumulate=self.accumulate,
            sequences_per_micro_batch=self.sequences_per_micro_batch,
            tail=self.tail,
        )
