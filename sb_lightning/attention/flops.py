"""FLOP formulas of the ops, for torch.utils.flop_counter: upper bounds, from shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from sb_lightning.attention.pairs import attended_pairs

__all__ = ["register_flops"]


def _most_pairs(tokens: int, max_seqlen: int, budget: int, block_size: int) -> int:
    """Bound the attended pairs of one head: sequences as long as they may be, all at `budget`."""
    count, rest = divmod(tokens, max(max_seqlen, 1))
    longest, last = (attended_pairs([length], budget, block_size) for length in (max_seqlen, rest))
    return count * longest + last


def _attention_flops(
    q: Any,
    k: Any,
    v: Any,
    cu: Any,
    budget: Any,
    block_size: int,
    max_seqlen: int,
    max_budget: int,
    *_: Any,
    **__: Any,
) -> int:
    """Count two products of the pairs; an upper bound, by `max_budget` and `max_seqlen` alone."""
    return 4 * int(q[1] * q[2]) * _most_pairs(q[0], max_seqlen, max_budget, block_size)


def _forward_flops(
    q: Any,
    k: Any,
    v: Any,
    selection: Any,
    ptr: Any,
    rows: Any,
    cu: Any,
    budget: Any,
    block_size: int,
    max_seqlen: int,
    *_: Any,
    **__: Any,
) -> int:
    """Count two products of the pairs; an upper bound, as above."""
    return 4 * int(q[1] * q[2]) * _most_pairs(q[0], max_seqlen, selection[2] + 1, block_size)


def _backward_flops(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    selection: Any,
    ptr: Any,
    rows: Any,
    cu: Any,
    budget: Any,
    block_size: int,
    max_seqlen: int,
    *_: Any,
    **__: Any,
) -> int:
    """Count five products of the pairs; an upper bound, as above."""
    return 10 * int(q[1] * q[2]) * _most_pairs(q[0], max_seqlen, selection[2] + 1, block_size)


def register_flops() -> None:
    """Register the formulas once the extension has defined the ops."""
    register_flop_formula(torch.ops.sb.moba_attention)(_attention_flops)
    register_flop_formula(torch.ops.sb.moba_forward)(_forward_flops)
    register_flop_formula(torch.ops.sb.moba_backward)(_backward_flops)
