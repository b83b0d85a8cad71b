"""The distributed batch sampler: plans whole windows and yields one rank's cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from sb_lightning._messages import explain
from sb_lightning.balance.window import (
    TAILS,
    Tail,
    WindowPlan,
    epoch_permutation,
    num_micro_batches,
    plan_random_window,
)

__all__ = ["Cell", "Policy", "SparsityAwareBatchSampler"]

Policy = Literal["random"]
POLICIES: tuple[str, ...] = get_args(Policy)


class Cell(list[int]):
    """One micro-batch: a list of data-set indices that also knows its place in the plan.

    A data set that is indexed by plain integers needs nothing of this; one whose ``__getitems__`` receives
    the cell can read the rest. Cells travel to worker processes.

    Attributes:
        window: Number of the window in the epoch.
        micro_batch: Number of the micro-batch in the window (the same on all ranks at one time).
        target_tokens: Labels of this cell that count in the loss; 0 for a pad cell.
        window_target_tokens: Labels of all cells of the window that run, over all ranks.
        is_padding: The cell repeats a sequence only so that all ranks run equally many; mask all its labels.
    """

    def __init__(
        self,
        indices: Sequence[int] = (),
        *,
        window: int = 0,
        micro_batch: int = 0,
        target_tokens: int = 0,
        window_target_tokens: int = 0,
        is_padding: bool = False,
    ) -> None:
        super().__init__(indices)
        self.window = window
        self.micro_batch = micro_batch
        self.target_tokens = target_tokens
        self.window_target_tokens = window_target_tokens
        self.is_padding = is_padding


class SparsityAwareBatchSampler:
    """Batch sampler that deals each window (one optimizer step of all ranks) as a whole.

    Every rank builds the same plan from (seed, epoch, window) and takes its own row: no communication, and
    the same number of micro-batches on every rank, always. Plans are made when they are needed. Pass it as
    ``batch_sampler=`` to :class:`~sb_lightning.balance.BalancedDataLoader` and set
    ``Trainer(use_distributed_sampler=False)``.

    It deliberately is no ``torch.utils.data.BatchSampler``: Lightning silently rebuilds those around a
    ``DistributedSampler``. ``sampler.sampler`` is the sampler itself because that is where Lightning looks
    for ``set_epoch``.

    Args:
        lengths: Tokens of every sequence of the data set.
        target_tokens: Labels of every sequence that count in the loss; None: all tokens but each sequence's
            first.
        ranks: Data-parallel ranks; None: those of ``torch.distributed``, or 1.
        rank: This process among them; None: that of ``torch.distributed``, or 0.
        accumulate: Micro-batches per rank and optimizer step (``Trainer.accumulate_grad_batches``).
        sequences_per_micro_batch: Sequences of a cell in a full window.
        policy: How a window's sequences are dealt over its cells; ``random`` as a ``DistributedSampler``
            does.
        tail: What happens to the short last window, see :func:`~sb_lightning.balance.num_micro_batches`.
        seed: Seed of the shuffle; epoch e uses ``seed + e``.
        max_batches: The Trainer stops after so many micro-batches of an epoch (``limit_train_batches``): only
            cells that run count among a window's target tokens. None: no limit.

    Raises:
        ValueError: An argument is out of range, or no window can be formed.
        TypeError: A count is not an integer.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        target_tokens: Sequence[int] | np.ndarray | None = None,
        *,
        ranks: int | None = None,
        rank: int | None = None,
        accumulate: int = 1,
        sequences_per_micro_batch: int = 1,
        policy: Policy = "random",
        tail: Tail = "partial",
        seed: int = 0,
        max_batches: int | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64).reshape(-1)
        if target_tokens is None:
            self.target_tokens = np.maximum(self.lengths - 1, 0)
        else:
            self.target_tokens = np.asarray(target_tokens, dtype=np.int64).reshape(-1)
        found_ranks, found_rank = _process_group(ranks, rank)
        self.ranks = _count("ranks", found_ranks)
        self.rank = _count("rank", found_rank, least=0)
        self.accumulate = _count("accumulate", accumulate)
        self.sequences_per_micro_batch = _count("sequences_per_micro_batch", sequences_per_micro_batch)
        self.max_batches = None if max_batches is None else _count("max_batches", max_batches)
        self.policy: Policy = _choice("policy", policy, POLICIES)
        self.tail: Tail = _choice("tail", tail, TAILS)
        self.seed = _count("seed", seed, least=0)
        self.epoch = 0
        self._start = 0
        self._order: tuple[int, np.ndarray] | None = None
        self._plan: tuple[tuple[int, int], WindowPlan] | None = None
        self._check()

    def _check(self) -> None:
        if self.rank >= self.ranks:
            raise ValueError(
                explain(
                    f"rank is {self.rank} of {self.ranks} ranks",
                    "ranks are counted from 0",
                    f"pass a rank from 0 to {self.ranks - 1}",
                )
            )
        if len(self.lengths) != len(self.target_tokens):
            raise ValueError(
                explain(
                    f"{len(self.lengths)} lengths and {len(self.target_tokens)} target_tokens",
                    "both describe the sequences of one data set",
                    "pass one entry of each per sequence",
                )
            )
        if self.num_batches == 0:
            raise ValueError(
                explain(
                    f"{len(self.lengths)} sequences do not fill one window of {self.ranks} ranks x "
                    f"accumulate {self.accumulate} x {self.sequences_per_micro_batch} sequences per "
                    f"micro-batch, and tail is {self.tail!r}",
                    "there would be no step to train",
                    "use more documents, lower trainer.accumulate_grad_batches, or set tail to 'partial'",
                )
            )

    @property
    def sampler(self) -> SparsityAwareBatchSampler:
        """The sampler itself: Lightning calls ``set_epoch`` on ``batch_sampler.sampler`` only."""
        return self

    @property
    def batch_size(self) -> int:
        """Sequences of a cell in a full window, under the name that loaders look for."""
        return self.sequences_per_micro_batch

    @property
    def drop_last(self) -> bool:
        """Whether sequences of an epoch may be left out, under the name that loaders look for."""
        return self.tail == "drop"

    @property
    def window_size(self) -> int:
        """Sequences of a full window."""
        return self.ranks * self.accumulate * self.sequences_per_micro_batch

    @property
    def num_batches(self) -> int:
        """Micro-batches per rank of a whole epoch, the same on every rank, before ``max_batches``."""
        full, rest = divmod(len(self.lengths), self.window_size)
        return full * self.accumulate + self._micro_batches(rest)

    @property
    def num_windows(self) -> int:
        """Windows (optimizer steps) of an epoch that run."""
        return -(-len(self) // self.accumulate)

    def __len__(self) -> int:
        """Micro-batches per rank and epoch that run, the same on every rank."""
        return self.num_batches if self.max_batches is None else min(self.num_batches, self.max_batches)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is used; Lightning calls this before each."""
        self.epoch = epoch

    def start_at(self, micro_batch: int) -> None:
        """Let the next iteration (only that one) begin at this micro-batch of the epoch."""
        self._start = _count("micro_batch", micro_batch, least=0)

    def __iter__(self) -> Iterator[Cell]:
        """Yield this rank's cells of the epoch; nothing is planned before the first is asked for."""
        start, self._start = self._start, 0
        for batch in range(start, len(self)):
            yield self.cell(*divmod(batch, self.accumulate))

    def members(self, window: int) -> np.ndarray:
        """Return the data-set indices of a window of this epoch, the same for every policy."""
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, epoch_permutation(self.seed, self.epoch, len(self.lengths)))
        return self._order[1][window * self.window_size : (window + 1) * self.window_size]

    def plan(self, window: int) -> WindowPlan:
        """Return a window's plan for all ranks in this epoch; positions count within ``members(window)``.

        Raises:
            IndexError: The window is not among those that run.
        """
        if not 0 <= window < self.num_windows:
            raise IndexError(f"window {window} is outside the {self.num_windows} windows of an epoch")
        key = (self.epoch, window)
        if self._plan is None or self._plan[0] != key:
            members = self.members(window)
            plan = plan_random_window(
                self.lengths[members].tolist(),
                self.target_tokens[members].tolist(),
                ranks=self.ranks,
                accumulate=self.accumulate,
                sequences_per_micro_batch=self.sequences_per_micro_batch,
                tail=self.tail,
                max_micro_batches=len(self) - window * self.accumulate,
            )
            self._plan = (key, plan)
        return self._plan[1]

    def cell(self, window: int, micro_batch: int, rank: int | None = None) -> Cell:
        """Return one cell of this epoch with its data-set indices; rank None is this process."""
        rank = self.rank if rank is None else rank
        plan, members = self.plan(window), self.members(window)
        return Cell(
            [int(members[i]) for i in plan.cells[rank][micro_batch]],
            window=window,
            micro_batch=micro_batch,
            target_tokens=plan.cell_target_tokens[rank][micro_batch],
            window_target_tokens=plan.target_tokens,
            is_padding=plan.is_padding[rank][micro_batch],
        )

    def fingerprint(self) -> dict[str, int | str]:
        """Return what must be equal on resume for the order of the sequences to be the same."""
        return {
            "sequences": len(self.lengths),
            "ranks": self.ranks,
            "accumulate": self.accumulate,
            "sequences_per_micro_batch": self.sequences_per_micro_batch,
            "policy": self.policy,
            "tail": self.tail,
            "seed": self.seed,
        }

    def _micro_batches(self, num_items: int) -> int:
        return num_micro_batches(
            num_items,
            ranks=self.ranks,
            accumulate=self.accumulate,
            sequences_per_micro_batch=self.sequences_per_micro_batch,
            tail=self.tail,
        )


def _process_group(ranks: int | None, rank: int | None) -> tuple[int, int]:
    import torch.distributed as dist

    ready = dist.is_available() and dist.is_initialized()
    if ranks is None:
        ranks = dist.get_world_size() if ready else 1
    if rank is None:
        rank = dist.get_rank() if ready else 0
    return ranks, rank


def _count(name: str, value: Any, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(explain(f"{name} is {value!r}", "it is a count", f"pass an integer >= {least}"))
    if value < least:
        raise ValueError(explain(f"{name} is {value}", f"it counts from {least}", f"pass {name} >= {least}"))
    return int(value)


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(explain(f"{name} is {value!r}", "there is no such choice", f"pass one of {allowed}"))
    return value
