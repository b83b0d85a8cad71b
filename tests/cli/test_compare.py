"""`sb compare`: what it writes, how it goes on, and what it says where it cannot work."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
import yaml
from tiny import tiny_architecture

from sb_lightning.cli import main


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
    for number in range(40):
        (docs / f"{number}.txt").write_text("word " * (10 + 23 * (number % 4)))
    architecture = tiny_architecture(num_hidden_layers=1)
    del architecture["vocab_size"]
    content = {
        "threads_per_rank": 1,
        "latency": {"table": None},
        "trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_steps": 8,
                    "accumulate_grad_batches": 1},
        "model": {"architecture": architecture, "attention": {"block_size": 16, "budget": 2}},
        "data": {"source": str(docs), "max_length": 300, "validation_share": 0.1, "tail": "drop",
                 "cache_dir": str(tmp_path / "cache")},
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    return str(tmp_path / "tiny.yaml")


def on_rank(arguments, folder):
    """Run the command in a rank of the pool; returns exit code and what was printed."""
    import os

    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["compare", *arguments])
    return code, out.getvalue(), err.getvalue()


def test_a_comparison_begins_goes_on_and_ends(config, gloo_pool, tmp_path):
    given = ["--config", config, "--output", "out", "--arms", "baseline,sab_dst,sab_uniform"]
    given += ["--preset", "bimodal"]
    # The first round takes longer than this, and nothing counts yet.
    (code, out, err), (other, silence, _) = gloo_pool.run(on_rank, [*given, "--minutes=0.0001"], tmp_path)
    assert (code, other) == (1, 0), err
    assert "3 arms, 2 rounds of 4 windows" in out
    assert "round 0 of 1 (warms up, not counted): ms per window: Baseline" in out
    assert "nothing has been measured yet" in err
    assert "To fix it, call the same command again, which goes on, or pass --minutes" in err
    assert not Path("out/results.json").exists()
    assert silence == ""

    (code, out, err), _ = gloo_pool.run(on_rank, given, tmp_path)
    assert code == 0, err
    assert "goes on after round 0" in out
    assert "1 of 1 rounds counted." in out
    found = json.loads(Path("out/results.json").read_text())
    assert list(found["arms"]) == ["baseline", "sab_dst", "sab_uniform"]
    assert all(row["windows"] == 4 for row in found["arms"].values())
    assert found["arms"]["sab_dst"]["speedup"] > 0
    assert found["data"] == "bimodal"
    assert "2 ranks on cpu" in found["machine"]
    assert sorted(found["losses"]) == ["baseline", "sab_dst", "sab_uniform"]
    assert all(len(losses) == 8 for losses in found["losses"].values())
    assert "| +SAB, uniform k | 4 |" in Path("out/results.md").read_text()
    assert Path("out/results.png").exists()
    assert len(list(Path("out/states").iterdir())) == 1
    assert not Path("runs").exists()

    # Nothing is left to run: the same answer, at once.
    (code, out, _), _ = gloo_pool.run(on_rank, given, tmp_path)
    assert code == 0
    assert json.loads(Path("out/results.json").read_text())["arms"] == found["arms"]
    assert "goes on after round 1" in out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--trainer.devices=1"], "trainer.devices is 1: .* To fix it, set trainer.devices to 2"),
        (["--trainer.max_steps=-1"], "trainer.max_steps is -1: .* To fix it, set trainer.max_steps"),
        (["--model.attention=null"], "model.attention is null: .* To fix it, set model.attention"),
        (["--arms=sab_dts"], r"--arms names 'sab_dts' \(did you mean sab_dst\?\)"),
        (["--arms=sab_uniform"], "add sab_dst to --arms"),
        (["--output=docs"], "--output is 'docs', which holds other files"),
        (["--minutes=0"], "pass a number of minutes above 0"),
        (["--study=fig7"], "invalid choice: 'fig7'"),
        (["--preset=flat"], "invalid choice: 'flat'"),
        (["--data.polcy=random"], "polcy"),
    ],
)
def test_what_cannot_work_is_said_at_once(changed, message, config, capsys, tmp_path):
    import re

    given = ["compare", "--config", config, *([] if changed[0].startswith("--output") else ["--output=out"])]
    assert main([*given, *changed]) != 0
    said = capsys.readouterr().err
    assert re.search(message, said, re.DOTALL), said
    # After a traceback there would be none: `report` shows those of unexpected errors only.
    assert "error: " in said.strip().splitlines()[-1]
    assert not Path("out").exists()


def test_output_is_demanded_and_help_names_everything(config, capsys):
    assert main(["compare", "--config", config]) == 2
    assert "--output" in capsys.readouterr().err
    assert main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("longtail", "bimodal", "fig10", "sab_dst_slack", "--minutes"))


def test_other_settings_in_the_same_folder_are_refused(config, capsys, tmp_path):
    from sb_lightning.compare.folder import ComparisonFolder

    ComparisonFolder(tmp_path / "out").begin({"arms": ["baseline"]})
    assert main(["compare", "--config", config, "--output=out"]) == 1
    said = capsys.readouterr().err
    assert "a comparison with other settings: arms ['baseline'] -> ['baseline', 'dst'" in said
