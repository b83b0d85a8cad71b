"""`sb` with a tiny model: `python tiny_program.py fit ...`; also imported by tests."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from sb_lightning._messages import explain
from sb_lightning.cli.train import run


class TinyModule(LightningModule):
    """A model of three weights.

    Args:
        learning_rate: Step size of SGD.
        fail: Raise this kind of error in the first training step.
        interrupt_at: Press Ctrl-C (SIGINT to the whole process group) in this training step of rank zero.
        notes: Folder in which each rank writes down its number of threads.
    """

    def __init__(
        self,
        learning_rate: float = 0.1,
        fail: str | None = None,
        interrupt_at: int | None = None,
        notes: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weight = torch.nn.Parameter(torch.ones(3))
        if learning_rate <= 0:
            raise ValueError(
                explain(
                    f"learning_rate is {learning_rate}",
                    "SGD steps downhill",
                    "set model.learning_rate above 0",
                )
            )

    def training_step(self, batch, batch_idx):
        if self.hparams.fail == "ours":
            raise ValueError(explain("the batch is empty", "nothing can be learnt", "set data.size above 0"))
        if self.hparams.fail == "unexpected":
            raise ZeroDivisionError("unexpected")
        if self.hparams.interrupt_at == batch_idx and self.global_rank == 0:
            os.killpg(os.getpgid(0), signal.SIGINT)
        return (self.weight * batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", (self.weight * batch).sum(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return (self.weight * batch).sum()

    test_step = validation_step

    def on_train_start(self):
        if self.hparams.notes is not None:
            note = {
                "pid": os.getpid(),
                "threads": torch.get_num_threads(),
                "environment": [os.environ.get("OMP_NUM_THREADS"), os.environ.get("MKL_NUM_THREADS")],
            }
            Path(self.hparams.notes, f"rank{self.global_rank}.json").write_text(json.dumps(note))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


class TinyData(LightningDataModule):
    """Random rows.

    Args:
        size: Number of rows.
    """

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.rows = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], TinyModule, TinyData))
