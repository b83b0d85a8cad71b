"""A small Lightning project with packed batches, and a clock that the model moves."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class PackedModule(LightningModule):
    """Loss 10 - w in window w, validation loss 20 - w; a step takes `step_s`, a validation batch 50 s."""

    def __init__(self, clock=None, step_s=2.0, logs=True, sparse_settings=None, raises_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.clock, self.step_s, self.logs, self.raises_at = clock, step_s, logs, raises_at
        self.sparse_settings = sparse_settings
        self.runs = 0

    def training_step(self, batch, batch_idx):
        if self.clock is not None:
            self.clock.now += self.step_s
        self.runs += 1
        if self.runs == self.raises_at:
            raise RuntimeError("broken on purpose")
        return self.weight.sum() * 0 + 10.0 - self.global_step

    def on_before_optimizer_step(self, optimizer):
        if self.logs:
            self.log("train/loss", 10.0 - self.global_step)

    def validation_step(self, batch, batch_idx):
        if self.clock is not None:
            self.clock.now += 50.0
        if self.logs:
            self.log("val/loss", 20.0 - self.global_step, batch_size=1)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def packed(lengths, **fields):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"input_ids": torch.zeros(1, sum(lengths), dtype=torch.long), "cu_seqlens": bounds, **fields}


def loader(*batches):
    return DataLoader(list(batches), batch_size=None)


def sparse(block_size, budget):
    return SimpleNamespace(block_size=block_size, budget=budget)


def trainer(folder, *callbacks, **settings):
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        **{
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": any(hasattr(callback, "disable") for callback in callbacks),
            "num_sanity_val_steps": 0,
            **settings,
        },
    )
