"""Times from the model's shape alone, where nothing was measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from sb_lightning._messages import explain
from sb_lightning.attention.pairs import attended_pairs, causal_pairs
from sb_lightning.latency.fingerprint import ModelShape
from sb_lightning.latency.lattice import Curve, Measurements
from sb_lightning.latency.table import LatencyModel

__all__ = ["AnalyticCost"]


class AnalyticCost(LatencyModel):
    """Times from counted operations at typical rates; the same interface as `LatencyTable`.

    Attention is counted by its pairs (two products of D forward, five backward) and, where it is sparse, the
    scores of the gate; all other layers by their matrix products (twice forward's work in backward). Good to
    run without a profile and to compare with one; plans made from it are rougher.

    Args:
        shape: The model's sizes.
        attention_gflops: Rate of the attention, in 1e9 operations per second. The defaults are those of
            one core with 512-bit vectors in fp32; only their ratio matters to a plan.
        matmul_gflops: Rate of the matrix products.
        overhead_ms: Time that one layer takes however short the sequence, forward.
        micro_batch_ms: Fixed cost of a micro-batch.

    Raises:
        ValueError: A rate is not positive, an overhead is negative, or the model has no layer.

    Example:
        >>> shape = ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=32, hidden_size=128,
        ...                    intermediate_size=384, vocab_size=2048, block_size=64)
        >>> AnalyticCost(shape).label
        'analytic (no profile)'
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention_gflops: float = 60.0,
        matmul_gflops: float = 120.0,
        overhead_ms: float = 0.02,
        micro_batch_ms: float = 1.0,
    ) -> None:
        rates = {"attention_gflops": attention_gflops, "matmul_gflops": matmul_gflops}
        for name, rate in rates.items():
            if not 1.0 <= rate <= 1e9:
                raise ValueError(
                    explain(
                        f"{name} is {rate}",
                        "a rate lies within 1 and 1e9 Gflop/s",
                        f"pass a positive {name}, or leave it out",
                    )
                )
        self.shape = shape
        block = shape.block_size
        lengths = _lengths()
        budgets = [_budgets((length - 1) // block) for length in lengths]

        def attention(length: int, budget: int | None) -> tuple[float, float]:
            pairs = causal_pairs([length]) if budget is None else attended_pairs([length], budget, block)
            product = 2.0 * pairs * shape.query_heads * shape.head_dim / (attention_gflops * 1e6)
            blocks, rest = divmod(length, block)
            scores = block * blocks * (blocks - 1) // 2 + rest * blocks
            gate = 2.0 * scores * shape.query_heads * shape.head_dim / (matmul_gflops * 1e6)
            return overhead_ms + 2 * product + (0 if budget is None else gate), overhead_ms + 5 * product

        heads = (2 * shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
        layer = 2.0 * shape.hidden_size * (heads + 3 * shape.intermediate_size) / (matmul_gflops * 1e6)
        outside = 2.0 * shape.hidden_size * shape.vocab_size / (matmul_gflops * 1e6)
        super().__init__(
            Measurements(
                block_size=block,
                layers=shape.layers,
                dense_layers=shape.dense_layers,
                fixed_ms=micro_batch_ms,
                lengths=lengths,
                budgets=budgets,
                sparse=[
                    _curve(row, functools.partial(attention, length))
                    for length, row in zip(lengths, budgets, strict=True)
                ],
                dense=_curve(lengths, lambda length: attention(length, None)),
                rest=_curve(lengths, lambda n: (overhead_ms + layer * n, overhead_ms + 2 * layer * n)),
                outside=_curve(lengths, lambda n: (overhead_ms + outside * n, overhead_ms + 2 * outside * n)),
            ),
            "analytic (no profile)",
        )

    @classmethod
    def from_config(
        cls, config: Any, *, block_size: int, dense_layers: Sequence[int] = (), **rates: float
    ) -> AnalyticCost:
        """Build from a transformers configuration.

        Args:
            config: The configuration of a decoder.
            block_size: Keys per block.
            dense_layers: Layers that keep full attention.
            **rates: The keyword arguments of the class.
        """
        return cls(ModelShape.from_config(config, block_size=block_size, dense_layers=dense_layers), **rates)


def _lengths() -> list[int]:
    """Half-octaves up to 131,072; what is longer follows the pairs, as it would here."""
    return sorted({round(2 ** (step / 2)) for step in range(35)})


def _budgets(most: int) -> list[int]:
    return sorted({min(round(2 ** (step / 2)), most) for step in range(64)} - {0}) if most > 0 else []


def _curve(points: Sequence[int], passes: Callable[[int], tuple[float, float]]) -> Curve:
    pairs = [passes(point) for point in points]
    return [[forward for forward, _ in pairs], [backward for _, backward in pairs]]
