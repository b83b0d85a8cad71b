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


def _coverage_flops(
    q: Any,
    k: Any,
    cu: Any,
    block_size: int,
    max_seqlen: int,
    max_rank: int,
    row_stride: int = 64,
    *_: Any,
    **__: Any,
) -> int:
    """Count one product of the sampled rows with the means of earlier blocks; an upper bound, as above."""
    count, rest = divmod(q[0], max(max_seqlen, 1))
    longest, last = (_sampled_pairs(length, block_size, row_stride) for length in (max_seqlen, rest))
    return int(2 * q[1] * q[2] * (count * longest + last))


def _sampled_pairs(length: int, block_size: int, row_stride: int) -> int:
    """Count the pairs of a sampled row and an earlier block."""
    ends = [min(begin + block_size, length) for begin in range(block_size, length, block_size)]
    rows = (
        (end - 1) // row_stride - (block * block_size - 1) // row_stride + ((end - 1) % row_stride != 0)
        for block, end in enumerate(ends, start=1)
    )
    return sum(block * count for block, count in enumerate(rows, start=1))


def _budget_flops(*_: Any, **__: Any) -> int:
    """Whole numbers are compared, nothing else."""
    return 0


def register_flops() -> None:
    """Register the formulas once the extension has defined the ops."""
    register_flop_formula(torch.ops.sb.moba_attention)(_attention_flops)
    register_flop_formula(torch.ops.sb.moba_forward)(_forward_flops)
    register_flop_formula(torch.ops.sb.moba_backward)(_backward_flops)
    register_flop_formula(torch.ops.sb.moba_coverage)(_coverage_flops)
    register_flop_formula(torch.ops.sb.moba_budget)(_budget_flops)
