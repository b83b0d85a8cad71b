from __future__ import annotations

import logging

import torch
from packed_run import PackedModule, loader, packed, sparse, trainer

from sb_lightning.attention import backends
from sb_lightning.callbacks import ModelLine


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
