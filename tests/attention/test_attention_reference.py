"""The naive twin itself: its gradient, and its selection against a sort in plain Python."""

from __future__ import annotations

import pytest
import torch
from moba_cases import Case, bounds, make_inputs

from sb_lightning.attention import moba_attention, moba_select, reference


def test_gradcheck():
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, h, 3, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    cu_seqlens = bounds([33, 0, 7])
    selection = reference.moba_select(q, k, cu_seqlens, 2, block_size=16)

    def attention(q, k, v):
        return reference.moba_attention(
            q, k, v, cu_seqlens, 2, block_size=16, return_lse=True, selection=selection
        )

    assert torch.autograd.gradcheck(attention, (q, k, v))


def test_selection_is_the_sorted_best():
    case = Case((170, 30), (4, 2), 16, 16, seed=3)
    x = make_inputs(case, requires_grad=False)
    selection = reference.moba_select(x.q, x.k, x.cu_seqlens, x.budget, block_size=16)
    for n, (start, end) in enumerate([(0, 170), (170, 200)]):
        for h in range(4):
            for t in range(0, end - start, 7):
                past = t // 16
                score = [
                    float(
                        x.q[start + t, h].double()
                        @ x.k[start + 16 * b : start + 16 * b + 16, h // 2].double().mean(0)
                    )
                    for b in range(past)
                ]
                want = sorted(range(past), key=lambda b: (-score[b], -b))[: int(x.budget[n, h]) - 1]
                row = [b for b in selection[h, start + t].tolist() if b >= 0]
                assert row == sorted(want)


def test_softmax_over_exactly_the_attended_keys():
    # One head, so small that the sum is written out.
    torch.manual_seed(1)
    q, k, v = (torch.randn(50, 1, 8, dtype=torch.float64) for _ in range(3))
    selection = torch.full((1, 50, 1), -1, dtype=torch.int16)
    selection[0, 32:] = 0
    selection[0, 16:32] = 0
    out, lse = reference.moba_attention(
        q, k, v, bounds([50]), 2, block_size=16, return_lse=True, selection=selection
    )
    keys = [*range(16), *range(32, 41)]
    logits = torch.stack([q[40, 0] @ k[j, 0] for j in keys]) * 8**-0.5
    weights = logits.exp() / logits.exp().sum()
    torch.testing.assert_close(out[40, 0], sum(w * v[j, 0] for w, j in zip(weights, keys, strict=True)))
    torch.testing.assert_close(lse[0, 40], logits.exp().sum().log())


def test_runs_what_the_kernels_do_not():
    torch.manual_seed(2)
    q, k = torch.randn(40, 4, 20, dtype=torch.float64), torch.randn(40, 2, 20, dtype=torch.float64)
    out = moba_attention(q, k, k, bounds([40]), 2, block_size=16, backend="reference")
    assert out.dtype == torch.float64
    assert moba_select(q, k, bounds([40]), 2, block_size=16, backend="reference").shape == (4, 40, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_reaches_exactly_the_rows_that_attend_it(value):
    case = Case((70, 40), (4, 2), 32, 16, budgets=(2, 3))
    x = make_inputs(case)
    bad = 20  # of the first sequence, in its block 1
    selection = moba_select(x.q, x.k, x.cu_seqlens, x.budget, block_size=16)
    attends = torch.zeros(110, 4, dtype=torch.bool)
    attends[bad:32] = True
    attends |= (selection == 1).any(-1).T & (torch.arange(110) < 70)[:, None]
    attends[:, 2:] = False  # the value is in KV head 0
    assert 0 < int(attends[32:70, :2].sum()) < attends[32:70, :2].numel()

    def outputs(v, backend, selection=selection):
        v = v.detach().requires_grad_()
        if backend == "cpu":
            out = moba_attention(x.q, x.k, v, x.cu_seqlens, x.budget, block_size=16)
        else:
            out = reference.moba_attention(
                x.q, x.k, v, x.cu_seqlens, x.budget, block_size=16, selection=selection
            )
        return out.detach(), *torch.autograd.grad(out, (x.q, v), x.dout)

    with_bad = x.v.detach().clone()
    with_bad[bad, 0] = value
    out, dq, dv = outputs(with_bad, "reference")
    finite, finite_dq, finite_dv = outputs(x.v, "reference")
    assert torch.equal(~out.isfinite().all(-1), attends)
    assert torch.equal(~dq.isfinite().all(-1), attends)
    torch.testing.assert_close(out[~attends], finite[~attends])
    torch.testing.assert_close(dq[~attends], finite_dq[~attends])
    torch.testing.assert_close(dv, finite_dv)
    # The kernels may add other rows of the key's own block, and no more.
    rows = ~outputs(with_bad, "cpu")[0].isfinite().all(-1)
    own = torch.zeros_like(attends)
    own[16:32, :2] = True
    assert bool((rows >= attends).all())
    assert bool((rows <= (attends | own)).all())
