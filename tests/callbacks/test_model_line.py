from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from attention.fake_gpu import report_gpu
from packed_run import PackedModule, loader, packed, sparse, trainer

from sb_lightning.attention import backends
from sb_lightning.callbacks import ModelLine
from sb_lightning.callbacks.model_line import describe_model


class Sized(PackedModule):
    def __init__(self, settings):
        super().__init__(sparse_settings=settings)
        self.model = torch.nn.Linear(40, 50, bias=False)
        self.model.weight.requires_grad = False


def line(tmp_path, caplog, module):
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, ModelLine()).fit(module, loader(packed([3])))
    (found,) = [record.message for record in caplog.records if record.message.startswith("model: ")]
    return found


def test_the_backend_that_runs_is_named(tmp_path, caplog):
    settings = sparse(64, 8)
    settings.backend = "reference"
    assert line(tmp_path, caplog, Sized(settings)) == (
        "model: Linear, 2 K parameters, 1 trainable, attention: moba reference, block 64, budget 8"
    )


def test_the_best_backend_is_named_with_its_instructions(tmp_path, caplog):
    isa = next(backend.detail["isa"] for backend in backends() if backend.name == "cpu")
    found = line(tmp_path, caplog, Sized(sparse(16, 3)))
    assert found.endswith(f"attention: moba cpu/{isa}, block 16, budget 3")


def test_dense_attention_and_modules_without(tmp_path, caplog):
    assert line(tmp_path, caplog, Sized(None)).endswith("1 trainable, attention: dense")
    caplog.clear()
    module = PackedModule()
    del module.sparse_settings
    assert line(tmp_path, caplog, module) == "model: PackedModule, 1 parameters, 1 trainable"


@pytest.mark.parametrize(
    ("precision", "dtype", "name"),
    [
        ("32-true", torch.float32, "reference"),
        ("32-true", torch.bfloat16, "cuda"),
        ("bf16-mixed", torch.float32, "cuda"),
        ("16-true", torch.float32, "cuda"),
        ("64-true", torch.float64, "reference"),
    ],
)
@pytest.mark.filterwarnings("ignore:(?s).*attention runs on backend 'reference'")
def test_a_gpu_runs_what_the_precision_allows(precision, dtype, name, monkeypatch):
    report_gpu(monkeypatch, (9, 0))
    strategy = SimpleNamespace(root_device=torch.device("cuda:0"))
    module = Sized(sparse(16, 3)).to(dtype)
    found = describe_model(SimpleNamespace(strategy=strategy, precision=precision), module)
    assert found.endswith(f"attention: moba {name}, block 16, budget 3")
