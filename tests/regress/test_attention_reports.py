"""Failures that users of other block-sparse attention kernels reported, each as a test of ours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from sb_lightning.attention import moba_attention, moba_select, reference


def bounds(*ends):
    return torch.tensor(ends, dtype=torch.int32)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(tokens, query_heads=2, kv_heads=1, head_dim=32, dtype=torch.float32, seed=0):
    shapes = [(tokens, heads, head_dim) for heads in (query_heads, kv_heads, kv_heads)]
    return [normal(*shape, seed=seed + i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def gradients(q, k, v, cu_seqlens, budget, block_size, **options):
    out = moba_attention(q, k, v, cu_seqlens, budget, block_size=block_size, **options)
    dout = normal(*out.shape, seed=9, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def reference_gradients(q, k, v, cu_seqlens, budget, block_size):
    selection = moba_select(q, k, cu_seqlens, budget, block_size=block_size)
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = reference.moba_attention(q, k, v, cu_seqlens, budget, block_size=block_size, selection=selection)
    dout = normal(*out.shape, seed=9).double()
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def assert_same(got, want, atol=5e-6):
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_memory_does_not_grow_with_the_group(kv_heads):
    """MoonshotAI/MoBA#14, #16: keys and values repeated per query head, 33 GB against 11 GB for dense."""
    q, k, v = qkv(400, 8, kv_heads)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        moba_attention(q, k, v, bounds(0, 400), 3, block_size=32)
    shapes = sorted(tuple(t.shape) for t in saved.values() if t.is_floating_point() and t.dim() == 3)
    assert shapes == sorted([(400, 8, 32)] * 2 + [(400, kv_heads, 32)] * 2)


def test_ties_have_a_rule():
    """MoonshotAI/MoBA#23: two implementations chose differently among equal scores."""
    q, k = torch.ones(100, 1, 32), torch.ones(100, 1, 32)
    for backend in ("cpu", "reference"):
        selection = moba_select(q, k, bounds(0, 100), 2, block_size=16, backend=backend)
        assert selection[0, 99].tolist() == [5]


def test_budget_one_is_not_full_attention():
    """MoonshotAI/MoBA#26: top-1 computed full causal attention."""
    q, k, v = qkv(96)
    out = moba_attention(q, k, v, bounds(0, 96), 1, block_size=32)
    want = [
        F.scaled_dot_product_attention(
            *(x[i : i + 32].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for i in (0, 32, 64)
    ]
    torch.testing.assert_close(out, torch.cat(want), rtol=0, atol=1e-6)


def test_budget_counts_the_own_block():
    """MoonshotAI/MoBA#27: why top-k minus one?"""
    q, k, _ = qkv(96)
    assert moba_select(q, k, bounds(0, 96), 2, block_size=32).shape[-1] == 1
    assert (moba_select(q, k, bounds(0, 96), 2, block_size=32)[:, 32:] >= 0).all()


def test_decoding_over_a_cache_is_refused():
    """MoonshotAI/MoBA#30: with fewer queries than keys something else was computed, silently."""
    q, k, v = qkv(96)
    with pytest.raises(ValueError, match="q_len != k_len"):
        moba_attention(q[-1:], k, v, bounds(0, 96), 2, block_size=32)


def test_result_does_not_depend_on_a_large_max_seqlen():
    """MoonshotAI/MoBA#32: max_seqlen of another sequence wasted the grid."""
    q, k, v = qkv(130)
    want = moba_attention(q, k, v, bounds(0, 100, 130), 2, block_size=32)
    assert torch.equal(want, moba_attention(q, k, v, bounds(0, 100, 130), 2, block_size=32, max_seqlen=10**8))


def test_edited_bounds_are_seen():
    """fla-org/flash-linear-attention#840: a cache on the identity of cu_seqlens gave stale results."""
    q, k, v = qkv(128)
    cu_seqlens = bounds(0, 64, 128)
    before = moba_attention(q, k, v, cu_seqlens, 2, block_size=32)
    cu_seqlens[1] = 32
    after = moba_attention(q, k, v, cu_seqlens, 2, block_size=32)
    assert not torch.equal(before, after)
    assert torch.equal(after, moba_attention(q, k, v, bounds(0, 32, 128), 2, block_size=32))


def test_several_documents_that_end_inside_a_block():
    """fla-org/native-sparse-attention#23: NaN with cu_seqlens [0, 781, 2048] and blocks of 32."""
    q, k, v = qkv(2048, 2, 1)
    cu_seqlens = bounds(0, 781, 2048)
    got = gradients(q, k, v, cu_seqlens, 4, 32)
    assert_same(got, reference_gradients(q, k, v, cu_seqlens, 4, 32))


def test_offsets_beyond_32_bits():
    """fla-org/native-sparse-attention#15, #7; SHI-Labs/NATTEN#347: int32 offsets overflow in long packs."""
    tokens, stride = 70, 1 << 25  # the last row lies 2.3e9 elements into the storage
    dense = [normal(tokens, heads, 32, seed=heads, dtype=torch.bfloat16) for heads in (2, 1, 1)]
    storage = torch.empty(tokens * stride, dtype=torch.bfloat16)  # pages nobody touches take no memory
    wide = []
    for i, x in enumerate(dense):
        view = storage.as_strided(x.shape, (stride, 4096, 1), i * 65536)
        view.copy_(x)
        wide.append(view)
    want = gradients(*(x.requires_grad_() for x in dense), bounds(0, tokens), 2, 16)
    got = gradients(*(x.requires_grad_() for x in wide), bounds(0, tokens), 2, 16)
    for ours, wanted in zip(got, want, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("group", [1, 2, 5, 6, 7, 8])
def test_any_group_size(group):
    """fla-org/native-sparse-attention#11: the group had to be 16.

    XunhaoLai/native-sparse-attention-triton#27: the backward mapped query heads to the wrong KV head,
    which as many KV heads as heads in a group hide.
    """
    q, k, v = qkv(100, group * 3, 3)
    got = gradients(q, k, v, bounds(0, 61, 100), 2, 16)
    assert_same(got, reference_gradients(q, k, v, bounds(0, 61, 100), 2, 16))


def test_other_value_dimension_is_refused():
    """XunhaoLai/native-sparse-attention-triton#27: Dv != Dqk computed garbage."""
    q, k, v = qkv(64)
    with pytest.raises(ValueError, match="v has head_dim 64 and q has 32"):
        moba_attention(q, k, torch.cat([v, v], -1), bounds(0, 64), 2, block_size=32)


@pytest.mark.parametrize("tokens", [32767, 32768, 32769])
def test_lengths_around_a_power_of_two(tokens):
    """Relaxed-System-Lab/Flash-Sparse-Attention#3: the number of blocks came out wrong at 32768."""
    q, k, v = (x.detach() for x in qkv(tokens, 1, 1))
    block = 1024
    cu_seqlens = bounds(0, tokens)
    selection = moba_select(q, k, cu_seqlens, 2, block_size=block)
    out = moba_attention(q, k, v, cu_seqlens, 2, block_size=block)
    for t in (0, 1023, 1024, tokens - 2, tokens - 1):
        own = t // block
        keys = torch.arange(own * block, t + 1)
        if own:
            chosen = int(selection[0, t, 0])
            means = torch.stack([k[b * block : (b + 1) * block, 0].mean(0) for b in range(own)])
            assert chosen == int((means @ q[t, 0]).argmax())
            keys = torch.cat([torch.arange(chosen * block, (chosen + 1) * block), keys])
        weights = torch.softmax(k[keys, 0] @ q[t, 0] * 32**-0.5, 0)
        torch.testing.assert_close(out[t, 0], weights @ v[keys, 0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33])
def test_short_sequences(tokens):
    """thu-ml/SpargeAttn#59: queries had to be 128 or longer."""
    q, k, v = qkv(tokens)
    cu_seqlens = bounds(0, tokens)
    assert_same(gradients(q, k, v, cu_seqlens, 2, 32), reference_gradients(q, k, v, cu_seqlens, 2, 32))


def test_shape_of_a_small_qwen():
    """OpenBMB/MiniCPM#326; fla's NSA kernel asserts a power of two: 14 query and 2 KV heads of 64."""
    q, k, v = qkv(355, 14, 2, 64)
    got = gradients(q, k, v, bounds(0, 355), 3, 64)
    assert_same(got, reference_gradients(q, k, v, bounds(0, 355), 3, 64))


def test_twelve_query_heads_over_two():
    """LMCache/LMCache#3092: keys indexed by the query head, silently wrong at 12 over 2."""
    q, k, v = (x.detach() for x in qkv(100, 12, 2))
    repeated = [x.repeat_interleave(6, 1) for x in (k, v)]
    assert torch.equal(
        moba_attention(q, k, v, bounds(0, 100), 2, block_size=32),
        moba_attention(q, *repeated, bounds(0, 100), 2, block_size=32),
    )


def test_two_configurations_in_one_process_in_both_orders():
    """Dao-AILab/flash-attention#2645: a cache key lacked a factor, so the second kernel was the first."""
    configurations = [(32, 16, torch.float32), (64, 48, torch.bfloat16), (32, 16, torch.bfloat16)]

    def results(order):
        found = {}
        for head_dim, block_size, dtype in order:
            q, k, v = qkv(150, 2, 1, head_dim, dtype)
            found[head_dim, block_size, dtype] = gradients(q, k, v, bounds(0, 150), 3, block_size)
        return found

    forth, back = results(configurations), results(configurations[::-1])
    for key, want in forth.items():
        assert all(torch.equal(a, b) for a, b in zip(back[key], want, strict=True))


@pytest.mark.parametrize("block_size", [16, 48, 80, 112, 176, 400])
def test_block_size_is_independent_of_the_tiles(block_size):
    """Dao-AILab/flash-attention#2429, #2727: forward and backward tiles disagreed with the block size."""
    q, k, v = qkv(421)
    got = gradients(q, k, v, bounds(0, 421), 3, block_size)
    assert_same(got, reference_gradients(q, k, v, bounds(0, 421), 3, block_size))


def test_one_key():
    """Dao-AILab/flash-attention#334, #443: NaN gradients of sequences of one key."""
    q, k, v = qkv(3)
    out, dq, dk, dv = gradients(q, k, v, bounds(0, 1, 2, 3), 2, 16)
    assert torch.equal(out, v.detach().expand(3, 2, 32))
    torch.testing.assert_close(dq, torch.zeros_like(dq), rtol=0, atol=1e-6)
    torch.testing.assert_close(dk, torch.zeros_like(dk), rtol=0, atol=2e-6)
    assert bool(dv.isfinite().all())


@pytest.mark.parametrize("ends", [(0, 0, 50, 90), (0, 50, 50, 90), (0, 50, 90, 90), (0, 0, 0, 90, 90)])
def test_empty_sequences(ends):
    """Dao-AILab/flash-attention#2568, #2421: bad access and NaN where a sequence has no tokens."""
    q, k, v = qkv(90)
    got = gradients(q, k, v, bounds(*ends), 2, 16)
    filled = bounds(*dict.fromkeys(ends))
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(q, k, v, filled, 2, 16), strict=True))


@pytest.mark.parametrize("tokens", [127, 129, 200])
def test_lengths_that_are_no_multiple_of_128(tokens):
    """pytorch/pytorch#153799, tile-ai/tilelang#2461: uninitialised padding gave NaN gradients."""
    q, k, v = qkv(tokens, dtype=torch.bfloat16)
    torch.full((1 << 20,), float("nan"))  # so that fresh memory is likely to hold NaN
    assert all(bool(x.isfinite().all()) for x in gradients(q, k, v, bounds(0, tokens), 3, 32))


def test_backward_on_cpu():
    """pytorch/pytorch#148752, #169224: no backward on CPU, and a cryptic error."""
    q, k, v = qkv(100)
    moba_attention(q, k, v, bounds(0, 100), 2, block_size=32).sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_gradients_are_the_same_in_every_run():
    """Dao-AILab/flash-attention#2469, #2253: no deterministic block-sparse backward."""
    q, k, v = qkv(700, 4, 2, dtype=torch.bfloat16)
    first, *others = (gradients(q, k, v, bounds(0, 400, 700), 4, 32, deterministic=True) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_recomputed_forward_uses_the_budget_of_the_first():
    """allenai/OLMo-core#713: an opaque kernel whose settings changed between forward and recomputation."""
    q, k, v = qkv(100)
    budget = torch.full((1, 2), 2, dtype=torch.int32)
    selections = []

    def attention(q, k, v):
        out, _, selection = torch.ops.sb.moba_attention(
            q, k, v, bounds(0, 100), budget, 32, 100, 3, 0.2, False
        )
        selections.append(selection)
        return out

    with set_checkpoint_early_stop(False):
        checkpoint(attention, q, k, v, use_reentrant=False).sum().backward()
    assert len(selections) == 2
    assert torch.equal(*selections)


def test_several_sequences_of_unequal_length():
    """mit-han-lab/Block-Sparse-Attention#7, x-attention#12: batches of more than one were unsupported."""
    q, k, v = qkv(300, 4, 2)
    cu_seqlens = bounds(0, 7, 140, 171, 300)
    budget = torch.tensor([[1], [3], [2], [9]], dtype=torch.int32)
    got = gradients(q, k, v, cu_seqlens, budget, 16)
    assert_same(got, reference_gradients(q, k, v, cu_seqlens, budget, 16))
