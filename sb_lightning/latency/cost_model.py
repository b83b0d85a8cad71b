"""Times of micro-batches and plans, kept true to what a run measures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from sb_lightning._messages import explain
from sb_lightning.latency.engine import EngineTable
from sb_lightning.latency.numeric import exp2, log2, to_fixed
from sb_lightning.latency.reference import whole_microseconds
from sb_lightning.latency.table import LatencyModel

__all__ = ["CostModel"]

STATE_VERSION = 1
NUM_BUCKETS = 63
"""Half-octaves of the length: bucket b is centred at log2(L) = b / 2."""
MOST_LOG2_FACTOR = 3.0
"""Measured times are believed up to 8 times the table's, and down to an eighth."""


class CostModel:
    """Predicted times of cells and plans, from a table and what was measured since.

    The table's times are multiplied by a factor per length bucket (half-octaves), linear in log2(L) between
    the buckets that have been measured and constant beyond. Each window moves the logarithm of a factor
    towards measured / predicted. The product is made monotone in the length again. All arithmetic gives the
    same bits on every machine, so ranks that are given the same measurements go on planning alike.

    Args:
        table: A `LatencyTable` or `AnalyticCost`.
        rate: Weight of the newest window, in (0, 1].

    Example:
        >>> from sb_lightning.latency import AnalyticCost, ModelShape
        >>> shape = ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=32, hidden_size=128,
        ...                    intermediate_size=384, vocab_size=2048, block_size=64)
        >>> model = CostModel(AnalyticCost(shape), rate=1.0)
        >>> before = model.cell_ms([4096], [8])
        >>> model.recalibrate([[4096]], [[8]], [before + 10.0])
        >>> before + 9 < model.cell_ms([4096], [8]) <= before + 10
        True
    """

    def __init__(self, table: LatencyModel, *, rate: float = 0.2) -> None:
        if not 0 < rate <= 1:
            raise ValueError(
                explain(f"rate is {rate}", "it is the newest window's weight", "pass a rate in (0, 1]")
            )
        self.table = table
        self.rate = rate
        self.version = 0
        """Number of windows that the factors come from."""
        self._log2_factors = [0.0] * NUM_BUCKETS
        self._seen = [False] * NUM_BUCKETS
        self.current: EngineTable = table
        """The table with the factors applied; it has all methods of a table and does not change."""

    @property
    def label(self) -> str:
        """Where the times come from."""
        return self.table.label + (f", recalibrated over {self.version} windows" if self.version else "")

    def predict(self, length: int, budget: int) -> float:
        """Return the time of one sequence through all layers, in ms."""
        return self.current.predict(length, budget)

    def cell_ms(self, lengths: Sequence[int], budgets: Sequence[int] | int) -> float:
        """Return the time of a micro-batch, its fixed cost included, in ms."""
        return self.current.micro_batch_ms(lengths, budgets)

    def cell_us(self, lengths: Sequence[int], budgets: Sequence[int] | int) -> int:
        """Return the time of a micro-batch in whole microseconds, as a planner adds it up.

        Each sequence and the fixed cost are rounded apart: a sequence that moves to another cell takes
        exactly its microseconds along.
        """
        rounded = self.current.predict_many_us(lengths, budgets)
        return whole_microseconds(self.table.fixed_ms) + int(rounded.sum())

    def plan_ms(
        self, lengths: Sequence[Sequence[Sequence[int]]], budgets: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[float]]:
        """Return the times of the cells of a plan, by rank and micro-batch, in ms.

        Args:
            lengths: `lengths[rank][micro_batch]` are the lengths of a cell's sequences.
            budgets: The same for the budgets.
        """
        return [
            [self.cell_ms(*cell) for cell in zip(*rank, strict=True)]
            for rank in zip(lengths, budgets, strict=True)
        ]

    def plan_us(
        self, lengths: Sequence[Sequence[Sequence[int]]], budgets: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[int]]:
        """Return the times of the cells of a plan in whole microseconds."""
        return [
            [self.cell_us(*cell) for cell in zip(*rank, strict=True)]
            for rank in zip(lengths, budgets, strict=True)
        ]

    def recalibrate(
        self,
        lengths: Sequence[Sequence[int]],
        budgets: Sequence[Sequence[int]],
        measured_ms: Sequence[float],
    ) -> None:
        """Take in the measured times of one window.

        The result does not depend on the order of the cells. A cell's ratio counts for the buckets of its
        sequences by their share of its predicted time.

        Args:
            lengths: Lengths of the sequences of each cell, over all ranks.
            budgets: Budgets that they used.
            measured_ms: Time of each cell, without waits.

        Raises:
            ValueError: A time is not a positive number, a cell is empty, or the numbers of cells differ.
        """
        _check_window(lengths, budgets, measured_ms)
        fixed_ms = self.table.fixed_ms
        moves: list[list[float]] = [[] for _ in range(NUM_BUCKETS)]
        shares: list[list[float]] = [[] for _ in range(NUM_BUCKETS)]
        for cell_lengths, cell_budgets, measured in zip(lengths, budgets, measured_ms, strict=True):
            times = self.current.predict_many(cell_lengths, cell_budgets).tolist()
            predicted = math.fsum(times)
            if predicted <= 0:
                continue
            # The fixed cost is not the sequences'; a cell faster than it says only that they are fast.
            ratio = max(measured - fixed_ms, predicted * 2.0**-MOST_LOG2_FACTOR) / predicted
            move = _clamp(log2(min(ratio, 2.0**60)))
            for length, time in zip(cell_lengths, times, strict=True):
                if length > 0:
                    share = time / (predicted + fixed_ms)
                    moves[_bucket(length)].append(share * move)
                    shares[_bucket(length)].append(share)
        factors = [self._factor_at(b / 2.0) for b in range(NUM_BUCKETS)]
        for b in range(NUM_BUCKETS):
            if shares[b]:
                total = math.fsum(shares[b])
                step = self.rate * min(1.0, total) * (math.fsum(moves[b]) / total)
                self._log2_factors[b] = _clamp(factors[b] + step)
        self._seen = [seen or bool(new) for seen, new in zip(self._seen, shares, strict=True)]
        self.version += 1
        self._apply()

    def factor(self, length: int) -> float:
        """Return what the table's times are multiplied by at a length, before they are made monotone."""
        return exp2(to_fixed(self._factor_at(log2(float(max(length, 1))))))

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, as plain numbers and lists."""
        return {
            "version": STATE_VERSION,
            "table": self._table_key(),
            "windows": self.version,
            "log2_factors": list(self._log2_factors),
            "seen": [int(seen) for seen in self._seen],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned.

        Factors of another table are dropped with a warning: they say nothing about this one.

        Raises:
            ValueError: The state is not one of this version, or holds impossible values.
        """
        factors, seen = state.get("log2_factors"), state.get("seen")
        windows = state.get("windows")
        good = (
            state.get("version") == STATE_VERSION
            and isinstance(windows, int)
            and windows >= 0
            and isinstance(factors, list)
            and isinstance(seen, list)
            and len(factors) == len(seen) == NUM_BUCKETS
            and all(isinstance(f, float) and abs(f) <= MOST_LOG2_FACTOR for f in factors)
            and all(s in (0, 1) for s in seen)
        )
        if not good:
            raise ValueError(
                explain(
                    f"the cost model's state (version {state.get('version')!r}) cannot be read",
                    f"this program reads version {STATE_VERSION} with {NUM_BUCKETS} finite factors",
                    "resume from another checkpoint, or without the cost model's state",
                )
            )
        if state.get("table") != self._table_key():
            warnings.warn(
                explain(
                    "the checkpoint's recalibration belongs to another latency table",
                    "its factors say nothing about this one and are dropped",
                    "resume with the table that the run started with to keep them",
                ),
                stacklevel=2,
            )
            return
        assert isinstance(windows, int)
        assert isinstance(factors, list)
        assert isinstance(seen, list)
        self.version, self._log2_factors, self._seen = windows, list(factors), [bool(s) for s in seen]
        self._apply()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "current"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._apply()

    def _apply(self) -> None:
        seen = [b for b in range(NUM_BUCKETS) if self._seen[b]]
        if seen:
            self.current = EngineTable.scaled(
                self.table, [b / 2.0 for b in seen], [self._log2_factors[b] for b in seen]
            )
        else:
            self.current = self.table

    def _factor_at(self, x: float) -> float:
        """Return the logarithm of the factor at log2 of a length."""
        seen = [b for b in range(NUM_BUCKETS) if self._seen[b]]
        if not seen:
            return 0.0
        above = next((n for n, b in enumerate(seen) if b / 2.0 > x), len(seen))
        if above == 0 or above == len(seen):
            return self._log2_factors[seen[max(above - 1, 0)]]
        low, high = seen[above - 1], seen[above]
        share = (x - low / 2.0) / ((high - low) / 2.0)
        return self._log2_factors[low] + (self._log2_factors[high] - self._log2_factors[low]) * share

    def _table_key(self) -> list[float]:
        """A few times that tell tables apart."""
        return [self.table.fixed_ms] + [self.table.predict(length, 1) for length in (64, 1024, 16384)]


def _bucket(length: int) -> int:
    return min(int(2.0 * log2(float(length)) + 0.5), NUM_BUCKETS - 1)


def _clamp(log2_factor: float) -> float:
    return min(max(log2_factor, -MOST_LOG2_FACTOR), MOST_LOG2_FACTOR)


def _check_window(
    lengths: Sequence[Sequence[int]], budgets: Sequence[Sequence[int]], measured_ms: Sequence[float]
) -> None:
    if not len(lengths) == len(budgets) == len(measured_ms) or not lengths:
        raise ValueError(
            explain(
                f"{len(lengths)} cells of lengths, {len(budgets)} of budgets, {len(measured_ms)} times",
                "each measured cell has all three, and a window has a cell",
                "pass one entry per cell in each list",
            )
        )
    for cell, (cell_lengths, measured) in enumerate(zip(lengths, measured_ms, strict=True)):
        if len(cell_lengths) == 0:
            raise ValueError(
                explain(f"lengths[{cell}] is empty", "no cell is empty", "leave out cells that did not run")
            )
        if not 0 < measured < math.inf:
            raise ValueError(
                explain(
                    f"measured_ms[{cell}] is {measured}",
                    "a cell takes a positive, finite time",
                    "pass the cell's time in milliseconds, without waits",
                )
            )
