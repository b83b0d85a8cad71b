"""Naive twins of the attention ops in plain torch: any dtype and device, quadratic in memory.

They define what the kernels compute. The gradient is that of autograd with the selection held fixed.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sb_lightning.attention.autocast import autocast_runs, cast_as_autocast
from sb_lightning.attention.checks import (
    check_block_size,
    check_layout,
    check_values,
    expand_budget,
)
from sb_lightning.attention.coverage_reference import moba_budget, moba_coverage

__all__ = ["moba_attention", "moba_budget", "moba_coverage", "moba_select"]


@torch.no_grad()
def moba_select(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    budget: int | Tensor,
    *,
    block_size: int,
    max_seqlen: int | None = None,
    max_budget: int | None = None,
) -> Tensor:
    """Select for each query the earlier blocks whose mean key it matches best.

    Of the earlier blocks the `budget - 1` with the highest q . mean(k) are taken; of equal ones the
    later, and NaN ranks last (MoBA, arXiv 2502.13189, section 2.2).

    Args:
        q: # [T, Hq, D]
        k: # [T, Hkv, D]
        cu_seqlens: Where sequences start, and the end # [N + 1] int32
        budget: Blocks a query attends, its own included; int, or int32 that broadcasts to [N, Hq].
        block_size: Keys per block.
        max_seqlen: Bound of the lengths; read from `cu_seqlens` if None.
        max_budget: Bound of the budgets; read from `budget` if None.

    Returns:
        Numbers of the selected blocks within their sequence, ascending, -1 where there is none
        # [Hq, T, max_budget - 1] int16
    """
    check_block_size(block_size)
    check_layout(q, k, None, cu_seqlens)
    if autocast_runs(q.device.type):
        q, k = cast_as_autocast(q, k)
        with torch.autocast(q.device.type, enabled=False):
            return moba_select(
                q, k, cu_seqlens, budget, block_size=block_size, max_seqlen=max_seqlen, max_budget=max_budget
            )
    (tokens, num_heads, _), group = q.shape, q.shape[1] // k.shape[1]
    budget = expand_budget(budget, cu_seqlens.shape[0] - 1, num_heads, q.device)
    _, max_budget = check_values(tokens, group, cu_seqlens, budget, block_size, max_seqlen, max_budget)
    wide = torch.promote_types(q.dtype, torch.float32)
    selection = q.new_full((num_heads, tokens, max_budget - 1), -1, dtype=torch.int16)
    bounds = cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        past = (end - start - 1) // block_size if end > start else 0
        if past == 0:
            continue
        complete = k[start : start + past * block_size].to(wide)
        mean = complete.reshape(past, block_size, *k.shape[1:]).mean(1)  # [past, Hkv, D]
        mean = mean.repeat_interleave(group, dim=1)
        gate = torch.einsum("thd,bhd->htb", q[start:end].to(wide), mean)
        gate = torch.where(gate.isnan(), float("-inf"), gate)
        own = torch.arange(end - start, device=q.device) // block_size  # [L]
        best_first = _rank_blocks(gate, own)[..., : max_budget - 1]
        want = torch.minimum(own, budget[n].long()[:, None] - 1)  # [Hq, L]
        place = torch.arange(best_first.shape[-1], device=q.device)
        chosen = torch.where(place < want[..., None], best_first, past).sort(-1).values
        selection[:, start:end, : chosen.shape[-1]] = torch.where(chosen == past, -1, chosen).to(torch.int16)
    return selection


def _rank_blocks(gate: Tensor, own: Tensor) -> Tensor:
    """Order the blocks of each row: earlier ones than its own first, by logit; of equal ones the later first.

    Args:
        gate: # [Hq, L, past]
        own: Block of each query # [L]
    """
    past = gate.shape[-1]
    by_logit = gate.flip(-1).argsort(dim=-1, descending=True, stable=True)
    block = past - 1 - by_logit
    visible = (block < own[:, None]).to(torch.int8)
    return block.gather(-1, visible.argsort(dim=-1, descending=True, stable=True))


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
    selection: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend the own block causally and the selected earlier blocks, under one softmax.

    Args:
        q: # [T, Hq, D]
        k: # [T, Hkv, D]
        v: # [T, Hkv, D]
        cu_seqlens: Where sequences start, and the end # [N + 1] int32
        budget: Blocks a query attends, its own included; int, or int32 that broadcasts to [N, Hq].
        block_size: Keys per block.
        max_seqlen: Bound of the lengths; read from `cu_seqlens` if None.
        max_budget: Bound of the budgets; read from `budget` if None.
        scale: Factor of the logits; head_dim^-0.5 if None.
        deterministic: Taken for the sake of the same signature; plain torch decides.
        return_lse: Also return the logarithm of the softmax's denominator.
        selection: What `moba_select` returned, to compare kernels on the same blocks; computed if None.

    Returns:
        out # [T, Hq, D], and with `return_lse` lse # [Hq, T] fp32 (fp64 for fp64 inputs)
    """
    check_layout(q, k, v, cu_seqlens)
    if autocast_runs(q.device.type):
        q, k, v = cast_as_autocast(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return moba_attention(
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
                selection=selection,
            )
    if selection is None:
        selection = moba_select(
            q, k, cu_seqlens, budget, block_size=block_size, max_seqlen=max_seqlen, max_budget=max_budget
        )
    num_heads, head_dim = q.shape[1:]
    group = num_heads // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    out = [q[:0]]
    lse = [q.new_zeros(num_heads, 0)]
    bounds = cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        heads = []
        sums = []
        for h in range(num_heads):
            logits = q[start:end, h] @ k[start:end, h // group].T * scale
            mask = _attended(selection[h, start:end], block_size)
            logits = logits.masked_fill(~mask, float("-inf"))
            heads.append(_weigh(torch.softmax(logits, -1), v[start:end, h // group], mask))
            sums.append(logits.logsumexp(-1))
        out.append(torch.stack(heads, 1))
        lse.append(torch.stack(sums))
    packed = torch.cat(out)
    if not return_lse:
        return packed
    return packed, torch.cat(lse, 1).to(torch.promote_types(q.dtype, torch.float32))


def _weigh(weights: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Sum the values of one sequence and head by weight, NaN and infinity only where they are attended.

    Args:
        weights: Zero where not attended # [L, L]
        v: # [L, D]
        mask: Which keys each query attends # [L, L]
    """
    # A transform of torch.func allows no branch on data.
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or bool(v.isfinite().all()):
        return weights @ v
    seen = torch.where(mask[..., None], v, 0)  # [L, L, D]; 0 * NaN would spread a value to every row
    return (weights[..., None] * seen).sum(1)


def _attended(selection: Tensor, block_size: int) -> Tensor:
    """Return which keys each query of one sequence and head attends # [L, L].

    Args:
        selection: Its earlier blocks # [L, width]
        block_size: Keys per block.
    """
    length = selection.shape[0]
    token = torch.arange(length, device=selection.device)
    block = token // block_size
    num_blocks = -(-length // block_size)
    chosen = torch.zeros(length, num_blocks + 1, dtype=torch.bool, device=selection.device)
    chosen.scatter_(1, torch.where(selection < 0, num_blocks, selection.long()), True)
    own = (block[:, None] == block) & (token[:, None] >= token)
    return own | chosen[:, :num_blocks][:, block]
