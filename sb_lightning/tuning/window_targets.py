"""The time that each micro-batch of a window is steered to, from the lengths of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sb_lightning.latency.reference import whole_microseconds
from sb_lightning.tuning.anchors import Anchor, anchor_latency

if TYPE_CHECKING:
    from sb_lightning.latency.table import LatencyModel

__all__ = ["CellGoal", "Prices", "anchor_of"]


@dataclass(frozen=True, kw_only=True)
class CellGoal:
    """What is known of one micro-batch before it runs."""

    tau_us: int | None
    """Time that it is steered to, fixed cost included; None: nothing is tuned."""
    lengths: tuple[int, ...] = ()
    """Tokens of its sequences, in order, if they are known beforehand."""
    ids: tuple[int, ...] = ()
    """A number for each sequence that stays the same, if there is one."""
    budgets: tuple[int, ...] = ()
    """Budgets that are chosen already, if they are."""
    is_padding: bool = False
    """It repeats a sequence so that all ranks run equally many."""


class Prices:
    """Predicted times in whole microseconds: what ranks compare must be whole numbers.

    Args:
        table: Predicts times; a table with factors applied will do.
        fixed_ms: Fixed cost of a micro-batch.
    """

    def __init__(self, table: Any, fixed_ms: float) -> None:
        self.table = table
        self.fixed_us = whole_microseconds(fixed_ms)

    @classmethod
    def of(cls, table: LatencyModel) -> Prices:
        """Take the times of a table as they are."""
        return cls(table, table.fixed_ms)

    def cell_us(self, lengths: Sequence[int], budgets: Sequence[int] | int) -> int:
        """Return the time of a micro-batch, its fixed cost included, as `CostModel.cell_us` does."""
        return self.fixed_us + int(self.table.predict_many_us(list(lengths), budgets).sum())

    def rows(self, lengths: Sequence[int], max_budget: int) -> NDArray[np.int32]:
        """Return the time of each sequence at budgets 1 to `max_budget` # [n, max_budget]."""
        rows = [self.table.cost_us(length, max_budget) for length in lengths]
        return np.stack(rows) if rows else np.zeros((0, max_budget), dtype=np.int32)


def anchor_of(least: int, total: int, most: int, count: int, anchor: Anchor) -> int:
    """Return the anchor of times of which only these sums are known.

    Example:
        >>> anchor_of(100, 701, 400, 3, "mean") == anchor_latency([100, 400, 201], "mean")
        True
    """
    if anchor == "mean":
        return (2 * total + count) // (2 * count)
    return anchor_latency([least, most], anchor)
