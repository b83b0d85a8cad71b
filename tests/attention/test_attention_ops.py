"""What torch knows of the ops: opcheck, compile, autocast, checkpointing, FLOPs, what is saved."""

from __future__ import annotations

import pytest
import torch
from moba_cases import DTYPES, Case, bounds, make_inputs, run, select
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sb_lightning.attention import moba_attention, moba_select, reference
from sb_lightning.attention.pairs import attended_pairs

CASE = Case((70, 1, 0, 99), (4, 2), 32, 32, budgets=(3, 1, 1, 2))


def test_opcheck():
    x = make_inputs(CASE, fused=True)
    ops = torch.ops.sb
    integers = (x.cu_seqlens, x.budget)
    plain = make_inputs(CASE, fused=True, requires_grad=False)
    q, k, v = plain.q, plain.k, plain.v
    selection = ops.moba_select(q, k, *integers, 32, 99, 3)
    index = ops.moba_index(selection, *integers, 32, 2)
    out, lse = ops.moba_forward(q, k, v, selection, *index, *integers, 32, 99, 0.2)
    torch.library.opcheck(ops.moba_select.default, (q, k, *integers, 32, 99, 3))
    torch.library.opcheck(ops.moba_index.default, (selection, *integers, 32, 2))
    torch.library.opcheck(ops.moba_forward.default, (q, k, v, selection, *index, *integers, 32, 99, 0.2))
    for dlse in (None, plain.dlse):
        torch.library.opcheck(
            ops.moba_backward.default,
            (plain.dout, dlse, q, k, v, out, lse, selection, *index, *integers, 32, 99, 0.2, False),
        )
    torch.library.opcheck(ops.moba_attention.default, (x.q, x.k, x.v, *integers, 32, 99, 3, 0.2, True))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compile_forward_backward_without_recompiling_for_another_budget(dtype):
    counter = CompileCounterWithBackend("aot_eager")

    def attention(q, k, v, cu_seqlens, budget):
        out, lse = moba_attention(
            q * 2, k, v, cu_seqlens, budget, block_size=32, max_seqlen=100, max_budget=4, return_lse=True
        )
        return out * 3, lse

    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    torch._dynamo.reset()
    for budgets in ((3, 1, 1, 2), (1, 1, 1, 4), (2, 1, 1, 1)):
        x = make_inputs(Case(CASE.lengths, (4, 2), 32, 32, dtype, budgets), fused=True)
        for got, want in zip(
            *[
                (*r, *torch.autograd.grad(r, (x.q, x.k, x.v), (x.dout, x.dlse)))
                for r in (f(x.q, x.k, x.v, x.cu_seqlens, x.budget) for f in (compiled, attention))
            ],
            strict=True,
        ):
            assert torch.equal(got, want)
    assert counter.frame_count == 1


def test_compile_with_inductor():
    x = make_inputs(CASE, requires_grad=False)

    def attention(q, k, v):
        return moba_attention(q, k, v, x.cu_seqlens, x.budget, block_size=32, max_seqlen=99, max_budget=3)

    assert torch.equal(torch.compile(attention, fullgraph=True)(x.q, x.k, x.v), attention(x.q, x.k, x.v))


def test_compile_with_numbers_that_change():
    # Dynamo turns a float or int argument that changes into a symbol.
    x = make_inputs(CASE, requires_grad=False)

    def attention(q, k, v, scale, max_seqlen, budget):
        return moba_attention(
            q,
            k,
            v,
            x.cu_seqlens,
            budget,
            block_size=32,
            max_seqlen=max_seqlen,
            max_budget=budget,
            scale=scale,
        )

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for scale, max_seqlen, budget in ((0.1, 99, 2), (0.2, 100, 3), (0.3, 120, 4)):
        numbers = (scale, max_seqlen, budget)
        assert torch.equal(compiled(x.q, x.k, x.v, *numbers), attention(x.q, x.k, x.v, *numbers))


def test_compile_cuts_the_budget_to_the_blocks_there_are():
    x = make_inputs(CASE, requires_grad=False)
    counter = CompileCounterWithBackend("aot_eager")

    def attention(q, k, v, max_seqlen, max_budget):
        bounds = {"max_seqlen": max_seqlen, "max_budget": max_budget}
        return moba_attention(q, k, v, x.cu_seqlens, 10**8, block_size=32, **bounds)

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=counter, dynamic=True)
    dense = moba_attention(x.q, x.k, x.v, x.cu_seqlens, 4, block_size=32)
    for max_seqlen, max_budget in ((99, 10**8), (128, 10**9), (1000, 4), (100, 6)):
        assert torch.equal(compiled(x.q, x.k, x.v, max_seqlen, max_budget), dense)
    assert counter.frame_count == 1

    @torch.compile(fullgraph=True, backend="aot_eager")
    def select(q, k):
        return moba_select(q, k, x.cu_seqlens, 10**8, block_size=32, max_seqlen=99, max_budget=10**8)

    assert select(x.q, x.k).shape[2] == 3


@pytest.mark.parametrize("given", [{"max_seqlen": -1, "max_budget": 3}, {"max_seqlen": 99, "max_budget": 0}])
def test_compile_refuses_bounds_that_bound_nothing(given):
    x = make_inputs(CASE, requires_grad=False)

    @torch.compile(fullgraph=True, backend="eager")
    def attention(q, k, v):
        return moba_attention(q, k, v, x.cu_seqlens, x.budget, block_size=32, **given)

    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"(max_seqlen is below 0|max_budget is below 1): it bounds"
    ):
        attention(x.q, x.k, x.v)


@pytest.mark.parametrize("given", [{"max_seqlen": 99}, {"max_budget": 3}])
def test_compile_asks_for_the_bounds(given):
    x = make_inputs(CASE, requires_grad=False)

    @torch.compile(fullgraph=True, backend="eager")
    def attention(q, k, v):
        return moba_attention(q, k, v, x.cu_seqlens, x.budget, block_size=32, **given)

    missing = ({"max_seqlen", "max_budget"} - set(given)).pop()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{missing} is None under torch.compile"):
        attention(x.q, x.k, x.v)


def test_compiled_graph_still_checks_values():
    x = make_inputs(CASE, requires_grad=False)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attention(q, k, v, cu_seqlens):
        return moba_attention(q, k, v, cu_seqlens, x.budget, block_size=32, max_seqlen=99, max_budget=3)

    attention(x.q, x.k, x.v, x.cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens decreases"):
        attention(x.q, x.k, x.v, bounds([70, -1, 1, 100]))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autocast_casts_to_one_dtype(dtype):
    x = make_inputs(CASE)
    with torch.autocast("cpu", dtype=DTYPES[dtype]):
        mixed = moba_attention(x.q, x.k.to(DTYPES[dtype]), x.v, x.cu_seqlens, x.budget, block_size=32)
    assert mixed.dtype == DTYPES[dtype]
    cast = (t.to(DTYPES[dtype]) for t in (x.q, x.k, x.v))
    assert torch.equal(mixed, moba_attention(*cast, x.cu_seqlens, x.budget, block_size=32))
    mixed.float().sum().backward()
    assert x.q.grad is not None
    assert x.q.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_reference_follows_autocast(dtype):
    x = make_inputs(CASE, requires_grad=False)
    cast = [t.to(DTYPES[dtype]) for t in (x.q, x.k, x.v)]
    integers = (x.cu_seqlens, x.budget)
    want = reference.moba_attention(*cast, *integers, block_size=32)
    chosen = moba_select(*cast[:2], *integers, block_size=32, backend="reference")
    with torch.autocast("cpu", dtype=DTYPES[dtype]):
        out = moba_attention(x.q, x.k.to(DTYPES[dtype]), x.v, *integers, block_size=32, backend="reference")
        for backend in ("cpu", "reference"):
            selection = moba_select(x.q, x.k, *integers, block_size=32, backend=backend)
            assert torch.equal(selection, chosen)
    assert out.dtype == DTYPES[dtype]
    assert torch.equal(out, want)


def test_autocast_under_compile():
    x = make_inputs(CASE, requires_grad=False)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attention(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return moba_attention(q, k, v, x.cu_seqlens, x.budget, block_size=32, max_seqlen=99, max_budget=3)

    assert attention(x.q, x.k.bfloat16(), x.v).dtype == torch.bfloat16


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_is_bitwise_equal(use_reentrant):
    x = make_inputs(CASE)
    want = run(CASE, x)

    def attention(q, k, v):
        return moba_attention(q, k, v, x.cu_seqlens, x.budget, block_size=32, return_lse=True)

    out, lse = checkpoint(attention, x.q, x.k, x.v, use_reentrant=use_reentrant)
    torch.autograd.backward((out, lse), (x.dout, x.dlse))
    for got, wanted in zip((out, lse, x.q.grad, x.k.grad, x.v.grad), want, strict=True):
        assert torch.equal(got, wanted)


def test_compiled_checkpointing():
    x = make_inputs(CASE)
    want = run(CASE, x)

    def attention(q, k, v):
        return moba_attention(
            q, k, v, x.cu_seqlens, x.budget, block_size=32, max_seqlen=99, max_budget=3, return_lse=True
        )

    @torch.compile(fullgraph=True, backend="aot_eager")
    def recomputed(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=False)

    out, lse = recomputed(x.q, x.k, x.v)
    torch.autograd.backward((out, lse), (x.dout, x.dlse))
    assert torch.equal(out, want[0])
    assert torch.equal(x.k.grad, want[3])


def test_saves_no_repeated_keys_and_no_index():
    case = Case((300, 200), (12, 2), 64, 32, "bf16", (5, 4))
    x = make_inputs(case)
    saved = {}

    def keep(t):
        saved[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32)
    tokens, width = 500, 4
    inputs = 2 * 64 * tokens * (12 + 2 + 2)
    results = 2 * 64 * tokens * 12 + 4 * tokens * 12 + 2 * width * tokens * 12
    small = 4 * (3 + 2 * 12)
    assert sum(saved.values()) == inputs + results + small
    out.sum().backward()


def test_editing_the_budget_between_forward_and_backward_is_caught():
    x = make_inputs(CASE)
    budget = x.budget.clone()
    out, _, _ = torch.ops.sb.moba_attention(x.q, x.k, x.v, x.cu_seqlens, budget, 32, 99, 3, 0.2, False)
    budget += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("shape", ["full", "row", "int32 scalar"])
def test_the_gradient_is_that_of_the_budget_at_the_forward(shape):
    x = make_inputs(CASE)
    budget = {"full": x.budget.clone(), "row": x.budget[:1].clone(), "int32 scalar": x.budget[0, 0].clone()}[
        shape
    ]

    def gradients(change):
        given = budget.clone()
        out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, given, block_size=32)
        if change:
            given.fill_(1)
        return torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)

    for got, want in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(got, want)


def test_flops_are_the_closed_form():
    case = Case((330,), (4, 2), 64, 32, budgets=(3,))
    x = make_inputs(case)
    with FlopCounterMode(display=False) as counter:
        moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32).sum().backward()
    assert counter.get_total_flops() == 14 * 4 * 64 * attended_pairs([330], 3, 32)
    plain = make_inputs(case, requires_grad=False)
    selection = select(case, plain)
    index = torch.ops.sb.moba_index(selection, x.cu_seqlens, x.budget, 32, 2)
    with FlopCounterMode(display=False) as counter:
        torch.ops.sb.moba_forward(
            plain.q, plain.k, plain.v, selection, *index, x.cu_seqlens, x.budget, 32, 330, 0.1
        )
    assert counter.get_total_flops() == 4 * 4 * 64 * attended_pairs([330], 3, 32)


def test_flops_bound_several_sequences():
    x = make_inputs(CASE, requires_grad=False)
    with FlopCounterMode(display=False) as counter:
        moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32)
    assert counter.get_total_flops() >= 4 * 4 * 32 * attended_pairs(list(CASE.lengths), 3, 32)


def test_uninitialised_memory_never_shows():
    case = Case((130, 1, 0, 65), (6, 2), 32, 32, "bf16", (3, 1, 1, 2))
    x = make_inputs(case)
    want = run(case, x)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        filled = torch.empty(2, dtype=torch.float32)
        got = run(case, x)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    assert bool(filled.isnan().all())
    for ours, wanted in zip(got, want, strict=True):
        assert torch.equal(ours, wanted)


def test_second_gradient_is_refused():
    x = make_inputs(CASE)
    out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32)
    (dq,) = torch.autograd.grad(out.square().sum(), x.q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dq.sum().backward()
