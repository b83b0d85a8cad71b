"""What the choice of a layer's budgets costs beside the layer itself.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --json benchmarks/results/coverage.json

In every round the attention (forward and backward), `moba_coverage`, `moba_budget` and, in some rounds, a
whole decoder layer (norms, projections, attention, MLP in the proportions of Qwen2; forward and backward) run
one after another. A share is the median over rounds of coverage plus budget by what it stands beside in the
same round, so that a slow moment of the machine touches both sides; +- is half the distance of the extremes.
`least` divides the least times of all rounds, what the code takes when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from sb_lightning.attention import backends, moba_attention, moba_budget, moba_coverage
from sb_lightning.latency import AnalyticCost, ModelShape
from sb_lightning.latency.fingerprint import processor_name

LENGTH = 8192
BUDGET = 8
MAX_BUDGET = 32
TARGET = 0.01


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    heads: tuple[int, int]
    head_dim: int
    block_size: int
    threads: int

    @property
    def label(self) -> str:
        hq, hkv = self.heads
        return f"L{LENGTH}-Hq{hq}-Hkv{hkv}-D{self.head_dim}-B{self.block_size}-k{BUDGET}-t{self.threads}"


class Layer(nn.Module):
    """A decoder layer with block-sparse attention, without rotary embedding."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        hq, hkv = setting.heads
        hidden = hq * setting.head_dim
        inner = hidden * 4864 // 896 // 16 * 16
        self.qkv = nn.Linear(hidden, (hq + 2 * hkv) * setting.head_dim)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        hq, hkv = self.setting.heads
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (hq + 2 * hkv, self.setting.head_dim))
        q, k, v = qkv.split([hq, hkv, hkv], 1)
        out = moba_attention(q, k, v, cu_seqlens, BUDGET, block_size=self.setting.block_size)
        x = x + self.out(out.flatten(1))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def clock(call: Callable[[], object]) -> float:
    """Return the ms of a call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(setting: Setting, rounds: int, layer_rounds: int) -> dict[str, object]:
    """Return the figures of one setting."""
    torch.manual_seed(0)
    torch.set_num_threads(setting.threads)
    (hq, hkv), dim, block_size = setting.heads, setting.head_dim, setting.block_size
    cu_seqlens = torch.tensor([0, LENGTH], dtype=torch.int32)
    q, k, v, dout = (torch.randn(LENGTH, heads, dim) for heads in (hq, hkv, hkv, hq))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    layer, x = Layer(setting), torch.randn(LENGTH, hq * dim, requires_grad=True)
    shape = ModelShape(
        layers=1, query_heads=hq, kv_heads=hkv, head_dim=dim, hidden_size=hq * dim,
        intermediate_size=layer.up.out_features, vocab_size=1024, block_size=block_size,
    )  # fmt: skip
    cost_us = torch.from_numpy(AnalyticCost(shape).cost_us(LENGTH, MAX_BUDGET))[None]
    tau_us = torch.tensor(int(cost_us[0, BUDGET]))
    tolerance, k0 = torch.tensor(0.1), torch.tensor(BUDGET, dtype=torch.int32)

    def attention() -> None:
        out = moba_attention(q, k, v, cu_seqlens, BUDGET, block_size=block_size)
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, (q, k, v), dout)

    def coverage() -> torch.Tensor:
        return moba_coverage(q, k, cu_seqlens, block_size=block_size, max_rank=MAX_BUDGET - 1)

    mass = coverage()

    def budget() -> torch.Tensor:
        return moba_budget(mass, cost_us, tau_us, tolerance, k0, cu_seqlens=cu_seqlens, block_size=block_size)

    def whole_layer() -> None:
        layer(x, cu_seqlens).square().mean().backward()

    for call in (attention, coverage, budget, whole_layer):
        call()
    times: dict[str, list[float]] = {"attention": [], "coverage": [], "budget": [], "layer": []}
    for i in range(rounds):
        times["attention"].append(clock(attention))
        times["coverage"].append(clock(coverage))
        times["budget"].append(clock(budget))
        if i < layer_rounds:
            times["layer"].append(clock(whole_layer))
    tuning = [c + b for c, b in zip(times["coverage"], times["budget"], strict=True)]
    row: dict[str, object] = {"case": setting.label, "threads": setting.threads}
    row |= {f"{name}_ms": round(statistics.median(values), 3) for name, values in times.items()}
    row["coverage_of_attention"] = share(times["coverage"], times["attention"])
    row["tuning_of_attention"] = share(tuning, times["attention"])
    row["tuning_of_layer"] = share(tuning[:layer_rounds], times["layer"])
    return row


def share(part: list[float], whole: list[float]) -> dict[str, float]:
    """Return median and half the distance of extremes of the rounds' ratios, and the ratio of least times."""
    ratios = [a / b for a, b in zip(part, whole, strict=True)]
    return {
        "median": round(statistics.median(ratios), 6),
        "spread": round((max(ratios) - min(ratios)) / 2, 6),
        "least": round(min(part) / min(whole), 6),
    }


def settings() -> Iterator[Setting]:
    """Yield all settings: two blocks, two head dimensions, one and two threads; and a wide group of heads."""
    for threads in (1, 2):
        for block_size in (64, 128):
            for head_dim in (64, 128):
                yield Setting((4, 2), head_dim, block_size, threads)
    for block_size in (64, 128):
        yield Setting((14, 2), 64, block_size, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layer-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    cpu = next(b for b in backends() if b.name == "cpu")
    if not cpu.available:
        raise SystemExit(cpu.reason)
    head = {
        "machine": processor_name(),
        "cores": os.cpu_count(),
        "isa": torch.ops.sb.cpu_isa(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rounds": arguments.rounds,
        "layer_rounds": arguments.layer_rounds,
        "target": TARGET,
    }
    print(json.dumps(head))
    print(
        f"{'case':36} {'attention':>9} {'coverage':>9} {'budget':>7} {'layer':>8}"
        f" {'of attention (least)':>22} {'of layer (least)':>22}"
    )
    rows = []
    for setting in settings():
        row = measure(setting, arguments.rounds, arguments.layer_rounds)
        rows.append(row)
        shares = [
            f"{row[name]['median']:.2%} +-{row[name]['spread']:.2%} ({row[name]['least']:.2%})"  # type: ignore[index]
            for name in ("tuning_of_attention", "tuning_of_layer")
        ]
        print(
            f"{setting.label:36} {row['attention_ms']:9.1f} {row['coverage_ms']:9.2f}"
            f" {row['budget_ms']:7.3f} {row['layer_ms']:8.1f} {shares[0]:>22} {shares[1]:>22}",
            flush=True,
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.json.with_suffix(".tmp")
        part.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(arguments.json)


if __name__ == "__main__":
    main()
