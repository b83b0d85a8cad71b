"""What sequences are expected to cost: a table's times at the budgets expected, and FLOPs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sb_lightning._messages import explain
from sb_lightning.balance.budget_store import BudgetStore
from sb_lightning.latency.analytic import AnalyticCost
from sb_lightning.latency.fingerprint import ModelShape
from sb_lightning.latency.flops import step_flops
from sb_lightning.latency.table import LatencyModel, LatencyTable

__all__ = ["GENERIC_SHAPE", "SequenceCosts", "latency_model"]

GENERIC_SHAPE = ModelShape(
    layers=24,
    query_heads=14,
    kv_heads=2,
    head_dim=64,
    hidden_size=896,
    intermediate_size=4864,
    vocab_size=151936,
    block_size=128,
)
"""Where nothing is known of the model: the sizes of Qwen2.5-0.5B."""


def latency_model(latency: LatencyModel | str | Path | None) -> LatencyModel:
    """Return what predicts times: what is given, the table in a file, or counted operations.

    Raises:
        ValueError: There is no such file, or it is damaged.
        TypeError: It is none of these.
    """
    if latency is None:
        return AnalyticCost(GENERIC_SHAPE)
    if isinstance(latency, (str, Path)):
        if not Path(latency).exists():
            raise ValueError(
                explain(
                    f"latency is '{latency}'",
                    "there is no such file",
                    "write a table with `sb profile --output`, or pass AnalyticCost(shape)",
                )
            )
        return LatencyTable.load(latency)
    if not isinstance(latency, LatencyModel):
        raise TypeError(
            explain(
                f"latency is a {type(latency).__name__}",
                "the planner asks a latency table for times",
                "pass a LatencyTable, an AnalyticCost, the path of a table, or None",
            )
        )
    return latency


class SequenceCosts:
    """Costs of sequences at the budgets expected for them.

    Args:
        table: Predicts times.
        budget: k0, the budget where nothing is tuned; None for full attention.
        store: Budgets expected, if anybody learns them.
    """

    def __init__(self, table: LatencyModel, *, budget: int | None, store: BudgetStore) -> None:
        if budget is not None and budget < 1:
            raise ValueError(
                explain(
                    f"budget is {budget}",
                    "a query attends its own block at least",
                    "pass a budget >= 1, or None for full attention",
                )
            )
        self.table = table
        self.budget = budget
        self.store = store

    @property
    def overhead_ms(self) -> float:
        """Fixed cost of a micro-batch."""
        return self.table.fixed_ms

    def base_budgets(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return k0 of each sequence; with full attention, as many blocks as it has # [n]."""
        if self.budget is not None:
            return np.full(len(lengths), self.budget, dtype=np.int64)
        return np.maximum(-(-lengths // self.table.block_size), 1)

    def budgets(self, version: int, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the budget expected for each sequence, in whole blocks # [n]."""
        base = self.base_budgets(lengths)
        if self.budget is None:
            return base
        expected = self.store.expected(version, ids=ids, lengths=lengths, base=base)
        return np.floor(expected + 0.5).astype(np.int64)

    def times_ms(
        self, version: int, lengths: NDArray[np.int64], budgets: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the predicted time of each sequence through all layers # [n]."""
        return np.asarray(self.store.costs(version, self.table).predict_many(lengths, budgets))

    def flops(self, lengths: Sequence[int], budgets: Sequence[int]) -> list[float]:
        """Return the operations of each sequence, forward and backward."""
        shape = self.shape
        return [step_flops(shape, *pair) for pair in zip(lengths, budgets, strict=True)]

    @property
    def shape(self) -> ModelShape:
        """The model that the table is about; a generic one if it does not say."""
        found = getattr(self.table, "shape", None) or getattr(self.table, "fingerprint", None)
        return found if isinstance(found, ModelShape) else GENERIC_SHAPE

    @property
    def is_generic(self) -> bool:
        """Whether that is a model of usual size, because nothing is known of the user's."""
        return replace(self.shape, block_size=GENERIC_SHAPE.block_size) == GENERIC_SHAPE

    @property
    def model(self) -> str:
        """The model and its attention in a few words."""
        shape = self.shape
        attention = "full attention"
        if self.budget is not None and shape.layers:
            attention = f"budget {self.budget} blocks of {shape.block_size} keys"
            if shape.dense_layers:
                attention += f" in {shape.layers} of them"
        return f"{shape.layers + shape.dense_layers} layers of width {shape.hidden_size}, {attention}"

    def digest(self) -> str:
        """Return a short name of what predicts the times: equal where plans will be."""
        content = f"{self.table.measurements!r} {self.budget} {self.shape!r}"
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
