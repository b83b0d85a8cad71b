"""`sb plan`: figures of policies without training."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from corpus import write_corpus
from tiny import tiny_architecture

from sb_lightning.balance import SparsityAwareBatchSampler
from sb_lightning.balance.costs import GENERIC_SHAPE
from sb_lightning.cli import main, plan_config
from sb_lightning.cli.plan import run as run_plan
from sb_lightning.cli.plan_lengths import read_lengths
from sb_lightning.cli.plan_report import histogram
from sb_lightning.data import TextDataModule
from sb_lightning.latency import AnalyticCost, LatencyTable

LENGTHS = [int(x) for x in np.exp(np.random.default_rng(3).normal(6, 1, 60)).clip(4, 5000)]
FEW = ["--ranks=2", "--accumulate=3"]


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
def lengths():
    Path("lengths.txt").write_text("\n".join(map(str, LENGTHS)) + "\n")
    return "lengths.txt"


@pytest.fixture
def config(tmp_path):
    architecture = tiny_architecture(num_hidden_layers=1, vocab_size=300)
    del architecture["max_position_embeddings"]
    content = {
        "seed_everything": 0,
        "threads_per_rank": 1,
        "trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "accumulate_grad_batches": 3,
                    "max_steps": 2},
        "model": {"architecture": architecture, "attention": {"block_size": 16, "budget": 2}},
        "data": {"source": write_corpus(tmp_path / "docs.jsonl", documents=40), "max_length": 100,
                 "cache_dir": str(tmp_path / "cache"), "validation_share": 0.1, "seed": 7},
    }  # fmt: skip
    Path("tiny.yaml").write_text(yaml.safe_dump(content))
    return "tiny.yaml"


def planned(*options):
    assert main(["plan", *options, "--no-png", "--json=out.json"]) == 0
    return json.loads(Path("out.json").read_text())


def test_lengths_alone_give_figures_and_a_picture(lengths, capsys):
    options = ["--lengths", lengths, *FEW, "--budget=4", "--block-size=64"]
    assert main(["plan", *options, "--output=out", "--json=out/plan.json"]) == 0
    printed = capsys.readouterr().out
    assert Path("out/plan.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in Path("out").iterdir()) == ["plan.json", "plan.png"]
    found = json.loads(Path("out/plan.json").read_text())
    assert (found["format"], found["version"]) == ("sb_lightning plan", 1)
    assert found["data"] == {
        "source": "lengths.txt", "sequences": 60, "tokens": sum(LENGTHS), "max": max(LENGTHS),
        "p50": sorted(LENGTHS)[29], "p90": sorted(LENGTHS)[53], "p99": sorted(LENGTHS)[58],
    }  # fmt: skip
    assert list(found["figures"]) == ["random", "length", "tokens", "latency"]
    sampler = SparsityAwareBatchSampler(
        LENGTHS, ranks=2, rank=0, accumulate=3, budget=4,
        latency=AnalyticCost(replace(GENERIC_SHAPE, block_size=64)),
    )  # fmt: skip
    values = [sampler.plan(0, window).value_ms for window in range(10)]
    assert found["figures"]["latency"]["window_ms_mean"] == pytest.approx(np.mean(values))
    assert "lengths.txt: 60 sequences" in printed
    assert "Model: a generic one, 24 layers of width 896, budget 4 blocks of 64 keys" in printed
    assert str(sampler.explain()).splitlines()[0] in printed
    assert f"{found['figures']['latency']['speedup']:.2f}x" in printed
    assert printed.endswith("\nout/plan.png\nout/plan.json\n")


def test_options_choose_windows_policies_epoch_and_objective(lengths):
    base = ["--lengths", lengths, *FEW]
    found = planned(*base, "--windows=4", "--policies=tokens, flops", "--objective=fsdp", "--epoch=1")
    assert list(found["figures"]) == ["tokens", "flops"]
    assert found["figures"]["flops"]["windows"] == 4
    assert (found["num_windows"], found["epoch"], found["objective"]) == (10, 1, "fsdp")
    whole = planned(*base, "--all")
    assert whole["figures"]["random"]["windows"] == 10
    other = planned(*base, "--all", "--epoch=1")
    assert other["figures"]["random"]["window_ms_mean"] != whole["figures"]["random"]["window_ms_mean"]


def test_a_configuration_is_planned_as_it_would_be_trained(config, monkeypatch, capsys):
    samplers = []
    original = plan_config.PlanSource

    def keep(**fields):
        samplers.append(fields["sampler"])
        return original(**fields)

    monkeypatch.setattr(plan_config, "PlanSource", keep)
    assert planned("--config", config)["ranks"] == 2
    printed = capsys.readouterr().out
    assert "docs.jsonl" in printed
    assert "Times: analytic (no profile)" in printed
    assert not Path("runs").exists()

    settings = yaml.safe_load(Path(config).read_text())["data"]
    data = TextDataModule(**settings)
    data.prepare_data()
    data.setup()
    expected = SparsityAwareBatchSampler(
        data.train_dataset.lengths, data.train_dataset.target_tokens, ranks=2, rank=0, accumulate=3, seed=7,
        latency=samplers[0].costs.table,
    )  # fmt: skip
    assert samplers[0].fingerprint() == expected.fingerprint()
    assert [list(samplers[0].members(0, w)) for w in range(3)] == [
        list(expected.members(0, w)) for w in range(3)
    ]
    assert samplers[0].costs.budget == 2
    assert samplers[0].costs.shape.layers == 1
    assert samplers[0].costs.table.block_size == 16


def test_keys_of_fit_and_options_of_plan_change_the_plan(config):
    assert planned("--config", config, "--trainer.accumulate_grad_batches=2")["accumulate"] == 2
    found = planned(
        "--config", config, "--ranks=3", "--accumulate=1", "--data.sequences_per_micro_batch=2",
        "--data.objective=fsdp",
    )  # fmt: skip
    assert (found["ranks"], found["accumulate"], found["sequences_per_micro_batch"]) == (3, 1, 2)
    assert found["objective"] == "fsdp"
    assert planned("--config", config, "--trainer.limit_train_batches=4")["num_windows"] == 2


def test_given_lengths_replace_the_corpus_and_are_cut_as_it_would_be(config, capsys):
    Path("l.json").write_text(json.dumps([250, 100, 30] * 10))
    base = ["--config", config, "--lengths=l.json"]
    found = planned(*base)
    assert (found["data"]["sequences"], found["data"]["max"]) == (30, 100)
    assert "data.max_length=100 with data.overlong=truncate cuts 10 of 30" in capsys.readouterr().out
    assert planned(*base, "--data.overlong=drop")["data"]["sequences"] == 20
    split = planned(*base, "--data.overlong=split")["data"]
    assert (split["sequences"], split["tokens"]) == (50, 10 * 380)
    # Nothing was read of it.
    assert not Path("cache").exists()


def test_a_table_is_used_but_never_measured(config, capsys):
    # One rank, so that the profile starts no neighbour.
    options = ["--config", config, "--latency.table=auto", "--trainer.devices=1", "--trainer.strategy=auto"]
    assert not planned(*options)["is_measured"]
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "not measured yet" in line]
    assert list(Path("cache").glob("latency/*")) == []
    program, *command = shlex.split(note.partition("To measure: ")[2])
    assert program == "sb"
    assert main([*command, "--budget-seconds=0.2"]) == 0
    found = planned(*options)
    assert found["is_measured"]
    (path,) = Path("cache").glob("latency/*.json")
    assert str(path) in found["latency"]
    assert planned("--config", config, "--latency.table", str(path))["is_measured"]
    # The model without a configuration.
    Path("l.txt").write_text("50 " * 20)
    assert planned("--lengths=l.txt", *FEW, "--latency.table", str(path))["is_measured"]
    path.write_text(path.read_text()[:-30])
    assert not planned(*options)["is_measured"]
    assert path.exists()
    assert "the cached table is damaged" in capsys.readouterr().out


def test_a_training_on_another_machine_can_be_planned_on_this_one(config, capsys):
    options = ["--config", config, "--trainer.accelerator=cuda", "--trainer.strategy=fsdp"]
    if torch.cuda.is_available():
        pytest.skip("the machine is not another one")
    found = planned(*options, "--trainer.devices=4", "--trainer.num_nodes=2", "--accumulate=1")
    assert found["ranks"] == 8
    assert "planned for trainer.devices x trainer.num_nodes = 8 ranks" in capsys.readouterr().out
    assert main(["plan", *options, "--trainer.devices=-1"]) == 1
    assert "To fix it, pass --ranks" in capsys.readouterr().err
    assert planned(*options, "--trainer.devices=-1", "--ranks=3")["ranks"] == 3


def test_a_preset_needs_no_file(capsys):
    found = planned("--preset=longalpaca", "--sequences=400", "--windows=3")
    assert found["data"]["sequences"] == 400
    assert (found["ranks"], found["accumulate"]) == (8, 4)
    assert "synthetic, matched to LongAlpaca-12k" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 1, "neither a configuration nor lengths are given"),
        (["--policies=lenght", "--preset=magi"], 1, "names 'lenght' (did you mean length?)"),
        (["--policies=,", "--preset=magi"], 1, "--policies is empty"),
        (["--preset=magi", "--ranks=0"], 2, "--ranks: it is '0'"),
        (["--preset=magi", "--accumulate=x"], 2, "--accumulate: it is 'x'"),
        (["--preset=magi", "--epoch=-1"], 2, "--epoch: it is '-1'"),
        (["--preset=nope"], 1, "preset is 'nope'"),
        (["--preset=magi", "--sequences=31"], 1, "31 sequences, and a window of 8 ranks x 4"),
        (["--preset=magi", "--windows=3", "--all"], 2, "--windows and --all are both given"),
        (["--preset=magi", "--lengths=l"], 2, "--lengths and --preset are both given"),
        (["--preset=magi", "--latency.table=auto"], 1, "--latency.table is auto"),
        (["--preset=magi", "--latency.table=no.json"], 1, "latency.table is 'no.json'"),
        (["--lengths=nowhere.txt"], 1, "--lengths is 'nowhere.txt'"),
        (["--preset=magi", "--output=file/out"], 1, "--output is 'file/out'"),
        (["--preset=magi", "--json=file/out.json"], 1, "the folder of --json is 'file'"),
        (["--preset=magi", "--json=folder"], 1, "--json is 'folder'"),
        (["--config=tiny.yaml", "--budget=3"], 1, "pass --model.attention.budget"),
        (["--config=tiny.yaml", "--data.source=/nowhere"], 1, "data.source is '/nowhere'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("config")
def test_errors_have_three_parts_and_leave_nothing(options, code, said, capsys):
    Path("file").write_text("mine")
    Path("folder").mkdir()
    before = sorted(p.name for p in Path().iterdir())
    assert main(["plan", *options]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "To fix it, " in error
    assert "Traceback" not in error
    assert sorted(p.name for p in Path().iterdir()) == before


@pytest.mark.parametrize("command", ["plan", "profile"])
def test_a_wrong_key_is_named_by_the_command_that_was_called(command, config, capsys):
    assert main([command, "--config", config, "--trainer.devcies=2"]) == 2
    usage, tip, error = capsys.readouterr().err.splitlines()[-3:]
    assert usage.startswith(f"usage: sb {command} [")
    assert tip.endswith(f"run: sb {command} --help")
    assert "trainer.devices" in error
    assert main([command, "--config", config, "--data.overlong=no"]) == 2
    assert "Expected one of 'truncate'" in capsys.readouterr().err


def test_a_table_that_may_be_wrong_is_said_to_be(config, capsys):
    command = ["profile", "--config", config, "--budget-seconds=0.1", "--trainer.devices=1"]
    assert main([*command, "--trainer.strategy=auto"]) == 0
    table = LatencyTable.load("table.json")
    Path("l.txt").write_text("50 " * 20)
    for spread, is_told in ((0.5, True), (0.01, False)):
        point = {"held_out": True, "length": 10}
        profile = {"points": [point] * 9, "noise": {"spread": spread, "held_out_error": 0.01},
                   "errors": {"table": {"median": 0.02}, "flops": {"median": 0.2}}}  # fmt: skip
        LatencyTable(table.measurements, table.fingerprint, profile).save("table.json")
        planned("--lengths=l.txt", *FEW, "--latency.table=table.json")
        printed = capsys.readouterr().out
        assert ("table.json: This table may be wrong: the machine was busy" in printed) == is_told
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            planned("--config", config, "--latency.table=table.json")
        assert any("may be wrong: the machine" in str(found.message) for found in caught) == is_told
    # Another program's table notes what it likes.
    LatencyTable(table.measurements, table.fingerprint, {"points": 3}).save("table.json")
    planned("--lengths=l.txt", *FEW, "--latency.table=table.json")


def test_the_picture_and_the_table_have_one_unit(monkeypatch):
    from sb_lightning.cli import plan_report

    drawn = {}
    monkeypatch.setattr(
        plan_report, "draw_plans", lambda rows, path, **options: drawn.update(rows=rows, **options)
    )
    Path("long.txt").write_text("400000 300000 200000 100000 50000 60000 " * 2 + "90000")
    assert main(["plan", "--lengths=long.txt", *FEW]) == 0
    assert drawn["time_unit"] == ("s", 1000.0)
    titles = [panel.title for row in drawn["rows"] for panel in row]
    assert titles[1].startswith("random: window that loses most (")
    assert not any("short" in title for title in titles)
    # Two sequences of 40 to 90 tokens, of the generic model: far below 100 s.
    Path("short.txt").write_text("40 90 50 60 " * 6)
    assert main(["plan", "--lengths=short.txt", *FEW, "--budget=4"]) == 0
    assert drawn["time_unit"] == ("ms", 1.0)


def test_data_that_our_sampler_does_not_plan_are_refused(capsys):
    from tiny_program import TinyData, TinyModule

    assert run_plan(["--trainer.accelerator=cpu"], TinyModule, TinyData) == 1
    assert (
        "the data module TinyData trains with a BatchSampler: there are no windows" in capsys.readouterr().err
    )


@pytest.mark.parametrize("stage", ["compare", "draw", "write"])
def test_ctrl_c_leaves_nothing_half_written(stage, lengths, capsys, monkeypatch):
    from sb_lightning.cli import plan_report

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    if stage == "compare":
        monkeypatch.setattr(SparsityAwareBatchSampler, "plan", interrupted)
    else:
        monkeypatch.setattr(
            plan_report, {"draw": "draw_plans", "write": "write_document"}[stage], interrupted
        )
    assert main(["plan", "--lengths", lengths, *FEW, "--output=out", "--json=out/p.json"]) == 130
    left = [p.name for p in Path("out").iterdir()]
    assert left == (["plan.png"] if stage == "write" else [])
    said = "written before: out/plan.png" if stage == "write" else "nothing was written"
    assert f"sb: interrupted; {said}." in capsys.readouterr().err


def test_help_is_short_and_imports_no_torch():
    code = (
        "import sys; from sb_lightning.cli import main; main(['plan', '--help'])\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, has_torch = result.stdout.splitlines()
    assert has_torch == "False"
    assert len(lines) <= 45
    for option in ("--policies", "--lengths", "--preset", "--objective", "--all", "--json"):
        assert any(line.strip().startswith(option) for line in lines)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "5\n7\n\n9\n"),
        ("a.txt", "\ufeff5\n7\n9\n"),
        ("a.lengths", "[5, 7, 9]"),
        ("a.json", "[5, 7, 9]"),
        ("a.jsonl", '{"length": 5}\n{"length": 7}\n\n{"length": 9}\n'),
        ("a.jsonl", "".join(json.dumps({"length": [0] * n}) + "\n" for n in (5, 7, 9))),
    ],
)
def test_lengths_are_read_from_text(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert read_lengths(tmp_path / name).tolist() == [5, 7, 9]


def test_lengths_are_read_from_arrays_and_parquet(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 7, 9], dtype=np.uint16))
    assert read_lengths(tmp_path / "a.npy").tolist() == [5, 7, 9]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"n": [5, 7, 9], "ids": [[1] * 5, [1] * 7, [1] * 9], "text": ["a", "b", "c"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    for column in ("n", "ids"):
        assert read_lengths(tmp_path / "a.parquet", column).tolist() == [5, 7, 9]
    with pytest.raises(ValueError, match=r"no column 'length' \(it has n, ids, text\)"):
        read_lengths(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'text' of .* holds string"):
        read_lengths(tmp_path / "a.parquet", "text")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match="is no parquet file"):
        read_lengths(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"5\n7 x\n", "line 2: '7 x'"),
        ("a.txt", b"5\n1.5\n", "line 2: '1.5'"),
        ("a.txt", b"5\n99999999999999999999\n", "line 2"),
        ("a.txt", b"5\n0\n", "length number 2 is 0"),
        ("a.txt", b"5\n-3\n", "length number 2 is -3"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.json", b"{}", "holds a dict"),
        ("a.json", b"[1, 2", "is no JSON"),
        ("a.json", b"[" * 100_000, "is no JSON"),
        ("a.txt", b"5\n3000000000\n", "length number 2 is 3000000000"),
        ("a.json", b'[1, "2"]', "length number 2 is '2'"),
        ("a.json", b"[1, true]", "length number 2 is 'True'"),
        ("a.jsonl", b'{"length": 5}\n{"n": 1}\n', "line 2 has n"),
        ("a.jsonl", b"{\n", "line 1 is no JSON"),
        ("a.npy", b"nonsense", "is no .npy array"),
    ],
)
def test_a_wrong_file_of_lengths_says_where(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        read_lengths(tmp_path / name)
    assert "To fix it, " in str(error.value)


def test_an_array_of_another_kind_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 2)))
    with pytest.raises(ValueError, match="float64 with 2 dimensions"):
        read_lengths(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "values", [[1], [7] * 5, [100, 101, 130], LENGTHS, [1, 10**6], list(range(1, 200)), [2**40]]
)
def test_every_length_is_in_one_bin(values):
    values = np.array(values)
    _, *lines = histogram(values).splitlines()
    assert 1 <= len(lines) <= 45
    bounds = [
        tuple(int(w.replace(",", "")) for w in line[: line.index("%") - 6].split("-")) for line in lines
    ]
    assert (bounds[0][0], bounds[-1][1]) == (values.min(), values.max())
    assert all(low <= high for low, high in bounds)
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(bounds))
    shares = [float(line.split("%")[0].split()[-1]) for line in lines]
    for (low, high), share in zip(bounds, shares, strict=True):
        assert share == pytest.approx(100 * np.mean((values >= low) & (values <= high)), abs=0.06)


def test_the_page_shows_what_the_command_prints(capsys):
    page = Path(__file__).parents[2] / "docs" / "planning.md"
    text = page.read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if line.startswith("sb plan --preset"))
    assert main([*shlex.split(command)[1:], "--output=."]) == 0
    printed = capsys.readouterr().out
    (shown,) = [block for block in text.split("```") if "policy latency" in block]
    timed = {"random", "length", "tokens", "latency"}
    for found, expected in itertools.zip_longest(printed.splitlines(), shown.strip("\n").splitlines()):
        now, then = found.split(), expected.split()
        # The last figure is measured.
        end = -1 if len(then) == 11 and then[0] in timed else None
        for a, b in zip(now[:end], then[:end], strict=True):
            numbers = [word.strip("x%(),").replace(",", "") for word in (a, b)]
            if numbers[1].replace(".", "").isdigit():
                assert float(numbers[0]) == pytest.approx(float(numbers[1]), rel=0.02, abs=0.5)
            else:
                assert a == b
