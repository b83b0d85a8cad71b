"""One training with `SparseBalanceCallback`: what it has found, and what it does in each micro-batch."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

from sb_lightning._messages import explain
from sb_lightning.balance.budget_store import BudgetStore
from sb_lightning.balance.window_sync import Gathered, WindowSync
from sb_lightning.callbacks.imbalance_batch import Lengths
from sb_lightning.callbacks.sparse_balance_attach import attach
from sb_lightning.callbacks.sparse_balance_forward import ForwardTuner
from sb_lightning.callbacks.sparse_balance_goals import EmaGoals, Goals, PlanGoals, SlotGoals
from sb_lightning.callbacks.sparse_balance_join import find_bases, find_monitor, find_sampler, find_table
from sb_lightning.callbacks.sparse_balance_recalibration import Recalibration
from sb_lightning.callbacks.sparse_balance_settings import TuningSettings
from sb_lightning.callbacks.sparse_balance_window import WindowOutcome, decode_window, encode_window
from sb_lightning.latency.table import LatencyModel
from sb_lightning.tracking.spans import span
from sb_lightning.tuning.curves import CURVE_BUDGETS
from sb_lightning.tuning.window_targets import Prices

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["TuningRun", "TuningState"]

STATE_VERSION = 1
# With one budget for all layers, coverage is measured once in so many windows.
MEASURE_EVERY = 8
# Sequences of a micro-batch that there is room for, of those nobody plans; and micro-batches of a window
# under manual optimization, where nobody knows beforehand how many there are.
MANY_SEQUENCES, MANUAL_MICRO_BATCHES = 32, 16


@dataclass(kw_only=True)
class TuningState:
    """What goes on in a resumed run; equal on all ranks."""

    num_windows: int = 0
    ema_us: float | None = None
    """Moving average of the anchor."""
    ema_of: str | None = None
    """What it is an average of: another anchor, k0 or table begins another."""
    store: BudgetStore | None = None
    """Where no sampler has one."""

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values and tensors."""
        return {
            "version": STATE_VERSION,
            "windows": self.num_windows,
            "ema_us": self.ema_us,
            "ema_of": self.ema_of,
            "store": None if self.store is None else self.store.state_dict(),
        }

    @classmethod
    def load(cls, state: dict[str, Any]) -> TuningState:
        """Read what `state_dict` returned.

        Raises:
            ValueError: It is not of this release, or damaged.
        """
        if isinstance(state, Mapping) and state.get("version") != STATE_VERSION:
            raise ValueError(
                explain(
                    f"the state of a SparseBalanceCallback has version {state.get('version')!r}",
                    f"this release reads version {STATE_VERSION}",
                    "resume with the release that wrote it, or start from the weights only",
                )
            )
        try:
            store = None
            if state["store"] is not None:
                store = BudgetStore()
                store.load_state_dict(state["store"])
            ema_us = state["ema_us"]
            return cls(
                num_windows=int(state["windows"]),
                ema_us=None if ema_us is None else float(ema_us),
                ema_of=state.get("ema_of"),
                store=store,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                explain(
                    f"the state of a SparseBalanceCallback cannot be read ({type(error).__name__}: {error})",
                    "it is not what the callback has saved",
                    "resume from a checkpoint as it was written, or start from the weights only",
                )
            ) from error


class TuningRun:
    """Attached to the models of a training from its start to its end.

    Args:
        trainer: The Trainer, at the start of the training.
        pl_module: Its module.
        settings: How to tune.
        table: What predicts times, if it was given.
        lengths: Returns the tokens of each sequence of a batch; None: look for them.
        state: What the run has learnt so far; kept up to date.

    Raises:
        MisconfigurationException: What the settings ask for is not there.
        ValueError: The table cannot be read, or is of another block size.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        settings: TuningSettings,
        table: LatencyModel | str | Path | None,
        lengths: Lengths | None,
        state: TuningState,
    ) -> None:
        self.settings = settings
        self.state = state
        self._lengths = lengths
        self._given_table = table
        self._number = 0
        self._is_automatic = pl_module.automatic_optimization
        # Whether the micro-batch at hand is the last one of a planned window.
        self._ends_plan = True
        # Of the planned window `_pending_number`, what several optimizer steps have come to so far. No
        # checkpoint keeps it: a resumed run starts that window anew.
        self._pending: list[WindowOutcome] = []
        self._pending_number = 0
        self._recalibration: Recalibration | None = None
        self._own_s = 0.0
        self._goals: Goals
        bases = find_bases(pl_module)
        self._base = bases[0]
        self.sampler = find_sampler(trainer, pl_module)
        self._use_table(trainer)
        around = functools.partial(span, trainer, "tune")
        self.tuner = ForwardTuner(settings, Prices.of(self._table), around)
        self.k0 = self.tuner.budget(self._base)
        self._join_monitor(trainer)
        self.capacity = self._capacity(trainer, pl_module)
        self.points = len(CURVE_BUDGETS) if settings.needs_curves else 0
        self._join(trainer)
        self._undo: list[Callable[[], None]] = []
        try:
            for base in bases:
                self._undo.append(attach(pl_module, base, self.tuner))
        except MisconfigurationException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the models as they were."""
        while self._undo:
            self._undo.pop()()

    def renew(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over a loader that was made anew."""
        sampler = find_sampler(trainer, pl_module)
        if sampler is not self.sampler:
            self.sampler = sampler
            if self._given_table is None:
                self._use_table(trainer)
                self.tuner.prices = Prices.of(self._table)
            self._join(trainer)

    def _use_table(self, trainer: Trainer) -> None:
        self._table = find_table(self._given_table, self.sampler, self._base, trainer)
        content = repr(self._table.measurements).encode()
        self._table_digest = hashlib.blake2b(content, digest_size=8).hexdigest()

    def _join_monitor(self, trainer: Trainer) -> None:
        if self.settings.recalibrate:
            self._recalibration = Recalibration(find_monitor(trainer))

    def _capacity(self, trainer: Trainer, pl_module: LightningModule) -> int:
        """Return how many sequences of a window a rank can tell the others of."""
        if self.sampler is not None:
            usual = self.sampler.accumulate * self.sampler.sequences_per_micro_batch
            return min(self.sampler.window_size, 4 * usual) + self.sampler.accumulate
        if pl_module.automatic_optimization:
            return MANY_SEQUENCES * trainer.accumulate_grad_batches
        return MANY_SEQUENCES * MANUAL_MICRO_BATCHES

    def _join(self, trainer: Trainer) -> None:
        settings, sampler, k0 = self.settings, self.sampler, self.k0
        sync = settings.sync or ("plan" if sampler is not None else "ema")
        if sampler is None and (sync == "plan" or settings.anchor == "slack" or settings.recalibrate):
            what = "recalibrate is true" if settings.recalibrate else "anchor is 'slack'"
            what = "sync is 'plan'" if sync == "plan" else what
            raise MisconfigurationException(
                explain(
                    f"{what}, and the training loader has no SparsityAwareBatchSampler",
                    "only that sampler knows the window before it runs",
                    "return a sb_lightning.balance.BalancedDataLoader from train_dataloader(), or set sync: "
                    "ema, another anchor and recalibrate: false",
                )
            )
        if sampler is not None and sampler.costs.budget != k0:
            rank_zero_warn(
                f"SparseBalanceCallback trains around a budget of {k0}, and the SparsityAwareBatchSampler "
                f"plans with budget={sampler.costs.budget}. Pass budget={k0} to the sampler, so that it "
                "balances the times that the attention will take."
            )
        store = self.store
        self.tuner.curve = lambda length: store.curve(store.version, length)
        state = self.state
        if sampler is not None and sync == "plan":
            self._goals = PlanGoals(
                sampler,
                settings,
                k0,
                self._prices,
                self._base.sb_settings.block_size,
                num_windows=lambda: state.num_windows,
            )
        elif sync == "slot":
            meeting, prices = WindowSync.of(trainer), Prices.of(self._table)
            self._goals = SlotGoals(settings, meeting, prices, k0, self._lengths, state.num_windows)
        else:
            name = f"{settings.anchor} at {k0} by {self._table_digest}"
            if name != state.ema_of:
                state.ema_us, state.ema_of = None, name
            self._goals = EmaGoals(settings, self._lengths, state.ema_us, state.num_windows)
        self.tuner.checks_lengths = self._lengths is not None and not isinstance(self._goals, PlanGoals)

    def _prices(self, version: int) -> Prices:
        """Return the predicted times as they were known at a version of the sampler's store."""
        table, sampler = self._table, self.sampler
        if sampler is None or sampler.costs.table is not table:
            return Prices.of(table)
        return Prices(sampler.store.costs(version, table), table.fixed_ms)

    @property
    def store(self) -> BudgetStore:
        """Where budgets and coverage are learnt: the sampler's, if there is one."""
        if self.sampler is not None:
            return self.sampler.store
        if self.state.store is None:
            self.state.store = BudgetStore()
        return self.state.store

    # Micro-batches and windows.

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Find out what time the micro-batch is steered to."""
        start = time.perf_counter()
        self.tuner.goal = self._goals.goal(batch, batch_idx)
        self.tuner.prices = self._goals.prices or self.tuner.prices
        if self.sampler is not None:
            window = batch_idx // self.sampler.accumulate
            self._number = self.sampler.window_number(self.sampler.epoch, window)
            done = batch_idx + 1
            is_last = done % self.sampler.accumulate == 0 or done == len(self.sampler)
            self._ends_plan = self._is_automatic or is_last
        else:
            self._number = self.state.num_windows
        self.tuner.measures = self._number % MEASURE_EVERY == 0 or self.settings.granularity == "layer"
        self._own_s += time.perf_counter() - start

    def prediction(self) -> tuple[float, float] | None:
        """Return the predicted time in ms and the mean budget of the micro-batch at hand."""
        start = time.perf_counter()
        told = self.tuner.prediction()
        self._own_s += time.perf_counter() - start
        return told

    def fill(self, global_step: int) -> tuple[list[float], list[int]]:
        """Return this rank's part of the window that is over, for `WindowSync`."""
        start = time.perf_counter()
        outcomes = self.tuner.take()
        self._own_s += self.tuner.take_cost_s() + time.perf_counter() - start
        own_s, self._own_s = self._own_s, 0.0
        return encode_window(outcomes, capacity=self.capacity, points=self.points, tune_ms=1e3 * own_s)

    def learn(self, gathered: Gathered, step: int, is_whole: bool = True) -> WindowOutcome | None:
        """Take in a window that is over, on every rank alike; None if nothing was tuned in it.

        Args:
            gathered: What `fill` has returned on all ranks.
            step: Optimizer steps done.
            is_whole: Whether an optimizer step has ended it. A resumed run starts another anew, so nothing
                is learnt from that one.
        """
        start = time.perf_counter()
        window = decode_window(gathered, capacity=self.capacity, points=self.points)
        if is_whole:
            self._take_in(window, step)
        self._own_s += time.perf_counter() - start
        return window

    def _take_in(self, window: WindowOutcome | None, step: int) -> None:
        self.state.num_windows += 1
        if window is not None:
            self._goals.learn(window)
            self.state.ema_us = self._goals.ema_us
            if self._pending and self._pending_number != self._number:
                # The optimizer has not stepped at its end.
                self._update_store(step)
            self._pending.append(window)
            self._pending_number = self._number
            if self._ends_plan:
                self._update_store(step)

    def _update_store(self, step: int) -> None:
        """Take in a planned window, once: under manual optimization it may have had several steps."""
        windows, number = self._pending, self._pending_number + 1
        self._pending = []
        if number <= self.store.version or not any(window.ids for window in windows):
            return
        self.store.update(
            number,
            ids=[i for window in windows for i in window.ids],
            lengths=[n for window in windows for n in window.lengths],
            budgets=[b for window in windows for b in window.budgets],
            curves=np.concatenate([window.curves for window in windows]) if self.points else None,
            weights=np.concatenate([window.rows for window in windows]) if self.points else None,
        )
        if self._recalibration is not None and isinstance(self._goals, PlanGoals):
            # Into the version that is new: no rank has planned by it yet.
            self._recalibration.note(step, windows[-1], self._goals.cells)
            self._recalibration.learn(self.store, self._goals.table)

    def inputs(self) -> dict[str, Any]:
        """Return what all ranks must agree on to tune alike, for `WindowSync`."""
        sparse = self._base.sb_settings
        return {
            **asdict(self.settings),
            "k0": self.k0,
            "block_size": sparse.block_size,
            "dense_layers": sparse.dense_layers,
            "table": self._table_digest,
            "windows": self.state.num_windows,
            **self._goals.inputs(),
        }
