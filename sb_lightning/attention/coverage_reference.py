"""Naive twins of moba_coverage and moba_budget in plain torch, for `sb_lightning.attention.reference`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sb_lightning._messages import explain
from sb_lightning.attention.autocast import autocast_runs, cast_as_autocast
from sb_lightning.attention.checks import check_block_size, check_layout, check_values, expand_budget
from sb_lightning.tuning.coverage import ROW_STRIDE, sampled_rows
from sb_lightning.tuning.reference import MANY_BLOCKS, BudgetSequence, choose_budgets, fixed_point

__all__ = ["moba_budget", "moba_coverage"]


@torch.no_grad()
def moba_coverage(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    *,
    block_size: int,
    max_rank: int | None = None,
    max_seqlen: int | None = None,
    row_stride: int = ROW_STRIDE,
) -> Tensor:
    """Return how the routing score of sampled rows is spread over the earlier blocks, by rank.

    Args:
        q: # [T, Hq, D]
        k: # [T, Hkv, D]
        cu_seqlens: Where sequences start, and the end # [N + 1] int32
        block_size: Keys per block.
        max_rank: Ranks to return; all if None.
        max_seqlen: Bound of the lengths; read from `cu_seqlens` if None.
        row_stride: Every so many-th row of a sequence is sampled, and each block's last.

    Returns:
        # [N, Hq, max_rank] fp32 (fp64 for fp64 inputs)
    """
    check_block_size(block_size)
    check_layout(q, k, None, cu_seqlens)
    if autocast_runs(q.device.type):
        q, k = cast_as_autocast(q, k)
        with torch.autocast(q.device.type, enabled=False):
            return moba_coverage(
                q,
                k,
                cu_seqlens,
                block_size=block_size,
                max_rank=max_rank,
                max_seqlen=max_seqlen,
                row_stride=row_stride,
            )
    (tokens, num_heads, head_dim), group = q.shape, q.shape[1] // k.shape[1]
    num_sequences = cu_seqlens.shape[0] - 1
    ones = expand_budget(1, num_sequences, num_heads, q.device)
    max_seqlen, _ = check_values(tokens, group, cu_seqlens, ones, block_size, max_seqlen, None)
    if max_rank is None:
        max_rank = max(0, -(-max_seqlen // block_size) - 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    mass = q.new_zeros((num_sequences, num_heads, max_rank), dtype=wide)
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        length = end - start
        past = max(length - 1, 0) // block_size
        if past == 0:
            continue
        sampled = [
            t
            for t in range(block_size, length)
            if t % row_stride == 0 or (t + 1) % block_size == 0 or t == length - 1
        ]
        rows = torch.tensor(sampled, device=q.device)
        mean = k[start : start + past * block_size].to(wide)
        mean = mean.reshape(past, block_size, *k.shape[1:]).mean(1).repeat_interleave(group, dim=1)
        logits = torch.einsum("thd,bhd->htb", q[start:end][rows].to(wide), mean) * head_dim**-0.5
        limit = torch.finfo(wide).max
        logits = logits.nan_to_num(nan=-limit, posinf=limit, neginf=-limit)
        visible = torch.arange(past, device=q.device) < (rows // block_size)[:, None]
        shares = torch.softmax(logits.masked_fill(~visible, float("-inf")), -1)
        ranked = shares.sort(-1, descending=True).values.mean(1)[:, :max_rank]  # [Hq, <= max_rank]
        mass[n, :, : ranked.shape[1]] = ranked
    return mass


@torch.no_grad()
def moba_budget(
    mass: Tensor,
    cost_us: Tensor,
    tau_us: Tensor,
    tolerance: Tensor,
    k0: Tensor,
    min_budget: int = 1,
    *,
    cu_seqlens: Tensor | None = None,
    block_size: int = 0,
    row_stride: int = ROW_STRIDE,
    tune_short: bool = False,
) -> Tensor:
    """Choose the budget of each sequence from its mass by rank; the kernel gives the same, bit for bit.

    Args:
        mass: # [N, Hq, max_rank] fp32
        cost_us: Time at budgets 1, 2, ... # [N, max_budget] int32
        tau_us: What all may take # int64, one number
        tolerance: Largest change of coverage # fp32, one number
        k0: Budget when nothing is tuned # int32, one number or [N]
        min_budget: No budget is lowered below it.
        cu_seqlens: Where sequences start, and the end # [N + 1] int32; without it all have the same
            weight and none is covered whole by `k0`.
        block_size: Keys per block.
        row_stride: That of `moba_coverage`.
        tune_short: Also cut sequences that `k0` covers whole.

    Returns:
        # [N] int32
    """
    num_sequences, num_heads = mass.shape[:2]
    max_budget = cost_us.shape[1]
    share = tolerance.item()
    if not share >= 0 or min(k0.flatten().tolist(), default=1) < 1 or min_budget < 1:
        raise ValueError(
            explain(
                f"tolerance is {share}, k0 {k0.tolist()} and min_budget {min_budget}",
                "a share is not negative, and a query always attends its own block",
                "pass tolerance >= 0, k0 >= 1 and min_budget >= 1",
            )
        )
    lengths = [None] * num_sequences if cu_seqlens is None else cu_seqlens.diff().tolist()
    usual = k0.reshape(-1).expand(num_sequences).tolist()
    sequences = []
    for n, length in enumerate(lengths):
        curve = [0]
        for rank in range(max_budget - 1):
            curve.append(curve[-1] + sum(fixed_point(x) for x in mass[n, :, rank].tolist()))
        sequences.append(
            BudgetSequence(
                coverage=curve,
                cost_us=cost_us[n].tolist(),
                k0=usual[n],
                rows=1 if length is None else sampled_rows(length, block_size, row_stride),
                blocks=MANY_BLOCKS if length is None else -(-length // block_size),
            )
        )
    budgets = choose_budgets(
        sequences,
        tau_us=int(tau_us.item()),
        tolerance=fixed_point(share) * num_heads,
        min_budget=min_budget,
        tune_short=tune_short,
    )
    return torch.tensor(budgets, dtype=torch.int32, device=mass.device)
