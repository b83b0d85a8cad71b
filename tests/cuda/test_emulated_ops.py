"""The CUDA kernels, on the emulator, behind the same ops as the CPU kernels and against the naive twin."""

from __future__ import annotations

import itertools
import os
import random

import emulated as emulator
import pytest
import torch
from attention.moba_cases import (
    Case,
    assert_close,
    assert_selection,
    bounds,
    make_inputs,
    run,
    run_reference,
    select,
)
from torch.utils.checkpoint import checkpoint

from sb_lightning.attention import functional, moba_attention, moba_coverage, moba_select
from sb_lightning.attention.backends import backends

pytestmark = [
    pytest.mark.skipif(emulator.missing() != "", reason=emulator.missing() or "-"),
    pytest.mark.skipif(
        not backends()[0].available, reason="the extension, whose ops these are, is not built"
    ),
]


@pytest.fixture(autouse=True)
def _cuda_kernels():
    with emulator.emulated():
        before = emulator.launches()
        yield
        assert emulator.launches() > before, "the test ran no CUDA kernel"


def fuzz_cases() -> list[Case]:
    choice = random.Random(11)
    cases = []
    for seed in range(40):
        block_size = choice.choice([16, 32, 48, 64])
        sizes = [0, 1, 15, 16, 17, block_size - 1, block_size, block_size + 1]
        sizes += [2 * block_size - 1, 2 * block_size, 2 * block_size + 1, 5 * block_size + 3]
        group, kv_heads = choice.choice([1, 2, 5, 6, 7]), choice.choice([1, 1, 2])
        lengths = [choice.choice(sizes) for _ in range(choice.randint(1, 2))]
        cases.append(
            Case(
                (*lengths, 2 * block_size + 1),
                (group * kv_heads, kv_heads),
                choice.choice([32, 64, 128]),
                block_size,
                choice.choice(["bf16", "fp16"]),
                seed=seed,
            )
        )
    return cases


def check(case: Case, **options: object) -> list[torch.Tensor]:
    x = make_inputs(case, fused=case.seed % 2 == 0)
    selection = select(case, x)
    assert_selection(case, x, selection)
    results = run(case, x, **options)
    assert_close(case, results, x, selection)
    return results


@pytest.mark.parametrize("case", fuzz_cases()[:6], ids=str)
def test_fuzz(case):
    check(case)


@pytest.mark.skipif(not os.environ.get("SB_LAB"), reason="`make lab` runs these: set SB_LAB=1")
@pytest.mark.parametrize("case", fuzz_cases()[6:], ids=str)
def test_lab_fuzz(case):
    check(case)


@pytest.mark.parametrize(
    "settings", ["order=reverse", "order=random seed=5", "mma=truncate multiprocessors=30"]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_schedules(settings, deterministic):
    case = Case((150, 1, 70), (4, 2), 64, 32, "bf16", (3, 1, 2))
    with emulator.emulated(settings):
        check(case, deterministic=deterministic)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_index_is_that_of_the_cpu(dtype):
    case = Case((200, 70, 0, 33), (6, 2), 32, 16, dtype, seed=3)
    x = make_inputs(case, requires_grad=False)
    selection = select(case, x)
    ours = torch.ops.sb_emulated.moba_index(selection, x.cu_seqlens, x.budget, 16, 3)
    emulator.load().sb_emulator_configure(b"order=random seed=9")
    again = torch.ops.sb_emulated.moba_index(selection, x.cu_seqlens, x.budget, 16, 3)
    cpu = cpu_index(selection, x, 16, 3)
    for mine, other, theirs in zip(ours, again, cpu, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(other, theirs)


def cpu_index(selection, x, block_size, group):
    """The CPU kernel, which the fixture hides, by its definition."""
    lists, rows = [0], []
    ends = x.cu_seqlens.tolist()
    num_heads, tokens, width = selection.shape
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        num_blocks = -(-(end - start) // block_size)
        for kv in range(num_heads // group):
            heads = range(kv * group, kv * group + group)
            dense = all(int(x.budget[n, h]) >= num_blocks for h in heads)
            for block in range(num_blocks):
                if not dense:
                    hits = (selection[heads, start:end] == block).any(-1)  # [group, L]
                    rows += [t * group + g for t, g in hits.T.nonzero().tolist()]
                lists.append(len(rows))
    capacity = num_heads // group * (tokens // block_size + len(ends) - 1)
    lists += [len(rows)] * (capacity + 1 - len(lists))
    rows += [-1] * (tokens * num_heads * width - len(rows))
    return torch.tensor(lists), torch.tensor(rows, dtype=torch.int32)


def test_budget_of_one_is_block_diagonal():
    case = Case((200, 70), (4, 2), 32, 32, "bf16", budgets=(1, 1))
    x = make_inputs(case, requires_grad=False)
    own_blocks = [32] * 6 + [8] + [32, 32, 6]  # each block a sequence of its own
    dense = moba_attention(x.q, x.k, x.v, bounds(own_blocks), 1, block_size=32)
    assert torch.equal(moba_attention(x.q, x.k, x.v, x.cu_seqlens, 1, block_size=32), dense)


def test_a_budget_over_all_blocks_is_dense():
    case = Case((130,), (4, 2), 64, 32, "bf16")
    x = make_inputs(case, requires_grad=False)
    out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, 10**6, block_size=32)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None].double() for t in (x.q, x.k, x.v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(out.double(), dense, rtol=0, atol=2e-2)


def test_of_equal_scores_the_later_block_wins():
    q, k = torch.ones(160, 1, 32, dtype=torch.bfloat16), torch.ones(160, 1, 32, dtype=torch.bfloat16)
    k[32:64] = 2.0
    selection = moba_select(q, k, bounds([160]), 3, block_size=32)
    assert selection[0, 159].tolist() == [1, 3]
    assert selection[0, 100].tolist() == [1, 2]
    assert selection[0, 64].tolist() == [0, 1]


def test_nan_scores_rank_last_and_slots_are_filled():
    q, k = torch.ones(160, 1, 32, dtype=torch.float16), torch.ones(160, 1, 32, dtype=torch.float16)
    k[96:128] = float("nan")
    assert moba_select(q, k, bounds([160]), 3, block_size=32)[0, 159].tolist() == [1, 2]
    k[:] = float("nan")
    assert moba_select(q, k, bounds([160]), 3, block_size=32)[0, 159].tolist() == [2, 3]


def test_infinite_negative_scores_of_a_block_leave_the_others():
    q, k, v = torch.ones(64, 1, 32), torch.zeros(64, 1, 32), torch.randn(64, 1, 32)
    k[:32] = float("-inf")
    q, k, v = (t.bfloat16() for t in (q, k, v))
    out = moba_attention(q, k, v, bounds([64]), 2, block_size=32)
    torch.testing.assert_close(out[63, 0].float(), v[32:, 0].float().mean(0), rtol=0, atol=4e-3)


def test_nan_reaches_only_the_rows_that_attend_it():
    case = Case((160,), (2, 1), 32, 32, "bf16", budgets=(2,))
    x = make_inputs(case, requires_grad=False)
    x.v[40] = float("nan")
    out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32)
    hit = (select(case, x) == 1).any(-1).T
    assert bool(out[hit].isnan().all())
    assert bool(out[64:][~hit[64:]].isfinite().all())
    assert bool(out[:32].isfinite().all())


def test_permuting_the_sequences_permutes_the_results_bitwise():
    lengths, order = (100, 65, 130, 1), (2, 0, 3, 1)
    case = Case(lengths, (4, 2), 32, 32, "bf16", (2, 3, 4, 1))
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


def test_results_depend_on_no_bound_and_no_machine():
    case = Case((150, 65), (4, 2), 32, 32, "bf16", budgets=(3, 2))
    x = make_inputs(case)
    want = run(case, x, deterministic=True)
    for options in ({"max_seqlen": 10**9}, {"max_budget": 5}):
        for ours, theirs in zip(run(case, x, deterministic=True, **options), want, strict=True):
            assert torch.equal(ours, theirs)
    with emulator.emulated("multiprocessors=50 order=reverse shared_kb=99"):
        out, lse, dq, _, _ = run(case, x, deterministic=True)
    for ours, theirs in zip((out, lse, dq), want, strict=False):
        assert torch.equal(ours, theirs)


def test_many_blocks_go_through_memory_where_shared_memory_is_short():
    case = Case((330,), (2, 1), 32, 16, "bf16", (4,))
    with emulator.emulated("shared_kb=16"):
        x = make_inputs(case, requires_grad=False)
        assert_selection(case, x, select(case, x))


def test_gqa_equals_repeated_keys_and_values():
    case = Case((90, 65), (6, 2), 32, 32, "bf16", budgets=(2, 2))
    x = make_inputs(case)
    out, _, dq, dk, _ = run(case, x, deterministic=True)
    k, v = (t.detach().repeat_interleave(3, 1).requires_grad_() for t in (x.k, x.v))
    again, lse = moba_attention(
        x.q, k, v, x.cu_seqlens, x.budget, block_size=32, return_lse=True, deterministic=True
    )
    grads = torch.autograd.grad((again, lse), (x.q, k, v), (x.dout, x.dlse))
    assert torch.equal(out, again)
    assert torch.equal(dq, grads[0])
    torch.testing.assert_close(dk.float(), grads[1].float().unflatten(1, (2, 3)).sum(2), rtol=0.02, atol=0.05)


def test_strided_and_misaligned_inputs():
    case = Case((100,), (4, 2), 32, 32, "bf16", budgets=(2,))
    x = make_inputs(case, requires_grad=False)
    want = moba_attention(x.q, x.k, x.v, x.cu_seqlens, 2, block_size=32)
    strided = [torch.stack([t, t + 1], -1)[..., 0] for t in (x.q, x.k, x.v)]
    assert torch.equal(moba_attention(*strided, x.cu_seqlens, 2, block_size=32), want)
    shifted = []
    for t in (x.q, x.k, x.v):
        room = torch.empty(t.numel() + 3, dtype=t.dtype)
        shifted.append(room[3:].view_as(t).copy_(t))
        assert shifted[-1].data_ptr() % 16 != 0
    assert torch.equal(moba_attention(*shifted, x.cu_seqlens, 2, block_size=32), want)


def test_no_tokens():
    empty = torch.zeros(0, 4, 32, dtype=torch.bfloat16).requires_grad_()
    moba_attention(empty, empty, empty, bounds([0, 0]), 3, block_size=32).sum().backward()
    assert empty.grad.shape == empty.shape
    moba_select(torch.zeros(20, 1, 32).half(), torch.zeros(20, 1, 32).half(), bounds([20]), 2, block_size=16)


def test_lse_alone_has_a_gradient():
    case = Case((100, 33), (4, 2), 32, 32, "fp16", budgets=(2, 2))
    x = make_inputs(case)
    lse = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32, return_lse=True)[1]
    dq, dk, dv = torch.autograd.grad(lse, (x.q, x.k, x.v), x.dlse)
    x.dout.zero_()
    _, _, want_dq, want_dk, _ = run_reference(case, x, select(case, x), torch.float64)
    torch.testing.assert_close(dq.double(), want_dq, rtol=0, atol=2e-3)
    torch.testing.assert_close(dk.double(), want_dk, rtol=0, atol=5e-3)
    assert not bool(dv.any())


def test_fp32_is_refused():
    x = make_inputs(Case((40,), (2, 1), 32, 16, "fp32", (2,)), requires_grad=False)
    with pytest.raises(RuntimeError, match="q is neither bfloat16 nor float16"):
        moba_attention(x.q, x.k, x.v, x.cu_seqlens, 2, block_size=16)
    half = [t.bfloat16() for t in (x.q, x.k, x.v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = moba_attention(x.q, x.k, x.v, x.cu_seqlens, 2, block_size=16)
    assert torch.equal(mixed, moba_attention(*half, x.cu_seqlens, 2, block_size=16))


def test_a_selection_from_elsewhere_cannot_write_astray():
    case = Case((100,), (2, 1), 32, 16, "bf16", budgets=(3,))
    x = make_inputs(case, requires_grad=False)
    selection = torch.randint(-5, 300, (2, 100, 2), generator=torch.Generator().manual_seed(1))
    lists, rows = torch.ops.sb_emulated.moba_index(selection.short(), x.cu_seqlens, x.budget, 16, 2)
    used = rows[: int(lists[-1])]
    assert bool((lists.diff() >= 0).all())
    assert bool(((used >= 0) & (used < 200)).all())
    assert bool((rows[int(lists[-1]) :] == -1).all())
    junk = torch.randint(-(2**31), 2**31 - 1, rows.shape, dtype=torch.int32)
    out, _ = torch.ops.sb_emulated.moba_forward(
        x.q, x.k, x.v, selection.short(), lists, junk, x.cu_seqlens, x.budget, 16, 100, 0.2
    )
    assert out.shape == x.q.shape


def test_checkpointing_is_bitwise_equal():
    case = Case((70, 1, 40), (2, 1), 32, 32, "bf16", (3, 1, 2))
    x = make_inputs(case)
    want = run(case, x, deterministic=True)

    def attention(q, k, v):
        return moba_attention(
            q, k, v, x.cu_seqlens, x.budget, block_size=32, return_lse=True, deterministic=True
        )

    out, lse = checkpoint(attention, x.q, x.k, x.v, use_reentrant=False)
    torch.autograd.backward((out, lse), (x.dout, x.dlse))
    for got, wanted in zip((out, lse, x.q.grad, x.k.grad, x.v.grad), want, strict=True):
        assert torch.equal(got, wanted)


def test_opcheck():
    case = Case((40, 1, 0, 35), (2, 1), 32, 16, "bf16", (3, 1, 1, 2))
    x = make_inputs(case, fused=True, requires_grad=False)
    ops, integers = torch.ops.sb, (x.cu_seqlens, x.budget)
    selection = ops.moba_select(x.q, x.k, *integers, 16, 40, 3)
    index = ops.moba_index(selection, *integers, 16, 2)
    forward = (x.q, x.k, x.v, selection, *index, *integers, 16, 40, 0.2)
    out, lse = ops.moba_forward(*forward)
    backward = (x.dout, None, x.q, x.k, x.v, out, lse, selection, *index, *integers, 16, 40, 0.2, True)
    only = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.moba_select.default, (x.q, x.k, *integers, 16, 40, 3), test_utils=only)
    torch.library.opcheck(ops.moba_index.default, (selection, *integers, 16, 2), test_utils=only)
    torch.library.opcheck(ops.moba_forward.default, forward, test_utils=only)
    torch.library.opcheck(ops.moba_backward.default, backward, test_utils=only)


@pytest.mark.parametrize(
    "bad", [[0, 60, 101], [0, 60, 400], [0, -5, 100], [-3, 60, 100], [0, 2**31 - 1, 100]]
)
def test_bounds_that_nobody_reads_make_no_kernel_write_astray(bad, monkeypatch):
    # As on a GPU: with max_seqlen and an int budget nothing is read.
    monkeypatch.setattr(functional, "choose_backend", lambda *_: "cuda")
    case = Case((60, 40), (4, 2), 64, 16, "bf16", (2, 2))
    x = make_inputs(case)
    cu_seqlens = torch.tensor(bad, dtype=torch.int32)
    arguments = {"block_size": 16, "max_seqlen": 100}
    out = moba_attention(x.q, x.k, x.v, cu_seqlens, 2, **arguments)
    out.backward(torch.ones_like(out))
    moba_select(x.q, x.k, cu_seqlens, 2, **arguments)
    mass = moba_coverage(x.q, x.k, cu_seqlens, **arguments)
    assert mass.isfinite().all()
    if bad[1] == 60:
        # Sequences before the bad bound are what they are.
        right = moba_attention(x.q, x.k, x.v, x.cu_seqlens, 2, **arguments)
        assert torch.equal(out[:60], right[:60])
