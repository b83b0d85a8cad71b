"""The code of docs/sampler.md runs as it stands; the plain loop resumes exactly, also on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sampler.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
LOOP = next(block for block in BLOCKS if "torchrun" in block)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"docs/sampler.md block {number}", "exec"), {})


def run_loop(folder, steps):
    """Run the loop up to a step; what it has trained on, in this process or on this rank."""
    import os

    os.chdir(folder)
    os.environ["STEPS"] = str(steps)
    try:
        names: dict = {}
        exec(compile(LOOP, "docs/sampler.md", "exec"), names)
        return names["trained"], names["step"]
    finally:
        del os.environ["STEPS"]


def check(whole, parts):
    trained, steps = whole
    assert [cell for part, _ in parts for cell in part] == trained
    assert parts[-1][1] == steps


def test_the_plain_loop_resumes_exactly(tmp_path, monkeypatch):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    whole = run_loop(tmp_path / "whole", 1000)
    assert sorted(i for epoch, cell, _ in whole[0] if epoch == 1 for i in cell) == list(range(100))
    # Twice in one epoch, then at its last window, then to the end.
    check(whole, [run_loop(tmp_path / "parts", steps) for steps in (3, 7, 25, 1000)])
    monkeypatch.chdir(tmp_path)


def test_the_plain_loop_on_two_ranks(tmp_path, gloo_pool):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = gloo_pool.run(run_loop, tmp_path / "whole", 1000)
    parts = [gloo_pool.run(run_loop, tmp_path / "parts", steps) for steps in (3, 7, 13, 1000)]
    for rank in range(2):
        check(whole[rank], [part[rank] for part in parts])
    seen = [i for trained, _ in whole for epoch, cell, _ in trained if epoch == 0 for i in cell]
    assert sorted(seen) == list(range(100))
