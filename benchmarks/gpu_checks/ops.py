"""Attention against the naive twin, the dense path, repeated runs, and large arrays."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
from moba_cases import Case, assert_close, assert_selection, make_inputs, run, run_reference
from torch import Tensor

from gpu_checks.machine import CHECKS, RESULTS, Figure, LeftOut, Machine, cases, check, on_cpu, relative
from sb_lightning.attention import dense, functional, moba_attention, moba_select

DENSE_ALLOWANCE = 3.0
"""How much more error than the kernels torch's attention is allowed; on a CPU it needs all of theirs."""


def ops_check(dim: int, dtype: str) -> Callable[[Machine], Figure]:
    """Make the check of select, forward and backward against the naive twin, for one kind of kernel."""

    def ops(machine: Machine) -> Figure:
        chosen = [case for case in cases() if (case.head_dim, case.dtype) == (dim, dtype)]
        if machine.tiny:
            chosen = [min(chosen, key=lambda case: abs(sum(case.lengths) - 150))]
        worst = 0.0
        for case in chosen:
            x = make_inputs(case, fused=case.seed % 2 == 0)
            here = machine.put(x)
            selection = moba_select(
                here.q, here.k, here.cu_seqlens, here.budget, block_size=case.block_size
            ).cpu()
            try:
                assert_selection(case, x, selection)
                for deterministic in (False, True):
                    results = on_cpu(run(case, here, deterministic=deterministic))
                    worst = max(worst, assert_close(case, results, x, selection))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None
        return f"{len(chosen)} shapes; largest error {worst:.2f} of what is allowed"

    return ops


for _dim, _dtype in itertools.product((32, 64, 128), ("bf16", "fp16")):
    CHECKS[f"ops D{_dim} {_dtype}"] = ops_check(_dim, _dtype)


@contextlib.contextmanager
def dense_way(machine: Machine) -> Iterator[list[str]]:
    """Note which way each call takes; on a CPU, let it be taken for a GPU."""
    taken: list[str] = []
    real = functional.dense_attention

    def note(*arguments: object) -> Tensor:
        taken.append("dense")
        return real(*arguments)

    with contextlib.ExitStack() as stack:
        if machine.device == "cpu":
            import fake_gpu
            import pytest

            patch = stack.enter_context(pytest.MonkeyPatch.context())
            fake_gpu.report_gpu(patch, (9, 0))
            fake_gpu.move_to_gpu(patch)
            stack.enter_context(fake_gpu.packed_attention_on_cpu())
        functional.dense_attention = note
        try:
            yield taken
        finally:
            functional.dense_attention = real


def dense_check(name: str, lengths: tuple[int, ...], heads: tuple[int, int], dim: int, dtype: str) -> None:
    """Enter the check of full budgets, which torch's attention runs, against the naive twin."""

    @check(f"dense {name} {dtype}")
    def dense_path(machine: Machine) -> Figure:
        sizes = tuple(min(length, 90) for length in lengths) if machine.tiny else lengths
        longest = -(-max(sizes) // 64)
        case = Case(sizes, heads, dim, 64, dtype, tuple(max(1, -(-n // 64)) for n in sizes))
        x = make_inputs(case)
        x.dlse.zero_()
        here, worst = machine.put(x), 0.0
        selection = moba_select(here.q, here.k, here.cu_seqlens, here.budget, block_size=64).cpu()
        lse = run_reference(case, x, selection, torch.float64)[1]
        with dense_way(machine) as taken:
            expected = dense.takes_dense(here.q, here.k, here.cu_seqlens, dim**-0.5)
            ways = [
                (here.budget, {}),
                (longest, {"max_seqlen": max(sizes)}),
                (longest + 3, {"max_seqlen": longest * 64, "max_budget": longest + 3}),
            ]
            for full, options in ways:
                out = moba_attention(here.q, here.k, here.v, here.cu_seqlens, full, block_size=64, **options)
                grads = torch.autograd.grad(out, (here.q, here.k, here.v), here.dout)
                results = [out.detach().cpu(), lse, *on_cpu(list(grads))]
                worst = max(worst, assert_close(case, results, x, selection, allow=DENSE_ALLOWANCE))
        assert len(taken) == (len(ways) if expected else 0), f"torch's attention ran {len(taken)} times"
        runs = "torch's attention" if expected else "this package's kernels (see 'dense path')"
        return f"{runs}; largest error {worst:.2f} of what is allowed"


dense_check("one sequence, groups", (1000,), (8, 2), 128, "bf16")
dense_check("one sequence", (777,), (3, 3), 64, "fp16")
dense_check("packed, groups", (300, 1, 0, 700, 65), (8, 2), 128, "bf16")
dense_check("packed", (33, 640, 0), (2, 2), 32, "fp16")


def deterministic_check(dtype: str) -> None:
    """Enter the check that two runs give the same bits."""

    @check(f"deterministic {dtype}")
    def deterministic(machine: Machine) -> Figure:
        lengths = (150, 70) if machine.tiny else (9001, 1, 0, 3000, 700)
        case = Case(lengths, (8, 2), 128, 64, dtype, seed=5)
        here = machine.put(make_inputs(case, fused=True))
        for asked in (True, False):
            first = run(case, here, deterministic=asked)
            for _ in range(2):
                again = run(case, here, deterministic=asked)
                for name, one, other in zip(RESULTS, first, again, strict=True):
                    # Only dq may differ where nobody asked.
                    fine = torch.equal(one, other) or (name == "dq" and not asked)
                    assert fine, f"{name} differs between runs, deterministic={asked}"
        return f"{sum(lengths)} tokens, three runs equal bit for bit"


deterministic_check("bf16")
deterministic_check("fp16")


@check("offsets")
def offsets(machine: Machine) -> Figure:
    """More than 2^31 elements: the last sequence gives what it gives alone."""
    if machine.device == "cpu":
        raise LeftOut("it is about addresses on a GPU")
    free, _ = torch.cuda.mem_get_info()
    if free < 60e9:
        raise LeftOut(f"{free / 1e9:.0f} GB of memory are free; 60 are needed")
    heads, dim, last = 128, 128, 300
    tokens = 2**31 // (heads * dim) + 2 * last
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(count: int) -> Tensor:
        shape = (tokens, count, dim)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_()

    q, k, v, dout = normal(heads), normal(1), normal(1), normal(heads).detach()
    cu = torch.tensor([0, tokens - last, tokens], dtype=torch.int32, device="cuda")
    budgets = torch.tensor([[1], [3]], dtype=torch.int32, device="cuda")
    options = {"block_size": 64, "deterministic": True}
    out = moba_attention(q, k, v, cu, budgets, **options)
    whole = [t[-last:].clone() for t in (out, *torch.autograd.grad(out, (q, k, v), dout))]
    alone = [t[-last:].detach().clone().requires_grad_() for t in (q, k, v)]
    again = moba_attention(*alone, cu.new_tensor([0, last]), budgets[1:], **options)
    parts = (again, *torch.autograd.grad(again, alone, dout[-last:]))
    for name, ours, theirs in zip(("out", "dq"), whole, parts, strict=False):
        assert torch.equal(ours, theirs), f"{name} differs beyond 2^31 elements"
    for name, ours, theirs in zip(("dk", "dv"), whole[2:], parts[2:], strict=True):
        # The second call cuts its lists into parts, so their sums are rounded elsewhere.
        difference = relative(ours, theirs)
        assert difference < 0.02, f"{name} differs by {difference:.1e} beyond 2^31 elements"
    return f"{tokens * heads * dim / 2**31:.3f} x 2^31 elements"
