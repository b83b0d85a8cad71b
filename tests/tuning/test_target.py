"""The decision of one layer: what it enters into the record, and what a second run makes of it."""

from __future__ import annotations

import pytest
import torch

from sb_lightning.attention import moba_budget, moba_coverage
from sb_lightning.attention.tuned import tuned_budget
from sb_lightning.tuning import SparseTarget, coverage_curve

BLOCK, LENGTHS, K0, WIDTH = 16, [150, 40, 9], 4, 10
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def make(tau=2000, tolerance=0.5, **fields):
    n = len(LENGTHS)
    cost = (torch.arange(1, WIDTH + 1) * 100).expand(n, WIDTH).to(torch.int32)
    return SparseTarget(
        **{
            "cost_us": cost.contiguous(),
            "tau_us": torch.tensor(tau),
            "tolerance": torch.tensor(tolerance),
            "k0": torch.full((n,), K0, dtype=torch.int32),
            "given": torch.zeros(n, dtype=torch.int32),
            "record": torch.zeros(3, n, 3),
            **fields,
        }
    )


def decide(target, layer=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (4 * torch.randn(sum(LENGTHS), heads, 32, generator=generator) for heads in (2, 1))
    budget = tuned_budget(target, layer, q, k, BOUNDS, block_size=BLOCK, max_seqlen=max(LENGTHS))
    return budget, q, k


def test_the_record_holds_the_budget_and_both_coverages():
    target = make()
    budget, q, k = decide(target)
    mass = moba_coverage(q, k, BOUNDS, block_size=BLOCK, max_rank=WIDTH - 1)
    want = moba_budget(mass, target.cost_us, 2000, 0.5, K0, cu_seqlens=BOUNDS, block_size=BLOCK)
    curves = coverage_curve(mass.numpy())
    assert budget.tolist() == [[b] for b in want.tolist()]
    assert want.tolist()[0] != K0
    for n, used in enumerate(want.tolist()):
        expected = [used, curves[n][used - 1], curves[n][K0 - 1]]
        assert target.record[1, n].tolist() == pytest.approx(expected, abs=1e-6)
    assert not target.record[[0, 2]].any(), "it wrote to the places of other layers"


def test_a_layer_that_runs_again_uses_its_first_budget():
    target = make(tau=2000)
    first, *_ = decide(target)
    kept = target.record.clone()
    target.tau_us = torch.tensor(0)
    again, *_ = decide(target)
    other, *_ = decide(target, layer=2)
    assert torch.equal(first, again)
    assert torch.equal(target.record[1], kept[1])
    assert not torch.equal(first, other), "the other time would have changed nothing: the test shows nothing"


def test_a_budget_that_is_given_is_used():
    target = make(given=torch.tensor([7, 2, 1], dtype=torch.int32))
    budget, *_ = decide(target)
    assert budget.flatten().tolist() == [7, 2, 1] == target.record[1, :, 0].tolist()
    assert target.record[1, 0, 1] > target.record[1, 0, 2] > 0
    unmeasured = make(given=torch.tensor([7, 2, 1], dtype=torch.int32), measures=False)
    assert torch.equal(decide(unmeasured)[0], budget)
    assert unmeasured.record[1].tolist() == [[7, 0, 0], [2, 0, 0], [1, 0, 0]]


def test_coverage_is_given_at_the_points_of_the_grid():
    target = make(curves=torch.zeros(3, 3, 4), grid=torch.tensor([0, 1, 3, 9]))
    _, q, k = decide(target)
    curves = coverage_curve(moba_coverage(q, k, BOUNDS, block_size=BLOCK, max_rank=WIDTH - 1).numpy())
    torch.testing.assert_close(
        target.curves[1].double(), torch.from_numpy(curves[:, [0, 1, 3, 9]]), rtol=0, atol=1e-6
    )


def test_nothing_of_it_has_a_gradient():
    target = make()
    q = torch.randn(sum(LENGTHS), 2, 32, requires_grad=True)
    k = torch.randn(sum(LENGTHS), 1, 32, requires_grad=True)
    budget = tuned_budget(target, 0, q, k, BOUNDS, block_size=BLOCK, max_seqlen=max(LENGTHS))
    assert not budget.requires_grad
    assert not target.record.requires_grad


@pytest.mark.parametrize("tolerance", [0.0, 1.0])
def test_the_time_of_the_decision_is_added_up(tolerance):
    target = make(tolerance=tolerance, spent_s=torch.zeros((), dtype=torch.float64))
    decide(target)
    once = target.spent_s.item()
    decide(target, layer=0)
    assert 0 < once < target.spent_s.item()
