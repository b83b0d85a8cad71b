"""Block-sparse attention on CPU beside scaled_dot_product_attention, in the same run, turn about.

    python benchmarks/attention.py --quick
    python benchmarks/attention.py --json benchmarks/results/attention.json

Every figure is the median of interleaved rounds (theirs, ours, theirs, ours, ...), both warmed up.
Selection and index are part of our times. `density` is computed pairs / causal pairs; `efficiency` is
speedup x density: 1 means that the time fell exactly as the work did. `GF/s` is that of the attended pairs
(4 products of D forward, 10 backward), to be seen beside the GF/s of a matrix product on as many threads.
`MiB` is the growth of the process's peak memory during forward and backward.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from sb_lightning.attention import backends, moba_attention
from sb_lightning.attention.pairs import attended_pairs, causal_pairs

HEADS = {"4/2": (4, 2), "14/2": (14, 2), "16/2": (16, 2)}
# Real lengths: files of Python 3.11's standard library in tokens of a 2,048-token BPE, in shuffled order
# (seed 0): the first twenty of up to 1,500 tokens, and the first three above 4,000.
MANY_SHORT = (
    1490, 1315, 1173, 672, 1037, 285, 1396, 396, 337, 315, 1129, 167, 942, 359, 166, 170, 626, 305, 1302, 688,
)  # fmt: skip
FEW_LONG = (13473, 5243, 19390)


@dataclass(frozen=True)
class Case:
    """One measurement."""

    lengths: tuple[int, ...]
    budget: tuple[int, ...]
    block_size: int
    head_dim: int
    heads: str = "4/2"
    dtype: str = "float32"
    threads: int = 1
    name: str = ""

    @property
    def label(self) -> str:
        """What a row is called."""
        size = self.name or f"L{self.lengths[0]}"
        budget = self.budget[0] if len(set(self.budget)) == 1 else "mixed"
        return (
            f"{size}-H{self.heads}-D{self.head_dim}-B{self.block_size}-k{budget}-{self.dtype}-t{self.threads}"
        )


def budget_for(length: int, block_size: int, density: float) -> int:
    """Return the budget whose share of the causal pairs is nearest to `density`."""
    blocks = -(-length // block_size)
    return min(
        range(1, blocks + 1),
        key=lambda k: abs(attended_pairs([length], k, block_size) / causal_pairs([length]) - density),
    )


def cases(quick: bool) -> Iterator[Case]:
    """Yield all measurements."""
    lengths = (8192,) if quick else (2048, 8192, 16384, 32768)
    blocks = (64, 128) if quick else (64, 128, 256)
    for dtype in ("float32", "bfloat16"):
        for dim in (64,) if quick else (32, 64, 128):
            for length in lengths:
                if length == 32768 and (dim == 32 or dtype == "bfloat16"):
                    continue
                for block in blocks:
                    for density in (0.1, 0.25, 0.5):
                        k = budget_for(length, block, density)
                        yield Case((length,), (k,), block, dim, dtype=dtype)
    for heads in ("14/2", "16/2"):
        for density in (0.1, 0.25):
            yield Case((8192,), (budget_for(8192, 128, density),), 128, 64, heads=heads)
    # Below a tenth of the pairs: the time must go on falling.
    for length in (8192,) if quick else (8192, 16384, 32768):
        for k in (1, 2, 3):
            yield Case((length,), (k,), 64, 64)
    # All pairs: our own dense path.
    for length in (256, 1024, 4096):
        yield Case((length,), (-(-length // 64),), 64, 64, name=f"dense{length}")
    packs = {"few_long": FEW_LONG, "many_short": MANY_SHORT}
    for name, pack in packs.items():
        yield Case(pack, (8,) * len(pack), 64, 64, name=name)
    yield Case(FEW_LONG, (16, 82, 8), 64, 64, name="few_long")
    for threads in (2,):
        for density in (0.1, 0.25, 0.5):
            yield Case((8192,), (budget_for(8192, 128, density),), 128, 64, threads=threads)
        for name, pack in packs.items():
            yield Case(pack, (8,) * len(pack), 64, 64, threads=threads, name=name)


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

    def __init__(self, case: Case) -> None:
        hq, hkv = HEADS[case.heads]
        total, dtype = sum(case.lengths), getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(total, h, case.head_dim, generator=generator).to(dtype) for h in (hq, hkv, hkv, hq)
        )
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.cu = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
        self.budget = torch.tensor(case.budget, dtype=torch.int32)[:, None]
        self.case = case

    def forward(self) -> torch.Tensor:
        out = moba_attention(self.q, self.k, self.v, self.cu, self.budget, block_size=self.case.block_size)
        assert isinstance(out, torch.Tensor)
        return out

    def backward(self, out: torch.Tensor) -> object:
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)

    def routing(self) -> None:
        """Selection (forward) and both sorts of the index (forward and backward): their share."""
        with torch.no_grad():
            blocks = max(-(-n // self.case.block_size) for n in self.case.lengths)
            hq, hkv = HEADS[self.case.heads]
            budget = self.budget.expand(-1, hq).contiguous()
            args = (self.case.block_size, max(self.case.lengths), min(max(self.case.budget), blocks))
            selection = torch.ops.sb.moba_select(self.q, self.k, self.cu, budget, *args)
            for _ in range(2):
                torch.ops.sb.moba_index(selection, self.cu, budget, self.case.block_size, hq // hkv)


class Theirs:
    """torch's causal attention, one call per sequence."""

    def __init__(self, ours: Ours) -> None:
        bounds = ours.cu.tolist()
        self.parts = []
        for start, stop in itertools.pairwise(bounds):
            q, k, v, dout = (
                x.detach()[start:stop].transpose(0, 1)[None].contiguous()
                for x in (ours.q, ours.k, ours.v, ours.dout)
            )
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


def measure(case: Case, rounds: int) -> dict[str, object]:
    """Time one case."""
    torch.set_num_threads(case.threads)
    ours, hq = Ours(case), HEADS[case.heads][0]
    theirs = Theirs(ours)
    sides = {"theirs": theirs, "ours": ours}
    memory = {name: peak_growth(lambda s=side: s.backward(s.forward())) for name, side in sides.items()}
    ours.routing()
    times: dict[str, list[float]] = {f"{n}_{p}": [] for n in sides for p in ("forward", "backward")} | {
        "routing": []
    }
    for _ in range(rounds):
        for name, side in sides.items():
            seconds, out = clock(side.forward)
            times[f"{name}_forward"].append(seconds)
            times[f"{name}_backward"].append(clock(lambda s=side, o=out: s.backward(o))[0])
        times["routing"].append(clock(ours.routing)[0])
    both = {
        n: [f + b for f, b in zip(times[f"{n}_forward"], times[f"{n}_backward"], strict=True)] for n in sides
    }
    # The ratio of each round, so that a slow moment of the machine touches both sides of one ratio only.
    ratios = [t / o for t, o in zip(both["theirs"], both["ours"], strict=True)]
    pairs = attended_pairs(case.lengths, case.budget, case.block_size)
    density = pairs / causal_pairs(case.lengths)
    speedup = statistics.median(ratios)
    median = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return {
        "case": case.label,
        **asdict(case),
        **{f"{name}_ms": value for name, value in median.items()},
        "routing_share": median["routing"] / (median["ours_forward"] + median["ours_backward"]),
        "density": density,
        "speedup_forward": median["theirs_forward"] / median["ours_forward"],
        "speedup_backward": median["theirs_backward"] / median["ours_backward"],
        "speedup": speedup,
        "speedup_spread": (max(ratios) - min(ratios)) / speedup,
        "efficiency": speedup * density,
        "useful_gflops": 14 * case.head_dim * hq * pairs / statistics.median(both["ours"]) / 1e9,
        "memory_mib": memory["ours"] / 2**20,
        "their_memory_mib": memory["theirs"] / 2**20,
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
    parser.add_argument("--json", type=Path, help="write all figures to this file")
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
        f"{'case':44} {'dens':>6} {'fwd ms':>8} {'bwd ms':>8} {'route':>6} {'speedup':>8} {'+-':>5}"
        f" {'fwd':>6} {'bwd':>6} {'effic':>6} {'GF/s':>5} {'MiB':>6} {'theirs':>6}"
    )
    rows = []
    for case in cases(arguments.quick):
        if arguments.only not in case.label:
            continue
        row = measure(case, arguments.rounds)
        rows.append(row)
        print(
            f"{row['case']:44} {row['density']:6.3f}"
            f" {row['ours_forward_ms']:8.1f} {row['ours_backward_ms']:8.1f}"
            f" {row['routing_share']:6.1%} {row['speedup']:8.2f} {row['speedup_spread']:5.0%}"
            f" {row['speedup_forward'] * row['density']:6.2f} {row['speedup_backward'] * row['density']:6.2f}"
            f" {row['efficiency']:6.2f} {row['useful_gflops']:5.0f} {row['memory_mib']:6.0f}"
            f" {row['their_memory_mib']:6.0f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.json.with_suffix(".tmp")
        part.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(arguments.json)


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
