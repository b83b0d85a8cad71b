"""Outputs, gradients and selection of the kernels against the naive twin."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from moba_cases import Case, assert_close, assert_selection, bounds, make_inputs, run, select

from sb_lightning.attention import moba_attention, moba_select, reference


def fuzz_cases() -> list[Case]:
    choice = random.Random(5)
    cases = []
    for seed in range(36):
        block_size = choice.choice([16, 32, 48, 64])
        sizes = [0, 1, 15, 16, 17, block_size - 1, block_size, block_size + 1]
        sizes += [2 * block_size - 1, 2 * block_size, 2 * block_size + 1, 5 * block_size + 3]
        group, kv_heads = choice.choice([1, 2, 5, 6, 7, 8]), choice.choice([1, 1, 2, 3])
        cases.append(
            Case(
                tuple(choice.choice(sizes) for _ in range(choice.randint(1, 7))),
                (group * kv_heads, kv_heads),
                choice.choice([32, 64, 128]),
                block_size,
                choice.choice(["fp32", "bf16", "fp16"]),
                seed=seed,
            )
        )
    return cases


@pytest.mark.parametrize("case", fuzz_cases(), ids=str)
def test_fuzz(case):
    x = make_inputs(case, fused=case.seed % 2 == 0)
    selection = select(case, x)
    assert_selection(case, x, selection)
    assert_close(case, run(case, x), x, selection)


@pytest.mark.parametrize(
    "case",
    [
        Case((700, 1, 333), (4, 2), 64, 64, "fp32", (3, 1, 2)),
        Case((1000, 257), (14, 2), 64, 128, "bf16", (4, 2)),
        Case((600,), (2, 1), 32, 16, "fp16", (9,)),
        Case((300,), (2, 1), 64, 1024, "fp32", (3,)),
    ],
    ids=str,
)
def test_longer_than_a_tile(case):
    x = make_inputs(case)
    selection = select(case, x)
    assert_selection(case, x, selection)
    assert_close(case, run(case, x), x, selection)


def test_budget_of_one_is_block_diagonal():
    case = Case((200, 70), (4, 2), 32, 32, budgets=(1, 1))
    x = make_inputs(case)
    assert select(case, x).shape == (4, 270, 0)
    own_blocks = [32] * 6 + [8] + [32, 32, 6]  # each block a sequence of its own
    dense = moba_attention(x.q, x.k, x.v, bounds(own_blocks), 1, block_size=32)
    out = run(case, x)[0]
    torch.testing.assert_close(out, dense, rtol=0, atol=2e-7)


@pytest.mark.parametrize("budget", [7, 8, 10**6, 2**40])
def test_budget_over_all_blocks_is_dense_causal(budget):
    case = Case((200,), (4, 2), 64, 32)
    x = make_inputs(case)
    out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, budget, block_size=32)
    grads = torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)
    q, k, v = (t.detach().double().requires_grad_() for t in (x.q, x.k, x.v))
    dense = F.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    want = torch.autograd.grad(dense, (q, k, v), x.dout.double())
    for ours, theirs in zip((out, *grads), (dense, *want), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=5e-6)
    selection = moba_select(x.q, x.k, x.cu_seqlens, budget, block_size=32)
    assert selection.shape == (4, 200, 6)
    assert selection[0, 199].tolist() == [0, 1, 2, 3, 4, 5]
    assert selection[3, 64].tolist() == [0, 1, -1, -1, -1, -1]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_of_equal_scores_the_later_block_wins(backend):
    # Integers, so that every backend computes the same logits exactly.
    q = torch.ones(160, 1, 32)
    k = torch.ones(160, 1, 32)
    k[32:64] = 2.0  # block 1 of 16 x 32 is best; all others tie
    selection = moba_select(q, k, bounds([160]), 3, block_size=32, backend=backend)
    assert selection[0, 159].tolist() == [1, 3]
    assert selection[0, 100].tolist() == [1, 2]
    assert selection[0, 64].tolist() == [0, 1]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nan_scores_rank_last_and_slots_are_filled(backend):
    q, k = torch.ones(160, 1, 32), torch.ones(160, 1, 32)
    k[96:128] = float("nan")  # the latest earlier block
    selection = moba_select(q, k, bounds([160]), 3, block_size=32, backend=backend)
    assert selection[0, 159].tolist() == [1, 2]
    k[:] = float("nan")
    selection = moba_select(q, k, bounds([160]), 3, block_size=32, backend=backend)
    assert selection[0, 159].tolist() == [2, 3]


def test_nan_reaches_only_the_rows_that_attend_it():
    case = Case((200,), (2, 1), 32, 32, budgets=(2,))
    x = make_inputs(case, requires_grad=False)
    x.k[40] = float("nan")  # makes the mean of block 1 NaN: it ranks last
    out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32)
    selection = select(case, x)
    hit = (selection == 1).any(-1).T  # [L, Hq]
    hit[40:64] = True
    assert bool(out[hit].isnan().all())
    assert bool(out[64:][~hit[64:]].isfinite().all())
    assert bool(out[:32].isfinite().all())


def test_infinite_negative_scores_of_a_block_leave_the_others():
    q, k, v = torch.ones(64, 1, 32), torch.zeros(64, 1, 32), torch.randn(64, 1, 32)
    k[:32] = float("-inf")
    out = moba_attention(q, k, v, bounds([64]), 2, block_size=32)
    torch.testing.assert_close(out[63, 0], v[32:, 0].mean(0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_permuting_the_sequences_permutes_the_results_bitwise(dtype):
    lengths, order = (100, 65, 230, 1), (2, 0, 3, 1)
    case = Case(lengths, (4, 2), 32, 32, dtype, (2, 3, 4, 1))
    x = make_inputs(case, requires_grad=False)
    out, lse = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32, return_lse=True)
    ends = x.cu_seqlens.tolist()
    token = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in order])
    moved, moved_lse = moba_attention(
        x.q[token],
        x.k[token],
        x.v[token],
        bounds([lengths[i] for i in order]),
        x.budget[list(order)],
        block_size=32,
        return_lse=True,
    )
    assert torch.equal(moved, out[token])
    assert torch.equal(moved_lse, lse[:, token])


def test_gqa_equals_repeated_keys_and_values():
    case = Case((150, 65), (12, 2), 64, 32, budgets=(3, 2))
    x = make_inputs(case)
    out, _, dq, dk, dv = run(case, x)
    k, v = (t.detach().repeat_interleave(6, 1).requires_grad_() for t in (x.k, x.v))
    again, lse = moba_attention(x.q, k, v, x.cu_seqlens, x.budget, block_size=32, return_lse=True)
    grads = torch.autograd.grad((again, lse), (x.q, k, v), (x.dout, x.dlse))
    assert torch.equal(out, again)
    assert torch.equal(dq, grads[0])
    torch.testing.assert_close(dk, grads[1].unflatten(1, (2, 6)).sum(2), rtol=0, atol=2e-5)
    torch.testing.assert_close(dv, grads[2].unflatten(1, (2, 6)).sum(2), rtol=0, atol=2e-5)


def test_larger_bounds_change_nothing():
    case = Case((150, 65), (4, 2), 64, 32, budgets=(3, 2))
    x = make_inputs(case)
    want = run(case, x)
    for options in ({"max_seqlen": 10**9}, {"max_budget": 4}, {"max_seqlen": 1000, "max_budget": 30}):
        for ours, theirs in zip(run(case, x, **options), want, strict=True):
            assert torch.equal(ours, theirs)
    wide = torch.ops.sb.moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, 32, 10**6, 50, 0.125, False)
    assert wide[2].shape == (4, 215, 49)
    assert torch.equal(wide[0], want[0])


def test_scale():
    case = Case((100,), (2, 2), 32, 32, budgets=(2,))
    x = make_inputs(case, requires_grad=False)
    half = moba_attention(x.q, x.k, x.v, x.cu_seqlens, 2, block_size=32, scale=0.5 * 32**-0.5)
    again = moba_attention(x.q * 0.5, x.k, x.v, x.cu_seqlens, 2, block_size=32)
    torch.testing.assert_close(half, again, rtol=0, atol=1e-6)


def test_budget_forms():
    case = Case((100, 70), (4, 2), 32, 32)
    x = make_inputs(case, requires_grad=False)

    def out(budget: object) -> torch.Tensor:
        return moba_attention(x.q, x.k, x.v, x.cu_seqlens, budget, block_size=32)

    per_sequence = torch.tensor([[2], [1]], dtype=torch.int32)
    assert torch.equal(out(2), out(torch.tensor(2, dtype=torch.int32)))
    assert torch.equal(out(2), out(torch.full((4,), 2, dtype=torch.int32)))
    assert torch.equal(out(per_sequence), out(per_sequence.repeat(1, 4)))
    assert not torch.equal(out(2), out(per_sequence))


def test_no_sequences_and_empty_sequences():
    empty = torch.zeros(0, 4, 32)
    out, lse = moba_attention(empty, empty, empty, bounds([]), 2, block_size=32, return_lse=True)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (4, 0)
    leaf = empty.clone().requires_grad_()
    moba_attention(leaf, leaf, leaf, bounds([0, 0]), 3, block_size=32).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape


def test_last_dimension_may_be_strided():
    case = Case((100,), (4, 2), 32, 32, budgets=(2,))
    x = make_inputs(case, requires_grad=False)
    want = moba_attention(x.q, x.k, x.v, x.cu_seqlens, 2, block_size=32)
    q, k, v = (torch.stack([t, t + 1], -1)[..., 0].requires_grad_() for t in (x.q, x.k, x.v))
    assert q.stride(-1) == 2
    out = moba_attention(q, k, v, x.cu_seqlens, 2, block_size=32)
    assert torch.equal(out, want)
    out.sum().backward()  # a gradient with all strides 0
    assert bool(q.grad.isfinite().all())


def test_lse_alone_has_a_gradient():
    case = Case((100, 33), (4, 2), 32, 32, budgets=(2, 2))
    x = make_inputs(case)
    lse = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32, return_lse=True)[1]
    dq, dk, dv = torch.autograd.grad(lse, (x.q, x.k, x.v), x.dlse)
    q, k, v = (t.detach().double().requires_grad_() for t in (x.q, x.k, x.v))
    exact = reference.moba_attention(
        q, k, v, x.cu_seqlens, x.budget, block_size=32, return_lse=True, selection=select(case, x)
    )[1]
    want = torch.autograd.grad(exact, (q, k), x.dlse.double())
    torch.testing.assert_close(dq.double(), want[0], rtol=0, atol=3e-6)
    torch.testing.assert_close(dk.double(), want[1], rtol=0, atol=3e-6)
    assert not bool(dv.any())
