"""The attention functions that users call."""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from sb_lightning._messages import explain
from sb_lightning.attention import ops, reference
from sb_lightning.attention.autocast import cast_as_autocast, dtype_in_kernel
from sb_lightning.attention.backends import choose_backend
from sb_lightning.attention.checks import (
    check_block_size,
    check_bound,
    check_kernel_limits,
    check_layout,
    expand_budget,
    read_values,
    trust_bounds,
)
from sb_lightning.attention.dense import covers_all, dense_attention, takes_dense

__all__ = ["moba_attention", "moba_select", "prepare"]


def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    budget: int | Tensor,
    *,
    block_size: int,
    max_seqlen: int | None = None,
    max_budget: int | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Block-sparse causal attention over packed sequences (MoBA, arXiv 2502.13189), with gradients.

    A query attends its own block causally and, of the earlier blocks of its sequence, the
    `budget - 1` whose mean key has the highest dot product with it, under one softmax. The selection
    has no gradient. The budget is data: another one never compiles anything anew, and it is copied, so
    that its tensor may be overwritten at once. Threads are those of `torch.set_num_threads`; a forked
    child runs on one, since OpenMP does not survive a fork.

    On a GPU, where every query attends all earlier keys, which the budgets or an int one tell without
    waiting for the device, torch's own fused attention runs: `scaled_dot_product_attention` for one
    sequence, `torch.nn.attention.varlen` for several. Not with `return_lse`, `deterministic` or a backend by
    name. `sb doctor` says what runs.

    Gradients are first derivatives in reverse mode, `torch.func.grad` and `jacrev` included; forward
    mode (`jvp`) raises. NaN or infinity in `v` reaches the rows that attend its key; the kernels, which
    read the own block in tiles, may also show it in other rows of that key's own block (fused attention
    of torch: of up to 128 tokens before it).

    Args:
        q: # [T, Hq, D], fp32, bf16 or fp16, D one of 32, 64, 128; token and head strides are free,
            a last dimension that is not contiguous is copied.
        k: # [T, Hkv, D]; Hq is a multiple of Hkv.
        v: # [T, Hkv, D]
        cu_seqlens: Where sequences start, and the end # [N + 1] int32
        budget: Blocks a query attends, its own included (1: only that one; more than there are: all);
            int, or int32 that broadcasts to [N, Hq].
        block_size: Keys per block, a multiple of 16.
        max_seqlen: Bound of the lengths. Read from `cu_seqlens` if None, except under
            `torch.compile`, which must not wait for data.
        max_budget: Bound of the budgets, likewise; it sizes the selection. More than the blocks of
            `max_seqlen` tokens is cut to those. On a GPU, with both bounds given (an int budget is its own),
            nothing is read, so that nothing waits for the device, and nothing in `cu_seqlens` and `budget`
            is checked either: to find a bad value there, leave a bound out.
        scale: Factor of the logits; head_dim^-0.5 if None.
        deterministic: Ask for gradients that are the same bit for bit in every run, as
            `torch.use_deterministic_algorithms` does. On CPU they always are, for any number of threads;
            on CUDA only the gradient of `q` is not otherwise, and then it is faster.
        return_lse: Also return the logarithm of the softmax's denominator; it has a gradient.
        backend: "cpu", "cuda", "reference" or None for the kernels of the tensors' device. Those of CUDA
            take bf16 and fp16 and need compute capability 8.0; where they are refused, "reference" runs,
            and a warning says why. "cuda" runs the kernels of this package or raises.

    Returns:
        out # [T, Hq, D], and with `return_lse` lse # [Hq, T] fp32

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A shape, dtype or value cannot work; the message names the argument.
        RuntimeError: The backend does not run here.

    Example:
        >>> import torch
        >>> q, kv = torch.randn(100, 4, 64), torch.randn(100, 2, 64)
        >>> cu_seqlens = torch.tensor([0, 70, 100], dtype=torch.int32)
        >>> moba_attention(q, kv, kv, cu_seqlens, 2, block_size=32).shape
        torch.Size([100, 4, 64])
    """
    call = prepare(q, k, v, cu_seqlens, budget, block_size, max_seqlen, max_budget, backend)
    chosen, budget, block_size, max_seqlen, max_budget, is_dense, cu_seqlens = call
    if scale is None:
        scale = q.shape[2] ** -0.5
    elif not torch.compiler.is_compiling() and not math.isfinite(scale):
        raise ValueError(
            explain(f"scale is {scale}", "it multiplies every logit", "pass a finite scale, or leave it out")
        )
    if chosen == "reference":
        return reference.moba_attention(
            q,
            k,
            v,
            cu_seqlens,
            budget,
            block_size=block_size,
            max_seqlen=max_seqlen,
            max_budget=max_budget,
            scale=scale,
            return_lse=return_lse,
        )
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    may_be_dense = chosen == "cuda" and backend is None and not (return_lse or deterministic)
    if may_be_dense and is_dense and takes_dense(q, k, cu_seqlens, scale):
        return dense_attention(q, k, v, cu_seqlens, max_seqlen, scale)
    out, lse = ops.run_attention(
        q, k, v, cu_seqlens, budget, block_size, max_seqlen, max_budget, scale, deterministic
    )
    return (out, lse) if return_lse else out


def moba_select(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    budget: int | Tensor,
    *,
    block_size: int,
    max_seqlen: int | None = None,
    max_budget: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return which earlier blocks each query attends; arguments as for `moba_attention`.

    Returns:
        Numbers of the blocks within their sequence, ascending, -1 where there is none
        # [Hq, T, max_budget - 1] int16
    """
    chosen, budget, block_size, max_seqlen, max_budget, _, cu_seqlens = prepare(
        q, k, None, cu_seqlens, budget, block_size, max_seqlen, max_budget, backend
    )
    q, k = cast_as_autocast(q, k)  # what the attention selects with
    if chosen == "reference":
        return reference.moba_select(
            q, k, cu_seqlens, budget, block_size=block_size, max_seqlen=max_seqlen, max_budget=max_budget
        )
    with torch.no_grad():
        selection: Tensor = torch.ops.sb.moba_select(
            q, k, cu_seqlens, budget, block_size, max_seqlen, max_budget
        )
    return selection


class Call(NamedTuple):
    """What was found out about a call."""

    backend: str
    budget: Tensor  # [N, Hq]
    block_size: int
    max_seqlen: int
    max_budget: int
    is_dense: bool
    """Whether every query is known to attend all earlier keys."""
    cu_seqlens: Tensor
    """Where sequences start, and the end; within the tokens where nobody has read them # [N + 1] int32"""


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens: Tensor,
    budget: int | Tensor,
    block_size: int,
    max_seqlen: int | None,
    max_budget: int | None,
    backend: str | None,
) -> Call:
    """Check everything, as far as it can be without waiting for a device that need not be waited for."""
    check_block_size(block_size)
    check_bound("max_seqlen", max_seqlen)
    check_bound("max_budget", max_budget)
    check_layout(q, k, v, cu_seqlens)
    if backend != "reference":
        check_kernel_limits(q)
    chosen = choose_backend(backend, q.device, dtype_in_kernel(q))
    num_heads, group = q.shape[1], q.shape[1] // k.shape[1]
    expanded = expand_budget(budget, cu_seqlens.shape[0] - 1, num_heads, q.device)
    if torch.compiler.is_compiling():
        for name, bound, least in (("max_seqlen", max_seqlen, 0), ("max_budget", max_budget, 1)):
            if bound is None:
                raise ValueError(
                    explain(
                        f"{name} is None under torch.compile",
                        "a compiled graph cannot read it from the tensors",
                        f"pass {name} as an int that bounds all sequences",
                    )
                )
            if bound < least:
                raise ValueError(
                    explain(
                        f"{name} is below {least}",  # not its value: a symbol has no text
                        "it bounds all sequences",
                        f"pass {name} >= {least}",
                    )
                )
        assert max_seqlen is not None
        assert max_budget is not None
        # On a GPU an int budget may compile once more, for the dense path.
        is_dense = (
            chosen == "cuda" and not isinstance(budget, Tensor) and covers_all(budget, block_size, max_seqlen)
        )
        # Symbols stay symbols: a comparison here would compile anew for the other outcome.
        blocks = torch.sym_max(1, (max_seqlen + block_size - 1) // block_size)  # type: ignore[no-untyped-call]
        most = torch.sym_min(max_budget, blocks)  # type: ignore[no-untyped-call]
        if chosen == "cuda":
            cu_seqlens = _within(cu_seqlens, q.shape[0])
        return Call(chosen, expanded, block_size, max_seqlen, most, is_dense, cu_seqlens)
    block_size = operator.index(block_size)
    max_seqlen = None if max_seqlen is None else operator.index(max_seqlen)
    max_budget = None if max_budget is None else operator.index(max_budget)
    trusted = None
    if chosen == "cuda" and max_seqlen is not None:
        known = None if isinstance(budget, Tensor) else operator.index(budget)
        trusted = trust_bounds(q.shape[0], group, known, block_size, max_seqlen, max_budget)
    if trusted is not None:
        return Call(chosen, expanded, block_size, *trusted, _within(cu_seqlens, q.shape[0]))
    values = read_values(q.shape[0], group, cu_seqlens, expanded, block_size, max_seqlen, max_budget)
    return Call(chosen, expanded, block_size, *values, cu_seqlens)


def _within(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Bring bounds that nobody has read within the tokens: kernels write where they say."""
    return cu_seqlens.clamp(0, tokens).cummax(0).values
