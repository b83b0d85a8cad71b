"""Ranks meet before the first micro-batch of a window only, and the Trainer is left as it was found."""

from __future__ import annotations

import signal

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from sb_lightning.callbacks import ImbalanceMonitor, LastCheckpoint, WindowMeetings

BROADCAST = "_broadcast_sigterm_tensor"


class Linear(LightningModule):
    """Notes each micro-batch, and each broadcast of the loop that gets through to torch."""

    def __init__(self, sigterm_at=None, sigterm_on=0):
        super().__init__()
        self.sigterm_on = sigterm_on
        self.layer = torch.nn.Linear(2, 1)
        self.events: list = []
        self.sigterm_at = sigterm_at

    def training_step(self, batch, batch_idx):
        self.events.append(batch_idx)
        if batch_idx == self.sigterm_at and self.global_rank == self.sigterm_on:
            signal.raise_signal(signal.SIGTERM)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(*, accumulate=3, batches=7, callbacks=(), sigterm_at=None, sigterm_on=0, epochs=2):
    module = Linear(sigterm_at, sigterm_on)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=accumulate,
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(callback, LastCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    real = {name: getattr(torch.distributed, name) for name in ("broadcast", "all_reduce")}

    def counted(name):
        def call(tensor, *args, **kwargs):
            if tensor.numel() == 1 and tensor.dtype == torch.int64:
                module.events.append("meets")
            return real[name](tensor, *args, **kwargs)

        return call

    for name in real:
        setattr(torch.distributed, name, counted(name))
    stopped = None
    try:
        trainer.fit(module, DataLoader(torch.ones(batches, 2), batch_size=1))
    except BaseException as error:
        stopped = type(error).__name__
    finally:
        for name, function in real.items():
            setattr(torch.distributed, name, function)
    first = next((i for i, event in enumerate(module.events) if event == 0), 0)
    return {
        "events": module.events[max(first - 1, 0) :],
        "stopped": stopped,
        "is_left_as_found": BROADCAST not in vars(trainer.fit_loop.epoch_loop),
        "steps": trainer.global_step,
    }


EPOCH = ["meets", 0, 1, 2, "meets", 3, 4, 5, "meets", 6]


def two_runs():
    return fit(callbacks=[WindowMeetings()]), fit(callbacks=[WindowMeetings(), ImbalanceMonitor(spans=False)])


def test_once_per_window(gloo_pool):
    for alone, measured in gloo_pool.run(two_runs):
        assert alone["events"] == 2 * EPOCH
        assert alone["is_left_as_found"]
        assert alone["steps"] == 6
        # The monitor wraps the same method, and both are gone in the end.
        assert [e for e in measured["events"] if e != "meets"] == [e for e in 2 * EPOCH if e != "meets"]
        assert measured["is_left_as_found"]


def without():
    return fit()


def test_what_it_leaves_out(gloo_pool):
    """Lightning still meets before every micro-batch by itself; if not, this callback can go."""
    for run in gloo_pool.run(without):
        assert run["events"] == 2 * [event for i in range(7) for event in ("meets", i)]


def ended(rank, folder):
    callbacks = [LastCheckpoint(dirpath=folder), WindowMeetings()]
    return fit(callbacks=callbacks, sigterm_at=4, sigterm_on=rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_ends_all_at_the_start_of_a_window(gloo_pool, rank, tmp_path):
    runs = gloo_pool.run(ended, rank, tmp_path)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    for run in runs:
        assert run["stopped"] in ("SIGTERMException", "SystemExit")
        assert run["events"][: len(EPOCH) - 1] == EPOCH[:-1]
        assert 6 not in run["events"]
        assert run["steps"] == 2
        assert run["is_left_as_found"]


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_nothing_happens_but_in_fit(stage):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    callback = WindowMeetings()
    callback.setup(trainer, Linear(), stage)
    assert BROADCAST not in vars(trainer.fit_loop.epoch_loop)
