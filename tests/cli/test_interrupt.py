"""Ctrl-C as a terminal sends it: to every process of the command, which runs in a group of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

import sb_lightning

PROGRAM = Path(__file__).with_name("tiny_program.py")
FLAGS = [
    "fit", "--trainer.accelerator=cpu", "--trainer.max_epochs=1000", "--trainer.accumulate_grad_batches=2",
    "--trainer.limit_val_batches=0", "--data.size=16", "--trainer.enable_model_summary=false",
]  # fmt: skip


def start(folder, *arguments):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")
    }
    # The copy under test, however it is installed.
    environment["PYTHONPATH"] = str(Path(sb_lightning.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *FLAGS, *arguments],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        alive = living(process.pid)
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output, alive


def living(group):
    """Processes of the group, without those that have ended and wait for their parent to notice."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


# One rank: tests/callbacks/test_checkpoint.py.
def test_ctrl_c_keeps_a_checkpoint_and_leaves_no_process(tmp_path):
    ranks = 2
    code, output, alive = start(
        tmp_path, f"--trainer.devices={ranks}", "--trainer.strategy=ddp",
        f"--model.notes={tmp_path}", "--model.interrupt_at=4", "--threads_per_rank=2",
    )  # fmt: skip
    assert alive == []
    # Lightning's exit code after Ctrl-C.
    assert code == 1, output
    assert "Traceback" not in output
    assert output.count("Interrupted: finishing this window") == 1, output
    checkpoint = torch.load(tmp_path / "runs/version_0/checkpoints/last.ckpt", weights_only=True)
    # The step with index 4 is the first of the third window, which was finished.
    assert checkpoint["global_step"] == 3
    assert checkpoint["optimizer_states"]
    summary = json.loads((tmp_path / "runs/version_0/summary.json").read_text())
    assert (summary["status"], summary["windows"], len(summary["ranks"])) == ("interrupted", 3, 1)
    assert summary["files"]["checkpoints"] == ["runs/version_0/checkpoints/last.ckpt"]
    assert "Run summary (interrupted)" in output
    notes = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert len({note["pid"] for note in notes}) == ranks
    # In the launched rank too, where Lightning would have set one thread.
    assert [(note["threads"], note["environment"]) for note in notes] == [(2, ["2", "2"])] * ranks


def test_ctrl_c_before_the_training_begins(tmp_path, capfd, monkeypatch):
    from sb_lightning.cli import train

    monkeypatch.setenv("SB_LAUNCHER_PID", "0")

    class Interrupted:
        def __init__(self, *args, **kwargs):
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "TrainingCLI", Interrupted)
    assert train.run(["fit"], object, object) == 130
    assert "nothing was saved" in capfd.readouterr().err
