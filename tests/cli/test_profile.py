"""`sb profile`, and what `latency.table` does before a training."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from tiny import tiny_architecture

from sb_lightning.cli import main
from sb_lightning.cli.latency import PRECISIONS, CannotMeasure, conditions_of
from sb_lightning.cli.profile import run as run_profile
from sb_lightning.cli.train import TrainingCLI
from sb_lightning.cli.train import run as run_training
from sb_lightning.latency import LatencyTable

SECONDS = "1"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SB_LAUNCHER_PID", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_RANK"):
        # Set and deleted: so that monkeypatch puts back whatever a run leaves there.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for number in range(12):
        (docs / f"{number}.txt").write_text("word " * (10 + 7 * number))
    architecture = tiny_architecture(num_hidden_layers=1, vocab_size=300)
    del architecture["max_position_embeddings"]
    content = {
        "threads_per_rank": 1,
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 6, "num_sanity_val_steps": 0,
                    "limit_val_batches": 0},
        "model": {"architecture": architecture, "attention": {"block_size": 16, "budget": 2}},
        "data": {"source": str(docs), "max_length": 200, "cache_dir": str(tmp_path / "cache")},
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    return "tiny.yaml"


def test_a_configuration_is_measured_without_its_corpus(config, tmp_path, capsys):
    given = ["profile", "--config", config, "--budget-seconds", SECONDS, "--output=out/t.json"]
    assert main([*given, "--trainer.precision=bf16-mixed"]) == 0
    table = LatencyTable.load("out/t.json")
    found = table.fingerprint
    assert (found.layers, found.block_size, found.vocab_size, found.ranks, found.threads) == (
        1,
        16,
        300,
        1,
        1,
    )
    assert found.dtype == "bfloat16-mixed"
    assert table.measurements.lengths[-1] == 200
    assert table.micro_batch_ms([100], 2) > 0
    text = capsys.readouterr().out
    assert "plan: sequences of 16 to 200 tokens" in text
    assert "held-out points" in text
    assert sorted(os.listdir("out")) == ["t.json", "t.png"]
    assert not Path("runs").exists()
    assert not (tmp_path / "cache").exists()


def test_ranks_and_length_can_be_set_and_the_vocabulary_comes_from_the_data(config, capsys):
    given = yaml.safe_load(Path(config).read_text())
    del given["model"]["architecture"]["vocab_size"]
    Path(config).write_text(yaml.safe_dump(given))
    options = ["--config", config, "--budget_seconds=0.5", "--ranks=2", "--max-length", "100"]
    assert main(["profile", *options]) == 0
    table = LatencyTable.load("table.json")
    assert (table.fingerprint.ranks, table.measurements.lengths[-1]) == (2, 100)
    assert table.fingerprint.vocab_size == 258
    assert "2 ranks x 1 thread" in capsys.readouterr().out


def test_a_wrong_key_is_named_as_by_fit(config, capsys):
    for option, part in (
        ("--model.attention.block_sise=3", "model.attention.block_size"),
        ("--trainer.devcies=3", "trainer.devices"),
        ("--budget=3", "--budget"),
    ):
        assert main(["profile", "--config", config, option]) == 2
        assert part in capsys.readouterr().err
    assert main(["profile", "--config", config, "--model.attention.block_size=17"]) == 1
    assert "multiple of 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--ranks=0", "--budget-seconds=-1", "--budget-seconds=nan", "--max-length=x"]
)
def test_a_wrong_number_is_named(option, capsys):
    assert main(["profile", option]) == 2
    error = capsys.readouterr().err
    assert option.split("=")[0] in error
    assert "above 0" in error


def test_help(capsys):
    assert main(["profile", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--output", "--ranks", "--budget-seconds", "--max-length", "sb fit --help", "goes on"):
        assert word in text


def test_ctrl_c_keeps_what_was_measured(config, capsys, monkeypatch):
    from sb_lightning.latency.profiler.step import StepProbe

    original, steps = StepProbe.measure, []

    def measure(self, point):
        steps.append(point)
        if len(steps) == 30:
            raise KeyboardInterrupt
        return original(self, point)

    monkeypatch.setattr(StepProbe, "measure", measure)
    options = ["profile", "--config", config, "--budget-seconds", SECONDS]
    assert main(options) == 130
    assert "measured is kept, and the same command goes on from there" in capsys.readouterr().err
    kept = json.loads(Path("table.json.partial.json").read_text())
    assert kept["points"]
    assert main([*options, "--threads_per_rank=2"]) == 1
    assert "threads (1 in the table, 2 here)" in capsys.readouterr().err
    assert main(options) == 0
    assert "points measured before are kept" in capsys.readouterr().out
    assert not Path("table.json.partial.json").exists()


def interrupt_at(monkeypatch, number):
    from sb_lightning.latency.profiler.step import StepProbe

    original, steps = StepProbe.measure, []

    def measure(self, point):
        steps.append(point)
        if len(steps) == number:
            raise KeyboardInterrupt
        return original(self, point)

    monkeypatch.setattr(StepProbe, "measure", measure)


def test_ctrl_c_before_the_first_point_promises_nothing(config, capsys, monkeypatch):
    interrupt_at(monkeypatch, 2)
    assert main(["profile", "--config", config, "--budget-seconds", SECONDS]) == 130
    error = capsys.readouterr().err
    assert "sb: interrupted; nothing was measured yet." in error
    assert "goes on" not in error


@pytest.mark.parametrize(("number", "said"), [(30, "goes on from there."), (2, "nothing was measured yet.")])
def test_ctrl_c_in_auto_says_one_thing(config, capsys, monkeypatch, number, said):
    interrupt_at(monkeypatch, number)
    assert fit(config, "--latency.table=auto", f"--latency.budget_seconds={SECONDS}") == 130
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sb:")]
    assert len(told) == 1
    assert told[0].startswith("sb: interrupted before the training began; ")
    assert told[0].endswith(said)


@pytest.mark.parametrize("name", ["t.png", "cache"])
def test_an_output_with_no_room_for_the_picture_is_refused(config, capsys, name):
    Path("cache").mkdir(exist_ok=True)
    assert main(["profile", "--config", config, "--budget-seconds", SECONDS, "--output", name]) == 1
    error = capsys.readouterr().err
    assert f"the output {'is ' if name == 't.png' else ''}{name}" in error
    assert "To fix it, name" in error


def test_sequences_too_short_to_measure_are_named_by_their_key(config, capsys):
    assert main(["profile", "--config", config, "--data.max_length=30"]) == 1
    assert "data.max_length is 30" in capsys.readouterr().err
    assert main(["profile", "--config", config, "--max-length=31"]) == 1
    assert "set --max-length to 32 or more" in capsys.readouterr().err


def test_a_model_of_another_kind_is_refused(capsys):
    from tiny_program import TinyData, TinyModule

    assert run_profile(["--trainer.accelerator=cpu"], TinyModule, TinyData) == 1
    assert "the model is a TinyModule" in capsys.readouterr().err


def test_every_precision_that_can_be_measured_is_one_of_torch():
    assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype, _ in PRECISIONS.values())


def fit(config, *options):
    return main(["fit", "--config", config, "--trainer.default_root_dir=runs", *options])


def summary(number):
    return json.loads(Path(f"runs/version_{number}/summary.json").read_text())


def test_a_training_measures_first_and_the_next_one_reuses_the_table(config, tmp_path, capsys):
    options = ["--latency.table=auto", f"--latency.budget_seconds={SECONDS}"]
    assert fit(config, *options) == 0
    first = capsys.readouterr()
    assert "plan: sequences of 16 to 200" in first.out
    (path,) = (tmp_path / "cache" / "latency").glob("*.json")
    written = path.stat().st_mtime_ns
    times = summary(0)["step_times"]
    assert str(path) in times["latency_model"]
    assert "measured (" in times["latency_model"]
    # Six windows of one micro-batch, the first left out.
    assert times["micro_batches"] == 5
    assert times["predicted_ms"] > 0
    assert "micro-batch time" in first.out
    assert fit(config, *options) == 0
    second = capsys.readouterr()
    assert "plan:" not in second.out
    assert path.stat().st_mtime_ns == written
    # The losses are those of a run that measured.
    assert summary(1)["loss"] == summary(0)["loss"]

    # Other conditions, another table; a damaged file is measured anew.
    assert fit(config, *options, "--trainer.fast_dev_run=true", "--data.max_length=100") == 0
    assert list((tmp_path / "cache" / "latency").glob("*.json")) == [path]
    path.write_text(path.read_text()[:-30])
    with pytest.warns(UserWarning, match="measured anew"):
        assert fit(config, *options) == 0
    assert LatencyTable.load(path).layers == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data.max_length=30"], "data.max_length is 30.*set data.max_length to 32"),
        (["--trainer.precision=transformer-engine"], "trainer.precision is"),
    ],
)
def test_a_run_that_cannot_be_measured_is_trained_without_a_table(
    config, tmp_path, options, said, monkeypatch
):
    if "precision" in options[0]:
        # The precision itself needs packages that are not here.
        options = ["--trainer.precision=32-true"]
        monkeypatch.delitem(PRECISIONS, "32-true")
    with pytest.warns(UserWarning, match=rf"latency\.table=auto measures nothing, .*{said}"):
        assert fit(config, "--latency.table=auto", *options) == 0
    assert summary(0)["step_times"]["latency_model"].startswith("analytic")
    assert not (tmp_path / "cache" / "latency").exists()


def test_damaged_samples_are_measured_anew(config, tmp_path, monkeypatch):
    options = ["--latency.table=auto", f"--latency.budget_seconds={SECONDS}"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 30)
        assert fit(config, *options) == 130
    (partial,) = (tmp_path / "cache" / "latency").iterdir()
    partial.write_text(partial.read_text()[:-40])
    with pytest.warns(UserWarning, match=r"measured from the start: .*partial\.json cannot be read"):
        assert fit(config, *options) == 0
    names = sorted(path.suffix for path in (tmp_path / "cache" / "latency").iterdir())
    assert names == [".json", ".png"]


def test_only_rank_zero_of_all_machines_measures(config, tmp_path, monkeypatch):
    from lightning.pytorch import Trainer

    monkeypatch.setattr(TrainingCLI, "_run_subcommand", lambda self, name: self.before_fit())
    for rank in (1, 0):
        monkeypatch.setattr(Trainer, "global_rank", rank)
        assert fit(config, "--latency.table=auto", "--latency.budget_seconds=0.1") == 0
        assert (tmp_path / "cache" / "latency").exists() == (rank == 0)


@pytest.mark.parametrize("command", ["validate", "profile"])
def test_commands_that_use_no_table_say_so_of_a_flag_but_not_of_a_file(config, command, capsys, recwarn):
    given = yaml.safe_load(Path(config).read_text())
    given["latency"] = {"table": "auto"}
    given["trainer"]["limit_val_batches"] = 1
    Path(config).write_text(yaml.safe_dump(given))
    options = ["--budget-seconds=0.1"] if command == "profile" else []
    assert main([command, "--config", config, *options]) == 0
    assert not [w for w in recwarn if "latency table" in str(w.message)]
    with pytest.warns(UserWarning, match="--latency.budget_seconds: ignored"):
        assert main([command, "--config", config, *options, "--latency.budget_seconds=3"]) == 0


def test_neighbours_run_on_the_devices_of_the_trainer(config, monkeypatch):
    from types import SimpleNamespace

    from sb_lightning.training import AttentionSettings, CausalLMModule

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    gpus = [torch.device("cuda", 2), torch.device("cuda", 3)]
    strategy = SimpleNamespace(root_device=gpus[0], parallel_devices=gpus)
    trainer = SimpleNamespace(strategy=strategy, num_devices=2, precision="32-true")
    model = CausalLMModule(
        architecture=tiny_architecture(), attention=AttentionSettings(block_size=16, budget=2)
    )
    found = conditions_of(trainer, model, None, threads=1)
    assert found.devices == ("cuda:2", "cuda:3")
    assert (found.spec.device, found.fingerprint.processor) == ("cuda:2", "GPU cuda:2")
    strategy.root_device = torch.device("mps")
    with pytest.raises(CannotMeasure, match="only steps on cpu and cuda"):
        conditions_of(trainer, model, None, threads=1)


def test_a_training_does_not_measure_unless_asked(config, tmp_path, capsys):
    assert fit(config) == 0
    assert not (tmp_path / "cache" / "latency").exists()
    text = capsys.readouterr().out
    assert "analytic (no profile), scaled to this run" in text
    assert summary(0)["step_times"]["latency_model"] == "analytic (no profile), scaled to this run"


def test_a_table_can_be_named(config, capsys):
    assert main(["profile", "--config", config, "--budget-seconds", "0.3"]) == 0
    with pytest.warns(
        UserWarning, match=r"latency.table differs from this run in threads \(1 in the table, 2"
    ):
        assert fit(config, "--latency.table=table.json", "--threads_per_rank=2") == 0
    assert summary(0)["step_times"]["latency_model"].startswith("table.json, measured (")
    with pytest.warns(UserWarning, match=r"differs from this run in .*loss_chunk_tokens \(1024 in"):
        assert fit(config, "--latency.table=table.json", "--model.loss_chunk_tokens=512") == 0
    capsys.readouterr()
    assert fit(config, "--latency.table=nowhere.json") == 1
    assert "latency.table is 'nowhere.json'" in capsys.readouterr().err


def test_a_table_of_a_model_of_another_kind_is_taken_unchecked(config):
    from tiny_program import TinyData, TinyModule

    assert main(["profile", "--config", config, "--budget-seconds", "0.3"]) == 0
    given = ["fit", "--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    with pytest.warns(UserWarning, match=r"is not checked: the model is a TinyModule"):
        assert run_training([*given, "--latency.table=table.json"], TinyModule, TinyData) == 0
