from __future__ import annotations

import io
import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from packed_run import Clock, PackedModule, loader, packed, sparse, trainer
from rich.console import Console

from sb_lightning.attention.pairs import attended_pairs, causal_pairs
from sb_lightning.callbacks import RunSummary
from sb_lightning.callbacks.run_files import log_place

WINDOWS = [packed([5]), packed([9, 2]), packed([20]), packed([1, 1, 1]), packed([33])]


def summary(clock=None):
    callback = RunSummary()
    if clock is not None:
        callback.clock = clock
    callback.console = Console(width=100, record=True, file=io.StringIO())
    return callback


def shown(callback):
    return callback.console.export_text()


def test_numbers_of_a_run_by_hand(tmp_path):
    clock = Clock()
    callback = summary(clock)
    # Five micro-batches by two: windows [5 + 11], [20 + 3], [33]; a validation of 2 x 50 s after each window.
    trainer(tmp_path, callback, accumulate_grad_batches=2, val_check_interval=2).fit(
        PackedModule(clock, sparse_settings=sparse(4, 2)), loader(*WINDOWS), loader({}, {})
    )
    found = callback.summary
    assert found["windows"] == found["global_step"] == 3
    assert found["loss"] == {"first": 10.0, "last": 8.0}
    assert found["validation_loss"] == {"first": 19.0, "last": 18.0}
    assert (found["tokens"], found["sequences"]) == (72, 8)
    # Without the first window: (20 + 3 + 33) tokens in three steps of 2 s.
    assert found["training_s"] == 6.0
    assert found["tokens_per_s"] == 56 / 6
    assert found["wall_s"] == 5 * 2 + 2 * 2 * 50
    pairs = attended_pairs([5, 9, 2, 20, 1, 1, 1, 33], 2, 4)
    assert found["ranks"] == [
        {"rank": 0, "attended_pairs": pairs, "share": 1.0, "tokens": 72, "sequences": 8}
    ]
    assert found["sparse"] == {"block_size": 4, "budget": 2}
    assert json.loads((tmp_path / "summary.json").read_text()) == found
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    text = shown(callback)
    for part in (
        "10.0000 -> 8.0000",
        "19.0000 -> 18.0000",
        "72 in 8",
        "100.0%",
        "2 blocks of 4 keys",
        "0:03:30",
    ):
        assert part in text, part


def test_dense_work_without_settings(tmp_path):
    callback = summary()
    trainer(tmp_path, callback, max_steps=2).fit(PackedModule(), loader(*WINDOWS))
    assert callback.summary["ranks"][0]["attended_pairs"] == causal_pairs([5, 9, 2])
    assert callback.summary["windows"] == 2
    assert callback.summary["sparse"] is None
    assert "dense" in shown(callback)


def test_a_project_of_another_kind_gets_what_can_be_known(tmp_path):
    callback = summary()
    trainer(tmp_path, callback, limit_train_batches=3, accumulate_grad_batches=2).fit(
        PackedModule(logs=False), loader(*map(torch.tensor, range(5)))
    )
    found = callback.summary
    # The loss that training_step returned, not the one that Lightning divided by two.
    assert found["loss"] == {"first": 10.0, "last": 9.0}
    assert found["validation_loss"] == {"first": None, "last": None}
    assert (found["windows"], found["tokens"], found["tokens_per_s"]) == (2, 0, None)
    assert "tokens" not in shown(callback)


def test_first_losses_survive_a_resume(tmp_path):
    path = tmp_path / "a.ckpt"
    first = summary()
    run = trainer(tmp_path, first, max_epochs=1, enable_checkpointing=True)
    run.fit(PackedModule(), loader(*WINDOWS), loader({}))
    run.save_checkpoint(path)
    torch.load(path, weights_only=True)
    again = summary()
    trainer(tmp_path, again, max_epochs=2).fit(PackedModule(), loader(*WINDOWS), loader({}), ckpt_path=path)
    assert again.summary["loss"] == {"first": 10.0, "last": 1.0}
    assert again.summary["validation_loss"] == {"first": 15.0, "last": 10.0}
    assert (again.summary["windows"], again.summary["global_step"]) == (5, 10)
    assert (first.summary["resumed_at"], again.summary["resumed_at"]) == (None, 5)
    text = shown(again)
    for name in ("windows", "tokens", "wall time", "work of rank 0"):
        assert f"{name} (this session)" in text
    assert "5 (windows 6 to 10)" in text
    assert "this session" not in shown(first)


def test_a_finished_run_says_that_nothing_is_left_to_do(tmp_path):
    run = trainer(tmp_path, max_steps=2, max_epochs=-1, enable_checkpointing=True)
    run.fit(PackedModule(), loader(*WINDOWS))
    run.save_checkpoint(tmp_path / "a.ckpt")
    for limits, key in (({"max_steps": 2, "max_epochs": -1}, "max_steps"), ({"max_epochs": 1}, "max_epochs")):
        again = summary()
        module = PackedModule()
        path = tmp_path / "a.ckpt"
        if key == "max_epochs":
            whole = trainer(tmp_path, max_epochs=1, enable_checkpointing=True)
            whole.fit(PackedModule(), loader(*WINDOWS))
            whole.save_checkpoint(path)
        with pytest.warns(
            UserWarning, match=f"nothing was left to do after window .* To fix it, raise trainer.{key}"
        ):
            trainer(tmp_path, again, **limits).fit(module, loader(*WINDOWS), ckpt_path=path)
        assert module.runs == 0
        assert again.summary is None


class Interrupting(PackedModule):
    def on_train_batch_start(self, batch, batch_idx):
        if self.runs == 3:
            raise KeyboardInterrupt


def test_an_interrupted_run_has_a_summary_that_says_so(tmp_path):
    callback = summary()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer(tmp_path, callback).fit(Interrupting(), loader(*WINDOWS))
    finally:
        signal.signal(signal.SIGINT, handler)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["status"] == "interrupted"
    assert (found["windows"], found["tokens"], found["sequences"]) == (3, 36, 4)
    assert found["ranks"][0]["share"] == 1.0
    text = shown(callback)
    assert "Run summary (interrupted)" in text
    assert "10.0000 -> 8.0000" in text


def test_without_the_other_ranks_only_the_work_of_rank_zero_is_told(tmp_path):
    callback = summary()
    run = trainer(tmp_path, callback)
    run.fit(PackedModule(), loader(*WINDOWS))
    assert callback.summary["status"] == "finished"
    callback._is_open = True
    two = SimpleNamespace(
        is_global_zero=True, world_size=2, global_step=5, strategy=run.strategy, loggers=[],
        default_root_dir=tmp_path, callbacks=[], checkpoint_callbacks=[], fast_dev_run=False,
    )  # fmt: skip
    callback.on_exception(two, PackedModule(), KeyboardInterrupt())
    found = callback.summary
    assert (found["tokens"], found["sequences"], found["tokens_per_s"]) == (None, None, None)
    assert found["ranks"] == [
        {"rank": 0, "attended_pairs": causal_pairs([5, 9, 2, 20, 1, 1, 1, 33]), "share": None,
         "tokens": 72, "sequences": 8}
    ]  # fmt: skip
    callback.on_exception(two, PackedModule(), KeyboardInterrupt())
    assert shown(callback).count("(interrupted)") == 1


class ServiceLogger(CSVLogger):
    """Keeps a run where only its experiment knows, as WandbLogger does."""

    log_dir = None
    experiment = SimpleNamespace(url=None, dir="./service/run-3/files")
    log_metrics = log_hyperparams = save = finalize = lambda self, *args, **kwargs: None


def test_every_logger_is_named_with_its_own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = summary()
    loggers = [ServiceLogger("./a", name="", version="one"), CSVLogger("./b", name="c")]
    trainer("./", callback, logger=loggers, enable_checkpointing=True).fit(PackedModule(), loader(*WINDOWS))
    files = callback.summary["files"]
    assert files["logs"] == ["service/run-3/files", "b/c/version_0"]
    assert "./" not in json.dumps(files)
    text = shown(callback)
    assert "service/run-3/files" in text
    assert "b/c/version_0" in text
    monkeypatch.setattr(ServiceLogger.experiment, "url", "https://example.org/run-3")
    assert log_place(loggers[0]) == "https://example.org/run-3"


def test_files_lie_beside_those_of_the_logger(tmp_path):
    callback = summary()
    trainer(tmp_path, callback, logger=CSVLogger(tmp_path, name="mine"), enable_checkpointing=True).fit(
        PackedModule(), loader(*WINDOWS)
    )
    files = callback.summary["files"]
    folder = tmp_path / "mine" / "version_0"
    assert files["logs"] == [str(folder)]
    assert files["summary"] == str(folder / "summary.json")
    assert files["config"] is None
    assert files["checkpoints"] == [str(folder / "checkpoints" / "epoch=0-step=5.ckpt")]
    assert (folder / "summary.json").exists()


def test_a_loss_that_is_not_a_number_keeps_the_file_valid(tmp_path):
    class Nan(PackedModule):
        def on_before_optimizer_step(self, optimizer):
            self.log("train/loss", math.nan)

    callback = summary()
    trainer(tmp_path, callback).fit(Nan(), loader(*WINDOWS))
    assert json.loads((tmp_path / "summary.json").read_text())["loss"] == {"first": None, "last": None}


def test_fast_dev_run_leaves_no_file(tmp_path):
    callback = summary()
    trainer(tmp_path, callback, fast_dev_run=True).fit(PackedModule(), loader(*WINDOWS))
    assert callback.summary["windows"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_fails_prints_no_summary(tmp_path):
    callback = summary()
    run = trainer(tmp_path, callback)
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(PackedModule(raises_at=3), loader(*WINDOWS))
    assert callback.summary is None
    assert shown(callback) == ""


def run_two_ranks(folder):
    """Rank 0 runs sequences of 8 tokens, rank 1 of 24."""
    import torch.distributed as dist

    from sb_lightning.callbacks import TrainingProgress

    rank = dist.get_rank()
    callback, bar = summary(), TrainingProgress()
    bar.console = callback.console
    shares = []

    class Watch(PackedModule):
        def on_train_batch_end(self, *args):
            if self.global_step and (not shares or shares[-1][0] != self.global_step):
                shares.append((self.global_step, bar._recent[-1][0] if bar._recent else None))

    run = trainer(
        folder,
        callback,
        bar,
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
    )
    run.fit(Watch(), loader(*[packed([8 + 16 * rank])] * 4))
    return callback.summary, shares, shown(callback)


def test_two_ranks_meet(gloo_pool, tmp_path):
    (zero, shares_zero, text), (one, shares_one, silence) = gloo_pool.run(run_two_ranks, str(tmp_path))
    assert one is None
    assert silence == ""
    assert [row["tokens"] for row in zero["ranks"]] == [32, 96]
    pairs = [causal_pairs([8] * 4), causal_pairs([24] * 4)]
    assert [row["attended_pairs"] for row in zero["ranks"]] == pairs
    assert zero["ranks"][1]["share"] == pairs[1] / sum(pairs)
    assert (zero["tokens"], zero["sequences"], zero["windows"]) == (128, 8, 2)
    # Tokens of the bar: both ranks, of the window after the first.
    assert shares_zero == shares_one == [(1, None), (2, 64)]
    assert "work of rank 1" in text
    assert "window 2/2" in text
