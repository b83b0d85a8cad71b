from __future__ import annotations

import csv
import io
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from packed_run import PackedModule, loader, packed, trainer
from rich.console import Console

from sb_lightning.callbacks import LastCheckpoint, RunSummary
from sb_lightning.callbacks.checkpoint import _rank_zero_saves_alone

BATCHES = [packed([4])] * 12


@pytest.fixture(autouse=True)
def _handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted(PackedModule):
    """Presses Ctrl-C in the training step (or validation batch) of the given number, as often as told."""

    def __init__(self, at, times=1, validation=False):
        super().__init__()
        self.at, self.times, self.validation, self.seen = at, times, validation, 0

    def press(self):
        if self.seen == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        self.seen += 1

    def training_step(self, batch, batch_idx):
        if not self.validation:
            self.press()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.validation:
            self.press()
        return super().validation_step(batch, batch_idx)


def fit(folder, module, **settings):
    callback = LastCheckpoint(dirpath=str(folder), every_n_windows=settings.pop("every_n_windows", None))
    settings = {"accumulate_grad_batches": 2, "enable_checkpointing": True, **settings}
    run = trainer(folder, callback, **settings)
    run.fit(module, loader(*BATCHES), loader({}, {}))
    return run


def steps(folder):
    return torch.load(folder / "last.ckpt", weights_only=True)["global_step"]


@pytest.mark.parametrize("at", [4, 5])
def test_ctrl_c_finishes_the_window_and_saves_it(tmp_path, at, capfd):
    module = Interrupted(at)
    with pytest.raises(SystemExit) as stop:
        fit(tmp_path, module)
    assert stop.value.code == 1
    assert module.seen == 6
    assert steps(tmp_path) == 3
    assert "finishing this window" in capfd.readouterr().err


def test_ctrl_c_logs_the_window_it_finished_and_the_summary_names_the_file(tmp_path):
    report = RunSummary()
    report.console = Console(file=io.StringIO())
    settings = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    logger = CSVLogger(tmp_path, name="", version="run")
    run = trainer(tmp_path, LastCheckpoint(), report, logger=logger, log_every_n_steps=50, **settings)
    with pytest.raises(SystemExit):
        run.fit(Interrupted(4), loader(*BATCHES))
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["train/loss"])) for row in rows] == [(2, 8.0)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["windows"]) == ("interrupted", 3)
    assert summary["files"]["checkpoints"] == [str(tmp_path / "run" / "checkpoints" / "last.ckpt")]


def test_ctrl_c_while_the_file_is_written_does_not_stop_that(tmp_path, monkeypatch):
    original = LastCheckpoint._write_alone

    def write(self, run):
        os.kill(os.getpid(), signal.SIGINT)
        original(self, run)

    monkeypatch.setattr(LastCheckpoint, "_write_alone", write)
    with pytest.raises(SystemExit):
        fit(tmp_path, Interrupted(4))
    assert steps(tmp_path) == 3


def test_a_resumed_run_goes_on_with_the_next_window(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path, Interrupted(4))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    losses = []

    class Watch(PackedModule):
        def on_before_optimizer_step(self, optimizer):
            losses.append(self.trainer.fit_loop.epoch_loop.batch_idx)

    run = trainer(tmp_path, accumulate_grad_batches=2)
    run.fit(Watch(), loader(*BATCHES), ckpt_path=tmp_path / "last.ckpt")
    assert losses == [7, 9, 11]
    assert run.global_step == 6


def test_more_steps_finish_the_epoch_that_max_steps_cut(tmp_path):
    fit(tmp_path, PackedModule(), max_steps=4)
    module, run = PackedModule(), trainer(tmp_path, accumulate_grad_batches=2, max_steps=6)
    run.fit(module, loader(*BATCHES), ckpt_path=tmp_path / "last.ckpt")
    assert (module.runs, run.global_step, run.current_epoch) == (4, 6, 1)


def test_a_second_ctrl_c_stops_at_once_and_saves_nothing(tmp_path):
    module = Interrupted(4, times=2)
    with pytest.raises(SystemExit):
        fit(tmp_path, module)
    assert module.seen == 4
    assert not (tmp_path / "last.ckpt").exists()


def test_ctrl_c_during_validation(tmp_path):
    module = Interrupted(1, validation=True)
    with pytest.raises(SystemExit):
        fit(tmp_path, module, val_check_interval=4)
    assert module.seen == 2
    assert steps(tmp_path) == 2


def test_ctrl_c_during_the_sanity_check_is_left_to_lightning(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path, Interrupted(0, validation=True), num_sanity_val_steps=2)
    assert list(tmp_path.iterdir()) == []


def test_an_error_saves_nothing_because_the_window_is_open(tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, PackedModule(raises_at=4))
    assert not (tmp_path / "last.ckpt").exists()


def test_the_signal_is_free_again_after_the_training(tmp_path):
    fit(tmp_path, PackedModule())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored(tmp_path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fit(tmp_path, Interrupted(4))
    assert steps(tmp_path) == 6
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_worker_of_a_data_loader_keeps_working(monkeypatch):
    callback = LastCheckpoint()
    callback._is_training, callback._pid = True, os.getpid() + 1
    callback._on_interrupt(signal.SIGINT, None)
    assert not callback._is_requested


@pytest.mark.parametrize(
    ("settings", "saved_at"),
    [
        ({}, [6]),
        ({"max_steps": 4, "max_epochs": -1}, [4]),
        ({"val_check_interval": 4, "max_steps": 5}, [2, 4, 5]),
        # Validation in the middle of a window writes nothing.
        ({"val_check_interval": 5, "limit_train_batches": 11}, [5, 6]),
        ({"max_epochs": 2, "limit_train_batches": 3}, [2, 4]),
        ({"every_n_windows": 2, "limit_val_batches": 0, "max_steps": 5}, [2, 4, 5]),
        ({"fast_dev_run": True}, []),
    ],
    ids=str,
)
def test_it_is_written_between_windows_only(tmp_path, settings, saved_at, monkeypatch):
    saved = []
    original = LastCheckpoint._save_checkpoint

    def save(self, run, path):
        assert path == os.path.realpath(tmp_path / "last.ckpt")
        saved.append(run.global_step)
        original(self, run, path)

    monkeypatch.setattr(LastCheckpoint, "_save_checkpoint", save)
    fit(tmp_path, PackedModule(), **settings)
    assert saved == saved_at
    assert [path.name for path in tmp_path.iterdir()] == (["last.ckpt"] if saved_at else [])


def test_windows_are_counted_from_one():
    with pytest.raises(ValueError, match="every_n_windows is 0"):
        LastCheckpoint(every_n_windows=0)


def test_rank_zero_saves_alone_only_where_no_other_rank_is_needed():
    def run(strategy, optimizer=None):
        return SimpleNamespace(strategy=strategy, optimizers=[optimizer] if optimizer else [])

    assert _rank_zero_saves_alone(run(DDPStrategy()))
    assert not _rank_zero_saves_alone(run(ModelParallelStrategy()))
    assert not _rank_zero_saves_alone(
        run(DDPStrategy(), SimpleNamespace(consolidate_state_dict=lambda: None))
    )
