"""Which sequences form a window, and which of them go to which cell: pure functions of plain data.

A window is what all data-parallel ranks run for one optimizer step: ``ranks`` x ``accumulate`` cells.
Membership comes first and is the same for every policy, so that policies can be compared on the same
optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

__all__ = [
    "TAILS",
    "Tail",
    "WindowPlan",
    "epoch_permutation",
    "num_micro_batches",
]

Tail = Literal["drop", "pad", "partial"]
TAILS: tuple[str, ...] = get_args(Tail)


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Where each item of one window runs.

    Attributes:
        cells: ``cells[rank][micro_batch]`` = positions of items in the window; only cells that run are
            listed, and every rank has the same number of them.
        is_padding: ``is_padding[rank][micro_batch]``: the cell repeats the window's shortest item and none of
            its tokens is a target.
        cell_target_tokens: ``cell_target_tokens[rank][micro_batch]`` = labels that count in the loss.
        target_tokens: Their sum over all cells: the denominator of the window's loss.
        predicted_ms: ``predicted_ms[rank][micro_batch]`` = predicted time of the cell.
        objective: What the plan is measured by: ``ddp`` or ``fsdp``.
        value_ms: The objective's value.
        lower_bound_ms: No plan of this window has a smaller value.
        gap: ``value_ms / lower_bound_ms - 1``.
        proven_optimal: No plan has a smaller value: the gap is 0, or the search was run to its end.
    """

    cells: tuple[tuple[tuple[int, ...], ...], ...]
    is_padding: tuple[tuple[bool, ...], ...]
    cell_target_tokens: tuple[tuple[int, ...], ...]
    target_tokens: int
    predicted_ms: tuple[tuple[float, ...], ...]
    objective: str
    value_ms: float
    lower_bound_ms: float
    gap: float
    proven_optimal: bool

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches each rank runs in this window."""
        return len(self.cells[0])

    @property
    def makespan_ms(self) -> float:
        """Predicted time of the slowest rank: what data-parallel ranks wait for."""
        return max(map(sum, self.predicted_ms), default=0.0)

    @property
    def slot_sum_ms(self) -> float:
        """Sum over slots of the slowest cell: what ranks wait for that meet in every micro-batch."""
        return sum((max(slot) for slot in zip(*self.predicted_ms, strict=True)), 0.0)

    def imbalances(self) -> dict[str, float]:
        """Return the four imbalances of the predicted times under the names of their metrics."""
        from sb_lightning.tracking.metrics import imbalances

        return imbalances(np.array(self.predicted_ms, dtype=np.float64), "_predicted")


def epoch_permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """Return the order of an epoch: what a shuffled ``DistributedSampler`` with this seed and epoch permutes.

    Args:
        seed: The run's seed.
        epoch: Epoch number, from 0.
        length: Number of sequences in the data set.

    Example:
        >>> sorted(epoch_permutation(0, 1, 5).tolist())
        [0, 1, 2, 3, 4]
    """
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).numpy()


def num_micro_batches(
    num_items: int, *, ranks: int, accumulate: int, sequences_per_micro_batch: int, tail: Tail
) -> int:
    """Return how many micro-batches each rank runs in a window of ``num_items`` sequences.

    A full window has ``accumulate``. For a short one (the last of an epoch):

    - ``drop``: 0, the window does not run.
    - ``pad``: ``ceil(num_items / (ranks * m))``, m being ``sequences_per_micro_batch``; no cell holds more
      than m sequences, and cells without one are pad cells.
    - ``partial``: the same, but at most ``num_items // ranks``, so that no cell is empty (and at least 1).
      The sequences are dealt evenly over those cells: with m = 1 some cells of the last window then hold two
      sequences. Only if there are fewer sequences than ranks does a pad cell remain.

    Example:
        >>> [num_micro_batches(7, ranks=2, accumulate=4, sequences_per_micro_batch=1, tail=t) for t in TAILS]
        [0, 4, 3]
    """
    if num_items == ranks * accumulate * sequences_per_micro_batch:
        return accumulate
    if num_items == 0 or tail == "drop":
        return 0
    filled = -(-num_items // (ranks * sequences_per_micro_batch))
    return filled if tail == "pad" else max(1, min(filled, num_items // ranks))
