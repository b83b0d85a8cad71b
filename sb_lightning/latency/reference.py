"""`LatencyTable` in plain Python: the twin of csrc/latency/table.h, bit for bit, and slow.

It is the oracle of the tests, and serves where the C++ module is not built.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb_lightning._messages import explain
from sb_lightning.latency.lattice import (
    MAX_LENGTH,
    Curve,
    Measurements,
    build_lattice,
    scale_lattice,
)
from sb_lightning.latency.numeric import WEIGHT_ONE, blend, exp2

__all__ = ["LatencyTable", "whole_microseconds"]

Integers = int | Sequence[int] | npt.NDArray[np.integer[Any]]


def whole_microseconds(ms: float) -> int:
    """Return whole microseconds, halves upward, at most 9e18.

    Example:
        >>> whole_microseconds(0.0125), whole_microseconds(0.0124)
        (13, 12)
    """
    return math.floor(min(ms * 1000.0, 9e18) + 0.5)


class LatencyTable:
    """Predicted times in milliseconds, monotone in the length and in the budget.

    Lengths lie in [0, 2**31 - 1] and an empty sequence takes no time; budgets are at least 1.
    """

    def __init__(
        self,
        block_size: int,
        layers: int,
        dense_layers: int,
        fixed_ms: float,
        lengths: Sequence[int],
        budgets: Sequence[Sequence[int]],
        sparse: Sequence[Curve],
        dense: Curve,
        rest: Curve,
        outside: Curve,
    ) -> None:
        self.block_size = block_size
        self.layers = layers
        self.dense_layers = dense_layers
        self.fixed_ms = fixed_ms
        self.extrapolated = 0
        """Predictions asked for outside the measured lengths or below the measured budgets."""
        self._measured = lengths[0], lengths[-1]
        self._lattice = build_lattice(
            Measurements(
                block_size=block_size,
                layers=layers,
                dense_layers=dense_layers,
                fixed_ms=fixed_ms,
                lengths=lengths,
                budgets=budgets,
                sparse=sparse,
                dense=dense,
                rest=rest,
                outside=outside,
            )
        )

    @property
    def correction(self) -> float:
        """Largest relative change that made the measurements monotone."""
        return self._lattice.correction

    @property
    def mean_correction(self) -> float:
        """Mean relative change that made the measurements monotone."""
        return self._lattice.mean_correction

    def predict(self, length: int, budget: int) -> float:
        """Return forward and backward of one sequence through all layers, without the fixed cost.

        Raises:
            ValueError: The length is outside [0, 2**31 - 1] or the budget below 1.
        """
        attention, fixed, _, _ = self._parts(length, budget)
        return float(self.layers) * attention + fixed

    def predict_us(self, length: int, budget: int) -> int:
        """Return the prediction in whole microseconds."""
        return whole_microseconds(self.predict(length, budget))

    def predict_passes(self, length: int, budget: int) -> tuple[float, float]:
        """Return the prediction as forward and backward."""
        attention, fixed, share, fixed_share = self._parts(length, budget)
        attention = float(self.layers) * attention
        forward = attention * share + fixed * fixed_share
        return forward, attention + fixed - forward

    def predict_many(self, lengths: Integers, budgets: Integers) -> npt.NDArray[np.float64]:
        """Return the prediction of each sequence; one budget may serve all."""
        pairs = _pairs(lengths, budgets)
        return np.array([self.predict(length, budget) for length, budget in pairs], dtype=np.float64)

    def predict_many_us(self, lengths: Integers, budgets: Integers) -> npt.NDArray[np.int64]:
        """Return the prediction of each sequence in whole microseconds."""
        pairs = _pairs(lengths, budgets)
        return np.array([self.predict_us(length, budget) for length, budget in pairs], dtype=np.int64)

    def attention_ms(self, length: int, budget: int) -> float:
        """Return forward and backward of the attention of one layer."""
        return self._parts(length, budget)[0]

    def attention_passes(self, length: int, budget: int) -> tuple[float, float]:
        """Return the attention of one layer as forward and backward."""
        attention, _, share, _ = self._parts(length, budget)
        return attention * share, attention - attention * share

    def budget_within(self, length: int, ms: float) -> int:
        """Return the largest budget whose prediction is within `ms`, or 0.

        Raises:
            ValueError: `ms` is not a number, or the length is out of range.
        """
        _check_length(length)
        if math.isnan(ms):
            raise ValueError(
                explain("ms is nan", "no budget can be compared with it", "pass a time in milliseconds")
            )
        if length == 0:
            return int(ms >= 0)
        blocks = -(-length // self.block_size)
        self._count(length, blocks)
        low, high = 0, blocks + 1
        while high - low > 1:
            middle = (low + high) // 2
            attention, fixed, _, _ = self._read(length, middle)
            low, high = (middle, high) if float(self.layers) * attention + fixed <= ms else (low, middle)
        return low

    def micro_batch_ms(self, lengths: Integers, budgets: Integers) -> float:
        """Return the sum of the predictions and the fixed cost of a micro-batch."""
        total = self.fixed_ms
        for length, budget in _pairs(lengths, budgets):
            total += self.predict(length, budget)
        return total

    def cost_us(self, length: int, max_budget: int) -> npt.NDArray[np.int32]:
        """Return the predictions at budgets 1 to `max_budget` in whole microseconds, at most 2**31 - 1."""
        _check_length(length)
        _check_budget(max_budget)
        blocks = -(-length // self.block_size)
        if length:
            self._count(length, blocks)
        costs = [0] * max_budget
        for k in range(1, max_budget + 1):
            if k <= blocks:
                attention, fixed, _, _ = self._read(length, k)
                costs[k - 1] = min(whole_microseconds(float(self.layers) * attention + fixed), 2**31 - 1)
            elif k > 1:
                costs[k - 1] = costs[k - 2]
        return np.array(costs, dtype=np.int32)

    def scaled(self, log2_lengths: Sequence[float], log2_factors: Sequence[float]) -> LatencyTable:
        """Return the same table with every time multiplied by 2**factor.

        Args:
            log2_lengths: Ascending; factors are linear between them and constant beyond.
            log2_factors: One for each; within +-8.

        Raises:
            ValueError: The lists do not fit.
        """
        good = 0 < len(log2_lengths) == len(log2_factors)
        good = good and all(abs(x) <= 64 for x in log2_lengths) and all(abs(f) <= 8 for f in log2_factors)
        if not good or any(a >= b for a, b in itertools.pairwise(log2_lengths)):
            raise ValueError(
                explain(
                    "the factors cannot be applied",
                    "each needs its own log2 length, ascending, and lies within 2^-8 and 2^8",
                    "pass two lists of the same length",
                )
            )
        table = LatencyTable.__new__(LatencyTable)
        table.block_size, table.layers, table.dense_layers = self.block_size, self.layers, self.dense_layers
        table.fixed_ms, table.extrapolated, table._measured = self.fixed_ms, 0, self._measured
        table._lattice = scale_lattice(self._lattice, log2_lengths, log2_factors)
        return table

    def _parts(self, length: int, budget: int) -> tuple[float, float, float, float]:
        _check_length(length)
        _check_budget(budget)
        if length == 0:
            return 0.0, 0.0, 0.0, 0.0
        self._count(length, budget)
        return self._read(length, budget)

    def _read(self, length: int, budget: int) -> tuple[float, float, float, float]:
        """Return attention of one layer, all that no budget changes, and the forward shares of the two."""
        lattice = self._lattice
        i, weight = lattice.row_at(length)
        a, b, near = lattice.rows[i], lattice.rows[i + 1], weight * 2.0**-20
        low_ms, high_ms = exp2(a.fixed), exp2(b.fixed)
        fixed = min(low_ms + (high_ms - low_ms) * near, high_ms)
        fixed_share = a.fixed_share + (b.fixed_share - a.fixed_share) * near
        reach = budget * self.block_size
        if reach >= length:
            share = a.dense_share + (b.dense_share - a.dense_share) * near
            return exp2(blend(a.dense, b.dense, weight)), fixed, share, fixed_share
        j, along = lattice.knot_at(budget)

        def value(row: Any) -> tuple[int, float]:
            last = len(row.values) - 1
            j0, j1 = min(j, last), min(j + 1, last)
            share = row.shares[j0] + (row.shares[j1] - row.shares[j0]) * (along * 2.0**-20)
            return blend(row.values[j0], row.values[j1], along), share

        (low, low_share), (high, high_share) = value(a), value(b)
        # A sequence costs no less than its first budget * block_size tokens alone, which are dense.
        time = max(blend(low, high, weight), lattice.dense_at(reach))
        return exp2(time), fixed, low_share + (high_share - low_share) * near, fixed_share

    def _count(self, length: int, budget: int) -> None:
        shortest, longest = self._measured
        i, weight = self._lattice.row_at(length)
        row = self._lattice.rows[i]
        if weight == 0:
            least = row.least_here
        elif weight == WEIGHT_ONE:
            least = self._lattice.rows[i + 1].least_here
        else:
            least = row.least_above
        below = budget < least and budget * self.block_size < length
        self.extrapolated += not shortest <= length <= longest or below


def _check_length(length: int) -> None:
    if not 0 <= length <= MAX_LENGTH:
        raise ValueError(
            explain(
                f"length is {length}",
                "a sequence has 0 to 2147483647 tokens",
                "pass the number of tokens of one sequence",
            )
        )


def _check_budget(budget: int) -> None:
    if budget < 1:
        raise ValueError(
            explain(f"budget is {budget}", "a query always attends its own block", "pass budget >= 1")
        )


def _pairs(lengths: Integers, budgets: Integers) -> list[tuple[int, int]]:
    flat = []
    for name, given in (("lengths", lengths), ("budgets", budgets)):
        values = np.asarray(given)
        if values.size and values.dtype.kind not in "iu":
            raise TypeError(
                explain(
                    f"{name} holds other things than integers",
                    "tokens and blocks are counted",
                    "pass whole numbers, as a list or an array",
                )
            )
        if values.ndim > 1:
            raise ValueError(
                explain(
                    f"{name} has {values.ndim} dimensions",
                    "it holds one number per sequence",
                    "pass a flat list",
                )
            )
        flat.append(values)
    n = flat[0].size
    if flat[1].ndim and flat[1].size != n:
        raise ValueError(
            explain(
                f"{flat[1].size} budgets for {n} lengths",
                "each sequence has exactly one budget",
                "pass one budget for all, or as many budgets as lengths",
            )
        )
    budget_list = flat[1].tolist() if flat[1].ndim else [flat[1].item()] * n
    return list(zip(np.atleast_1d(flat[0]).tolist(), budget_list, strict=True))
