"""Denormal numbers, kept or flushed to zero, and NaN: what they reach, and for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from moba_cases import Case, Inputs, bounds, make_inputs, run, run_reference, select
from torch import Tensor

from sb_lightning.attention import moba_select

CASE = Case((700, 260), (4, 2), 32, 32, budgets=(4, 3))
SHORT = Case((170, 70), (4, 2), 32, 32, budgets=(4, 3))
TINY = 1e-40
STEP = 1.5e-45  # between neighbouring denormals


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def with_denormals(case: Case, name: str) -> Inputs:
    x = make_inputs(case)
    setattr(x, name, (getattr(x, name).detach() * TINY).requires_grad_())
    return x


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_denormals_are_numbers(name):
    x = with_denormals(SHORT, name)
    exact = run_reference(SHORT, x, select(SHORT, x), torch.float64)
    for ours, want in zip(run(SHORT, x), exact, strict=True):
        size = float(want.abs().max())
        # Each of up to some hundred sums may be off by half a step where it is denormal.
        torch.testing.assert_close(ours.double(), want, rtol=0, atol=max(3e-6 * size, 200 * STEP))
    if name == "v":
        assert 0 < float(exact[0].abs().max()) < 1e-38


def selection_of_denormal_scores() -> Tensor:
    # Means of 1 to 5 denormal steps, in this order of the blocks.
    order = torch.tensor([4, 1, 5, 2, 3], dtype=torch.float32)
    k = torch.zeros(192, 1, 32)
    k[:160, 0, 0] = (order * TINY).repeat_interleave(32)
    return moba_select(torch.ones(192, 1, 32), k, bounds([192]), 3, block_size=32)[0, -1]


def test_denormal_scores_rank_by_their_value_unless_flushed():
    assert selection_of_denormal_scores().tolist() == [0, 2]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    assert selection_of_denormal_scores().tolist() == [3, 4]  # all equal: the later blocks win
    torch.set_flush_denormal(False)
    assert selection_of_denormal_scores().tolist() == [0, 2]


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_all_threads_flush_as_the_caller_does(name):
    # A worker that kept denormals would leave them in the rows that it happens to compute. The workers
    # are started first, since a thread begins with the mode of the one that starts it.
    large = torch.full((1 << 20,), TINY)
    torch.set_num_threads(4)
    assert bool((large * 1).all())
    x = with_denormals(CASE, name)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    torch.set_num_threads(1)
    want = [select(CASE, x), *run(CASE, x)]
    torch.set_num_threads(4)
    for _ in range(3):
        for ours, wanted in zip([select(CASE, x), *run(CASE, x)], want, strict=True):
            assert torch.equal(ours, wanted)
    if name == "v":
        assert not bool(want[1].any())
    torch.set_flush_denormal(False)
    assert bool((large * 1).all()), "a thread that torch shares still flushes"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_bad_value_never_leaves_its_sequence(name, dtype, value):
    case = Case((130, 65, 200), (4, 2), 32, 32, dtype, (2, 3, 4))
    want = run(case, make_inputs(case))
    x = make_inputs(case)
    bad = getattr(x, name).detach().clone()
    bad[150] = value  # of the second sequence
    setattr(x, name, bad.requires_grad_(name != "dout"))
    others = torch.cat([torch.arange(130), torch.arange(195, 395)])
    spoilt = False
    for result, ours, wanted in zip(("out", "lse", "dq", "dk", "dv"), run(case, x), want, strict=True):
        axis = 1 if result == "lse" else 0
        assert torch.equal(ours.index_select(axis, others), wanted.index_select(axis, others)), result
        spoilt = spoilt or not bool(ours.isfinite().all())
    assert spoilt
