"""A resumed run equals the unbroken one: the same sequences and the same losses, in every window."""

from __future__ import annotations

import pytest
import torch
from corpus import write_corpus
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import tiny_architecture

from sb_lightning.data import TextDataModule
from sb_lightning.training import AttentionSettings, CausalLMModule, OptimizerSettings

STEPS = 8


class Recorder(Callback):
    """What each window ran on this rank, and its loss."""

    def __init__(self):
        self.ids = []
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ids.append(
            (trainer.current_epoch, batch["window"], batch["micro_batch"], batch["sequence_ids"].tolist())
        )
        if trainer.fit_loop.epoch_loop._should_accumulate() is False:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))


def train(source, folder, *, workers, devices, resume=None, save_every=3):
    """Train 8 windows (an epoch has 5) and keep a checkpoint after the third and the sixth."""
    torch.manual_seed(0)
    recorder = Recorder()
    checkpoints = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=save_every, monitor=None
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        accumulate_grad_batches=4 // devices,
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[recorder, checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    module = CausalLMModule(
        architecture=tiny_architecture(vocab_size=300),
        attention=AttentionSettings(block_size=16, budget=2),
        optimizer=OptimizerSettings(learning_rate=1e-2),
    )
    data = TextDataModule(
        source=source,
        tokenizer="bytes",
        max_length=128,
        cache_dir=str(folder.parent / "cache"),
        validation_share=0.0,
        num_workers=workers,
        seed=3,
    )
    trainer.fit(module, data, ckpt_path=resume)
    return recorder.ids, recorder.losses


def both_runs(source, folder, workers, devices):
    """The unbroken run, and what two resumed runs did after their checkpoints."""
    ids, losses = train(source, folder / "whole", workers=workers, devices=devices)
    per_window = 4 // devices
    outcome = []
    # Step 3 lies in the first epoch, step 6 in the second, whose order differs.
    for step in (3, 6):
        again = train(
            source,
            folder / f"from{step}",
            workers=workers,
            devices=devices,
            resume=folder / "whole" / f"step={step}.ckpt",
            save_every=100,
        )
        first = step * per_window if step < 5 else ids_before(ids, step, per_window)
        outcome.append(((ids[first:], losses[step:]), again))
    return outcome


def ids_before(ids, step, per_window):
    """Micro-batches of the first epoch (its last window may be short) plus the windows of the second."""
    first_epoch = sum(epoch == 0 for epoch, *_ in ids)
    return first_epoch + (step - 5) * per_window


def check(outcome):
    for (want_ids, want_losses), (got_ids, got_losses) in outcome:
        assert got_ids == want_ids
        assert got_losses == want_losses
        assert got_losses


@pytest.mark.parametrize("workers", [0, 2])
def test_one_process(workers, tmp_path):
    source = write_corpus(tmp_path / "corpus.jsonl", documents=18)
    check(both_runs(source, tmp_path, workers, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks(workers, tmp_path, gloo_pool):
    source = write_corpus(tmp_path / "corpus.jsonl", documents=18)
    for outcome in gloo_pool.run(both_runs, source, tmp_path, workers, 2):
        check(outcome)
