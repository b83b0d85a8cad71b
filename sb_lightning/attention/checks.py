"""Checks of what users pass to the attention functions; each error names the argument."""

from __future__ import annotations

import itertools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from sb_lightning._messages import explain
from sb_lightning.attention.autocast import autocast_runs, dtype_in_kernel

__all__ = [
    "SUPPORTED_DTYPES",
    "SUPPORTED_HEAD_DIMS",
    "check_block_size",
    "check_bound",
    "check_budget",
    "check_kernel_limits",
    "check_layout",
    "check_values",
    "expand_budget",
    "read_values",
    "trust_bounds",
]

SUPPORTED_HEAD_DIMS = (32, 64, 128)
"""Head dimensions of the kernels."""
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the kernels."""
MAX_BLOCKS = 32767
"""Most blocks of a sequence: block numbers are int16."""
INT32_MAX = 2**31 - 1

_HOW_BOUNDS = "pass cu_seqlens = cumulative sum of the sequence lengths, with 0 in front, as int32"


def _check_integer(name: str, value: object, why: str, change: str) -> None:
    """Refuse what is no integer; a tensor of one integer passes for one, as `operator.index` has it.

    Raises:
        TypeError: It is not.
    """
    whole = hasattr(type(value), "__index__") and not isinstance(value, bool)
    if whole and not torch.compiler.is_compiling():
        try:
            operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            whole = False
    if not whole:
        shown = f" of {value.dtype}" if isinstance(value, Tensor) else ""
        raise TypeError(explain(f"{name} is a {type(value).__name__}{shown}", why, change))


def check_bound(name: str, bound: int | None) -> None:
    """Refuse a `max_seqlen` or `max_budget` that is neither an integer nor None.

    Raises:
        TypeError: It is neither.

    Example:
        >>> check_bound("max_seqlen", 1024)
    """
    if bound is not None:
        _check_integer(
            name, bound, "it is a bound of whole numbers", f"pass {name} as an int, or leave it out"
        )


def check_block_size(block_size: int) -> None:
    """Refuse a block size that is not a positive multiple of 16.

    Raises:
        TypeError: It is no integer.
        ValueError: It is not such a multiple, or beyond 32 bits.

    Example:
        >>> check_block_size(64)
    """
    _check_integer("block_size", block_size, "it counts keys", "pass an int, such as block_size=64")
    if block_size > INT32_MAX:
        raise ValueError(
            explain(
                f"block_size is {block_size}",
                "no sequence is that long: token numbers have 32 bits",
                "pass a block_size below 2^31, such as 64",
            )
        )
    if block_size < 16 or block_size % 16 != 0:
        raise ValueError(
            explain(
                f"block_size is {block_size}",
                "the kernels work in steps of 16 keys",
                "pass a positive multiple of 16, such as block_size=64",
            )
        )


def check_budget(budget: int) -> None:
    """Refuse a budget below 1.

    Raises:
        TypeError: The budget is no integer.
        ValueError: It is below 1.

    Example:
        >>> check_budget(8)
    """
    _check_integer(
        "budget",
        budget,
        "it counts blocks",
        "pass an int, or an int32 tensor that broadcasts to [sequences, query heads]",
    )
    if budget < 1:
        raise ValueError(
            explain(
                f"budget is {budget}",
                "a query always attends its own block, so the budget counts at least 1",
                "pass budget >= 1 (1 attends the own block only)",
            )
        )


def check_layout(q: Tensor, k: Tensor, v: Tensor | None, cu_seqlens: Tensor) -> None:
    """Check shapes, dtypes and devices.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: The shapes, dtypes or devices do not fit together.
    """
    named = {"q": q, "k": k, "cu_seqlens": cu_seqlens} | ({} if v is None else {"v": v})
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(
                explain(f"{name} is a {type(x).__name__}", "the attention runs on tensors", "pass a tensor")
            )
        if x.device != q.device:
            raise ValueError(
                explain(
                    f"{name} is on {x.device} and q on {q.device}",
                    "one device runs the attention",
                    f"move {name} to {q.device}",
                )
            )
    for name in ("q", "k", "v"):
        x = named.get(name, q)
        if x.dim() != 3:
            raise ValueError(
                explain(
                    f"{name} has shape {tuple(x.shape)}",
                    "sequences are packed one after another, without a batch dimension",
                    f"pass {name} as [tokens, heads, head_dim]",
                )
            )
        if x.shape[0] != q.shape[0]:
            raise ValueError(
                explain(
                    f"{name} has {x.shape[0]} tokens and q has {q.shape[0]}",
                    "every query is also a key of its sequence: attention over a cache of earlier keys "
                    "(q_len != k_len) is not defined here",
                    "pass q, k and v of the same tokens, and use dense attention for decoding",
                )
            )
        if x.shape[2] != q.shape[2]:
            raise ValueError(
                explain(
                    f"{name} has head_dim {x.shape[2]} and q has {q.shape[2]}",
                    "all three share one head dimension",
                    "make the last dimension of q, k and v equal",
                )
            )
        if dtype_in_kernel(x) != dtype_in_kernel(q) and autocast_runs(q.device.type):
            odd = next(n for n in ("q", "k", "v") if dtype_in_kernel(named[n]) == named[n].dtype)
            raise ValueError(
                explain(
                    f"{odd} is {named[odd].dtype}",
                    "that dtype is not supported under torch.autocast, which leaves it as it is",
                    f"convert {odd} to float32, bfloat16 or float16",
                )
            )
        if dtype_in_kernel(x) != dtype_in_kernel(q):
            raise ValueError(
                explain(
                    f"{name} is {x.dtype} and q is {q.dtype}",
                    "the kernels take one dtype",
                    "convert q, k and v to the same dtype, or run under torch.autocast",
                )
            )
    if v is not None and v.shape[1] != k.shape[1]:
        raise ValueError(
            explain(
                f"v has {v.shape[1]} heads and k has {k.shape[1]}",
                "every key has one value",
                "pass k and v with the same number of heads",
            )
        )
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            explain(
                f"q has {q.shape[1]} heads and k has {k.shape[1]}",
                "every KV head serves the same number of query heads",
                "make the number of query heads a multiple of the number of KV heads",
            )
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            explain(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}",
                "it holds where each sequence starts, and the end",
                _HOW_BOUNDS,
            )
        )


def check_kernel_limits(q: Tensor) -> None:
    """Check what the kernels, but not the reference, limit.

    Raises:
        ValueError: The head dimension or dtype is none of theirs.
    """
    if q.shape[2] not in SUPPORTED_HEAD_DIMS:
        raise ValueError(
            explain(
                f"head_dim is {q.shape[2]}",
                f"the kernels are built for {', '.join(map(str, SUPPORTED_HEAD_DIMS))}",
                "choose one of those, or pass backend='reference' (plain torch, slow)",
            )
        )
    if dtype_in_kernel(q) not in SUPPORTED_DTYPES:
        raise ValueError(
            explain(
                f"q is {q.dtype}",
                "the kernels run float32, bfloat16 and float16",
                "convert q, k and v, or pass backend='reference' (plain torch, slow)",
            )
        )


def expand_budget(budget: int | Tensor, num_sequences: int, num_heads: int, device: torch.device) -> Tensor:
    """Return the budget as int32 # [N, Hq], a copy: the backward reads it, whatever became of the caller's.

    Raises:
        TypeError: It is neither an int nor a tensor.
        ValueError: It is an int below 1, or a tensor of another dtype, device or shape.
    """
    if not isinstance(budget, Tensor):
        check_budget(budget)
        value = min(operator.index(budget), INT32_MAX)
        return torch.full((num_sequences, num_heads), value, dtype=torch.int32, device=device)
    change = (
        f"pass an int, or an int32 tensor on {device} that broadcasts to "
        f"[sequences, query heads] = [{num_sequences}, {num_heads}]"
    )
    if budget.dtype != torch.int32 or budget.device != device:
        raise ValueError(
            explain(f"budget is {budget.dtype} on {budget.device}", "the kernels read it as int32", change)
        )
    wanted = (num_sequences, num_heads)
    fits = budget.dim() <= 2 and all(
        have in (1, want) for have, want in zip(reversed(budget.shape), reversed(wanted), strict=False)
    )
    if not fits:
        raise ValueError(
            explain(
                f"budget has shape {tuple(budget.shape)}",
                "there is one budget per sequence and query head",
                change,
            )
        )
    return budget.expand(wanted).clone(memory_format=torch.contiguous_format)


def check_values(
    tokens: int,
    group: int,
    cu_seqlens: Tensor,
    budget: Tensor,
    block_size: int,
    max_seqlen: int | None,
    max_budget: int | None,
) -> tuple[int, int]:
    """Return `max_seqlen` and `max_budget` of `read_values`, which also says whether all is dense."""
    values = read_values(tokens, group, cu_seqlens, budget, block_size, max_seqlen, max_budget)
    return values.max_seqlen, values.max_budget


class Values(NamedTuple):
    """What the host knows of the lengths and budgets of a call."""

    max_seqlen: int
    """Bound of the lengths."""
    max_budget: int
    """Bound of the budgets, at most the blocks of the longest sequence."""
    is_dense: bool
    """Whether every query attends all earlier keys of its sequence."""


def trust_bounds(
    tokens: int, group: int, budget: int | None, block_size: int, max_seqlen: int, max_budget: int | None
) -> Values | None:
    """Take the bounds from the caller without reading a tensor; None where they do not do or contradict.

    Args:
        tokens: All tokens.
        group: Query heads per KV head.
        budget: That of all sequences; None where it is a tensor.
        block_size: Keys per block.
        max_seqlen: Bound of the lengths.
        max_budget: Bound of the budgets; None takes `budget`.

    Example:
        >>> trust_bounds(1000, 1, 4, 64, 256, None)
        Values(max_seqlen=256, max_budget=4, is_dense=True)
    """
    longest = min(max_seqlen, tokens)
    num_blocks = -(-longest // block_size)
    most = budget if max_budget is None else max_budget
    if most is None or most < 1 or longest < min(1, tokens):
        return None
    if num_blocks > MAX_BLOCKS or longest * group > INT32_MAX:
        return None
    used = None if budget is None else min(budget, num_blocks)
    if used is not None and used > most:
        return None
    return Values(max_seqlen, max(1, min(most, num_blocks)), used == num_blocks)


def read_values(
    tokens: int,
    group: int,
    cu_seqlens: Tensor,
    budget: Tensor,
    block_size: int,
    max_seqlen: int | None,
    max_budget: int | None,
) -> Values:
    """Check what can only be seen by reading the tensors.

    This waits for the device once. `max_budget` is cut to the blocks of the longest sequence, since
    it sizes the selection.

    Raises:
        ValueError: `cu_seqlens` does not cover the tokens, a sequence has too many blocks, a budget is
            below 1, or `max_seqlen` or `max_budget` is below what the tensors hold.
    """
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(
            explain(f"cu_seqlens starts at {bounds[0]}", "the first sequence starts at token 0", _HOW_BOUNDS)
        )
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if any(length < 0 for length in lengths):
        where = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(
            explain(
                f"cu_seqlens decreases at position {where + 1} ({bounds[where]} to {bounds[where + 1]})",
                "a length cannot be negative",
                _HOW_BOUNDS,
            )
        )
    if bounds[-1] != tokens:
        raise ValueError(
            explain(
                f"cu_seqlens ends at {bounds[-1]} and q has {tokens} tokens",
                "every token belongs to a sequence",
                _HOW_BOUNDS,
            )
        )
    longest = max(lengths, default=0)
    if max_seqlen is None:
        max_seqlen = longest
    elif max_seqlen < longest:
        raise ValueError(
            explain(
                f"max_seqlen is {max_seqlen} and a sequence has {longest} tokens",
                "max_seqlen must bound every length",
                f"pass max_seqlen >= {longest}, or leave it out",
            )
        )
    num_blocks = -(-longest // block_size)
    if num_blocks > MAX_BLOCKS:
        raise ValueError(
            explain(
                f"block_size is {block_size} and a sequence has {longest} tokens",
                f"that is {num_blocks} blocks, and block numbers are 16-bit (at most {MAX_BLOCKS})",
                f"pass block_size >= {(-(-longest // MAX_BLOCKS) + 15) // 16 * 16}",
            )
        )
    if longest * group > INT32_MAX:
        raise ValueError(
            explain(
                f"cu_seqlens holds a sequence of {longest} tokens, with {group} query heads per KV head",
                "tokens times query heads per KV head must stay below 2^31",
                "cut the sequence",
            )
        )
    most, is_dense = _check_budget_values(lengths, budget, block_size, num_blocks, max_budget)
    return Values(max_seqlen, most, is_dense)


def _check_budget_values(
    lengths: list[int], budget: Tensor, block_size: int, num_blocks: int, max_budget: int | None
) -> tuple[int, bool]:
    """Check the budgets; return the largest that any sequence can use, and whether each covers all blocks."""
    if max_budget is not None and max_budget < 1:
        raise ValueError(
            explain(f"max_budget is {max_budget}", "every budget is at least 1", "pass max_budget >= 1")
        )
    most, is_dense = 1, True
    for n, (length, row) in enumerate(zip(lengths, budget.tolist(), strict=True)):
        if min(row) < 1:
            raise ValueError(
                explain(
                    f"budget of sequence {n} is {min(row)}",
                    "a query always attends its own block, so the budget counts at least 1",
                    "pass budget >= 1 (1 attends the own block only)",
                )
            )
        blocks = -(-length // block_size)
        used = min(max(row), blocks)
        is_dense = is_dense and min(row) >= blocks
        if max_budget is not None and used > max_budget:
            raise ValueError(
                explain(
                    f"budget of sequence {n} is {max(row)} and max_budget is {max_budget}",
                    "max_budget sizes the selection and must bound every budget",
                    f"pass max_budget >= {used}, or leave it out",
                )
            )
        most = max(most, used)
    return (most if max_budget is None else max(1, min(max_budget, num_blocks))), is_dense
