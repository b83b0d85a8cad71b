"""A run of a tiny model over a tiny corpus that records what was trained on, and saves at every turn."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from sb_lightning.data import TextDataModule


class TinyModule(LightningModule):
    """An embedding and a linear layer; `log_of_batches` has one entry per training micro-batch."""

    def __init__(self, estimate: bool = False, fail_at: tuple[int, int] | None = None):
        super().__init__()
        self.estimate = estimate
        self.fail_at = fail_at
        self.embedding = torch.nn.Embedding(258, 4)
        self.head = torch.nn.Linear(4, 258)
        self.log_of_batches: list[tuple] = []
        self.events: list[str] = []
        self.batches: list[dict] = []

    def loss(self, batch):
        logits = self.head(self.embedding(batch["input_ids"]))[0, :-1]
        return torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="sum")

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        if self.fail_at == (trainer.current_epoch, batch_idx):
            raise RuntimeError("interrupted")
        loss = self.loss(batch)
        self.batches.append(batch)
        self.log_of_batches.append(
            (
                trainer.current_epoch,
                batch_idx,
                batch["window"],
                batch["micro_batch"],
                tuple(batch["sequence_ids"].tolist()),
                trainer.global_step,
                trainer.fit_loop.epoch_loop._batches_that_stepped,
                loss.item(),
            )
        )
        return loss / batch["window_target_tokens"]

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.events.append(f"val {self.trainer.global_step} {batch_idx}")
            self.batches.append(batch)

    def test_step(self, batch, batch_idx):
        self.batches.append(batch)

    def predict_step(self, batch, batch_idx):
        return batch["sequence_ids"].tolist()

    def on_train_epoch_end(self):
        self.events.append(f"end {self.trainer.current_epoch}")

    def configure_optimizers(self):
        if self.estimate:
            self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.05)


class SaveAlways(Callback):
    """Saves after each micro-batch (b-EPOCH-BATCH), epoch (e-), validation (v-), the end, an exception."""

    def __init__(self, folder: Path):
        self.folder = folder

    def _save(self, trainer, name):
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_train_epoch_start(self, trainer, pl_module):
        self._save(trainer, f"s-{trainer.current_epoch}")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._save(trainer, f"b-{trainer.current_epoch}-{batch_idx}")

    def on_train_epoch_end(self, trainer, pl_module):
        self._save(trainer, f"e-{trainer.current_epoch}")

    def on_validation_end(self, trainer, pl_module):
        self._save(trainer, f"v-{trainer.current_epoch}")

    def on_train_end(self, trainer, pl_module):
        self._save(trainer, "end")

    def on_exception(self, trainer, pl_module, exception):
        self._save(trainer, "x")


def write_documents(folder: Path, count: int = 23) -> Path:
    """Text files of 2 to some 60 letters, in two folders."""
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        path = folder / ("even" if i % 2 == 0 else "odd") / f"{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        length = int(torch.randint(2, 60, (1,), generator=generator))
        path.write_text("".join(chr(97 + (i * 7 + j * j) % 26) for j in range(length)))
    return folder


def data_module(folder: Path, **settings) -> TextDataModule:
    defaults = {
        "source": str(folder / "docs"),
        "cache_dir": str(folder / "cache"),
        "validation_share": 0.2,
        "seed": 5,
    }
    return TextDataModule(**{**defaults, **settings})


def make_trainer(folder: Path, save: bool = False, callbacks=(), **settings) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "accumulate_grad_batches": 3,
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": [*callbacks, *([SaveAlways(folder)] if save else [])],
    }
    return Trainer(**{**defaults, **settings})


def fit(
    folder: Path, *, resume=None, save=False, estimate=False, fail_at=None, data=None, **settings
) -> TinyModule:
    """Run `Trainer.fit`; returns the module with its records. Data of 23 documents unless `data` is given."""
    torch.manual_seed(0)
    module = TinyModule(estimate, fail_at)
    data = {"num_workers": 0, **(data or {})}
    trainer = make_trainer(folder, save, **settings)
    threads = torch.get_num_threads()
    # A second thread costs more than it gives on so small a model.
    torch.set_num_threads(1)
    try:
        trainer.fit(module, data_module(folder, **data), ckpt_path=resume and folder / f"{resume}.ckpt")
    except RuntimeError as error:
        if "interrupted" not in str(error):
            raise
    finally:
        torch.set_num_threads(threads)
    return module
