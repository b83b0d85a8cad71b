from __future__ import annotations

import pytest
import yaml
from tiny_program import TinyData, TinyModule

from sb_lightning.cli import loggers
from sb_lightning.cli.parse_errors import one_line
from sb_lightning.cli.train import run
from sb_lightning.training.settings import AttentionSettings, OptimizerSettings


class Configured(TinyModule):
    """A model with settings.

    Args:
        attention: An optional dataclass.
        optimizer: A dataclass.
    """

    def __init__(
        self,
        attention: AttentionSettings | None = None,
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008
    ) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SB_LAUNCHER_PID", "0")


def error_of(capsys, *arguments):
    assert run(["fit", *arguments], Configured, TinyData) == 2
    _, tip, *error = capsys.readouterr().err.splitlines()
    assert tip.startswith("tip: ")
    assert len(error) == 1, error
    return error[0]


def write(content):
    with open("bad.yaml", "w") as file:
        yaml.safe_dump(content, file)
    return "--config=bad.yaml"


@pytest.mark.parametrize(
    ("section", "name", "value", "parts"),
    [
        ("model.attention", "bugdet", 4, ["attention.bugdet'", "did you mean 'model.attention.budget'"]),
        ("model.attention", "x", 4, ["model.attention.x'", "(keys of model.attention: backend, block_size,"]),
        ("model.attention", "budget", "lots", ['"model.attention.budget": Not of type Positive', "'lots'"]),
        ("model.attention", "budget", -3, ['"model.attention.budget"', "-3 does not conform"]),
        ("model.attention", "dense_layers", "x", ['"model.attention.dense_layers": Expected a list', "x"]),
        ("model.optimizer", "lr", 1, ["model.optimizer.lr", "did you mean 'model.optimizer.learning_rate'"]),
        ("model.optimizer", "beta2", "b", ['"model.optimizer.beta2": Not of type ClosedUnitInterval', "'b'"]),
        ("trainer", "precision", 17, ['"trainer.precision": \'17\' is given, wanted one of 64, 32, 16']),
        ("trainer", "max_steps", "x", ['"trainer.max_steps": Expected an int. Got value: x']),
        ("trainer", "logger", "Tensorbored", ['"trainer.logger": no class \'Tensorbored\' is known']),
    ],
)  # fmt: skip
def test_one_line_names_the_full_key(capsys, section, name, value, parts):
    tree = {name: value}
    for part in reversed(section.split(".")):
        tree = {part: tree}
    for arguments in ([f"--{section}.{name}={value}"], [write(tree)]):
        error = error_of(capsys, *arguments)
        assert all(part in error for part in parts), error


def test_a_class_given_a_key_it_does_not_have(capsys):
    error = error_of(capsys, "--trainer.callbacks+=LastCheckpoint", "--trainer.callbacks.every_n_window=3")
    assert "no key 'trainer.callbacks.every_n_window' of LastCheckpoint" in error
    assert "did you mean 'trainer.callbacks.every_n_windows'" in error
    error = error_of(capsys, "--trainer.callbacks+=LastCheckpoint", "--trainer.callbacks.every_n_windows=x")
    assert "\"trainer.callbacks.every_n_windows\": 'x' is given, wanted int or null" in error


@pytest.mark.parametrize("in_file", [False, True])
def test_a_logger_without_its_folder(capsys, in_file):
    argument = "--trainer.logger=TensorBoardLogger"
    if in_file:
        argument = write({"trainer": {"logger": {"class_path": "TensorBoardLogger"}}})
    error = error_of(capsys, argument)
    assert "TensorBoardLogger cannot be made for trainer.logger" in error
    assert error.endswith("it needs a value for trainer.logger.save_dir")


def test_the_keys_of_a_class_without_a_near_one(capsys):
    tuning = {"class_path": "sb_lightning.callbacks.SparseBalanceCallback", "init_args": {"p": 0.1}}
    arguments = ["fit", write({"trainer": {"callbacks": [tuning]}})]
    assert run(arguments, Configured, TinyData) == 2
    _, _, error, *keys = capsys.readouterr().err.splitlines()
    assert error == "error: there is no key 'trainer.callbacks.p' of SparseBalanceCallback"
    assert keys[0].startswith("  keys of trainer.callbacks: anchor, base_budget, ")
    assert "tolerance" in " ".join(keys)
    assert all(len(line) <= 100 for line in keys)


def test_the_keys_of_a_group_and_of_the_command(capsys):
    assert run(["fit", "--trainer.foo=1"], Configured, TinyData) == 2
    keys = " ".join(capsys.readouterr().err.splitlines()[3:])
    assert keys.startswith("  keys of trainer: accelerator, ")
    told, more = keys.split(", and ")
    assert len(told.split(", ")) == 20
    assert int(more.partition(" ")[0]) > 5
    for argument in ("--zzz=1", "--zzz.foo=1"):
        error = error_of(capsys, argument)
        assert "unrecognized arguments: --zzz" in error
        assert "(keys: " in error
        assert ", model, " in error
    assert "(did you mean 'trainer'?)" in error_of(capsys, "--trainr.foo=1")


def test_unknown_messages_stay_as_they_are():
    assert one_line("something\nelse", []) == "something\nelse"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=tb"],
        ["--trainer.logger+=CSVLogger", "--trainer.logger.save_dir=a",
         "--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=b"],
    ],
)  # fmt: skip
def test_a_logger_without_its_package(capfd, monkeypatch, arguments):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    assert run(["fit", "--trainer.accelerator=cpu", *arguments], TinyModule, TinyData) == 1
    error = capfd.readouterr().err
    assert "sb: error: trainer.logger is TensorBoardLogger: it needs the package tensorboard" in error
    assert "To fix it, pip install tensorboard" in error
    assert "Traceback" not in error
    monkeypatch.setattr(loggers, "find_spec", lambda name: name == "tensorboardX" or None)
    loggers.check_loggers({"class_path": "lightning.pytorch.loggers.TensorBoardLogger"})


def test_wandb_without_a_key(capfd):
    from wandb.errors import UsageError

    from sb_lightning.cli.errors import report

    assert report(UsageError("No API key configured. Use `wandb login` to log in.")) == 1
    error = capfd.readouterr().err
    assert "To fix it, run `wandb login`, or set trainer.logger.init_args.offline to true." in error
    assert "Traceback" not in error


def test_help_describes_the_fields_of_settings(capsys):
    assert run(["fit", "--help"], Configured, TinyData) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Peak learning rate. (type:" in text
    assert "Share of all optimizer steps spent warming up. (type:" in text
    assert run(["fit", "--model.attention.help"], Configured, TinyData) == 0
    assert "Layers, counted from 0, that keep full attention." in " ".join(capsys.readouterr().out.split())


def test_help_of_the_tokenizer_is_that_of_the_argument(capsys):
    from sb_lightning.data import TextDataModule

    assert run(["fit", "--help"], TinyModule, TextDataModule) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--data.tokenizer TOKENIZER ``bytes``; ``train:SIZE``, a byte-level BPE" in text


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_begins_with_a_whole_sentence(capsys, command):
    assert run([command, "--help"], TinyModule, TinyData) == 0
    usage, empty, sentence = capsys.readouterr().out.splitlines()[:3]
    assert usage == f"usage: sb {command} [--config FILE ...] [--key value | --key=value ...]"
    assert empty == ""
    assert sentence[0].isupper()
    assert sentence.endswith(".")
