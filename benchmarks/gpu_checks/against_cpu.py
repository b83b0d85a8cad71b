"""Coverage against the naive twin, budgets against the CPU's op, attention against the emulator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import emulated
import torch
from moba_cases import Case, Inputs, make_inputs, run
from torch import Tensor

from gpu_checks.machine import CHECKS, RESULTS, Figure, LeftOut, Machine, cases, check, on_cpu, relative
from sb_lightning.attention import moba_coverage, reference

COVERAGE_LIMIT = 1e-5
"""Largest difference of a share from the naive twin's; the emulated kernels, whose exponential is exact, are
within 2e-6."""


def coverage_inputs(case: Case) -> Inputs:
    """Return inputs whose logits are sharper than those of random keys, so that ranks differ."""
    x = make_inputs(case, fused=True, requires_grad=False)
    x.q, x.k = x.q * 2, x.k * 4
    return x


def coverage_check(dtype: str) -> Callable[[Machine], Figure]:
    """Make the check of moba_coverage against the naive twin."""
    chosen = [
        Case((300,), (4, 2), 64, 64, dtype),
        Case((333, 1, 0, 65, 64, 0), (4, 2), 32, 32, dtype),
        Case((400,), (7, 1), 32, 16, dtype),
        Case((257, 400), (4, 2), 128, 128, dtype),
        Case((290,), (3, 3), 64, 48, dtype),
        # More blocks than shared memory holds logits of.
        Case((20011, 500, 0), (4, 2), 128, 16, dtype),
    ]

    def coverage(machine: Machine) -> Figure:
        worst, ran = 0.0, 0
        for case in chosen[:2] if machine.tiny else chosen:
            x = machine.put(coverage_inputs(case))
            q, k = x.q.detach(), x.k.detach()
            for row_stride, max_rank in itertools.product((5, 64), (None, 3)):
                options = {"block_size": case.block_size, "row_stride": row_stride, "max_rank": max_rank}
                mass = moba_coverage(q, k, x.cu_seqlens, **options)
                twin = moba_coverage(q, k, x.cu_seqlens, backend="reference", **options)
                difference = float((mass - twin).abs().max()) if mass.numel() else 0.0
                assert difference <= COVERAGE_LIMIT, f"{case}, {options}: off by {difference:.1e}"
                assert torch.equal(mass, moba_coverage(q, k, x.cu_seqlens, **options)), (
                    f"{case}, {options}: a second run differs"
                )
                worst, ran = max(worst, difference), ran + 1
        return f"{ran} calls; largest difference from the twin {worst:.1e} (allowed {COVERAGE_LIMIT:.0e})"

    return coverage


for _dtype in ("bf16", "fp16"):
    CHECKS[f"coverage {_dtype}"] = coverage_check(_dtype)


def budget_arguments(choice: random.Random) -> list[object]:
    """Draw arguments of moba_budget: plateaus, ties, sums above 1, odd sizes, empty sequences at the end."""
    count, heads = choice.choice([1, 2, 3, 5, 31, 33, 70, 257]), choice.choice([1, 3, 7, 28])
    ranks = choice.choice([0, 1, 2, 5, 6, 31, 32, 33] + ([700] if count < 6 else []))
    draw = torch.Generator().manual_seed(choice.getrandbits(31))
    if choice.random() < 0.5:
        values = torch.tensor([0.0, 2.0**-31, 0.0625, 0.1, 0.25, 1 / 3, float("nan")])
        mass = values[torch.randint(0, choice.choice([6, 7]), (count, heads, ranks), generator=draw)]
    else:
        mass = torch.randn(count, heads, ranks, generator=draw).mul(3).softmax(-1)
    width = choice.randint(1, ranks + 1)
    step = choice.choice([10, 3_000_000])
    cost_us = torch.randint(0, step, (count, width), generator=draw).cumsum(1).int()
    k0 = torch.randint(1, width + 3, (choice.choice([1, count]),), generator=draw).int()
    lengths = torch.randint(0, choice.choice([260, 90000]), (count,), generator=draw)
    lengths[count - choice.choice([0, 1, count]) :] = 0
    bounds = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    layout = choice.choice([(None, 0), (bounds, 32), (bounds, 80)])
    return [
        mass.sort(-1, descending=True).values.contiguous(),
        cost_us,
        torch.tensor(choice.randint(-5, max(1, int(cost_us[:, -1].sum(dtype=torch.int64))) + 5)),
        torch.tensor(choice.choice([0.0, 0.05, 0.3, 1.0, choice.random()])),
        k0,
        choice.randint(1, 4),
        *layout,
        choice.choice([1, 64]),
        choice.random() < 0.5,
    ]


@check("budget")
def budget(machine: Machine) -> Figure:
    """Against the CPU's op, bit for bit; small ones against the naive twin too."""
    choice, total = random.Random(11), 60 if machine.tiny else 2000
    for number in range(total):
        arguments = budget_arguments(choice)
        here = [a.to(machine.device) if isinstance(a, Tensor) else a for a in arguments]
        chosen = torch.ops.sb.moba_budget(*here).cpu()
        want = torch.ops.sb.moba_budget(*arguments)
        shape = tuple(arguments[0].shape)
        assert torch.equal(chosen, want), f"case {number} {shape}: {chosen.tolist()}, CPU {want.tolist()}"
        if number % 20 == 0 and arguments[0].numel() < 2000:
            names = ("cu_seqlens", "block_size", "row_stride", "tune_short")
            twin = reference.moba_budget(*arguments[:6], **dict(zip(names, arguments[6:], strict=True)))
            assert torch.equal(chosen, twin), (
                f"case {number} {shape}: {chosen.tolist()}, twin {twin.tolist()}"
            )
    return f"{total} random cases, all equal to the CPU's bit for bit"


def emulator_check(dtype: str) -> None:
    """Enter the comparison with the same kernels on the emulator."""

    @check(f"emulator {dtype}")
    def emulator(machine: Machine) -> Figure:
        if why := emulated.missing():
            raise LeftOut(why)
        chosen = [case for case in cases() if case.dtype == dtype and sum(case.lengths) < 400]
        worst = 0.0
        for case in chosen[:1] if machine.tiny else chosen:
            x = make_inputs(case, fused=case.seed % 2 == 0)
            results = on_cpu(run(case, machine.put(x), deterministic=True))
            with emulated.emulated():
                twin = run(case, x, deterministic=True)
            for name, ours, theirs in zip(RESULTS, results, twin, strict=True):
                difference = relative(ours, theirs)
                assert difference < 0.02, f"{case}: {name} differs by {difference:.1e} of the largest value"
                worst = max(worst, difference)
        return f"largest difference {worst:.1e} of the largest value (allowed 2e-2)"


emulator_check("bf16")
emulator_check("fp16")
