"""Which backend runs on which device, in which dtype, and that a slower one is never taken without a word."""

from __future__ import annotations

import importlib
import itertools
import re
import warnings

import pytest
import torch
from fake_gpu import backends_module, list_gpus, move_to_gpu, report_gpu

from sb_lightning.attention import backends, coverage, functional, moba_attention, reference
from sb_lightning.attention.backends import best_backend, choose_backend

NOT_BUILT = ("the C++ extension was built without CUDA kernels", "build it with SB_BUILD_CUDA=1")
BUILT = ("", "")
GPU = torch.device("cuda:0")


@pytest.mark.parametrize("build", [BUILT, NOT_BUILT], ids=["built", "not built"])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_kind_of_gpu(dtype, capability, build, monkeypatch):
    report_gpu(monkeypatch, capability, build=build)
    wanted = []
    if build != BUILT:
        wanted.append("without CUDA kernels")
    if capability < (8, 0):
        wanted.append("compute capability 7.5; the CUDA kernels need 8.0")
    if dtype == torch.float32:
        wanted.append("q is torch.float32 and the CUDA kernels run bfloat16 and float16")
    name, why, change = best_backend(GPU, dtype)
    if not wanted:
        assert (name, why, change) == ("cuda", "", "")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choose_backend(None, GPU, dtype) == choose_backend("cuda", GPU, dtype) == "cuda"
        return
    assert name == "reference"
    assert wanted[0] in why
    with pytest.warns(UserWarning, match="backend 'reference'") as told:
        assert choose_backend(None, GPU, dtype) == "reference"
    (warning,) = told
    assert wanted[0] in str(warning.message)
    assert change in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend(None, GPU, dtype) == "reference", "the same reason is told once"
        assert choose_backend("reference", GPU, dtype) == "reference"
    error = ValueError if len(wanted) == 1 and dtype == torch.float32 else RuntimeError
    with pytest.raises(error, match="backend 'cuda' was refused") as refused:
        choose_backend("cuda", GPU, dtype)
    assert wanted[0] in str(refused.value)
    assert "backend='reference'" in str(refused.value)


def test_another_reason_is_told_again(monkeypatch):
    report_gpu(monkeypatch, (8, 0), (7, 0))
    with pytest.warns(UserWarning, match="q is torch.float32"):
        choose_backend(None, "cuda:0", torch.float32)
    with pytest.warns(UserWarning, match=r"compute capability 7\.0"):
        choose_backend(None, "cuda:1", torch.bfloat16)


def test_only_rank_zero_warns(monkeypatch):
    report_gpu(monkeypatch, (7, 0))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend(None, GPU) == "reference"


def test_elsewhere_nothing_slower_is_taken(monkeypatch):
    with pytest.raises(RuntimeError, match="q is on device 'meta'"):
        choose_backend(None, "meta", torch.bfloat16)
    with pytest.raises(RuntimeError, match="q is on device 'cpu' and backend is 'cuda'"):
        choose_backend("cuda", "cpu", torch.bfloat16)
    with pytest.raises(RuntimeError, match="q is on device 'cuda' and backend is 'cpu'"):
        choose_backend("cpu", GPU, torch.bfloat16)
    refused = importlib.import_module("sb_lightning.attention.extension").load_extension(None)
    monkeypatch.setattr(backends_module, "EXTENSION", refused)
    monkeypatch.setattr(backends_module, "_TOLD", set())
    assert best_backend(torch.device("cpu"))[:2] == ("reference", "the C++ extension is not built")
    with pytest.raises(RuntimeError, match="backend 'cpu' was refused: the C\\+\\+ extension is not built"):
        choose_backend(None, "cpu", torch.float32)
    with pytest.warns(UserWarning, match="the C\\+\\+ extension is not built"):
        assert choose_backend(None, GPU, torch.bfloat16) == "reference"


@pytest.mark.parametrize("dim", [48, 64, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_calls_on_a_gpu(dtype, dim, monkeypatch):
    report_gpu(monkeypatch, (8, 0))
    move_to_gpu(monkeypatch)
    ran = []
    twin = reference.moba_attention
    monkeypatch.setattr(reference, "moba_attention", lambda *a, **b: ran.append("reference") or twin(*a, **b))
    q, kv = torch.randn(40, 2, dim, dtype=dtype), torch.randn(40, 1, dim, dtype=dtype)
    cu_seqlens = torch.tensor([0, 40], dtype=torch.int32)

    def attend(**options):
        return moba_attention(q, kv, kv, cu_seqlens, 2, block_size=16, **options)

    if dim != 64 or dtype == torch.float64:
        message = f"head_dim is {dim}" if dim != 64 else f"q is {dtype}"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for backend in (None, "cuda"):
                with pytest.raises(ValueError, match=message):
                    attend(backend=backend)
        assert attend(backend="reference").dtype == dtype
    elif dtype == torch.float32:
        with pytest.warns(UserWarning, match="q is torch.float32"):
            attend()
        assert ran == ["reference"]
        with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("error")
            attend()  # autocast's dtype is what the kernels see
        assert ran == ["reference"]
    else:
        attend()
        assert ran == []


def test_the_compiler_is_told_once(monkeypatch):
    report_gpu(monkeypatch, (8, 0))
    move_to_gpu(monkeypatch)
    q = torch.randn(40, 2, 32)
    cu_seqlens = torch.tensor([0, 40], dtype=torch.int32)
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def attention(q):
        return moba_attention(q, q, q, cu_seqlens, 2, block_size=16, max_seqlen=40, max_budget=2) * 2

    with pytest.warns(UserWarning, match="q is torch.float32") as told:
        out = attention(q)
    assert sum("backend 'reference'" in str(warning.message) for warning in told) == 1
    want = reference.moba_attention(q, q, q, cu_seqlens, 2, block_size=16) * 2
    torch.testing.assert_close(out, want)


def test_coverage_follows_the_same_rule(monkeypatch):
    report_gpu(monkeypatch, (7, 0))
    move_to_gpu(monkeypatch)
    q = torch.randn(40, 2, 32)
    cu_seqlens = torch.tensor([0, 40], dtype=torch.int32)
    with pytest.warns(UserWarning, match=r"compute capability 7\.0"):
        mass = coverage.moba_coverage(q, q, cu_seqlens, block_size=16)
    assert torch.equal(mass, coverage.moba_coverage(q, q, cu_seqlens, block_size=16, backend="reference"))


@pytest.mark.parametrize(
    ("capabilities", "available", "reason"),
    [
        ([], False, "torch .* has no CUDA"),
        ([(8, 0)], True, r"CUDA kernels on GPU 8 \(bfloat16 and float16\)"),
        ([(7, 5)], False, r"GPU 7 has compute capability 7\.5"),
        ([(9, 0), (7, 5)], True, "CUDA kernels on GPU 9"),
    ],
)
def test_the_list_for_sb_doctor(capabilities, available, reason, monkeypatch):
    report_gpu(monkeypatch, *capabilities)
    list_gpus(monkeypatch, len(capabilities))
    cuda = backends()[1]
    assert cuda.available == available
    assert re.search(reason, cuda.reason)
    if available:
        assert "scaled_dot_product_attention" in cuda.detail["dense"] or "kernels" in cuda.detail["dense"]
        assert "reference" in cuda.detail["float32"]
        assert ("cuda:1: GPU 7 has compute" in cuda.detail.get("refused", "")) == (len(capabilities) == 2)


def test_names_of_the_backends_are_those_of_the_list():
    assert [backend.name for backend in backends()] == list(backends_module.BACKENDS)
    for name, device in itertools.product(("gpu", ""), ("cpu", "cuda")):
        with pytest.raises(ValueError, match="no backend has that name"):
            functional.choose_backend(name, device)
