"""The CUDA kernels of coverage and budget, on the emulator: against the naive twin and the CPU's choice."""

from __future__ import annotations

import emulated as emulator
import pytest
import torch
from attention.moba_cases import DTYPES, Case, assert_close, bounds, make_inputs, run, select
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.attention import moba_attention, moba_coverage
from sb_lightning.attention.backends import backends
from sb_lightning.attention.tuned import tuned_budget
from sb_lightning.tuning import SparseTarget, sampled_rows

pytestmark = [
    pytest.mark.skipif(emulator.missing() != "", reason=emulator.missing() or "-"),
    pytest.mark.skipif(
        not backends()[0].available, reason="the extension, whose ops these are, is not built"
    ),
]

CASES = [
    Case((300,), (4, 2), 64, 64, "bf16"),
    Case((333, 1, 0, 65, 64), (4, 2), 32, 32, "fp16"),
    Case((400,), (7, 1), 32, 16, "bf16"),
    Case((257, 400), (4, 2), 128, 128, "fp16"),
    Case((290,), (3, 3), 64, 48, "bf16"),
]


def sharp(case):
    """Inputs whose logits are sharper than those of random keys, so that ranks differ."""
    x = make_inputs(case, fused=True, requires_grad=False)
    x.q, x.k = x.q * 2, x.k * 4
    return x


def coverage(case, emulate="", **options):
    x = sharp(case)
    options = {"block_size": case.block_size} | options
    if options.get("backend") == "reference":
        return moba_coverage(x.q, x.k, x.cu_seqlens, **options)
    before = emulator.launches()
    with emulator.emulated(emulate):
        mass = moba_coverage(x.q, x.k, x.cu_seqlens, **options)
    assert emulator.launches() > before
    return mass


@pytest.mark.parametrize("row_stride", [5, 64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_coverage_and_twin_agree(case, row_stride):
    mass = coverage(case, row_stride=row_stride)
    twin = coverage(case, row_stride=row_stride, backend="reference")
    assert mass.shape == twin.shape
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, twin, rtol=0, atol=2e-6)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    block_size=st.sampled_from([16, 32, 48]),
    row_stride=st.sampled_from([1, 5, 64]),
    max_rank=st.integers(0, 11),
    dtype=st.sampled_from(["bf16", "fp16"]),
)
def test_mass_is_a_share_and_ranks_are_what_a_longer_list_begins_with(
    lengths, heads, block_size, row_stride, max_rank, dtype
):
    case = Case((*lengths, 70), heads, 32, block_size, dtype)
    full = coverage(case, max_rank=11, row_stride=row_stride)
    with emulator.emulated():
        x = sharp(case)
        mass = moba_coverage(
            x.q, x.k, x.cu_seqlens, block_size=block_size, max_rank=max_rank, row_stride=row_stride
        )
    torch.testing.assert_close(mass, full[..., :max_rank], rtol=0, atol=3e-7)
    twin = coverage(case, max_rank=11, row_stride=row_stride, backend="reference")
    torch.testing.assert_close(full, twin, rtol=0, atol=2e-6)
    assert bool((full >= 0).all())
    assert bool((full.diff(dim=-1) <= 0).all())
    totals = full.double().sum(-1)
    assert bool((totals <= 1).all())
    some = torch.tensor([sampled_rows(length, block_size, row_stride) > 0 for length in (*lengths, 70)])
    torch.testing.assert_close(totals, some.double()[:, None].expand_as(totals), rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", [CASES[1], Case((700,), (2, 1), 32, 16, "bf16")], ids=str)
def test_coverage_depends_on_no_schedule_no_machine_and_no_bound(case):
    want = coverage(case, max_rank=12)
    for emulate in ("order=reverse", "order=random seed=4", "multiprocessors=50", "shared_kb=16"):
        assert torch.equal(coverage(case, emulate, max_rank=12), want)
    assert torch.equal(coverage(case, max_rank=12, max_seqlen=5000), want)


def test_coverage_of_a_sequence_depends_on_no_other():
    case = CASES[1]
    x = sharp(case)
    with emulator.emulated():
        pack = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32)
        alone = moba_coverage(x.q[334:399], x.k[334:399], bounds([65]), block_size=32)
    assert torch.equal(pack[3:4, :, :2], alone)
    assert not bool(pack[1:3].any())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_equal_scores_share_alike_and_one_block_may_have_all(dtype):
    q, k = (torch.ones(256, 1, 32, dtype=DTYPES[dtype]) for _ in range(2))
    with emulator.emulated():
        for max_rank in (7, 3):  # sorted whole; the highest found first
            mass = moba_coverage(q, k, bounds([256]), block_size=32, max_rank=max_rank)[0, 0]
            # Rows 64 and 63, 128 and 95, 127, ... : rank r has a share of 1 / blocks in those that see r.
            rows = [t // 32 for t in range(32, 256) if t % 64 == 0 or t % 32 == 31]
            want = torch.tensor(
                [sum(1 / blocks for blocks in rows if blocks > r) / len(rows) for r in range(max_rank)]
            )
            torch.testing.assert_close(mass, want, rtol=0, atol=1e-6)
        k.zero_()[:32] = 100.0
        assert moba_coverage(q, k, bounds([256]), block_size=32)[0, 0].tolist() == [1.0] + [0.0] * 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_bad_numbers_leave_shares_and_never_leave_their_sequence(value):
    x = make_inputs(Case((130, 165, 200), (4, 2), 32, 32, "bf16"), requires_grad=False)
    with emulator.emulated():
        want = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32)
        x.k[150:185] = value
        x.q[290] = value
        mass = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32)
    assert bool(mass.isfinite().all())
    assert bool((mass.double().sum(-1) <= 1).all())
    assert torch.equal(mass[[0, 2]], want[[0, 2]])


def test_a_block_of_nan_keys_counts_as_the_lowest():
    q, k = torch.ones(128, 1, 32).half(), torch.zeros(128, 1, 32).half()
    k[32:64] = float("nan")
    with emulator.emulated():
        mass = moba_coverage(q, k, bounds([128]), block_size=32)
    torch.testing.assert_close(mass[0, 0], torch.tensor([3.5, 0.5, 0.0]) / 4)


def test_nothing_to_measure():
    q = torch.zeros(0, 4, 32).half()
    with emulator.emulated():
        assert not moba_coverage(q, q, bounds([0, 0]), block_size=16, max_rank=3).any()
        assert moba_coverage(q, q, bounds([]), block_size=16, max_rank=3).shape == (0, 4, 3)
        one = torch.ones(40, 1, 32).half()
        assert moba_coverage(one, one, bounds([40]), block_size=16, max_rank=0).shape == (1, 1, 0)


@st.composite
def choices(draw):
    """Draw arguments of moba_budget: mass with plateaus, ties and sums above 1, costs with plateaus."""
    count, heads = draw(st.one_of(st.integers(1, 4), st.integers(30, 70))), draw(st.integers(1, 3))
    ranks = draw(st.integers(0, 6))
    values = torch.tensor([0.0, 2.0**-31, 0.0625, 0.1, 0.25, 1 / 3, float("nan")])
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mass = values[torch.randint(0, 6 + draw(st.booleans()), (count, heads, ranks), generator=random)]
    width = draw(st.integers(1, ranks + 1))
    cost_us = torch.randint(0, 10, (count, width), generator=random).cumsum(1).int()
    k0 = torch.randint(1, 9, (draw(st.sampled_from([1, count])),), generator=random).int()
    tau_us = torch.tensor(draw(st.integers(-5, 20 * count)))
    tolerance = torch.tensor(draw(st.floats(0, 1, width=32)))
    arguments = [mass.sort(-1, descending=True).values, cost_us, tau_us, tolerance, k0]
    lengths = torch.randint(0, 260, (count,), generator=random).tolist()
    layout = draw(st.sampled_from([(None, 0), (bounds(lengths), 32), (bounds(lengths), 80)]))
    stride, tune_short = draw(st.sampled_from([1, 64])), draw(st.booleans())
    return [*arguments, draw(st.integers(1, 4)), *layout, stride, tune_short]


@settings(max_examples=150, deadline=None)
@given(arguments=choices())
def test_budgets_are_those_of_the_cpu(arguments):
    emulator.load()
    chosen = torch.ops.sb_emulated.moba_budget(*arguments)
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen, torch.ops.sb.moba_budget(*arguments))


def test_many_budgets_and_large_numbers():
    random = torch.Generator().manual_seed(1)
    mass = torch.rand(3, 28, 700, generator=random).sort(-1, descending=True).values
    mass /= mass.sum(-1, keepdim=True)
    cost_us = torch.randint(0, 3_000_000, (3, 701), generator=random).cumsum(1).int()
    cu_seqlens = torch.tensor([0, 2**30, 2**30 + 90000, 2**31 - 1], dtype=torch.int32)
    k0 = torch.tensor([32], dtype=torch.int32)
    emulator.load()
    for tau in (10**8, 10**9, 2 * 10**9, 10**12):
        arguments = (mass, cost_us, torch.tensor(tau), torch.tensor(0.3), k0, 4, cu_seqlens, 4096, 64)
        chosen = torch.ops.sb_emulated.moba_budget(*arguments)
        assert torch.equal(chosen, torch.ops.sb.moba_budget(*arguments))


def test_values_that_the_cpu_refuses_do_no_harm():
    mass, cost_us = torch.full((2, 2, 3), 0.25), torch.tensor([[9, 3, -5, 2]] * 2, dtype=torch.int32)
    fine = [mass, cost_us, torch.tensor(8), torch.tensor(0.5), torch.tensor([-7, 10**9]).int(), 1]
    emulator.load()
    for change in ({}, {3: torch.tensor(float("nan"))}, {3: torch.tensor(-1.0)}):
        arguments = [change.get(i, x) for i, x in enumerate(fine)]
        budgets = torch.ops.sb_emulated.moba_budget(*arguments, bounds([5, -9]), 32)
        assert bool((budgets >= 1).all())


def test_sizes_are_checked_as_on_the_cpu():
    mass, cost_us = torch.zeros(2, 4, 2), torch.ones(2, 4, dtype=torch.int32)
    numbers = (torch.tensor(1), torch.tensor(0.1), torch.tensor(2, dtype=torch.int32))
    q = torch.zeros(40, 2, 32).half()
    emulator.load()
    for ops in (torch.ops.sb, torch.ops.sb_emulated):
        with pytest.raises(RuntimeError, match="needs the mass of one rank less"):
            ops.moba_budget(mass, cost_us, *numbers, 1)
        with pytest.raises((ValueError, RuntimeError), match="min_budget is 0"):
            ops.moba_budget(mass, cost_us[:, :3], *numbers, 0)
        with pytest.raises((ValueError, RuntimeError), match="row_stride is 0"):
            ops.moba_coverage(q, q, bounds([40]), 16, 40, 2, 0)
        with pytest.raises((ValueError, RuntimeError), match="max_rank is 40000"):
            ops.moba_coverage(q, q, bounds([40]), 16, 40, 40000)
    with pytest.raises(RuntimeError, match="q is neither bfloat16 nor float16"):
        torch.ops.sb_emulated.moba_coverage(q.float(), q.float(), bounds([40]), 16, 40, 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_layer_is_tuned_as_on_the_cpu(dtype):
    """Coverage, budget, record and attention, as `sb_target` runs them in a layer."""
    case = Case((200, 1, 0, 130), (4, 2), 32, 32, dtype)
    x, width = sharp(case), 7
    cost_us = torch.arange(1, width + 1, dtype=torch.int32).mul(10).repeat(4, 1)
    chosen = []
    for emulate in (False, True):
        target = SparseTarget(
            cost_us=cost_us,
            tau_us=torch.tensor(130),
            tolerance=torch.tensor(0.4),
            k0=torch.full((4,), 3, dtype=torch.int32),
            given=torch.zeros(4, dtype=torch.int32),
            record=torch.zeros(2, 4, 3),
        )
        options = {"block_size": 32, "max_seqlen": 200}
        if not emulate:
            chosen.append(tuned_budget(target, 1, x.q, x.k, x.cu_seqlens, **options))
            record = target.record
            continue
        before = emulator.launches()
        with emulator.emulated():
            budget = tuned_budget(target, 1, x.q, x.k, x.cu_seqlens, **options)
            again = tuned_budget(target, 1, x.q, x.k, x.cu_seqlens, **options)
            results = run(case, make_tuned(x, budget), max_budget=width)
            selection = select(case, make_tuned(x, budget), max_budget=width)
            out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, budget, max_budget=width, **options)
        assert emulator.launches() > before + 10
        chosen.append(budget)
        torch.testing.assert_close(target.record, record, rtol=0, atol=2e-6)
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(again, budget)
    assert len(set(budget.flatten().tolist())) > 1
    assert torch.equal(out, results[0])
    assert_close(case, results, x, selection)


def make_tuned(x, budget):
    """Give the inputs this budget, and gradients."""
    x.budget = budget.expand(-1, x.q.shape[1]).contiguous()
    x.q, x.k, x.v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    return x


def test_opcheck():
    x = make_inputs(Case((70, 1, 0, 35), (2, 1), 32, 16, "bf16"), fused=True, requires_grad=False)
    only = ("test_schema", "test_faketensor")
    cost_us = torch.ones(4, 4, dtype=torch.int32)
    numbers = (torch.tensor(9), torch.tensor(0.2), torch.tensor(2, dtype=torch.int32))
    with emulator.emulated():
        ops = torch.ops.sb
        torch.library.opcheck(
            ops.moba_coverage.default, (x.q, x.k, x.cu_seqlens, 16, 70, 4, 64), test_utils=only
        )
        mass = ops.moba_coverage(x.q, x.k, x.cu_seqlens, 16, 70, 4)
        budget = (mass, cost_us, *numbers, 1, x.cu_seqlens, 16)
        torch.library.opcheck(ops.moba_budget.default, budget, test_utils=only)
