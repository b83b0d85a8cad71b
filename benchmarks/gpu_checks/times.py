"""Times of the kernels beside scaled_dot_product_attention, for benchmarks/gpu_check.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = {128: (28, 4), 64: (14, 2)}
"""Query and KV heads by head_dim, those of Qwen2.5 7B and 0.5B."""
LENGTHS = ((8192, 16), (32768, 32), (131072, 32))
"""Tokens of the one sequence, and its budget of blocks of 256 keys."""


def median_ms(device: str, call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(rounds):
        if device == "cpu":
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1000)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(
    device: str, length: int, budget: int, heads: tuple[int, int], dim: int, block_size: int
) -> dict[str, float]:
    """Return the times of one sequence, block-sparse and dense."""
    from sb_lightning.attention import moba_attention, moba_coverage

    query_heads, kv_heads = heads

    def normal(count: int) -> Tensor:
        return torch.randn(length, count, dim, device=device, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = normal(query_heads), normal(kv_heads), normal(kv_heads)
    dout = torch.randn_like(q)
    cu = torch.tensor([0, length], dtype=torch.int32, device=device)
    budgets = torch.full((1, query_heads), budget, dtype=torch.int32, device=device)
    heads_first = [t.detach().transpose(0, 1)[None].requires_grad_() for t in (q, k, v)]
    dense_dout = dout.transpose(0, 1)[None]
    bounds = {"block_size": block_size, "max_seqlen": length}

    def sparse() -> Tensor:
        return moba_attention(q, k, v, cu, budget, max_budget=budget, **bounds)

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)

    row: dict[str, float] = {"length": length, "budget": budget, "head_dim": dim}
    rounds = 5 if length > 40000 else 10
    ways = (("sparse", sparse, (q, k, v), dout), ("dense", dense, heads_first, dense_dout))
    for name, call, leaves, upstream in ways:
        with torch.no_grad():
            row[f"{name}_forward_ms"] = median_ms(device, call, rounds)
        out = call()

        def backward(out: Tensor = out, leaves: object = leaves, upstream: Tensor = upstream) -> object:
            return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

        row[f"{name}_backward_ms"] = median_ms(device, backward, rounds)
    with torch.no_grad():
        select = (q, k, cu, budgets, block_size, length, budget)
        row["select_ms"] = median_ms(device, lambda: torch.ops.sb.moba_select(*select), rounds)
        row["coverage_ms"] = median_ms(
            device, lambda: moba_coverage(q, k, cu, max_rank=2 * budget, **bounds), rounds
        )
    sparse_ms, dense_ms = (
        row[f"{name}_forward_ms"] + row[f"{name}_backward_ms"] for name in ("sparse", "dense")
    )
    row["speedup"] = dense_ms / sparse_ms
    return row
