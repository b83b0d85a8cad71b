"""Block-sparse attention on CPU beside scaled_dot_product_attention, in the same run, turn about.

    python benchmarks/attention.py --quick
    python benchmarks/attention.py --json benchmarks/results/attention.json

Each round times scaled_dot_product_attention and then our variants of the same shape, all warmed up; a
figure is the median over rounds of the ratio within a round, `+-` half the spread of those ratios.
Selection and index are part of our times, `route` is their share. `density` is computed pairs / causal
pairs; `effic` is speedup x density: 1 means that the time fell exactly as the work did (for both, and for
forward and backward apart). `GF/s` is that of the attended pairs (4 products of D forward, 10 backward), to
be seen beside the GF/s of a matrix product on as many threads. `MiB` is the growth of the process's peak
memory during forward and backward, ours and theirs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sb_lightning.attention import backends, moba_attention
from sb_lightning.attention.pairs import attended_pairs, causal_pairs

# Real lengths: files of Python 3.11's standard library in tokens of a 2,048-token BPE, in shuffled order
# (seed 0): the first twenty of up to 1,500 tokens, and the first three above 4,000.
MANY_SHORT = (
    1490, 1315, 1173, 672, 1037, 285, 1396, 396, 337, 315, 1129, 167, 942, 359, 166, 170, 626, 305, 1302, 688,
)  # fmt: skip
FEW_LONG = (13473, 5243, 19390)
DENSITIES = (0.1, 0.25, 0.5)


@dataclass(frozen=True)
class Shape:
    """What both sides compute on; `rounds` 0 means the command line's number."""

    lengths: tuple[int, ...]
    head_dim: int = 64
    heads: tuple[int, int] = (4, 2)
    dtype: str = "float32"
    name: str = ""
    rounds: int = 0

    @property
    def label(self) -> str:
        """How the shape is called."""
        size = self.name or f"L{self.lengths[0]}"
        return f"{size}-H{self.heads[0]}/{self.heads[1]}-D{self.head_dim}-{self.dtype}"


@dataclass(frozen=True)
class Variant:
    """How ours computes it; `budget` is one number or one per (sequence, head)."""

    block_size: int
    budget: int | tuple[tuple[int, ...], ...]
    threads: int = 1

    @property
    def label(self) -> str:
        """How the variant is called."""
        budget = self.budget if isinstance(self.budget, int) else "mixed"
        return f"B{self.block_size}-k{budget}-t{self.threads}"


def budget_for(length: int, block_size: int, density: float) -> int:
    """Return the budget whose share of the causal pairs is nearest to `density`."""
    blocks = -(-length // block_size)
    return min(
        range(1, blocks + 1),
        key=lambda k: abs(attended_pairs([length], k, block_size) / causal_pairs([length]) - density),
    )


def grid(length: int, blocks: tuple[int, ...] = (64, 128, 256)) -> list[Variant]:
    """Return the variants of one length: every block size at every density."""
    return [Variant(b, budget_for(length, b, density)) for b in blocks for density in DENSITIES]


def mixed_budgets(lengths: tuple[int, ...], heads: int) -> tuple[tuple[int, ...], ...]:
    """Return another budget for every sequence and head, from 2 to 16 and once all blocks."""
    rows = [[2 + (5 * n + 3 * h) % 15 for h in range(heads)] for n in range(len(lengths))]
    rows[-1] = [-(-lengths[-1] // 64)] * heads
    return tuple(map(tuple, rows))


def cases(quick: bool) -> Iterator[tuple[Shape, list[Variant]]]:
    """Yield all shapes with their variants."""
    if quick:
        for dtype in ("float32", "bfloat16"):
            yield Shape((4096,), dtype=dtype), grid(4096, (64, 128))
        yield Shape((4096,)), [Variant(128, 8, threads) for threads in (1, 2)]
    else:
        yield Shape((2048,)), grid(2048, (64, 128))
        for dtype in ("float32", "bfloat16"):
            for dim in (32, 64, 128):
                yield Shape((8192,), dim, dtype=dtype), grid(8192)
            yield Shape((16384,), 64, dtype=dtype, rounds=3), grid(16384)
        yield Shape((16384,), 128, rounds=3), grid(16384, (128,))
        yield Shape((32768,), 64, rounds=3), grid(32768, (64, 128))
        for heads in ((14, 2), (16, 2)):
            for dim in (64, 128):
                yield Shape((8192,), dim, heads, rounds=3), grid(8192, (64, 128))[:2] + grid(8192, (128,))[:2]
        # Two threads, beside one.
        for dim in (64, 128):
            yield (
                Shape((8192,), dim),
                [Variant(128, budget_for(8192, 128, d), t) for d in DENSITIES for t in (1, 2)],
            )
    # Below a tenth of the pairs: the time must go on falling.
    for length in (8192,) if quick else (8192, 16384, 32768):
        small = [Variant(64, k) for k in (1, 2, 3)]
        yield Shape((length,), name=f"few{length}", rounds=3), small
    # All pairs: our own dense path. And the smallest sizes, where a call's own cost shows.
    for length in (256, 1024, 4096):
        yield (
            Shape((length,), name=f"dense{length}", rounds=9),
            [Variant(64, -(-length // 64)), Variant(64, 2)],
        )
    for name, lengths in (("many_short", MANY_SHORT), ("few_long", FEW_LONG)):
        if quick and name == "few_long":
            continue
        variants = [
            Variant(64, budget, threads)
            for budget in (8, max(-(-n // 64) for n in lengths), mixed_budgets(lengths, 4))
            for threads in (1, 2)
        ]
        yield Shape(lengths, name=name, rounds=3 if name == "few_long" else 0), variants


def clock(call: Callable[[], object]) -> tuple[float, object]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def peak_growth(call: Callable[[], object]) -> int:
    """Return by how many bytes a call raises the peak of the resident memory above what is there before."""
    gc.collect()
    # Freed memory goes back to the system first, or the call would reuse it unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Return a memory figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


class Ours:
    """Packed block-sparse attention."""

    def __init__(self, shape: Shape, inputs: tuple[torch.Tensor, ...], variant: Variant) -> None:
        self.q, self.k, self.v, self.dout = inputs
        self.cu = torch.tensor([0, *shape.lengths]).cumsum(0).to(torch.int32)
        self.budget = torch.tensor(variant.budget, dtype=torch.int32).expand(
            len(shape.lengths), shape.heads[0]
        )
        self.budget = self.budget.contiguous()
        self.shape, self.variant = shape, variant

    def forward(self) -> torch.Tensor:
        size = self.variant.block_size
        out = moba_attention(self.q, self.k, self.v, self.cu, self.budget, block_size=size)
        assert isinstance(out, torch.Tensor)
        return out

    def backward(self, out: torch.Tensor) -> object:
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)

    def routing(self) -> None:
        """Selection (forward) and both sorts of the index (forward and backward): their share."""
        size, lengths = self.variant.block_size, self.shape.lengths
        hq, hkv = self.shape.heads
        most = min(int(self.budget.max()), max(-(-n // size) for n in lengths))
        with torch.no_grad():
            selection = torch.ops.sb.moba_select(
                self.q, self.k, self.cu, self.budget, size, max(lengths), most
            )
            for _ in range(2):
                torch.ops.sb.moba_index(selection, self.cu, self.budget, size, hq // hkv)

    def pairs(self) -> float:
        """Attended (query, key) pairs, mean over query heads."""
        size, heads = self.variant.block_size, self.shape.heads[0]
        columns = self.budget.t().tolist()
        return sum(attended_pairs(self.shape.lengths, column, size) for column in columns) / heads


class Theirs:
    """torch's causal attention, one call per sequence."""

    def __init__(self, shape: Shape, inputs: tuple[torch.Tensor, ...]) -> None:
        bounds = [0, *itertools.accumulate(shape.lengths)]
        self.parts = []
        for start, stop in itertools.pairwise(bounds):
            q, k, v, dout = (x.detach()[start:stop].transpose(0, 1)[None].contiguous() for x in inputs)
            self.parts.append((q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout))

    def forward(self) -> list[torch.Tensor]:
        return [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v, _ in self.parts
        ]

    def backward(self, outs: list[torch.Tensor]) -> object:
        return [
            torch.autograd.grad(out, (q, k, v), dout)
            for out, (q, k, v, dout) in zip(outs, self.parts, strict=True)
        ]


@dataclass
class Times:
    """Seconds of every round."""

    forward: list[float]
    backward: list[float]

    @property
    def both(self) -> list[float]:
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


def measure(shape: Shape, variants: list[Variant], rounds: int) -> Iterator[dict[str, object]]:
    """Time one shape: yield a row per variant."""
    rounds = shape.rounds or rounds
    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator().manual_seed(0)
    hq, hkv = shape.heads
    inputs = tuple(
        torch.randn(sum(shape.lengths), h, shape.head_dim, generator=generator)
        .to(dtype)
        .requires_grad_(i < 3)
        for i, h in enumerate((hq, hkv, hkv, hq))
    )
    theirs = Theirs(shape, inputs)
    ours = [Ours(shape, inputs, variant) for variant in variants]
    threads = sorted({variant.threads for variant in variants})
    sides: list[tuple[int, Ours | Theirs]] = [(t, theirs) for t in threads]
    sides += [(side.variant.threads, side) for side in ours]
    memory = []
    for t, side in sides:  # also the warm-up
        torch.set_num_threads(t)
        memory.append(peak_growth(lambda s=side: s.backward(s.forward())))
    times = [Times([], []) for _ in sides]
    routing: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for i, (t, side) in enumerate(sides):
            torch.set_num_threads(t)
            seconds, out = clock(side.forward)
            times[i].forward.append(seconds)
            times[i].backward.append(clock(lambda s=side, o=out: s.backward(o))[0])
            del out
            if isinstance(side, Ours):
                routing[i].append(clock(side.routing)[0])
    for i, side in enumerate(ours, start=len(threads)):
        yield row_of(side, times[i], times[threads.index(side.variant.threads)], routing[i]) | {
            "memory_mib": memory[i] / 2**20,
            "their_memory_mib": memory[threads.index(side.variant.threads)] / 2**20,
        }


def row_of(side: Ours, own: Times, other: Times, routing: list[float]) -> dict[str, object]:
    """Return the figures of one variant."""
    shape, variant = side.shape, side.variant
    # The ratio of each round, so that a slow moment of the machine touches both sides of one ratio only.
    ratios = {
        part: [a / b for a, b in zip(getattr(other, part), getattr(own, part), strict=True)]
        for part in ("both", "forward", "backward")
    }
    speedup = {part: statistics.median(values) for part, values in ratios.items()}
    density = side.pairs() / causal_pairs(shape.lengths)
    flops = 14 * shape.head_dim * shape.heads[0] * side.pairs()
    share = [r / b for r, b in zip(routing, own.both, strict=True)]
    return {
        "case": f"{shape.label}-{variant.label}",
        "lengths": shape.lengths,
        "head_dim": shape.head_dim,
        "heads": shape.heads,
        "dtype": shape.dtype,
        "block_size": variant.block_size,
        "budget": variant.budget,
        "threads": variant.threads,
        "density": density,
        "rounds": len(own.forward),
        **{f"{part}_ms": statistics.median(getattr(own, part)) * 1e3 for part in speedup},
        **{f"their_{part}_ms": statistics.median(getattr(other, part)) * 1e3 for part in speedup},
        **{f"speedup_{part}": value for part, value in speedup.items()},
        "speedup_spread": (max(ratios["both"]) - min(ratios["both"])) / 2 / speedup["both"],
        **{f"efficiency_{part}": value * density for part, value in speedup.items()},
        "routing_share": statistics.median(share),
        "useful_gflops": flops / statistics.median(own.both) / 1e9,
    }


def matmul_gflops(threads: int) -> float:
    """Return the GF/s of a large fp32 matrix product."""
    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    a @ b
    return 2 * 1024**3 / statistics.median(clock(lambda: a @ b)[0] for _ in range(15)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few cases, some two minutes")
    parser.add_argument("--only", default="", help="only cases whose label contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--json", type=Path, help="write all figures to this file, and a table beside it (.md)"
    )
    arguments = parser.parse_args()
    cpu = next(b for b in backends() if b.name == "cpu")
    if not cpu.available:
        raise SystemExit(cpu.reason)
    matmul = {threads: matmul_gflops(threads) for threads in (1, 2)}
    head = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "isa": torch.ops.sb.cpu_isa(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "matmul_gflops": matmul,
        "rounds": arguments.rounds,
    }
    print(json.dumps(head))
    print(
        f"{'case':46} {'density':>7} {'fwd ms':>8} {'bwd ms':>8} {'route':>6} {'speedup':>8} {'+-':>4}"
        f" {'fwd':>5} {'bwd':>5} {'effic':>6} {'GF/s':>5} {'MiB':>6} {'theirs':>6}"
    )
    rows = []
    for shape, variants in cases(arguments.quick):
        wanted = [v for v in variants if arguments.only in f"{shape.label}-{v.label}"]
        if not wanted:
            continue
        for row in measure(shape, wanted, arguments.rounds):
            rows.append(row)
            print(
                f"{row['case']:46} {row['density']:7.3f} {row['forward_ms']:8.1f} {row['backward_ms']:8.1f}"
                f" {row['routing_share']:6.1%} {row['speedup_both']:8.2f} {row['speedup_spread']:4.0%}"
                f" {row['efficiency_forward']:5.2f} {row['efficiency_backward']:5.2f}"
                f" {row['efficiency_both']:6.2f} {row['useful_gflops']:5.0f} {row['memory_mib']:6.1f}"
                f" {row['their_memory_mib']:6.1f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.json.with_suffix(".tmp")
        part.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(arguments.json)
        table = arguments.json.with_suffix(".md")
        table.write_text(markdown(head, rows), encoding="utf-8")


def markdown(head: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the figures as a page."""
    matmul = ", ".join(f"{rate:.0f} GF/s on {n} thread(s)" for n, rate in head["matmul_gflops"].items())
    lines = [
        "# Block-sparse attention on CPU beside scaled_dot_product_attention",
        "",
        "Made by `python benchmarks/attention.py`, which says what the columns mean.",
        f"{head['machine']}, {head['cores']} cores, kernels {head['isa']}, torch {head['torch']},"
        f" {head['date']}; a matrix product of 1024: {matmul}.",
        "",
        "| case | density | forward, backward ms | routing | speedup | +- | efficiency (forward, backward)"
        " | GF/s | MiB, theirs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['case']} | {r['density']:.3f} | {r['forward_ms']:.1f}, {r['backward_ms']:.1f}"
        f" | {r['routing_share']:.1%} | {r['speedup_both']:.2f} | {r['speedup_spread']:.0%}"
        f" | **{r['efficiency_both']:.2f}** ({r['efficiency_forward']:.2f}, {r['efficiency_backward']:.2f})"
        f" | {r['useful_gflops']:.0f} | {r['memory_mib']:.0f}, {r['their_memory_mib']:.0f} |"
        for r in rows
    ]
    by_case = {r["case"]: r for r in rows}
    pairs = [(r, by_case.get(name[:-1] + "2")) for name, r in by_case.items() if name.endswith("-t1")]
    scaling = [(one, two) for one, two in pairs if two is not None]
    if scaling:
        lines += ["", "| two threads | times as fast as one |", "|---|---|"]
        lines += [f"| {one['case'][:-3]} | {one['both_ms'] / two['both_ms']:.2f} |" for one, two in scaling]
    return "\n".join(lines) + "\n"


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
