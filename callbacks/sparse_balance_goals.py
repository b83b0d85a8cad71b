"""Where the time that a micro-batch is steered to comes from: the plan, past windows, or the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sb_lightning._messages import explain
from sb_lightning.balance import SparsityAwareBatchSampler, WindowPlan, WindowSync
from sb_lightning.callbacks.imbalance_batch import Lengths
from sb_lightning.callbacks.sparse_balance_settings import TuningSettings
from sb_lightning.callbacks.windows import length_source
from sb_lightning.tuning.anchors import Anchor, anchor_latency
from sb_lightning.tuning.coverage import sampled_rows
from sb_lightning.tuning.curves import between_points
from sb_lightning.tuning.slack import ExpectedSequence, slack_budgets
from sb_lightning.tuning.window_targets import CellGoal, Prices, anchor_of

if TYPE_CHECKING:
    from sb_lightning.callbacks.sparse_balance_window import WindowOutcome
    from sb_lightning.latency.table import LatencyModel

__all__ = ["EmaGoals", "Goals", "PlanGoals", "SlotGoals"]

EMA_RATE = 0.3
"""Weight of the newest window, as in the `BudgetStore`."""
MOST_TOKENS = 2**31


class Goals(Protocol):
    """One way to find the goal of a micro-batch."""

    @property
    def prices(self) -> Prices | None:
        """Predicted times of the window at hand, if they change."""

    @property
    def ema_us(self) -> float | None:
        """What was learnt from past windows, for a checkpoint."""

    def goal(self, batch: Any, batch_idx: int) -> CellGoal:
        """Return the goal of the micro-batch that begins."""

    def learn(self, outcome: WindowOutcome) -> None:
        """Take in a window that is over, on every rank alike."""

    def inputs(self) -> dict[str, Any]:
        """Return what the goals of the window at hand are made of, equal on all ranks."""


class PlanGoals:
    """Goals from the plan of the window, which every rank knows whole: nothing is exchanged.

    Args:
        sampler: Whose plans to read.
        settings: How to tune.
        k0: Budget when nothing is tuned.
        prices: Returns the predicted times as they were known at a version of the sampler's store.
        block_size: Keys per block.
        num_windows: Returns how many windows of the run are over.
    """

    ema_us = None

    def __init__(
        self,
        sampler: SparsityAwareBatchSampler,
        settings: TuningSettings,
        k0: int,
        prices: Callable[[int], Prices],
        block_size: int,
        num_windows: Callable[[], int],
    ) -> None:
        self._block_size = block_size
        self._num_windows = num_windows
        self.cells: list[list[list[int]]] = []
        """Lengths of the window's sequences, by rank and micro-batch."""
        self._sampler = sampler
        self._settings = settings
        self._k0 = k0
        self._prices = prices
        self._key: tuple[int, int] | None = None
        self._goals: list[CellGoal] = []
        self._taus: list[int] = []
        self.prices: Prices | None = None
        """Those of the window at hand."""

    def goal(self, batch: Any, batch_idx: int) -> CellGoal:
        """Return the goal of the micro-batch that begins."""
        sampler = self._sampler
        window, micro_batch = divmod(batch_idx, sampler.accumulate)
        key = (sampler.epoch, window)
        if key != self._key:
            self._plan(*key)
            self._key = key
        return self._goals[micro_batch]

    @property
    def table(self) -> LatencyModel:
        """What the plans are made by."""
        return self._sampler.costs.table

    def learn(self, outcome: WindowOutcome) -> None:
        """Nothing: each window's plan says it all."""

    def inputs(self) -> dict[str, Any]:
        """Return the times that the window's micro-batches are steered to."""
        return {"window": self._key, "tau_us": self._taus}

    def _plan(self, epoch: int, window: int) -> None:
        sampler, settings = self._sampler, self._settings
        plan, members = sampler.plan(epoch, window), sampler.members(epoch, window)
        cut = sampler.cell(window, 0).max_length
        lengths = sampler.lengths[members] if cut is None else np.minimum(sampler.lengths[members], cut)
        number = sampler.window_number(epoch, window)
        self.prices = prices = self._prices(number - sampler.lag)
        self.cells = cells = [[lengths[list(cell)].tolist() for cell in row] for row in plan.cells]
        times = [[prices.cell_us(cell, self._k0) for cell in row] for row in cells]
        rank = sampler.rank
        taus: list[int | None] = [None] * len(cells[rank])
        budgets: list[tuple[int, ...]] = [()] * len(cells[rank])
        self._taus = []
        if self._num_windows() >= settings.warmup_windows:
            anchor = "mean" if settings.anchor == "slack" else settings.anchor
            tau = anchor_latency([time for row in times for time in row], anchor)
            taus, self._taus = [tau] * len(taus), [tau]
            chosen = self._slack(plan, lengths, tau, prices) if settings.anchor == "slack" else None
            if chosen is not None:
                placed = [[tuple(chosen[n] for n in cell) for cell in row] for row in plan.cells]
                all_taus = [
                    [prices.cell_us(*cell) for cell in zip(*row, strict=True)]
                    for row in zip(cells, placed, strict=True)
                ]
                taus, budgets = list(all_taus[rank]), placed[rank]
                self._taus = [time for row in all_taus for time in row]
        ids: NDArray[np.int64] = sampler.sequence_ids[members]
        self._goals = [
            CellGoal(
                tau_us=taus[a],
                lengths=tuple(cells[rank][a]),
                ids=tuple(ids[list(cell)].tolist()),
                budgets=budgets[a],
                is_padding=plan.is_padding[rank][a],
            )
            for a, cell in enumerate(plan.cells[rank])
        ]

    def _slack(
        self, plan: WindowPlan, lengths: NDArray[np.int64], anchor_us: int, prices: Prices
    ) -> list[int] | None:
        """Return the budget of each sequence of the window, or None while no coverage is known."""
        sampler, settings, block = self._sampler, self._settings, self._block_size
        expected = []
        for length in lengths.tolist():
            points = sampler.store.curve(sampler.store.version, length)
            if points is None:
                return None
            blocks = max(1, -(-length // block))
            width = blocks if settings.max_budget is None else min(blocks, settings.max_budget)
            expected.append(
                ExpectedSequence(
                    coverage=between_points(points, width, blocks),
                    cost_us=prices.rows([length], width)[0].astype(np.int64),
                    k0=self._k0,
                    rows=sampled_rows(length, block),
                    num_blocks=blocks,
                )
            )
        return slack_budgets(
            plan.cells,
            expected,
            anchor_us=anchor_us,
            fixed_us=prices.fixed_us,
            tolerance=settings.tolerance,
            min_budget=settings.min_budget,
            tune_short=settings.tune_short,
            speed=settings.slack_speed,
            objective=sampler.objective,
        )


class EmaGoals:
    """Goals from past windows, where nobody knows the window at hand.

    The anchor of each window, over all ranks, goes into a moving average; nothing is tuned before there is
    one.

    Args:
        settings: How to tune.
        lengths: Returns the tokens of each sequence of a batch; None: look for them.
        ema_us: What an earlier part of the run has learnt.
        num_windows: Windows of the run so far.
    """

    prices = None

    def __init__(
        self, settings: TuningSettings, lengths: Lengths | None, ema_us: float | None, num_windows: int
    ) -> None:
        self._settings = settings
        self._lengths = lengths
        self.ema_us = ema_us
        self._num_windows = num_windows

    def goal(self, batch: Any, batch_idx: int) -> CellGoal:
        """Return the goal of the micro-batch that begins."""
        is_cold = self.ema_us is None or self._num_windows < self._settings.warmup_windows
        tau = None if is_cold or self.ema_us is None else int(self.ema_us + 0.5)
        return _goal(tau, batch, self._lengths)

    def learn(self, outcome: WindowOutcome) -> None:
        """Take in a window that is over, on every rank alike."""
        self._num_windows += 1
        times = (outcome.base_least_us, outcome.base_total_us, outcome.base_most_us, outcome.cells)
        anchor_us = anchor_of(*times, cast("Anchor", self._settings.anchor))
        before = self.ema_us
        self.ema_us = float(anchor_us) if before is None else before + EMA_RATE * (anchor_us - before)

    def inputs(self) -> dict[str, Any]:
        """Return what was learnt."""
        return {"ema_us": self.ema_us}


class SlotGoals:
    """Goals from the micro-batches that all ranks begin at this moment, exchanged in one gather each.

    Args:
        settings: How to tune.
        sync: Where the ranks meet.
        prices: Predicted times.
        k0: Budget when nothing is tuned.
        lengths: Returns the tokens of each sequence of a batch; None: look for them.
        num_windows: Windows of the run so far.
    """

    ema_us = None

    def __init__(
        self,
        settings: TuningSettings,
        sync: WindowSync,
        prices: Prices,
        k0: int,
        lengths: Lengths | None,
        num_windows: int,
    ) -> None:
        self._settings = settings
        self._sync = sync
        self.prices: Prices | None = prices
        self._k0 = k0
        self._lengths = lengths
        self._num_windows = num_windows

    def goal(self, batch: Any, batch_idx: int) -> CellGoal:
        """Return the goal of the micro-batch that begins; all ranks must call this."""
        assert self.prices is not None
        lengths = self._tokens(batch)
        tau = self.sync_anchor(self.prices.cell_us(lengths, self._k0), batch_idx)
        is_cold = self._num_windows < self._settings.warmup_windows
        return _goal(None if is_cold else tau, batch, self._lengths)

    def sync_anchor(self, time_us: int, batch_idx: int) -> int:
        """Return the anchor of the slot: 32 bytes from each rank.

        Raises:
            RuntimeError: On every rank, if they are not at the same micro-batch.
        """
        words = np.array([time_us, batch_idx, self._num_windows, 0], dtype=np.int64)
        rows = self._sync.gather_words(words)
        if (rows[:, 1:3] != rows[0, 1:3]).any():
            raise RuntimeError(
                explain(
                    f"the ranks begin micro-batches {rows[:, 1].tolist()} of windows {rows[:, 2].tolist()}",
                    "sync: slot steers micro-batches that run at the same time",
                    "use a sampler that gives all ranks equally many batches, or set sync: ema",
                )
            )
        return anchor_latency(rows[:, 0].tolist(), cast("Anchor", self._settings.anchor))

    def learn(self, outcome: WindowOutcome) -> None:
        """Count the window."""
        self._num_windows += 1

    def inputs(self) -> dict[str, Any]:
        """Return nothing: each gather looks for itself."""
        return {}

    def _tokens(self, batch: Any) -> list[int]:
        if self._lengths is not None:
            return _tokens(self._lengths, batch)
        source = length_source(batch)
        if source is None:
            raise ValueError(
                explain(
                    f"a batch of type {type(batch).__name__} does not say how long its sequences are",
                    "sync: slot predicts its time before it runs",
                    "pass lengths=, a function of the batch, to SparseBalanceCallback, or set sync: ema",
                )
            )
        return source()


def _goal(tau_us: int | None, batch: Any, lengths: Lengths | None) -> CellGoal:
    """Return a goal with the numbers and lengths of a batch's sequences, where reading them is free."""
    fields: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else {}
    ids, source = fields.get("sequence_ids"), length_source(batch)
    is_free = not any(isinstance(field, Tensor) and field.device.type != "cpu" for field in fields.values())
    is_named = isinstance(ids, Tensor) and ids.device.type == "cpu" and not ids.is_floating_point()
    known: Sequence[int] = ()
    if lengths is not None:
        known = _tokens(lengths, batch)
    elif is_named and is_free and source is not None:
        known = source()
    named: Sequence[int] = ids.flatten().tolist() if is_named and known else ()  # type: ignore[union-attr]
    return CellGoal(tau_us=tau_us, ids=tuple(named), lengths=tuple(known))


def _tokens(lengths: Lengths, batch: Any) -> list[int]:
    """Return what a user's function says of a batch.

    Raises:
        TypeError: It is no flat list of numbers.
        ValueError: A number counts no tokens.
    """
    found: Any = lengths(batch)
    is_array, is_empty = hasattr(found, "ndim"), getattr(found, "is_meta", False)
    is_no_list = isinstance(found, (str, bytes, Mapping, Set)) or not isinstance(found, Iterable)
    if is_no_list or is_empty or (is_array and found.ndim != 1):
        what = "None" if found is None else f"a {type(found).__name__}"
        what += " without data" if is_empty else f" of {found.ndim} dimensions" if is_array else ""
        raise TypeError(_refused(what))
    return [_count(value) for value in (found.tolist() if hasattr(found, "tolist") else found)]


def _count(value: Any) -> int:
    is_scalar = getattr(value, "ndim", None) == 0 and not getattr(value, "is_meta", False)
    number = value.item() if is_scalar else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(_refused(f"{number!r} for a sequence"))
    if not 0 <= number < MOST_TOKENS or number != int(number):
        raise ValueError(_refused(f"{number} tokens for a sequence"))
    return int(number)


def _refused(found: str) -> str:
    return explain(
        f"lengths of SparseBalanceCallback returns {found}",
        "micro-batches are steered by the tokens of their sequences",
        "return a flat list, array or tensor of whole numbers, one for each sequence of the batch",
    )
