"""What benchmarks/gpu_check.sh runs on a GPU: the ops against the naive twin and the emulator, and times.

python benchmarks/gpu_check.py ops                     # the matrix of shapes
python benchmarks/gpu_check.py shapes                  # two small shapes, for compute-sanitizer
python benchmarks/gpu_check.py times [--json FILE]     # beside scaled_dot_product_attention
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "attention"), str(ROOT / "tests" / "cuda")]

import emulated  # noqa: E402
from moba_cases import Case, Inputs, assert_close, assert_selection, make_inputs  # noqa: E402

from sb_lightning.attention import moba_attention, moba_select  # noqa: E402
from sb_lightning.attention.backends import backends  # noqa: E402

TENSORS = ("q", "k", "v", "cu_seqlens", "budget", "dout", "dlse")
TWO = [
    Case((150, 1, 0, 70), (4, 2), 64, 32, "bf16", (3, 1, 1, 2)),
    Case((131, 40), (3, 1), 128, 64, "fp16", (2, 5)),
]


def cases() -> list[Case]:
    choice = random.Random(7)
    found = list(TWO)
    for seed in range(30):
        block_size = choice.choice([16, 32, 48, 64, 128])
        sizes = [0, 1, 15, 16, 17, block_size - 1, block_size, block_size + 1, 5 * block_size + 3, 700]
        group, kv_heads = choice.choice([1, 2, 5, 6, 7, 8]), choice.choice([1, 2, 3])
        lengths = tuple(choice.choice(sizes) for _ in range(choice.randint(1, 6)))
        dim, dtype = choice.choice([32, 64, 128]), choice.choice(["bf16", "fp16"])
        found.append(Case(lengths, (group * kv_heads, kv_heads), dim, block_size, dtype, seed=seed))
    return found


def on_gpu(x: Inputs) -> Inputs:
    moved = {name: getattr(x, name).detach().cuda() for name in TENSORS}
    for name in ("q", "k", "v"):
        moved[name].requires_grad_()
    return Inputs(**moved)


def run(case: Case, x: Inputs, deterministic: bool) -> list[Tensor]:
    out, lse = moba_attention(
        x.q,
        x.k,
        x.v,
        x.cu_seqlens,
        x.budget,
        block_size=case.block_size,
        return_lse=True,
        deterministic=deterministic,
    )
    grads = torch.autograd.grad((out, lse), (x.q, x.k, x.v), (x.dout, x.dlse))
    return [out.detach(), lse.detach(), *grads]


def check_ops() -> None:
    worst = 0.0
    for case in cases():
        x = make_inputs(case, fused=case.seed % 2 == 0)
        gpu = on_gpu(x)
        options = {"block_size": case.block_size}
        selection = moba_select(gpu.q, gpu.k, gpu.cu_seqlens, gpu.budget, **options)
        assert_selection(case, x, selection.cpu())
        for deterministic in (False, True):
            results = run(case, gpu, deterministic)
            assert_close(case, [t.cpu() for t in results], x, selection.cpu())
        for one, other in zip(results, run(case, gpu, True), strict=True):
            assert torch.equal(one, other), f"{case}: a second run differs"
        if not emulated.missing() and sum(case.lengths) < 400:
            with emulated.emulated():
                twin = run(case, x, True)
            for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), results, twin, strict=True):
                if ours.numel() == 0:
                    continue
                difference = float((ours.cpu().float() - theirs.float()).abs().max())
                size = max(1.0, float(theirs.float().abs().max()))
                worst = max(worst, difference / size)
                assert difference < 0.02 * size, f"{case}: {name} differs from the emulator by {difference}"
        print(f"ok {case}", flush=True)
    check_graph()
    check_offsets()
    print(f"{len(cases())} shapes; largest difference from the emulator {worst:.1e} of the largest value")


def check_graph() -> None:
    """A CUDA graph holds the launches, and another budget is only data to it."""
    case = Case((300, 200), (4, 2), 64, 32, "bf16", (4, 3))
    x = on_gpu(make_inputs(case, requires_grad=False))

    def attention() -> Tensor:
        bounds = (32, 300, 10, 0.125, False)
        return torch.ops.sb.moba_attention(
            x.q.detach(), x.k.detach(), x.v.detach(), x.cu_seqlens, x.budget, *bounds
        )[0]

    attention()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention()
    for budget in (4, 1, 7):
        x.budget.fill_(budget)
        graph.replay()
        assert torch.equal(captured, attention()), f"the graph differs at budget {budget}"
    print("ok CUDA graph, three budgets")


def check_offsets() -> None:
    """More than 2^31 elements: the last sequence gives what it gives alone."""
    free, _ = torch.cuda.mem_get_info()
    if free < 60e9:
        print(f"left out: arrays of more than 2^31 elements, {free / 1e9:.0f} GB of memory are free")
        return
    heads, dim, last = 128, 128, 300
    tokens = 2**31 // (heads * dim) + 2 * last
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(count: int) -> Tensor:
        shape = (tokens, count, dim)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_()

    q, k, v, dout = normal(heads), normal(1), normal(1), normal(heads).detach()
    cu = torch.tensor([0, tokens - last, tokens], dtype=torch.int32, device="cuda")
    budget = torch.tensor([[1], [3]], dtype=torch.int32, device="cuda")
    options = {"block_size": 64, "deterministic": True}
    out = moba_attention(q, k, v, cu, budget, **options)
    whole = [t[-last:].clone() for t in (out, *torch.autograd.grad(out, (q, k, v), dout))]
    alone = [t[-last:].detach().clone().requires_grad_() for t in (q, k, v)]
    again = moba_attention(*alone, cu[:2] * 0 + cu[:2].new_tensor([0, last]), budget[1:], **options)
    parts = (again, *torch.autograd.grad(again, alone, dout[-last:]))
    for name, ours, theirs in zip(("out", "dq"), whole, parts, strict=False):
        assert torch.equal(ours, theirs), f"{name} differs beyond 2^31 elements"
    for name, ours, theirs in zip(("dk", "dv"), whole[2:], parts[2:], strict=True):
        # The second call cuts its lists into parts, so their sums are rounded elsewhere.
        difference = float((ours.float() - theirs.float()).abs().max())
        assert difference < 0.02 * float(theirs.float().abs().max()), f"{name} differs beyond 2^31 elements"
    print("ok arrays of more than 2^31 elements")


def check_shapes() -> None:
    for case in TWO:
        x = on_gpu(make_inputs(case))
        for deterministic in (False, True):
            run(case, x, deterministic)
    torch.cuda.synchronize()
    print("ran")


def median_ms(call: Callable[[], object], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(length: int, budget: int, heads: tuple[int, int], dim: int, block_size: int) -> dict[str, float]:
    query_heads, kv_heads = heads

    def normal(count: int) -> Tensor:
        return torch.randn(length, count, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = normal(query_heads), normal(kv_heads), normal(kv_heads)
    dout = torch.randn_like(q)
    cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    group = query_heads // kv_heads

    def sparse() -> Tensor:
        return moba_attention(
            q, k, v, cu, budget, block_size=block_size, max_seqlen=length, max_budget=budget
        )

    def dense() -> Tensor:
        repeated = (t.repeat_interleave(group, 1) for t in (k, v))
        heads_first = [t.transpose(0, 1)[None] for t in (q, *repeated)]
        return F.scaled_dot_product_attention(*heads_first, is_causal=True)[0].transpose(0, 1)

    row: dict[str, float] = {"length": length, "budget": budget, "head_dim": dim}
    rounds = 5 if length > 40000 else 10
    for name, call in (("sparse", sparse), ("dense", dense)):
        with torch.no_grad():
            row[f"{name}_forward_ms"] = median_ms(call, rounds)
        out = call()
        row[f"{name}_backward_ms"] = median_ms(
            lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), rounds
        )
    with torch.no_grad():
        row["select_ms"] = median_ms(
            lambda: torch.ops.sb.moba_select(
                q,
                k,
                cu,
                torch.full((1, query_heads), budget, dtype=torch.int32, device="cuda"),
                block_size,
                length,
                budget,
            ),
            rounds,
        )
    return row


def check_times(path: Path | None) -> None:
    rows = []
    print("length  budget  D    forward ms (select)   dense    backward ms   dense    speed-up")
    for dim, heads in ((128, (28, 4)), (64, (14, 2))):
        for length, budget in ((8192, 16), (32768, 32), (131072, 32)):
            row = measure(length, budget, heads, dim, 256)
            rows.append(row)
            ours = row["sparse_forward_ms"] + row["sparse_backward_ms"]
            dense = row["dense_forward_ms"] + row["dense_backward_ms"]
            dense_part = f"{row['dense_forward_ms']:10.2f}", f"{row['dense_backward_ms']:10.2f}"
            print(
                f"{length:6d}  {budget:6d}  {dim:3d}  {row['sparse_forward_ms']:10.2f} "
                f"({row['select_ms']:.2f})  "
                f"{dense_part[0]}  {row['sparse_backward_ms']:10.2f}  {dense_part[1]}  {dense / ours:8.2f}",
                flush=True,
            )
    if path is not None:
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["ops", "shapes", "times"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda = next(backend for backend in backends() if backend.name == "cuda")
    if not cuda.available:
        raise SystemExit(f"the CUDA kernels do not run here: {cuda.reason}")
    print(cuda.reason)
    if options.what == "times":
        check_times(options.json)
    elif options.what == "shapes":
        check_shapes()
    else:
        check_ops()


if __name__ == "__main__":
    main()
