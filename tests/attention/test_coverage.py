"""moba_coverage: the twin, what shares must be, and bad values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moba_cases import DTYPES, Case, bounds, make_inputs

from sb_lightning.attention import moba_coverage, reference
from sb_lightning.tuning import coverage_curve, sampled_rows

CASES = [
    Case((300,), (4, 2), 64, 64),
    Case((333, 1, 0, 65, 64), (4, 2), 32, 32),
    Case((700,), (7, 1), 32, 16, "bf16"),
    Case((257, 900), (4, 2), 128, 128, "fp16"),
    Case((500,), (3, 3), 64, 48, "bf16"),
]


def coverage(case, **options):
    x = make_inputs(case, fused=True, requires_grad=False)
    # Sharper logits than those of random keys, so that ranks differ.
    return moba_coverage(x.q * 2, x.k * 4, x.cu_seqlens, block_size=case.block_size, **options)


@pytest.mark.parametrize("row_stride", [1, 64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_and_twin_agree(case, row_stride):
    mass = coverage(case, row_stride=row_stride)
    twin = coverage(case, row_stride=row_stride, backend="reference")
    blocks = -(-max(case.lengths) // case.block_size)
    assert mass.shape == twin.shape == (len(case.lengths), case.heads[0], blocks - 1)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, twin, rtol=0, atol=2e-6)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    block_size=st.sampled_from([16, 32, 48]),
    row_stride=st.sampled_from([1, 5, 64]),
    max_rank=st.integers(0, 14),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_mass_is_a_share_and_ranks_are_what_a_longer_list_begins_with(
    lengths, heads, block_size, row_stride, max_rank, dtype
):
    case = Case(tuple(lengths), heads, 32, block_size, dtype)
    options = {"row_stride": row_stride}
    mass = coverage(case, max_rank=max_rank, **options)
    full = coverage(case, max_rank=14, **options)
    torch.testing.assert_close(mass, full[..., :max_rank], rtol=0, atol=3e-7)
    assert bool((full >= 0).all())
    assert bool((full.diff(dim=-1) <= 0).all())
    totals = full.double().sum(-1)
    assert bool((totals <= 1).all())
    some = torch.tensor([sampled_rows(length, block_size, row_stride) > 0 for length in lengths])
    torch.testing.assert_close(totals, some.double()[:, None].expand_as(totals), rtol=0, atol=2e-6)
    blocks = torch.tensor([-(-length // block_size) for length in lengths])
    beyond = torch.arange(14) >= (blocks - 1)[:, None]
    assert not bool(full.transpose(0, 1)[:, beyond].any())


def test_the_curve_is_1_once_all_blocks_are_attended():
    curve = coverage_curve(coverage(Case((333, 1, 0, 65, 64), (4, 2), 32, 32)))
    assert curve.shape == (5, 11)
    assert curve[0, 10] == pytest.approx(1, abs=1e-6)
    assert curve[3, 2] == pytest.approx(1, abs=1e-6)  # 65 tokens: blocks 1 and 2 before the last
    assert not curve[1:3].any()
    assert curve[4, 1] == pytest.approx(1, abs=1e-6)


def test_one_block_that_draws_all_score_has_all_mass():
    q, k = torch.ones(256, 1, 32), torch.zeros(256, 1, 32)
    k[:32] = 100.0
    mass = moba_coverage(q, k, bounds([256]), block_size=32)
    assert mass[0, 0].tolist() == [1.0] + [0.0] * 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_bad_numbers_leave_shares_and_never_leave_their_sequence(value):
    case = Case((130, 165, 200), (4, 2), 32, 32)
    x = make_inputs(case, requires_grad=False)
    want = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32)
    x.k[150:185] = value
    x.q[290] = value
    mass = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32)
    twin = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=32, backend="reference")
    for ours in (mass, twin):
        assert bool(ours.isfinite().all())
        assert bool((ours.double().sum(-1) <= 1 + 1e-6).all())
    assert torch.equal(mass[[0, 2]], want[[0, 2]])


def test_a_block_of_nan_keys_counts_as_the_lowest():
    q, k = torch.ones(128, 1, 32), torch.zeros(128, 1, 32)
    k[32:64] = float("nan")
    for backend in ("cpu", "reference"):
        mass = moba_coverage(q, k, bounds([128]), block_size=32, backend=backend)
        # Rows 63 and 64, 95, 127: one block, one and NaN twice, two and NaN.
        torch.testing.assert_close(mass[0, 0], torch.tensor([3.5, 0.5, 0.0]) / 4)


def test_the_same_bits_for_any_number_of_threads():
    before = torch.get_num_threads()
    try:
        for case in [*CASES, Case((5000,), (4, 2), 32, 16), Case((50,) * 90, (4, 2), 32, 16)]:
            torch.set_num_threads(1)
            want = coverage(case)
            for threads in (2, 4):
                torch.set_num_threads(threads)
                assert torch.equal(coverage(case), want)
    finally:
        torch.set_num_threads(before)


def test_strides_of_any_kind():
    case = CASES[0]
    x = make_inputs(case, requires_grad=False)
    want = moba_coverage(x.q, x.k, x.cu_seqlens, block_size=64)
    spread = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x.q, x.k)]
    assert torch.equal(moba_coverage(*spread, x.cu_seqlens, block_size=64), want)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k)]
    assert torch.equal(moba_coverage(*turned, x.cu_seqlens, block_size=64), want)


def test_fp64_runs_on_the_reference():
    x = make_inputs(CASES[0], requires_grad=False)
    exact = moba_coverage(x.q.double(), x.k.double(), x.cu_seqlens, block_size=64, backend="reference")
    assert exact.dtype == torch.float64
    torch.testing.assert_close(
        moba_coverage(x.q, x.k, x.cu_seqlens, block_size=64).double(), exact, rtol=0, atol=1e-6
    )
    same = reference.moba_coverage(x.q, x.k, x.cu_seqlens, block_size=64)
    torch.testing.assert_close(same.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"block_size": 24}, ValueError, "block_size is 24"),
        ({"max_rank": -1}, ValueError, "max_rank is -1"),
        ({"max_rank": 1.5}, TypeError, "max_rank is a float"),
        ({"max_rank": 40000}, ValueError, "max_rank is 40000"),
        ({"row_stride": 0}, ValueError, "row_stride is 0"),
        ({"max_seqlen": 99}, ValueError, "max_seqlen is 99"),
        ({"cu_seqlens": bounds([301])}, ValueError, "cu_seqlens ends at 301"),
        ({"k": torch.zeros(299, 2, 64)}, ValueError, "k has 299 tokens"),
        ({"backend": "metal"}, ValueError, "backend is 'metal'"),
    ],
)
def test_bad_values_are_named(changed, error, named):
    x = make_inputs(CASES[0], requires_grad=False)
    fine = {"q": x.q, "k": x.k, "cu_seqlens": x.cu_seqlens, "block_size": 64}
    with pytest.raises(error, match=named):
        moba_coverage(**(fine | changed))
