"""What torch knows of moba_coverage and moba_budget: opcheck, compile, autocast, FLOPs; and the choice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moba_cases import DTYPES, Case, bounds, make_inputs
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from sb_lightning.attention import moba_attention, moba_budget, moba_coverage, reference
from sb_lightning.tuning import choose_budgets, sampled_rows

CASE = Case((300, 1, 0, 199), (4, 2), 32, 32)
MAX_BUDGET = 10


def costs(num_sequences: int) -> torch.Tensor:
    return (torch.arange(1, MAX_BUDGET + 1, dtype=torch.int32) * 10).repeat(num_sequences, 1)


def numbers(tau_us: int, tolerance: float, k0: int) -> tuple[torch.Tensor, ...]:
    return torch.tensor(tau_us), torch.tensor(tolerance), torch.tensor(k0, dtype=torch.int32)


def tuned(x, cost_us, tau_us, tolerance, k0, max_seqlen=300):
    """A layer's attention with its budget chosen on the way, as training runs it."""
    mass = moba_coverage(
        x.q, x.k, x.cu_seqlens, block_size=32, max_rank=MAX_BUDGET - 1, max_seqlen=max_seqlen
    )
    budget = moba_budget(mass, cost_us, tau_us, tolerance, k0, cu_seqlens=x.cu_seqlens, block_size=32)
    out = moba_attention(
        x.q,
        x.k,
        x.v,
        x.cu_seqlens,
        budget[:, None],
        block_size=32,
        max_seqlen=max_seqlen,
        max_budget=MAX_BUDGET,
    )
    return out, budget


def test_opcheck():
    x = make_inputs(CASE, fused=True, requires_grad=False)
    ops = torch.ops.sb
    torch.library.opcheck(ops.moba_coverage.default, (x.q, x.k, x.cu_seqlens, 32, 300, 9, 64))
    mass = ops.moba_coverage(x.q, x.k, x.cu_seqlens, 32, 300, 9)
    arguments = (mass, costs(4), *numbers(100, 0.2, 4), 1)
    torch.library.opcheck(ops.moba_budget.default, arguments)
    torch.library.opcheck(ops.moba_budget.default, (*arguments, x.cu_seqlens, 32, 64, True))


def test_neither_has_a_gradient():
    x = make_inputs(CASE)
    mass = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32)
    assert not mass.requires_grad
    budget = moba_budget(mass.requires_grad_(), costs(4), *numbers(100, 0.2, 4))
    assert not budget.requires_grad


def test_compiles_once_for_all_targets():
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(tuned, fullgraph=True, backend=counter)
    seen = set()
    for tau, tolerance, k0, scale in ((10**6, 0.9, 3, 1), (50, 0.9, 3, 2), (10, 0.3, 4, 1), (90, 0.0, 5, 3)):
        x = make_inputs(CASE)
        target = numbers(tau, tolerance, k0)
        got, budget = compiled(x, costs(4) * scale, *target)
        want, wanted = tuned(x, costs(4) * scale, *target)
        assert torch.equal(budget, wanted)
        assert torch.equal(got, want)
        got.sum().backward()
        seen.add(tuple(budget.tolist()))
    assert counter.frame_count == 1
    assert len(seen) > 1


def test_compiles_with_numbers_in_place_of_tensors():
    torch._dynamo.reset()
    compiled = torch.compile(tuned, fullgraph=True, backend="aot_eager")
    x = make_inputs(CASE, requires_grad=False)
    for target in ((100, 0.5, 3), (60, 0.4, 4), (30, 0.3, 5)):
        assert torch.equal(compiled(x, costs(4), *target)[1], tuned(x, costs(4), *target)[1])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autocast_decides_from_what_the_attention_reads(dtype):
    x = make_inputs(CASE, requires_grad=False)
    cast = [t.to(DTYPES[dtype]) for t in (x.q, x.k)]
    want = moba_coverage(*cast, x.cu_seqlens, block_size=32)
    twin = reference.moba_coverage(*cast, x.cu_seqlens, block_size=32)
    with torch.autocast("cpu", dtype=DTYPES[dtype]):
        assert torch.equal(moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32), want)
        same = reference.moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32)
    torch.testing.assert_close(same, twin, rtol=0, atol=1e-6)


def test_flops_are_those_of_the_sampled_rows():
    x = make_inputs(Case((330,), (4, 2), 64, 32), requires_grad=False)
    with FlopCounterMode(display=False) as counter:
        mass = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32)
        moba_budget(mass, costs(1), *numbers(100, 0.2, 4))
    pairs = sum(t // 32 for t in range(32, 330) if t % 64 == 0 or t % 32 == 31 or t == 329)
    assert counter.get_total_flops() == 2 * 4 * 64 * pairs


def test_poisoned_results_are_written_whole():
    torch.use_deterministic_algorithms(True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        x = make_inputs(CASE, requires_grad=False)
        mass = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32, max_rank=12)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    assert bool(mass.isfinite().all())
    assert not bool(mass[1:3].any())


@st.composite
def masses(draw):
    """Draw mass by rank with plateaus, ties and sums above 1."""
    count, heads, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 6))
    values = st.sampled_from([0.0, 2.0**-31, 0.0625, 0.1, 0.25, 1 / 3])
    flat = draw(st.lists(values, min_size=count * heads * ranks, max_size=count * heads * ranks))
    return torch.tensor(flat).reshape(count, heads, ranks).sort(-1, descending=True).values


@settings(max_examples=150, deadline=None)
@given(mass=masses(), data=st.data())
def test_op_and_twin_choose_alike(mass, data):
    count, _, ranks = mass.shape
    width = data.draw(st.integers(1, ranks + 1))
    steps = data.draw(st.lists(st.integers(0, 9), min_size=count * width, max_size=count * width))
    cost_us = torch.tensor(steps, dtype=torch.int32).reshape(count, width).cumsum(1, dtype=torch.int32)
    k0 = torch.tensor(data.draw(st.lists(st.integers(1, 8), min_size=count, max_size=count)))
    lengths = data.draw(st.lists(st.integers(0, 260), min_size=count, max_size=count))
    arguments = (
        mass,
        cost_us,
        torch.tensor(data.draw(st.integers(0, 60))),
        torch.tensor(data.draw(st.floats(0, 1, width=32))),
        k0.int(),
        data.draw(st.integers(1, 4)),
    )
    options = data.draw(
        st.sampled_from(
            [
                {},
                {"tune_short": True},
                {"cu_seqlens": bounds(lengths), "block_size": 32},
                {"cu_seqlens": bounds(lengths), "block_size": 32, "tune_short": True, "row_stride": 1},
            ]
        )
    )
    budget = moba_budget(*arguments, **options)
    assert budget.dtype == torch.int32
    assert torch.equal(budget, reference.moba_budget(*arguments, **options))
    # The same rule on plain arrays: curves in whole units of 2^-30, as the op sums them.
    units = (mass.double() * 2**30 + 0.5).floor().sum(1).cumsum(1) / (2**30 * mass.shape[1])
    curve = np.concatenate([np.zeros((count, 1)), units.numpy()], 1)[:, :width]
    if mass.shape[1] == 1 and curve.max() <= 1:
        plain = choose_budgets(
            curve,
            cost_us.numpy(),
            int(arguments[2]),
            tolerance=float(arguments[3]),
            k0=k0.numpy(),
            min_budget=arguments[5],
            rows=[sampled_rows(n, 32, options.get("row_stride", 64)) for n in lengths]
            if len(options) > 1
            else 1,
            num_blocks=[-(-n // 32) for n in lengths] if len(options) > 1 else None,
            tune_short=options.get("tune_short", False),
        )
        assert plain.tolist() == budget.tolist()


def test_the_rule_of_one_sequence_through_the_op():
    mass = torch.tensor([[[0.6, 0.3, 0.1], [0.4, 0.4, 0.2]]])  # C = 0, 0.5, 0.85, 1
    times = torch.tensor([[10, 20, 30, 40]], dtype=torch.int32)

    def choose(tau, tolerance=0.36, k0=3, **options):
        return moba_budget(mass, times, tau, tolerance, k0, **options).tolist()

    assert [choose(tau) for tau in (5, 20, 29, 30, 40, 100)] == [[2], [2], [2], [3], [4], [4]]
    assert choose(5, min_budget=3) == [3]
    assert choose(5, tolerance=0.34) == [3]
    assert choose(5, tolerance=1.0) == [1]
    assert choose(100, tolerance=0.0) == [3]
    assert choose(5, k0=9) == [3]  # counts as max_budget
    assert choose(5, k0=3, cu_seqlens=bounds([96]), block_size=32) == [3]
    assert choose(5, k0=9, cu_seqlens=bounds([96]), block_size=32) == [9]
    assert choose(5, k0=3, cu_seqlens=bounds([96]), block_size=32, tune_short=True) == [2]
    assert choose(100, k0=2, tolerance=0.5, cu_seqlens=bounds([96]), block_size=32) == [3]


def test_a_k0_beyond_int32_bounds_nothing_and_does_not_wrap_around():
    choose = [moba_budget(**(FINE | {"k0": k0, "tolerance": 0.0})) for k0 in (torch.tensor(2**32 + 1), 10)]
    assert torch.equal(*choose)


FINE = {
    "mass": torch.zeros(2, 4, 9),
    "cost_us": costs(2),
    "tau_us": 50,
    "tolerance": 0.1,
    "k0": 4,
    "min_budget": 1,
}


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"mass": torch.zeros(2, 4, 8)}, ValueError, "mass has shape \\(2, 4, 8\\)"),
        ({"mass": torch.zeros(2, 9)}, ValueError, "mass has shape \\(2, 9\\)"),
        ({"mass": torch.zeros(2, 4, 9).double()}, ValueError, "mass is torch.float64"),
        ({"cost_us": costs(2).long()}, ValueError, "cost_us torch.int64"),
        ({"cost_us": -costs(2)}, ValueError, "cost_us of sequence 0 is -10"),
        ({"cost_us": costs(2).flip(1)}, ValueError, "cost_us of sequence 0 is 90 at budget 2"),
        ({"tau_us": 1.5}, TypeError, "float"),
        ({"tau_us": torch.tensor(1.5)}, ValueError, "tau_us is torch.float32"),
        ({"tau_us": torch.tensor([1, 2])}, ValueError, "tau_us has shape"),
        ({"tolerance": -0.1}, ValueError, "tolerance is -0.1"),
        ({"tolerance": float("nan")}, ValueError, "tolerance is nan"),
        ({"tolerance": torch.tensor(1)}, ValueError, "tolerance is torch.int64"),
        ({"tolerance": torch.tensor(float("nan"))}, ValueError, "tolerance is -?nan"),
        ({"k0": 0}, ValueError, "k0 is 0"),
        ({"k0": 2**31}, ValueError, "k0 is 2147483648"),
        ({"cost_us": costs(2).to("meta")}, ValueError, "cost_us on meta"),
        ({"cu_seqlens": bounds([5, 6]).to("meta"), "block_size": 32}, ValueError, "cu_seqlens on meta"),
        ({"cu_seqlens": bounds([5, 6]).long(), "block_size": 32}, ValueError, "cu_seqlens is torch.int64"),
        ({"k0": torch.tensor([1, 2, 3])}, ValueError, "k0 has shape \\(3,\\)"),
        ({"min_budget": 0}, ValueError, "min_budget is 0"),
        ({"cu_seqlens": bounds([5, 6])}, ValueError, "block_size is 0"),
        ({"cu_seqlens": bounds([5]), "block_size": 32}, ValueError, "cu_seqlens has shape \\(2,\\)"),
        ({"cu_seqlens": bounds([5, -1]), "block_size": 32}, ValueError, "cu_seqlens decreases"),
    ],
)
def test_bad_values_are_named(changed, error, named):
    with pytest.raises(error, match=named):
        moba_budget(**(FINE | changed))
