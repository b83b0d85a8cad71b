"""A Lightning project of its own with the balanced sampler and loader, which records what it trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from tiny_run import SaveAlways

from sb_lightning.balance import BalancedDataLoader, SparsityAwareBatchSampler

LENGTHS = [3 + (i * 37) % 61 for i in range(18)]
"""18 sequences: 6 windows of 3 micro-batches on one rank."""


class Documents(torch.utils.data.Dataset):
    """Items that know their number; nothing here has heard of cells."""

    def __init__(self, lengths=None):
        self.lengths = LENGTHS if lengths is None else lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return index, float(self.lengths[index])


def collate(items):
    ids, lengths = zip(*items, strict=True)
    return torch.tensor(ids), torch.tensor(lengths)


def make_sampler(lengths=None, **options):
    defaults = {"accumulate": 3, "policy": "tokens", "seed": 5}
    return SparsityAwareBatchSampler(LENGTHS if lengths is None else lengths, **{**defaults, **options})


def make_loader(sampler=None, workers=0, **options):
    sampler = make_sampler(**options) if sampler is None else sampler
    data = Documents(sampler.lengths.tolist())
    return BalancedDataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=workers)


class Recording:
    """A linear model of one weight whose loss depends on the sequences and on all steps before."""

    def make(self, loader: Any = None, estimate: bool = False, fail_at: Any = None, hook: Any = None) -> None:
        self.loader, self.estimate, self.fail_at, self.hook = loader, estimate, fail_at, hook
        self.weight = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
        self.records: list[tuple] = []

    def train_dataloader(self):
        return self.loader() if callable(self.loader) else self.loader

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        if self.hook is not None:
            self.hook(self, batch_idx)
        if self.fail_at == (trainer.current_epoch, batch_idx):
            raise RuntimeError("interrupted")
        ids, lengths = batch
        loss = ((self.weight[0] + self.weight[1] * (lengths % 61) / 30 - ids / 10) ** 2).sum()
        self.records.append(
            (
                trainer.current_epoch,
                batch_idx,
                tuple(ids.tolist()),
                trainer.global_step,
                trainer.fit_loop.epoch_loop._batches_that_stepped,
                loss.item(),
            )
        )
        return loss

    def validation_step(self, batch, batch_idx):
        self.records.append(("val", tuple(batch[0].tolist())))

    def predict_step(self, batch, batch_idx):
        return batch[0].tolist()

    def configure_optimizers(self):
        if self.estimate:
            self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Project(Recording, LightningModule):
    """The model for `lightning.pytorch`."""

    def __init__(self, *args, **options):
        super().__init__()
        self.make(*args, **options)


def make_trainer(folder: Path, *callbacks, save=False, trainer=Trainer, **settings):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "accumulate_grad_batches": 3,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "callbacks": [*callbacks, *([SaveAlways(folder)] if save else [])],
    }
    return trainer(**{**defaults, **settings})


def fit(
    folder,
    *callbacks,
    resume=None,
    save=False,
    estimate=False,
    fail_at=None,
    hook=None,
    data=None,
    **settings,
):
    """Train; return the module with its records. `data` are options of `make_loader`, or a loader."""
    loader = data if callable(data) else lambda: make_loader(**(data or {}))
    module = Project(loader, estimate, fail_at, hook)
    trainer = make_trainer(folder, *callbacks, save=save, **settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer.fit(module, ckpt_path=resume and folder / f"{resume}.ckpt")
    except RuntimeError as error:
        if "interrupted" not in str(error):
            raise
    finally:
        torch.set_num_threads(threads)
    return module


def rest(records, checkpoint, accumulate=3):
    """What an unbroken run did from the window on that a checkpoint leaves unfinished."""
    kind, epoch, *batch = checkpoint.split("-")
    epoch = int(epoch)
    in_epoch = sum(record[0] == epoch for record in records)
    done = {"b": int(batch[0]) + 1 if batch else 0, "e": in_epoch, "s": 0}[kind]
    start = done if done == in_epoch else done - done % accumulate
    return [record for record in records if record[:2] >= (epoch, start)]
