"""A GPU that torch reports though there is none: tensors stay on the CPU, whose kernels serve as CUDA's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from sb_lightning.attention import dense, functional

backends_module = importlib.import_module("sb_lightning.attention.backends")


def report_gpu(
    monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], build: tuple[str, str] = ("", "")
) -> None:
    """Let torch report GPUs of these compute capabilities, and the build have CUDA kernels unless refused."""

    def capability(index: Any = None) -> tuple[int, int]:
        return capabilities[index if isinstance(index, int) else 0]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: f"GPU {capability(index)[0]}")
    monkeypatch.setattr(backends_module, "_build_refusal", lambda: build)
    monkeypatch.setattr(backends_module, "_TOLD", set())


def list_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch also say that there are GPUs; then torch.compile needs them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def move_to_gpu(monkeypatch: pytest.MonkeyPatch, index: int = 0) -> None:
    """Let the attention functions take CPU tensors for tensors of a GPU."""
    real = backends_module.choose_backend
    monkeypatch.setattr(
        functional, "choose_backend", lambda name, _, dtype=None: real(name, f"cuda:{index}", dtype)
    )
    monkeypatch.setattr(dense, "_flash_refusal", lambda: "")


def _weights(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[1:]).triu(1).bool(), float("-inf"))
    return logits.softmax(-1)


def _sequences(bounds: Tensor, group: int, q: Tensor, *rest: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield q, k and v of each sequence in fp32, keys and values repeated for all query heads."""
    for start, end in torch.stack([bounds[:-1], bounds[1:]], 1).tolist():
        yield q[start:end].float(), *(x[start:end].float().repeat_interleave(group, 1) for x in rest)


@torch.autocast("cpu", enabled=False)
def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options):
    """What aten::_flash_attention_forward does for packed sequences, in fp32."""
    check_packed(q, k, v, cu_q, cu_k, max_q, max_k, options)
    out = [
        torch.einsum("hqk,khd->qhd", _weights(one, keys, is_causal, options["scale"]), values)
        for one, keys, values in _sequences(cu_q, q.shape[1] // k.shape[1], q, k, v)
    ]
    lse = torch.zeros(q.shape[1], q.shape[0])
    return torch.cat(out).to(q.dtype), lse, torch.zeros(2).to(torch.uint64), torch.empty(0), torch.empty(0)


@torch.autocast("cpu", enabled=False)
def flash_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, state, unused, **options
):
    """What aten::_flash_attention_backward does for packed sequences, in fp32."""
    check_packed(q, k, v, cu_q, cu_k, max_q, max_k, options)
    group, grads = q.shape[1] // k.shape[1], []
    gradients = _sequences(cu_q, 1, dout)
    for (one, keys, values), (upstream,) in zip(_sequences(cu_q, group, q, k, v), gradients, strict=True):
        weights = _weights(one, keys, is_causal, options["scale"])
        dweights = torch.einsum("qhd,khd->hqk", upstream, values)
        dlogits = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * options["scale"]
        dq = torch.einsum("hqk,khd->qhd", dlogits, keys)
        dk, dv = (
            torch.einsum("hqk,qhd->khd", x, y).unflatten(1, (-1, group)).sum(2)
            for x, y in ((dlogits, one), (weights, upstream))
        )
        grads.append((dq, dk, dv))
    return tuple(torch.cat(parts).to(q.dtype) for parts in zip(*grads, strict=True))


def check_packed(q, k, v, cu_q, cu_k, max_q, max_k, options) -> None:
    """Refuse what the kernel refuses, or would read astray."""
    lengths = cu_q.diff()
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype == torch.int32
    assert cu_q.is_contiguous()
    assert int(lengths.max()) <= max_q == max_k
    assert q.shape[1] % k.shape[1] == 0
    assert (options["window_size_left"], options["window_size_right"]) == (-1, 0)
    for x in (q, k, v):
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.stride(2) == 1
        assert x.data_ptr() % 16 == 0
        assert all(x.stride(dim) % 8 == 0 for dim in (0, 1))


@contextmanager
def packed_attention_on_cpu() -> Iterator[None]:
    """Give torch.nn.attention.varlen, which has CUDA kernels alone, kernels for CPU tensors."""
    kernels = torch.library.Library("aten", "IMPL")
    try:
        kernels.impl("_flash_attention_forward", flash_forward, "CPU")
        kernels.impl("_flash_attention_backward", flash_backward, "CPU")
        yield
    finally:
        kernels._destroy()
