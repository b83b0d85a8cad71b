"""Operations of a training step, counted from the model's sizes."""

from __future__ import annotations

from sb_lightning.attention.pairs import attended_pairs, causal_pairs
from sb_lightning.latency.fingerprint import ModelShape

__all__ = ["step_flops"]


def step_flops(shape: ModelShape, length: int, budget: int) -> float:
    """Count the operations of forward and backward of one sequence.

    Two per weight and token forward and four backward; for each attended pair, head and dimension four
    forward and ten backward.

    Args:
        shape: The model's sizes.
        length: Tokens.
        budget: Blocks that a query attends in the layers with a budget.
    """
    heads = (2 * shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
    per_layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
    weights = (shape.layers + shape.dense_layers) * per_layer + shape.hidden_size * shape.vocab_size
    pairs = shape.layers * attended_pairs([length], budget, shape.block_size)
    pairs += shape.dense_layers * causal_pairs([length])
    return 6.0 * weights * length + 14.0 * pairs * shape.query_heads * shape.head_dim
