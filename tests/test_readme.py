"""The code of the README runs as it stands (on less data, for fewer steps)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
FEWER = {
    'source="stdlib"': f'source="{Path(json.__file__).parent}", file_pattern="*.py"',
    "max_steps=20": "max_steps=1",
}


def test_there_are_four_blocks():
    assert len(BLOCKS) == 4
    assert all(any(text in block for block in BLOCKS) for text in FEWER)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[number]
    for text, less in FEWER.items():
        code = code.replace(text, less)
    exec(compile(code, f"README block {number}", "exec"), {})
