"""Where all queries attend all earlier keys, a GPU runs torch's fused attention: when, and rightly."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import move_to_gpu, packed_attention_on_cpu, report_gpu
from moba_cases import Case, assert_close, bounds, make_inputs, run_reference, select
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from sb_lightning.attention import dense, functional, moba_attention


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    report_gpu(monkeypatch, (9, 0))
    move_to_gpu(monkeypatch)
    with packed_attention_on_cpu():
        yield


@pytest.fixture
def calls(monkeypatch):
    """Which of the two ways each call took."""
    taken = []

    def note(name, function):
        return lambda *args: taken.append(name) or function(*args)

    monkeypatch.setattr(functional, "dense_attention", note("dense", dense.dense_attention))
    monkeypatch.setattr(functional.ops, "run_attention", note("kernels", functional.ops.run_attention))
    return taken


CASES = [
    Case((130,), (4, 2), 64, 32, "bf16", (5,)),
    Case((97,), (3, 3), 32, 16, "fp16", (9,), seed=1),
    Case((1,), (4, 1), 32, 16, "bf16", (1,)),
    Case((90, 0, 1, 40), (4, 2), 64, 32, "bf16", (3, 1, 1, 2), seed=2),
    Case((33, 64), (2, 2), 128, 16, "fp16", (3, 7), seed=3),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, fused, calls):
    x = make_inputs(case, fused=fused)
    x.dlse.zero_()
    selection = select(case, x)
    out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=case.block_size)
    assert calls == ["dense"]
    assert out.is_contiguous()
    grads = torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)
    lse = run_reference(case, x, selection, torch.float64)[1]
    assert_close(case, [out.detach(), lse, *grads], x, selection)


def inputs(lengths=(60, 40), heads=(4, 2)):
    return make_inputs(Case(lengths, heads, 32, 32, "bf16"), requires_grad=False)


def attend(x, budget, **options):
    return moba_attention(x.q, x.k, x.v, x.cu_seqlens, budget, block_size=32, **options)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)[:, None]


@pytest.mark.parametrize(
    ("budget", "options", "way"),
    [
        (2, {}, "dense"),
        (10**9, {}, "dense"),
        (1, {}, "kernels"),
        (2, {"max_seqlen": 64}, "dense"),
        (2, {"max_seqlen": 65}, "kernels"),  # nobody read that no sequence is so long
        (3, {"max_seqlen": 96, "max_budget": 3}, "dense"),
        (int32(2, 2), {}, "dense"),
        (int32(2, 1), {}, "kernels"),
        (int32(2, 2), {"max_seqlen": 60, "max_budget": 2}, "kernels"),  # nobody read the budgets
        (2, {"return_lse": True}, "kernels"),
        (2, {"deterministic": True}, "kernels"),
        (2, {"scale": 0.3}, "dense"),
        (2, {"scale": -0.3}, "kernels"),
        (2, {"scale": 0.0}, "kernels"),
        (2, {"backend": "cuda"}, "kernels"),
    ],
)
def test_when_it_is_taken(budget, options, way, calls):
    x = inputs()
    result = attend(x, budget, **options)
    assert calls == [way]
    out = result[0] if isinstance(result, tuple) else result
    twin = {name: value for name, value in options.items() if name == "scale"}
    torch.testing.assert_close(out, attend(x, budget, backend="reference", **twin), rtol=0, atol=4e-2)


def test_deterministic_algorithms_take_the_kernels(calls):
    torch.use_deterministic_algorithms(True)
    try:
        attend(inputs(), 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == ["kernels"]


def test_no_tokens_take_the_kernels(calls):
    assert attend(inputs((0, 0)), 2).shape == (0, 4, 32)
    assert calls == ["kernels"]


@pytest.mark.parametrize(
    ("options", "budget"),
    [({"max_seqlen": 64}, 2), ({"max_seqlen": 64}, 1), ({"max_seqlen": 60, "max_budget": 2}, int32(2, 1))],
)
def test_given_bounds_wait_for_nothing(options, budget, monkeypatch, calls):
    x = inputs()

    def read(self):
        raise AssertionError("a tensor was read")

    for name in ("tolist", "item", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    choose = functional.choose_backend
    monkeypatch.setattr(functional.ops, "run_attention", lambda *args: (args[0], None))
    monkeypatch.setattr(functional, "dense_attention", lambda *args: args[0])
    assert attend(x, budget, **options) is x.q
    monkeypatch.setattr(functional, "choose_backend", lambda *args: "cpu")
    with pytest.raises(AssertionError, match="a tensor was read"):
        attend(x, budget, **options)
    assert choose is not functional.choose_backend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqlen": 59, "max_budget": 0}, "max_seqlen is 59"),
        ({"max_seqlen": 64, "max_budget": 0}, "max_budget is 0"),
        ({"max_seqlen": 64, "max_budget": 1}, "max_budget is 1"),
        ({"max_seqlen": 0}, "max_seqlen is 0"),
        ({"max_seqlen": -1}, "max_seqlen is -1"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attend(inputs(), 2, **options)


@pytest.mark.parametrize(
    ("patch", "lengths", "heads", "way"),
    [
        ({"_flash_refusal": "no flash"}, (60,), (4, 2), "kernels"),
        ({"_packed_refusal": "no varlen"}, (60,), (4, 2), "dense"),
        ({"_packed_refusal": "no varlen"}, (60, 40), (4, 2), "kernels"),
        ({"_packed_takes_groups": False}, (60, 40), (4, 2), "kernels"),
        ({"_packed_takes_groups": False}, (60, 40), (4, 4), "dense"),
        ({"_packed_takes_groups": False}, (60,), (4, 2), "dense"),
    ],
)
def test_what_torch_lacks_takes_the_kernels(patch, lengths, heads, way, calls, monkeypatch):
    for name, value in patch.items():
        monkeypatch.setattr(dense, name, lambda value=value: value)
    attend(inputs(lengths, heads), 2)
    assert calls == [way]


def test_this_torch_has_all(monkeypatch):
    assert dense._packed_refusal() == ""
    assert dense._packed_takes_groups()
    assert dense.dense_paths() == "scaled_dot_product_attention for one sequence, varlen_attn for several"
    monkeypatch.setattr(dense, "_packed_takes_groups", lambda: False)
    assert "before torch 2.12" in dense.dense_paths()
    monkeypatch.setattr(dense, "_packed_refusal", lambda: "torch 2.9 has no varlen_attn")
    assert "for several the kernels of this package; torch 2.9" in dense.dense_paths()


def test_flash_attention_that_is_switched_off_is_told(monkeypatch):
    monkeypatch.undo()
    assert "built without flash attention" in dense.dense_paths()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert "enable_flash_sdp(False)" in dense.dense_paths()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert "varlen_attn for several" in dense.dense_paths()


@pytest.mark.parametrize("lengths", [(60,), (60, 40)])
def test_what_cannot_be_read_16_bytes_at_a_time_is_copied(lengths, calls):
    x = inputs(lengths)
    want = attend(x, 2)
    tokens = sum(lengths)
    for room, view in (
        (lambda t: torch.empty(t.numel() + 3, dtype=t.dtype), lambda r, t: r[3:].view_as(t)),
        (lambda t: torch.empty(*t.shape, 2, dtype=t.dtype), lambda r, t: r[..., 1]),
        (lambda t: torch.empty(tokens, t.shape[1], 33, dtype=t.dtype), lambda r, t: r[..., :32]),
    ):
        odd = [view(room(t), t).copy_(t) for t in (x.q, x.k, x.v)]
        out = moba_attention(*odd, x.cu_seqlens, 2, block_size=32)
        assert torch.equal(out, want)
    assert calls == ["dense"] * 4


def test_bounds_in_every_other_place_are_copied(calls):
    x = inputs()
    cu_seqlens = torch.stack([x.cu_seqlens, x.cu_seqlens], 1)[:, 0]
    assert not cu_seqlens.is_contiguous()
    out = moba_attention(x.q, x.k, x.v, cu_seqlens, 2, block_size=32)
    assert torch.equal(out, attend(x, 2))
    assert calls == ["dense"] * 2


@pytest.mark.parametrize("lengths", [(60,), (60, 40)])
def test_autocast(lengths, calls):
    x = inputs(lengths)
    leaves = [t.float().requires_grad_() for t in (x.q, x.k, x.v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = moba_attention(*leaves, x.cu_seqlens, 2, block_size=32)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(x, 2))
    out.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    assert calls == ["dense"] * 2


@pytest.mark.parametrize("lengths", [(60,), (60, 40)])
def test_checkpointing_is_bitwise_equal(lengths, calls):
    x = make_inputs(Case(lengths, (4, 2), 32, 32, "bf16"))

    def attention(q, k, v):
        return moba_attention(q, k, v, x.cu_seqlens, 2, block_size=32)

    out = attention(x.q, x.k, x.v)
    want = torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)
    out = checkpoint(attention, x.q, x.k, x.v, use_reentrant=False)
    for got, wanted in zip(torch.autograd.grad(out, (x.q, x.k, x.v), x.dout), want, strict=True):
        assert torch.equal(got, wanted)
    assert calls == ["dense"] * 3


def test_transforms_of_torch_func_take_the_kernels(calls):
    x = inputs()
    gradient = torch.func.grad(
        lambda q: moba_attention(q, x.k, x.v, x.cu_seqlens, 2, block_size=32).float().sum()
    )(x.q)
    assert gradient.shape == x.q.shape
    assert calls == ["kernels"]


def test_forward_mode_is_refused():
    x = inputs()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.q, torch.ones_like(x.q))
        with pytest.raises(RuntimeError, match="forward-mode derivative"):
            moba_attention(dual, x.k, x.v, x.cu_seqlens, 2, block_size=32)


@pytest.mark.parametrize("lengths", [(60,), (60, 40)])
def test_compiled(lengths):
    x = make_inputs(Case(lengths, (4, 2), 32, 32, "bf16"))
    counter = CompileCounterWithBackend("aot_eager")

    def attention(q, k, v, max_seqlen):
        bounds = {"max_seqlen": max_seqlen, "max_budget": 2}
        return moba_attention(q, k, v, x.cu_seqlens, 2, block_size=32, **bounds)

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=counter, dynamic=True)
    names = []
    for max_seqlen in (64, 61, 63, 70, 80):
        out, want = (f(x.q, x.k, x.v, max_seqlen) for f in (compiled, attention))
        torch.testing.assert_close(out, want, rtol=0, atol=2e-2)  # one sequence is taken apart on a CPU
        grads = [torch.autograd.grad(o, (x.q, x.k, x.v), x.dout) for o in (out, want)]
        for ours, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0.02, atol=4e-2)
        graph = counter.graphs[-1]
        names.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
    fused = "scaled_dot_product_attention" if len(lengths) == 1 else "varlen_attn"
    assert any(fused in name for name in names[0])
    assert not any("moba_attention" in name for name in names[0])
    assert any("moba_attention" in name for name in names[-1])
    assert counter.frame_count == 2, "one graph for dense, one for sparse attention"


def test_many_sequences_in_a_compiled_graph_with_a_tensor_of_budgets():
    x = inputs()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attention(budget):
        return moba_attention(
            x.q, x.k, x.v, bounds_of_call, budget, block_size=32, max_seqlen=64, max_budget=2
        )

    bounds_of_call = bounds([60, 40])
    assert torch.equal(attention(int32(2, 2)), attend(x, 2, backend="cuda"))
