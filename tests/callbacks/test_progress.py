from __future__ import annotations

import io

import pytest
import torch
from packed_run import Clock, PackedModule, loader, packed, trainer
from rich.console import Console

from sb_lightning.callbacks import TrainingProgress

BATCHES = [packed([100, 50])] * 12


def progress(is_terminal, clock=None, **settings):
    bar = TrainingProgress(**settings)
    bar.console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=100,
        color_system=None,
        legacy_windows=False,
        _environ={},
    )
    if clock is not None:
        bar.clock = clock
    return bar


def text_of(bar):
    return bar.console.file.getvalue()


class Frames(PackedModule):
    """Keeps what the bar shows after each micro-batch and during validation."""

    def __init__(self, bar, **settings):
        super().__init__(**settings)
        self.bar, self.frames, self.below = bar, [], []

    def snapshot(self):
        if self.bar._bar is None:
            return []
        console = Console(width=100, color_system=None, file=io.StringIO(), _environ={})
        console.print(self.bar._bar)
        return [line.strip() for line in console.file.getvalue().splitlines()]

    def on_train_batch_end(self, *args):
        self.frames.append(self.snapshot())

    def on_validation_batch_end(self, *args):
        self.below.append(self.snapshot())


def test_one_bar_counts_windows_over_all_epochs(tmp_path):
    clock = Clock()
    bar = progress(True, clock)
    module = Frames(bar, clock=clock, step_s=3.0)
    trainer(tmp_path, bar, accumulate_grad_batches=2, max_epochs=2, limit_train_batches=5).fit(
        module, loader(*BATCHES), loader({}, {})
    )
    # Windows of 2, 2 and 1 micro-batches, twice.
    assert all(len(frame) == 1 for frame in module.frames)
    assert "Training" in module.frames[0][0]
    assert "0/6" in module.frames[0][0]
    assert module.frames[1][0].endswith("1/6  loss 10.000")
    # 300 tokens in 6 s; then 5 windows in 6 s each.
    assert module.frames[3][0].endswith("2/6  loss 9.000  50 tok/s  ETA 0:00:24")
    # The third window is one micro-batch: 450 tokens in 9 s; three left, by the clock.
    assert module.frames[4][0].endswith("3/6  loss 8.000  50 tok/s  ETA 0:00:14")
    # Validation took 100 s: not in the throughput, but in the time left.
    assert module.frames[6][0].endswith("4/6  loss 7.000  val 17.000  50 tok/s  ETA 0:01:17")
    assert "6/6" in module.frames[-1][0]
    assert [line.split()[0] for line in module.below[0]] == ["Training", "Validation"]
    assert module.below[0][1].endswith("1/2")
    assert module.below[1][1].endswith("2/2")
    assert bar._bar is None


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    clock = Clock()
    bar = progress(False, clock, refresh_every=4)
    trainer(tmp_path, bar, max_steps=10, max_epochs=-1, val_check_interval=6).fit(
        PackedModule(clock), loader(*BATCHES), loader({})
    )
    assert text_of(bar).splitlines() == [
        "window 1/10  loss 10.000",
        "window 4/10  loss 7.000  75 tok/s  ETA 0:00:12",
        "validation after window 6  loss 14.000",
        "window 8/10  loss 3.000  val 14.000  75 tok/s  ETA 0:00:18",
        "window 10/10  loss 1.000  val 14.000  75 tok/s",
    ]


def test_an_unknown_end_and_batches_of_another_kind(tmp_path):
    class Stop(PackedModule):
        def on_train_batch_end(self, *args):
            self.trainer.should_stop = self.global_step == 3

    bar = progress(False, refresh_every=1)
    trainer(tmp_path, bar, max_epochs=-1).fit(Stop(logs=False), loader(*map(torch.tensor, range(5))))
    assert text_of(bar).splitlines() == [
        "window 1/?  loss 10.000",
        "window 2/?  loss 9.000",
        "window 3/?  loss 8.000",
    ]


def test_metrics_that_ask_for_the_bar_are_shown(tmp_path):
    class Metric(PackedModule):
        def training_step(self, batch, batch_idx):
            self.log("accuracy", 0.25, prog_bar=True)
            self.log("train/loss", 1.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    bar = progress(False, refresh_every=1)
    trainer(tmp_path, bar, max_steps=2).fit(Metric(logs=False), loader(*BATCHES))
    assert text_of(bar).splitlines()[-1].startswith("window 2/2  loss 1.000")
    assert text_of(bar).splitlines()[-1].count("accuracy 0.250") == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_gives_the_terminal_back(tmp_path, error):
    class Breaks(PackedModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise error("stop")
            return super().training_step(batch, batch_idx)

    bar = progress(True)
    run = trainer(tmp_path, bar)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        run.fit(Breaks(), loader(*BATCHES))
    assert bar._bar is None
    shows_cursor = "\x1b[?25h"
    assert text_of(bar).rstrip().endswith(shows_cursor)


def test_sanity_check_validate_test_and_predict(tmp_path):
    bar = progress(True)
    run = trainer(tmp_path, bar, num_sanity_val_steps=2, max_steps=1)
    run.fit(PackedModule(), loader(*BATCHES), loader({}, {}, {}))
    assert "Sanity check" in text_of(bar)
    for method, title, total in (
        ("validate", "Validation", 3),
        ("test", "Test", 3),
        ("predict", "Predict", 3),
    ):
        bar.console.file = io.StringIO()
        getattr(run, method)(PackedModule(), loader({}, {}, {}))
        assert title in text_of(bar)
        assert f"{total}/{total}" in text_of(bar)
        assert bar._bar is None


def test_lines_are_counted_from_one():
    with pytest.raises(ValueError, match="refresh_every is 0"):
        TrainingProgress(refresh_every=0)


def test_resume_starts_where_it_stopped(tmp_path):
    run = trainer(tmp_path, max_steps=5, enable_checkpointing=True)
    run.fit(PackedModule(), loader(*BATCHES))
    run.save_checkpoint(tmp_path / "a.ckpt")
    bar = progress(False, refresh_every=1)
    trainer(tmp_path, bar, max_steps=7, max_epochs=2).fit(
        PackedModule(), loader(*BATCHES), ckpt_path=tmp_path / "a.ckpt"
    )
    assert [line.split("  ")[0] for line in text_of(bar).splitlines()] == ["window 6/7", "window 7/7"]
