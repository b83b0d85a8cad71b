"""Shapes, inputs and comparisons that the attention tests share."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from sb_lightning.attention import moba_attention, moba_select, reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One shape of the attention."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    block_size: int
    dtype: str = "fp32"
    budgets: tuple[int, ...] | None = None  # per sequence; random per sequence and head if None
    seed: int = 0

    def __str__(self) -> str:
        lengths = "_".join(map(str, self.lengths))
        query_heads, kv_heads = self.heads
        return f"L{lengths}-Hq{query_heads}-Hkv{kv_heads}-D{self.head_dim}-B{self.block_size}-{self.dtype}"


@dataclass
class Inputs:
    """The tensors of a case."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    budget: Tensor
    dout: Tensor
    dlse: Tensor


def bounds(lengths: tuple[int, ...] | list[int]) -> Tensor:
    """Return cu_seqlens of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def make_inputs(case: Case, *, fused: bool = False, requires_grad: bool = True) -> Inputs:
    """Random inputs; `fused` takes q, k and v as slices of one tensor, so that none is contiguous."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, tokens = DTYPES[case.dtype], sum(case.lengths)
    query_heads, kv_heads = case.heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    qkv = normal(tokens, query_heads + 2 * kv_heads, case.head_dim).to(dtype)
    parts = qkv.split([query_heads, kv_heads, kv_heads], 1)
    if not fused:
        parts = tuple(part.contiguous() for part in parts)
    q, k, v = (part.detach().requires_grad_(requires_grad) for part in parts)
    if case.budgets is not None:
        budget = torch.tensor(case.budgets, dtype=torch.int32)[:, None].repeat(1, query_heads)
    else:
        choice = random.Random(case.seed)
        rows = [
            [choice.randint(1, -(-length // case.block_size) + 2) for _ in range(query_heads)]
            for length in case.lengths
        ]
        budget = torch.tensor(rows, dtype=torch.int32).reshape(len(case.lengths), query_heads)
    dout = normal(tokens, query_heads, case.head_dim).to(dtype)
    return Inputs(q, k, v, bounds(case.lengths), budget, dout, normal(query_heads, tokens))


def run(case: Case, x: Inputs, **options: object) -> list[Tensor]:
    """Return out, lse, dq, dk, dv of the kernels."""
    out, lse = moba_attention(
        x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=case.block_size, return_lse=True, **options
    )
    grads = torch.autograd.grad((out, lse), (x.q, x.k, x.v), (x.dout, x.dlse))
    return [out.detach(), lse.detach(), *grads]


def run_reference(case: Case, x: Inputs, selection: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the same five of the naive twin, computed in `dtype` on a given selection."""
    q, k, v = (leaf.detach().to(dtype).requires_grad_() for leaf in (x.q, x.k, x.v))
    out, lse = reference.moba_attention(
        q, k, v, x.cu_seqlens, x.budget, block_size=case.block_size, return_lse=True, selection=selection
    )
    grads = torch.autograd.grad((out, lse), (q, k, v), (x.dout.to(out.dtype), x.dlse.to(lse.dtype)))
    return [out.detach(), lse.detach(), *grads]


def select(case: Case, x: Inputs, **options: object) -> Tensor:
    """Return the kernels' selection."""
    return moba_select(x.q, x.k, x.cu_seqlens, x.budget, block_size=case.block_size, **options)


def assert_close(case: Case, got: list[Tensor], x: Inputs, selection: Tensor, allow: float = 1.0) -> float:
    """Compare with fp64 on the same selection; return the largest error as a share of what is allowed.

    fp32: some units of rounding. bf16 and fp16: at most twice the error that plain torch makes in the
    same dtype, plus one rounding of the result; or `allow` times that.
    """
    exact = run_reference(case, x, selection, torch.float64)
    dtype = DTYPES[case.dtype]
    same = exact if dtype == torch.float32 else run_reference(case, x, selection, dtype)
    worst = 0.0
    for name, ours, want, naive in zip(("out", "lse", "dq", "dk", "dv"), got, exact, same, strict=True):
        assert ours.shape == want.shape
        if want.numel() == 0:
            continue
        size = max(1.0, float(want.abs().max()))
        error = float((ours.double() - want).abs().max())
        if dtype == torch.float32:
            limit = 3e-6 * size
        else:
            limit = 2 * float((naive.double() - want).abs().max()) + torch.finfo(dtype).eps / 2 * size
        limit *= allow
        assert error <= limit, f"{name}: off by {error:.2e}, allowed {limit:.2e}"
        worst = max(worst, error / limit)
    return worst


def assert_selection(case: Case, x: Inputs, selection: Tensor) -> None:
    """Check every row: the count, the order, and that no block left out scores clearly higher."""
    group, block_size = x.q.shape[1] // x.k.shape[1], case.block_size
    ends = x.cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        past = max(0, end - start - 1) // block_size
        own = torch.arange(end - start) // block_size
        rows = selection[:, start:end].long()
        want = torch.minimum(own, x.budget[n].long()[:, None] - 1)  # [Hq, L]
        place = torch.arange(rows.shape[-1])
        used = place < want[..., None]
        assert torch.equal(rows >= 0, used), "a row has the wrong number of blocks"
        assert bool((rows < own[:, None]).all()), "a row selects its own block or a later one"
        assert bool(((rows.diff() > 0) | ~used[..., 1:]).all()), "a row is not ascending"
        if past == 0 or rows.shape[-1] == 0:
            continue
        mean = (
            x.k[start : start + past * block_size].detach().double().reshape(past, block_size, *x.k.shape[1:])
        )
        gate = torch.einsum(
            "thd,bhd->htb", x.q[start:end].detach().double(), mean.mean(1).repeat_interleave(group, 1)
        )
        chosen = torch.zeros(*gate.shape[:2], past + 1, dtype=torch.bool)
        chosen.scatter_(2, torch.where(used, rows, past), True)
        chosen = chosen[..., :past]
        visible = torch.arange(past) < own[:, None]
        lowest = gate.masked_fill(~chosen, float("inf")).amin(-1)
        highest = gate.masked_fill(chosen | ~visible, float("-inf")).amax(-1)
        assert float((highest - lowest).max()) < 1e-4, "a block with a clearly higher score was left out"
