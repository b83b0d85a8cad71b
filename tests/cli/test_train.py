from __future__ import annotations

import json
import logging
import os
import warnings
from functools import wraps
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary
from tiny_program import TinyData, TinyModule

from sb_lightning.callbacks import LastCheckpoint, ModelLine, PredictionWriter, RunSummary, TrainingProgress
from sb_lightning.cli.train import run

QUIET = ["--trainer.accelerator=cpu"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SB_LAUNCHER_PID", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # Set and deleted: so that monkeypatch puts back whatever a run leaves there.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tiny(*arguments):
    return run(list(arguments), TinyModule, TinyData)


def printed_config(capsys, *arguments):
    assert tiny(*arguments, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)


def write(name, content):
    Path(name).write_text(yaml.safe_dump(content))
    return name


def trainers(monkeypatch):
    """Let no Trainer run: return the list of those that were built."""
    built = []
    for method in ("fit", "validate", "test", "predict"):
        # Wrapped: the command line reads the arguments off the method.
        @wraps(getattr(Trainer, method))
        def note(self, *args, **kwargs):
            built.append((self, kwargs))

        monkeypatch.setattr(Trainer, method, note)
    return built


def test_several_files_and_overrides(capsys):
    write("a.yaml", {"trainer": {"max_steps": 3, "devices": 1}, "model": {"learning_rate": 0.5}})
    write("b.yaml", {"trainer": {"max_steps": 4}, "data": {"size": 6}})
    found = printed_config(
        capsys, "fit", "--config", "a.yaml", "--config=b.yaml", "--data.size=10",
        "--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval=step",
        "--trainer.callbacks+=TrainingProgress", "--trainer.callbacks.refresh_every=3",
    )  # fmt: skip
    assert (found["trainer"]["max_steps"], found["trainer"]["devices"]) == (4, 1)
    assert (found["model"]["learning_rate"], found["data"]["size"]) == (0.5, 10)
    monitor, bar = found["trainer"]["callbacks"]
    assert (monitor["class_path"].split(".")[-1], monitor["init_args"]["logging_interval"]) == (
        "LearningRateMonitor",
        "step",
    )
    assert (bar["class_path"].split(".")[-1], bar["init_args"]["refresh_every"]) == ("TrainingProgress", 3)


def test_a_printed_config_is_a_config(capsys):
    first = printed_config(
        capsys, "fit", "--trainer.max_steps=3", "--model.learning_rate=0.25", "--threads_per_rank=1"
    )
    write("again.yaml", first)
    assert printed_config(capsys, "fit", "--config=again.yaml") == first


def test_defaults(capsys):
    found = printed_config(capsys, "fit")
    assert found["seed_everything"] == 0
    assert found["threads_per_rank"] is None
    assert found["trainer"]["use_distributed_sampler"] is False
    assert found["trainer"]["default_root_dir"] == "runs"
    assert "optimizer" not in found


def test_help_tells_the_meaning_of_each_key(capsys):
    assert tiny("fit", "--help") == 0
    text = capsys.readouterr().out
    assert "Step size of SGD." in text
    assert "CPU threads of each rank" in text


MISSPELT = [
    ("fit", "trainer.max_stepz", "trainer.max_steps"),
    ("fit", "model.learning_rat", "model.learning_rate"),
    ("fit", "data.siz", "data.size"),
    ("validate", "trainer.devcies", "trainer.devices"),
    ("test", "treads_per_rank", "threads_per_rank"),
    ("predict", "modl.learning_rate", "model.learning_rate"),
]


@pytest.mark.parametrize(("command", "key", "meant"), MISSPELT)
def test_a_misspelt_key_is_named(command, key, meant, capsys):
    *sections, name = key.split(".")
    file = write("bad.yaml", {sections[0]: {name: 1}} if sections else {name: 1})
    for arguments in ([f"--{key}=1"], ["--config", file]):
        assert tiny(command, *arguments) == 2
        error = capsys.readouterr().err
        assert key in error
        assert f"did you mean '{meant}'" in error
        assert len(error.splitlines()) < 8


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("fit", "--model.learning=1"),
        ("fit", "--conf=a.yaml"),
        ("fit", "--print_conf"),
        ("validate", "--trainer.max_st=1"),
        ("test", "--trainer.max_st=1"),
        ("predict", "--trainer.max_st=1"),
    ],
)
def test_abbreviations_are_refused(command, flag, capsys):
    assert tiny(command, flag) == 2
    assert flag.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "epochs", "noticed"),
    [
        ([], 1, True),
        (["--trainer.max_epochs=3"], 3, False),
        (["--trainer.max_steps=7"], None, False),
        (["--trainer.max_time=00:00:01:00"], None, False),
    ],
)
def test_there_are_no_thousand_epochs_by_accident(arguments, epochs, noticed, monkeypatch, caplog):
    built = trainers(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert tiny("fit", *QUIET, *arguments) == 0
    assert built[0][0].fit_loop.max_epochs == epochs
    assert sum("Training for one epoch" in record.message for record in caplog.records) == noticed


def kinds(trainer):
    return [type(callback) for callback in trainer.callbacks]


def test_our_callbacks_are_there_and_can_be_configured_or_left_out(monkeypatch):
    built = trainers(monkeypatch)
    assert tiny("fit", *QUIET) == 0
    assert {TrainingProgress, RunSummary, LastCheckpoint, ModelLine} <= set(kinds(built[-1][0]))
    assert ModelSummary not in kinds(built[-1][0])
    assert tiny("validate", *QUIET) == 0
    assert TrainingProgress in kinds(built[-1][0])
    assert {LastCheckpoint, ModelLine, PredictionWriter}.isdisjoint(kinds(built[-1][0]))
    assert tiny("predict", *QUIET) == 0
    assert PredictionWriter in kinds(built[-1][0])
    assert built[-1][1]["return_predictions"] is False
    assert tiny("predict", *QUIET, "--return_predictions=true") == 0
    assert built[-1][1]["return_predictions"] is True
    off = ["--trainer.enable_progress_bar=false", "--trainer.enable_checkpointing=false"]
    assert tiny("fit", *QUIET, *off) == 0
    assert {TrainingProgress, LastCheckpoint}.isdisjoint(kinds(built[-1][0]))
    own = ["--trainer.callbacks+=TrainingProgress", "--trainer.callbacks.refresh_every=7"]
    assert tiny("fit", *QUIET, *own, "--trainer.callbacks+=LastCheckpoint") == 0
    trainer = built[-1][0]
    assert trainer.progress_bar_callback.refresh_every == 7
    assert kinds(trainer).count(LastCheckpoint) == kinds(trainer).count(TrainingProgress) == 1


def test_the_logger_is_csv_unless_another_is_configured(monkeypatch):
    built = trainers(monkeypatch)
    assert tiny("fit", *QUIET, "--trainer.default_root_dir=elsewhere") == 0
    assert type(built[-1][0].logger).__name__ == "CSVLogger"
    assert built[-1][0].logger.log_dir == "elsewhere/version_0"
    assert tiny("fit", *QUIET, "--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=tb") == 0
    assert type(built[-1][0].logger).__name__ == "TensorBoardLogger"
    assert tiny("fit", *QUIET, "--trainer.logger=false") == 0
    assert built[-1][0].loggers == []


def test_a_whole_run_and_its_resume(capfd):
    assert tiny("fit", *QUIET, "--trainer.max_epochs=1", "--model.learning_rate=0.01") == 0
    folder = Path("runs/version_0")
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints", "config.yaml", "hparams.yaml", "metrics.csv", "summary.json",
    }  # fmt: skip
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["learning_rate"] == 0.01
    assert saved["trainer"]["logger"]["init_args"]["save_dir"] == "runs"
    assert json.loads((folder / "summary.json").read_text())["files"]["config"] == str(folder / "config.yaml")
    assert "Run summary" in capfd.readouterr().out
    # The saved file runs again; in `fit` the user's model wins over the checkpoint's.
    last = str(folder / "checkpoints" / "last.ckpt")
    resume = ["--config", str(folder / "config.yaml"), "--ckpt_path", last]
    assert tiny("fit", *resume, "--trainer.max_epochs=2", "--model.learning_rate=0.02") == 0
    again = Path("runs/version_1")
    assert torch.load(again / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 8
    assert yaml.safe_load((again / "config.yaml").read_text())["model"]["learning_rate"] == 0.02
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for command in ("validate", "test", "predict"):
            assert tiny(command, *QUIET, "--ckpt_path", last) == 0
    assert not [str(each.message) for each in caught if "callbacks used to create" in str(each.message)]
    # A second run into the same folder overwrites the file in place of failing.
    version = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs", "--trainer.logger.name=",
               "--trainer.logger.version=0"]  # fmt: skip
    assert tiny("fit", *QUIET, *version, "--model.learning_rate=0.03") == 0
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["learning_rate"] == 0.03


def test_fast_dev_run_leaves_nothing():
    assert tiny("fit", *QUIET, "--trainer.fast_dev_run=true") == 0
    assert list(Path().rglob("*.ckpt")) == list(Path().rglob("config.yaml")) == []


def test_a_missing_checkpoint_is_named(capfd):
    assert tiny("fit", *QUIET, "--ckpt_path=gone.ckpt") == 1
    assert "error: ckpt_path is 'gone.ckpt': there is no such file. To fix it," in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model.learning_rate=-1"],
            "learning_rate is -1.0: SGD steps downhill. To fix it, set model.learning_rate",
        ),
        (
            ["--model.fail=ours"],
            "the batch is empty: nothing can be learnt. To fix it, set data.size above 0.",
        ),
        (["--threads_per_rank=0"], "threads_per_rank is 0"),
        (["--trainer.overfit_batches=2.5"], "2.5"),
    ],
)
def test_an_error_that_the_user_can_mend_is_one_message(arguments, message, capfd, monkeypatch):
    monkeypatch.delenv("SB_TRACEBACK", raising=False)
    assert tiny("fit", *QUIET, *arguments) == 1
    error = capfd.readouterr().err
    assert [line for line in error.splitlines() if "sb: error: " in line and message in line]
    assert "Traceback" not in error
    monkeypatch.setenv("SB_TRACEBACK", "1")
    assert tiny("fit", *QUIET, *arguments) == 1
    assert "Traceback" in capfd.readouterr().err


def test_an_unexpected_error_keeps_its_traceback(capfd):
    assert tiny("fit", *QUIET, "--model.fail=unexpected") == 1
    error = capfd.readouterr().err
    assert "ZeroDivisionError: unexpected" in error
    assert "in training_step" in error


def test_threads_of_one_rank(monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "fit", lambda self, *args, **kwargs: seen.append(torch.get_num_threads()))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pytest.warns(UserWarning, match="threads_per_rank=3 replaces OMP_NUM_THREADS=7"):
        assert tiny("fit", *QUIET, "--threads_per_rank=3") == 0
    assert seen == [3]
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("3", "3")


def test_the_real_classes_are_the_default(capsys):
    from sb_lightning.cli import main

    assert main(["fit", "--print_config", "--data.source=texts", "--trainer.max_steps=2"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["data"]["source"] == "texts"
    assert {"architecture", "pretrained", "attention", "optimizer"} <= set(found["model"])


def test_another_rank_says_which_it_is(monkeypatch, capfd):
    from sb_lightning._messages import explain
    from sb_lightning.cli.errors import report

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("RANK", raising=False)
    assert report(ValueError(explain("found", "why", "change it"))) == 1
    assert capfd.readouterr().err == "[rank 1] sb: error: found: why. To fix it, change it.\n"


def test_advertisements_are_hidden(caplog):
    from lightning.pytorch.utilities import rank_zero_info

    from sb_lightning.cli.noise import hide_noise

    hide_noise()
    with caplog.at_level(logging.INFO):
        rank_zero_info("Tip: try installing [litlogger](https://pypi.org/project/litlogger/)")
        rank_zero_info("about the run")
    assert [record.message for record in caplog.records] == ["about the run"]


def test_a_launched_rank_leaves_ctrl_c_to_rank_zero(monkeypatch):
    from sb_lightning.cli import launch

    monkeypatch.setenv(launch.LAUNCHER, "1")
    assert not launch.follow_rank_zero()
    assert os.environ[launch.LAUNCHER] == str(os.getpid())
    calls = []
    monkeypatch.setattr(launch.signal, "signal", lambda *args: calls.append(args))
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: None)
    monkeypatch.setenv(launch.LAUNCHER, str(os.getppid()))
    assert launch.follow_rank_zero()
    assert calls == [(launch.signal.SIGINT, launch.signal.SIG_IGN)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--trainer.strategy=fsdp"], "the Trainer cannot be made of these settings"),
        (["--trainer.devices=-1"], "the Trainer cannot be made of these settings"),
        (["--trainer.accelerator=tpu"], "the Trainer cannot be made of these settings"),
        (["--trainer.val_check_interval=0"], "trainer.val_check_interval is 0"),
        (["--seed_everything=-1"], "seed_everything is -1"),
    ],
)
def test_settings_that_lightning_refuses_end_in_one_message(options, reason, capsys):
    assert tiny("fit", *QUIET, *options) == 1
    errors = capsys.readouterr().err
    assert f"sb: error: {reason}" in errors
    assert "To fix it" in errors
    assert "Traceback" not in errors


def test_a_full_disk_ends_in_one_message(monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "/full/disk")

    monkeypatch.setattr("sb_lightning.cli.train.TrainingCLI", full)
    assert tiny("fit") == 1
    errors = capsys.readouterr().err
    assert "No space left on device: '/full/disk'" in errors
    assert "Traceback" not in errors


def test_no_batches_at_all_are_told(monkeypatch):
    built = trainers(monkeypatch)
    with pytest.warns(UserWarning, match="nothing will be trained"):
        assert tiny("fit", *QUIET, "--trainer.limit_train_batches=0") == 0
    assert built


def test_barebones_runs(monkeypatch):
    built = trainers(monkeypatch)
    assert tiny("fit", *QUIET, "--trainer.barebones=true") == 0
    assert not built[0][0].loggers


def test_checkpoints_are_written_atomically_unless_the_user_has_another_way(monkeypatch):
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from sb_lightning.training import AtomicCheckpointIO

    built = trainers(monkeypatch)
    assert tiny("fit", *QUIET) == 0
    other = "lightning.pytorch.plugins.io.AsyncCheckpointIO"
    assert tiny("fit", *QUIET, f"--trainer.plugins={other}") == 0
    ways = [trainer.strategy.checkpoint_io for trainer, _ in built]
    assert isinstance(ways[0], AtomicCheckpointIO)
    assert isinstance(ways[1], AsyncCheckpointIO)
    assert not isinstance(ways[1], AtomicCheckpointIO)


def test_sigterm_ends_with_its_own_code(monkeypatch, capsys):
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    def ended(*args, **kwargs):
        raise SIGTERMException

    monkeypatch.setattr("sb_lightning.cli.train.TrainingCLI", ended)
    assert tiny("fit") == 143
    assert "SIGTERM" in capsys.readouterr().err


def test_ctrl_c_while_importing_ends_with_130(monkeypatch, capsys):
    import builtins

    from sb_lightning.cli import main

    real = builtins.__import__

    def interrupted(name, *args, **kwargs):
        if name == "sb_lightning.cli.train":
            raise KeyboardInterrupt
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert main(["fit"]) == 130
    assert "nothing was saved" in capsys.readouterr().err


def test_what_the_user_says_of_the_model_wins_over_the_checkpoint(monkeypatch, tmp_path):
    checkpoint = tmp_path / "model.ckpt"
    saved = {"learning_rate": 0.125, "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    torch.save({"state_dict": {}, "hyper_parameters": saved}, checkpoint)
    built = trainers(monkeypatch)
    assert tiny("validate", *QUIET, f"--ckpt_path={checkpoint}") == 0
    assert tiny("validate", *QUIET, f"--ckpt_path={checkpoint}", "--model.learning_rate=0.5") == 0
    assert [kwargs["model"].hparams["learning_rate"] for _, kwargs in built] == [0.125, 0.5]
