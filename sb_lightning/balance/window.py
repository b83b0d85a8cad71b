"""Which sequences form a window, and which of them go to which cell: pure functions of plain data.

A window is what all data-parallel ranks run for one optimizer step: ``ranks`` x ``accumulate`` cells.
Membership comes first and is the same for every policy, so that policies can be compared on the same
optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from sb_lightning._messages import explain

__all__ = [
    "TAILS",
    "Tail",
    "WindowPlan",
    "epoch_permutation",
    "num_micro_batches",
    "plan_random_window",
    "window_members",
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
    """

    cells: tuple[tuple[tuple[int, ...], ...], ...]
    is_padding: tuple[tuple[bool, ...], ...]
    cell_target_tokens: tuple[tuple[int, ...], ...]
    target_tokens: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches each rank runs in this window."""
        return len(self.cells[0])


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


def window_members(seed: int, epoch: int, length: int, window_size: int, window: int) -> np.ndarray:
    """Return the data-set indices of one window, in the order of the epoch's permutation.

    Args:
        seed: The run's seed.
        epoch: Epoch number, from 0.
        length: Number of sequences in the data set.
        window_size: Sequences of a full window: ranks x accumulate x sequences_per_micro_batch.
        window: Number of the window in the epoch, from 0; the last one may be short.

    Example:
        >>> perm = epoch_permutation(3, 0, 10)
        >>> bool((window_members(3, 0, 10, 4, 2) == perm[8:10]).all())
        True
    """
    return epoch_permutation(seed, epoch, length)[window * window_size : (window + 1) * window_size]


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


def plan_random_window(
    lengths: Sequence[int],
    target_tokens: Sequence[int],
    *,
    ranks: int,
    accumulate: int,
    sequences_per_micro_batch: int = 1,
    tail: Tail = "partial",
    max_micro_batches: int | None = None,
) -> WindowPlan:
    """Deal the items of a window over the cells as a shuffled ``DistributedSampler`` would.

    Item i goes to rank ``i % ranks``; a rank's items are cut in order into micro-batches. In a full window
    ``cells[r][a]`` is therefore ``[(a * m + j) * ranks + r for j in range(m)]``. A short window has
    :func:`num_micro_batches` micro-batches per rank: under ``pad`` each takes m items until none are left,
    under ``partial`` a rank's items are spread as evenly as possible (counts differ by one, the larger
    first).

    Args:
        lengths: Tokens of each item of the window.
        target_tokens: Labels of each item that count in the loss.
        ranks: Data-parallel ranks.
        accumulate: Micro-batches per rank of a full window.
        sequences_per_micro_batch: Items per cell of a full window.
        tail: What happens to a short window, see :func:`num_micro_batches`.
        max_micro_batches: Only the first so many micro-batches of each rank will run (the Trainer stops
            there); the others are left out of the plan and of its count of target tokens.

    Example:
        >>> plan = plan_random_window([5, 3, 8], [4, 2, 7], ranks=2, accumulate=2)
        >>> plan.cells, plan.target_tokens
        ((((0, 2),), ((1,),)), 13)
        >>> plan_random_window([5, 3, 8], [4, 2, 7], ranks=2, accumulate=2, tail="pad").cells
        (((0,), (2,)), ((1,), (1,)))
    """
    if len(lengths) != len(target_tokens):
        raise ValueError(
            explain(
                f"{len(lengths)} lengths and {len(target_tokens)} target_tokens",
                "both describe the items of one window",
                "pass one entry of each per item",
            )
        )
    num_items = len(lengths)
    planned = num_micro_batches(
        num_items,
        ranks=ranks,
        accumulate=accumulate,
        sequences_per_micro_batch=sequences_per_micro_batch,
        tail=tail,
    )
    run = planned if max_micro_batches is None else min(planned, max_micro_batches)
    if num_items == 0:
        empty: tuple[tuple[()], ...] = ((),) * ranks
        return WindowPlan(cells=empty, is_padding=empty, cell_target_tokens=empty, target_tokens=0)
    shortest = min(range(num_items), key=lambda i: (lengths[i], i))
    even = tail == "partial"
    cells, padding, targets = [], [], []
    for rank in range(ranks):
        mine = range(rank, num_items, ranks)
        counts = _even_counts(len(mine), planned) if even else [sequences_per_micro_batch] * planned
        starts = np.cumsum([0, *counts])
        row = [tuple(mine[starts[a] : starts[a + 1]]) for a in range(run)]
        padding.append(tuple(not cell for cell in row))
        targets.append(tuple(sum(int(target_tokens[i]) for i in cell) for cell in row))
        cells.append(tuple(cell or (shortest,) for cell in row))
    return WindowPlan(
        cells=tuple(cells),
        is_padding=tuple(padding),
        cell_target_tokens=tuple(targets),
        target_tokens=sum(map(sum, targets)),
    )


def _even_counts(num_items: int, num_cells: int) -> list[int]:
    if num_cells == 0:
        return []
    share, extra = divmod(num_items, num_cells)
    return [share + (a < extra) for a in range(num_cells)]
