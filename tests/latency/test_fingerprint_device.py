"""The backend in a fingerprint is that of the device and dtype that the model runs on."""

from __future__ import annotations

import pytest
import torch
from attention.fake_gpu import report_gpu

from sb_lightning.latency import ModelShape, current_fingerprint

SHAPE = ModelShape(
    layers=1, query_heads=2, kv_heads=1, head_dim=32, hidden_size=64, intermediate_size=64, vocab_size=8,
    block_size=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "dtype", "backend"),
    [
        ("cpu", "float32", "cpu"),
        ("cpu", torch.bfloat16, "cpu"),
        ("cuda", "bfloat16", "cuda"),
        ("cuda:0", torch.float16, "cuda"),
        ("cuda:0", "bfloat16-mixed", "cuda"),
        ("cuda:0", "float32", "reference"),
        ("cuda:1", "bfloat16", "reference"),
    ],
)
def test_the_backend_is_that_of_the_device(device, dtype, backend, monkeypatch):
    report_gpu(monkeypatch, (9, 0), (7, 5))
    found = current_fingerprint(SHAPE, device=device, dtype=dtype)
    assert (found.backend, found.device) == (backend, device.split(":")[0])
    assert ("+" in found.build) == (backend == "cpu")
    assert found.dtype == str(dtype).removeprefix("torch.")


def test_a_gpu_without_kernels_is_measured_with_the_reference(monkeypatch):
    report_gpu(monkeypatch, (9, 0), build=("no kernels", "build them"))
    assert current_fingerprint(SHAPE, device="cuda", dtype="bfloat16").backend == "reference"
    assert current_fingerprint(SHAPE, device="cuda", dtype="bfloat16", backend="dense").backend == "dense"
