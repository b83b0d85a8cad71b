"""The distributed batch sampler: plans whole windows and yields one rank's cells."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sb_lightning._messages import explain
from sb_lightning.balance.arguments import check_overflow, choice, count, digest, process_group
from sb_lightning.balance.budget_store import BudgetStore
from sb_lightning.balance.cell import Cell
from sb_lightning.balance.costs import SequenceCosts, latency_model
from sb_lightning.balance.lengths import LengthSource, sequence_lengths
from sb_lightning.balance.membership import Membership
from sb_lightning.balance.policies import OBJECTIVES, POLICIES, Objective, Policy
from sb_lightning.balance.rebuild import refuse_rebuild
from sb_lightning.balance.window import TAILS, Tail, WindowPlan
from sb_lightning.balance.window_planner import PlannedWindow, WindowPlanner
from sb_lightning.latency.table import LatencyModel

if TYPE_CHECKING:
    from sb_lightning.balance.figures import Explanation

__all__ = ["SparsityAwareBatchSampler"]

Indices = NDArray[np.int64]
STATE_VERSION = 1
NUM_PLAN_DIGESTS = 256
"""Windows whose plan's digest is kept, or more where workers draw further ahead."""
LARGEST_SEED = 2**63 - 2**32
"""The epoch is added to the seed, and the sum has to fit in 64 bits."""


class SparsityAwareBatchSampler:
    """Batch sampler that deals each window (one optimizer step of all ranks) as a whole.

    Which sequences form a window is what a shuffled ``DistributedSampler`` with the same seed would train on
    in that step; where in the window each of them runs is planned, so that all ranks have the same predicted
    work (SAB of SparseBalance, arXiv 2604.13847). Every rank builds the same plan from (seed, epoch, window,
    version of the store) and takes its own row: no communication, and the same number of micro-batches on
    every rank, always. Plans are made when they are needed.

    Pass it as ``batch_sampler=`` to :class:`~sb_lightning.balance.BalancedDataLoader`. It deliberately is no
    ``torch.utils.data.BatchSampler``: Lightning silently rebuilds those around a ``DistributedSampler``.
    ``sampler.sampler`` is the sampler itself because that is where Lightning looks for ``set_epoch``.

    Args:
        lengths: Tokens of every sequence of the data set: a list, an array, the column of a data set or its
            name, or a function, see :func:`~sb_lightning.balance.sequence_lengths`.
        target_tokens: Labels of every sequence that count in the loss; None: all tokens but each sequence's
            first.
        ranks: Data-parallel ranks; None: those of ``torch.distributed``, or 1.
        rank: This process among them; None: that of ``torch.distributed``, or 0.
        accumulate: Micro-batches per rank and optimizer step (``Trainer.accumulate_grad_batches``).
        sequences_per_micro_batch: Sequences of a cell in a full window, on average; other policies than
            ``random`` may put more into one cell and fewer into another.
        policy: ``latency`` evens out predicted times; ``flops`` and ``tokens`` do the same for operations and
            tokens; ``length`` sorts by length and deals one sequence to each rank at a time, in
            alternating direction; ``random`` deals as a ``DistributedSampler`` does.
        objective: How ranks meet: ``ddp`` once per window (the slowest rank's sum counts), ``fsdp`` in every
            micro-batch (the slowest cell of each slot counts).
        tail: What happens to the short last window, see :func:`~sb_lightning.balance.num_micro_batches`.
        seed: Seed of the shuffle; epoch e uses ``seed + e``.
        latency: Predicts times: a ``LatencyTable``, an ``AnalyticCost``, or the path of a table. None counts
            the operations of a generic model.
        budget: Attention budget k0 of the model; None for full attention.
        store: Budgets that sequences are expected to use, where something tunes them; None: a new one.
        sequence_ids: A stable number for each sequence, for the store; None: its position.
        dataset: Where ``lengths`` names a column of it, or is a function of its samples.
        max_tokens: Most tokens of a cell, never exceeded; None: no limit.
        overflow: What happens to sequences that do not fit: ``raise``, or ``truncate`` them.
        equal_counts: Give every cell equally many sequences (they may differ by one).
        max_batches: The Trainer stops after so many micro-batches of an epoch (``limit_train_batches``): only
            cells that run are planned and count among a window's target tokens. None: no limit.

    Raises:
        ValueError: An argument is out of range, or no window can be formed.
        TypeError: A count is not an integer.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> SparsityAwareBatchSampler:
        """Refuse to be rebuilt by Lightning around a sampler of its own."""
        refuse_rebuild(kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        lengths: LengthSource,
        target_tokens: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        ranks: int | None = None,
        rank: int | None = None,
        accumulate: int = 1,
        sequences_per_micro_batch: int = 1,
        policy: Policy = "latency",
        objective: Objective = "ddp",
        tail: Tail = "partial",
        seed: int = 0,
        latency: LatencyModel | str | Path | None = None,
        budget: int | None = None,
        store: BudgetStore | None = None,
        sequence_ids: Sequence[int] | Indices | None = None,
        dataset: Any | None = None,
        max_tokens: int | None = None,
        overflow: str = "raise",
        equal_counts: bool = False,
        max_batches: int | None = None,
    ) -> None:
        self.lengths = sequence_lengths(lengths, dataset)
        num_sequences = len(self.lengths)
        self.target_tokens = _per_sequence("target_tokens", target_tokens, np.maximum(self.lengths - 1, 0))
        _check_targets(self.target_tokens, self.lengths)
        self.sequence_ids = _per_sequence("sequence_ids", sequence_ids, np.arange(num_sequences))
        self.has_own_ranks = ranks is not None
        """Whether `ranks` was given; otherwise the loader compares them with those of the process group."""
        found_ranks, found_rank = process_group(ranks, rank)
        self.rank = count("rank", found_rank, least=0)
        self.max_tokens = None if max_tokens is None else count("max_tokens", max_tokens)
        self.overflow = choice("overflow", overflow, ("raise", "truncate"))
        self.policy: Policy = choice("policy", policy, POLICIES)
        self.objective: Objective = choice("objective", objective, OBJECTIVES)
        if not isinstance(equal_counts, (bool, np.bool_)):
            raise TypeError(
                explain(f"equal_counts is {equal_counts!r}", "it is a switch", "pass True or False")
            )
        self.equal_counts = bool(equal_counts)
        self._membership = Membership(
            num_sequences=num_sequences,
            ranks=count("ranks", found_ranks),
            accumulate=count("accumulate", accumulate),
            sequences_per_micro_batch=count("sequences_per_micro_batch", sequences_per_micro_batch),
            tail=choice("tail", tail, TAILS),
            seed=count("seed", seed, least=0, most=LARGEST_SEED),
            max_batches=None if max_batches is None else count("max_batches", max_batches),
        )
        if latency is None and policy == "latency":
            warnings.warn(
                "SparsityAwareBatchSampler got no latency table: it plans by the counted operations of a "
                "generic model. Pass latency=LatencyTable.load(...) (`sb profile` measures one) or "
                "latency=AnalyticCost(shape).",
                stacklevel=2,
            )
        if not isinstance(store, (BudgetStore, type(None))):
            raise TypeError(
                explain(
                    f"store is a {type(store).__name__}",
                    "it tells the budgets expected",
                    "pass a BudgetStore, or None for a new one",
                )
            )
        self.store = BudgetStore() if store is None else store
        self.costs = SequenceCosts(
            latency_model(latency),
            budget=None if budget is None else count("budget", budget),
            store=self.store,
        )
        self.lag = 1
        """Windows by which the store's version that a plan uses is behind; the loader sets it."""
        self.plan_span: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Entered around the making of a plan, to time it."""
        self.epoch = 0
        self._start = 0
        self._first_epoch = 0
        self._plan_digests: dict[tuple[int, int], str] = {}
        self._plan: tuple[tuple[Any, ...], PlannedWindow] | None = None
        self._check()
        self._planner = WindowPlanner(
            membership=self._membership,
            lengths=self.lengths,
            target_tokens=self.target_tokens,
            sequence_ids=self.sequence_ids,
            costs=self.costs,
            policy=self.policy,
            objective=self.objective,
            max_tokens=self.max_tokens,
            truncates=self.overflow == "truncate",
            equal_counts=self.equal_counts,
        )

    def _check(self) -> None:
        if self.rank >= self.ranks:
            raise ValueError(
                explain(
                    f"rank is {self.rank} of {self.ranks} ranks",
                    "ranks are counted from 0",
                    f"pass a rank from 0 to {self.ranks - 1}",
                )
            )
        if self.max_tokens is not None:
            self.lengths, self.target_tokens = check_overflow(
                self.lengths, self.target_tokens, self.max_tokens, truncate=self.overflow == "truncate"
            )
        if not len(self.lengths):
            raise ValueError(
                explain(
                    "lengths is empty",
                    "there would be no step to train",
                    "pass the lengths of a data set with at least one sequence",
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
    def batch_size(self) -> None:
        """None: cells differ in their number of sequences. Loaders look for it, and Lightning for both."""
        return

    @property
    def drop_last(self) -> bool:
        """Whether sequences of an epoch may be left out, under the name that loaders look for."""
        return self.tail == "drop"

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self._membership.ranks

    @property
    def accumulate(self) -> int:
        """Micro-batches per rank of a full window."""
        return self._membership.accumulate

    @property
    def sequences_per_micro_batch(self) -> int:
        """Sequences of a cell in a full window, on average."""
        return self._membership.sequences_per_micro_batch

    @property
    def tail(self) -> Tail:
        """What happens to the short last window of an epoch."""
        return self._membership.tail

    @property
    def seed(self) -> int:
        """Seed of the shuffle."""
        return self._membership.seed

    @property
    def window_size(self) -> int:
        """Sequences of a full window."""
        return self._membership.window_size

    @property
    def max_batches(self) -> int | None:
        """Micro-batches of an epoch after which the Trainer stops; None: it does not."""
        return self._membership.max_batches

    @max_batches.setter
    def max_batches(self, max_batches: int | None) -> None:
        self._membership.max_batches = None if max_batches is None else count("max_batches", max_batches)
        self._forget_plans()

    @property
    def skipped(self) -> int:
        """Sequences of this epoch that were trained on before, in windows of another size."""
        return self._membership.skipped_in(self.epoch)

    @skipped.setter
    def skipped(self, num_sequences: int) -> None:
        self._membership.skipped = (self.epoch, count("skipped", num_sequences, least=0))
        self._first_epoch = self.epoch
        self._forget_plans()
        self.store.collapse()

    @property
    def num_batches(self) -> int:
        """Micro-batches per rank of this whole epoch, the same on every rank, before ``max_batches``."""
        return self._membership.num_batches(self.epoch)

    @property
    def num_windows(self) -> int:
        """Windows (optimizer steps) of this epoch that run."""
        return self._membership.num_windows(self.epoch)

    def __len__(self) -> int:
        """Micro-batches per rank of this epoch that run, the same on every rank."""
        return self.num_batches if self.max_batches is None else min(self.num_batches, self.max_batches)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.lengths)} sequences, rank {self.rank} of {self.ranks}, "
            f"accumulate={self.accumulate}, policy={self.policy!r}, objective={self.objective!r}, "
            f"epoch {self.epoch}: {self.num_windows} windows)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is used; Lightning calls this before each."""
        self.epoch = count("epoch", epoch, least=0)

    def start_at(self, micro_batch: int) -> None:
        """Let the next iteration (only that one) begin at this micro-batch of the epoch."""
        self._start = count("micro_batch", micro_batch, least=0)

    def __iter__(self) -> Iterator[Cell]:
        """Yield this rank's cells of the epoch; nothing is planned before the first is asked for."""
        start, self._start = self._start, 0
        self.check_epoch()
        for batch in range(start, len(self)):
            yield self.cell(*divmod(batch, self.accumulate))

    def members(self, epoch: int, window: int) -> Indices:
        """Return the data-set indices of the sequences that run in a window, the same for every policy."""
        return self._membership.members(epoch, window)[0]

    def plan(
        self, epoch: int, window: int, *, policy: Policy | None = None, objective: Objective | None = None
    ) -> WindowPlan:
        """Return a window's plan for all ranks; its positions count within ``members(epoch, window)``.

        Args:
            epoch: Epoch, from 0.
            window: Window of the epoch, from 0.
            policy: Another policy than the sampler's, to compare.
            objective: Another objective than the sampler's.

        Raises:
            IndexError: The window is not among those that run.
            ValueError: Its sequences cannot be packed under ``max_tokens``.
        """
        return self._planned(epoch, window, policy, objective).plan

    def cell(self, window: int, micro_batch: int, rank: int | None = None) -> Cell:
        """Return one cell of this epoch with its data-set indices; rank None is this process."""
        rank = self.rank if rank is None else rank
        if not 0 <= rank < self.ranks:
            raise IndexError(
                explain(f"rank is {rank} of {self.ranks}", "ranks are counted from 0", "pass one of them")
            )
        planned = self._planned(self.epoch, window)
        plan, items = planned.plan, list(planned.plan.cells[rank][micro_batch])
        return Cell(
            planned.members[items].tolist(),
            window=window,
            micro_batch=micro_batch,
            target_tokens=plan.cell_target_tokens[rank][micro_batch],
            window_target_tokens=plan.target_tokens,
            is_padding=plan.is_padding[rank][micro_batch],
            predicted_ms=plan.predicted_ms[rank][micro_batch],
            budgets=None if self.costs.budget is None else planned.budgets[items].tolist(),
            plan_gap=plan.gap,
            max_length=planned.max_length,
        )

    def plan_digest(self, epoch: int, window: int) -> str:
        """Return a short name of a window's plan, kept from when its cells were drawn: it costs nothing."""
        key = (epoch, window)
        if key not in self._plan_digests:
            self._note_plan(key, self._planned(epoch, window))
        return self._plan_digests[key]

    def check_epoch(self) -> None:
        """Make sure that every window of this epoch can be packed under ``max_tokens``.

        Raises:
            ValueError: One cannot.
        """
        self._planner.check_packing(self.epoch)

    def explain(self, num_windows: int = 200) -> Explanation:
        """Return what each policy is predicted to give on windows of this epoch; print it to read it.

        Args:
            num_windows: Windows that are looked at, evenly spread over the epoch.
        """
        from sb_lightning.balance.figures import explain_sampler

        return explain_sampler(self, num_windows)

    def fingerprint(self) -> dict[str, int | str]:
        """Return what must be equal on resume for the windows to hold the same sequences."""
        return {
            "sequences": len(self.lengths),
            "ranks": self.ranks,
            "accumulate": self.accumulate,
            "sequences_per_micro_batch": self.sequences_per_micro_batch,
            "tail": self.tail,
            "seed": self.seed,
        }

    def plan_inputs(self) -> dict[str, int | str | bool | None]:
        """Return what all ranks must agree on to plan alike, for `WindowSync.watch`."""
        return {
            **self.fingerprint(),
            **self._digests,
            "policy": self.policy,
            "objective": self.objective,
            "max_tokens": self.max_tokens,
            "overflow": self.overflow,
            "equal_counts": self.equal_counts,
            "max_batches": self.max_batches,
            "lag": self.lag,
            "epoch": self.epoch,
            "skipped": self.skipped,
            "first_epoch": self._first_epoch,
            "store_rate": self.store.rate,
            "store": self.store.digest(),
        }

    @cached_property
    def _digests(self) -> dict[str, str]:
        arrays = ("lengths", "target_tokens", "sequence_ids")
        return {**{name: digest(getattr(self, name)) for name in arrays}, "latency": self.costs.digest()}

    def state_dict(self) -> dict[str, Any]:
        """Return what plans depend on beyond the arguments: plain values and tensors, equal on all ranks."""
        return {
            "version": STATE_VERSION,
            "first_epoch": self._first_epoch,
            "skipped": list(self._membership.skipped),
            "store": self.store.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned.

        Raises:
            ValueError: The state is not one of this release.
        """
        if state_dict.get("version") != STATE_VERSION:
            raise ValueError(
                explain(
                    f"the state of a SparsityAwareBatchSampler has version {state_dict.get('version')!r}",
                    f"this release reads version {STATE_VERSION}",
                    "resume with the release that wrote it, or start from the weights only",
                )
            )
        self._first_epoch = int(state_dict["first_epoch"])
        epoch, num_sequences = state_dict["skipped"]
        self._membership.skipped = (int(epoch), int(num_sequences))
        self._forget_plans()
        self.store.load_state_dict(state_dict["store"])

    def window_number(self, epoch: int, window: int) -> int:
        """Return a window's number in the run, by which the store counts its versions; there may be gaps."""
        return (epoch - self._first_epoch) * self._membership.num_full_windows + window

    def _planned(
        self, epoch: int, window: int, policy: Policy | None = None, objective: Objective | None = None
    ) -> PlannedWindow:
        version = self.window_number(epoch, window) - self.lag
        key = (epoch, window, policy, objective, self.store.resolve(version))
        if self._plan is None or self._plan[0] != key:
            with self.plan_span():
                self._plan = (key, self._planner.planned(epoch, window, version, policy, objective))
            if policy is None and objective is None:
                self._note_plan((epoch, window), self._plan[1])
        return self._plan[1]

    def _forget_plans(self) -> None:
        self._plan = None
        self._plan_digests.clear()

    def _note_plan(self, key: tuple[int, int], planned: PlannedWindow) -> None:
        self._plan_digests.pop(key, None)
        self._plan_digests[key] = planned.digest()
        while len(self._plan_digests) > max(NUM_PLAN_DIGESTS, 2 * self.lag):
            del self._plan_digests[next(iter(self._plan_digests))]


def _per_sequence(name: str, given: Any, default: Indices) -> Indices:
    if given is None:
        return default
    values = np.asarray(given)
    if values.shape != default.shape:
        raise ValueError(
            explain(
                f"{len(default)} lengths and {values.size} {name}",
                "both describe the sequences of one data set",
                "pass one entry of each per sequence",
            )
        )
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(
            explain(
                f"{name} holds {values.tolist()[0]!r}", "they are whole numbers", f"pass integers as {name}"
            )
        )
    return values.astype(np.int64)


def _check_targets(target_tokens: Indices, lengths: Indices) -> None:
    wrong = np.flatnonzero((target_tokens < 0) | (target_tokens > lengths))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            explain(
                f"target_tokens of sequence {first} is {int(target_tokens[first])} and its length "
                f"{int(lengths[first])}",
                "it counts those of its tokens that are labels",
                "pass from 0 to as many as the sequence has",
            )
        )
