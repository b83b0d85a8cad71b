"""The data set that a loader indexes: some sequences of an index, and their packing into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from sb_lightning.balance import Cell
from sb_lightning.balance.batch_place import place_of
from sb_lightning.data.collator import MicroBatch, pack_sequences
from sb_lightning.data.index import TokenIndex

__all__ = ["EvaluationBatchSampler", "RankSampler", "TokenDataset", "collate_cell", "in_validation"]


@dataclass(frozen=True)
class CellSamples:
    """The sequences of one cell as they travel from ``__getitems__`` to the collate function."""

    cell: list[int]
    sequences: list[np.ndarray]
    sequence_ids: list[int]


class TokenDataset(Dataset[CellSamples]):
    """Some sequences of a token index.

    Args:
        index: The tokenized corpus.
        sequences: Which of its sequences, in order.

    Attributes:
        lengths: Tokens of each sequence.
        target_tokens: Labels of each sequence that count in the loss.
        sequence_ids: Number of each sequence in the index: stable whatever the split.
    """

    def __init__(self, index: TokenIndex, sequences: np.ndarray) -> None:
        self.index = index
        self.sequence_ids = sequences
        self.lengths: np.ndarray = index.lengths[sequences]
        self.target_tokens: np.ndarray = index.target_tokens[sequences]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_ids)

    def __getitem__(self, item: int) -> CellSamples:
        """Return one sequence, as a cell of its own."""
        return self.__getitems__([item])

    def __getitems__(self, items: list[int]) -> CellSamples:
        """Return the sequences of a cell (or of a plain list of positions)."""
        ids = [int(self.sequence_ids[item]) for item in items]
        cut = getattr(items, "max_length", None)
        return CellSamples(items, [self.index.tokens(i)[:cut] for i in ids], ids)


def collate_cell(samples: CellSamples | Sequence[CellSamples]) -> MicroBatch:
    """Pack the sequences of a cell; a training cell also brings its place in the plan."""
    if not isinstance(samples, CellSamples):
        merged = list(samples)
        samples = CellSamples(
            [i for s in merged for i in s.cell],
            [q for s in merged for q in s.sequences],
            [i for s in merged for i in s.sequence_ids],
        )
    cell = samples.cell
    is_padding = isinstance(cell, Cell) and cell.is_padding
    batch = pack_sequences(samples.sequences, samples.sequence_ids, is_padding=is_padding)
    if isinstance(cell, Cell) and hasattr(cell, "window"):
        batch.update(place_of(cell))
    return batch


class EvaluationBatchSampler:
    """Deals the sequences of an evaluation split over the ranks, in order: as many micro-batches to each.

    Rank r gets sequences r, r + ranks, and so on, ``sequences_per_micro_batch`` at a time. Ranks that would
    have fewer micro-batches than others repeat the shortest sequence with all labels masked: nothing hangs,
    and the sum of losses over the sum of target tokens stays exact.

    Args:
        lengths: Tokens of every sequence; at least one.
        ranks: Data-parallel ranks.
        rank: This process among them.
        sequences_per_micro_batch: Sequences of a micro-batch.
    """

    def __init__(self, lengths: np.ndarray, *, ranks: int, rank: int, sequences_per_micro_batch: int) -> None:
        self.batch_size = sequences_per_micro_batch
        self.drop_last = False
        self.ranks = ranks
        self.rank = rank
        self._mine = list(range(rank, len(lengths), ranks))
        self._shortest = int(np.argmin(lengths))
        self._num_batches = -(-len(lengths) // (ranks * sequences_per_micro_batch))

    @property
    def sampler(self) -> EvaluationBatchSampler:
        """The sampler itself, where loaders look for one."""
        return self

    def __len__(self) -> int:
        """Micro-batches per rank, the same on every rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[Cell]:
        """Yield this rank's micro-batches."""
        for b in range(self._num_batches):
            items = self._mine[b * self.batch_size : (b + 1) * self.batch_size]
            yield Cell(items or [self._shortest], is_padding=not items)


class RankSampler(DistributedSampler[int]):
    """The items of one rank, in order, none repeated: ranks may have unequally many.

    A ``DistributedSampler`` by its class, so that Lightning does not put one around it.

    Args:
        num_items: Items of all ranks.
        ranks: Data-parallel ranks.
        rank: This process among them.
    """

    def __init__(self, num_items: int, *, ranks: int, rank: int) -> None:
        super().__init__(range(num_items), num_replicas=ranks, rank=rank, shuffle=False)  # type: ignore[arg-type]
        self._items = range(rank, num_items, ranks)

    def __len__(self) -> int:
        """Items of this rank."""
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's items."""
        return iter(self._items)


def in_validation(document_id: str, share: float) -> bool:
    """Return whether a document belongs to the validation split, by a hash of its id: the same anywhere.

    Example:
        >>> sum(in_validation(f"{i}.txt", 0.1) for i in range(1000))
        72
    """
    digest = blake2b(document_id.encode("utf-8"), digest_size=8, person=b"sb-validation").digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split_sequences(index: TokenIndex, share: float) -> dict[str, np.ndarray[Any, Any]]:
    """Return the sequences of the ``train`` and ``val`` split; pieces of a document stay together."""
    chosen = np.array([in_validation(name, share) for name in index.document_ids()], dtype=bool)
    is_val = chosen[index.documents]
    return {"train": np.flatnonzero(~is_val), "val": np.flatnonzero(is_val)}
