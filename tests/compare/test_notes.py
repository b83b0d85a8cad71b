"""What is said of figures that say little."""

from __future__ import annotations

import pytest

from sb_lightning.compare.arms import select_arms
from sb_lightning.compare.notes import notes

ARMS = select_arms("table2", ["sab", "dst", "sab_dst"])


def found(**of_sab_dst):
    still = {"windows": 4, "work_ratio": 1.0, "coverage_change": 0.0}
    moved = {**still, "work_ratio": 0.9, "coverage_change": -0.01}
    return {"sab": still, "dst": moved, "sab_dst": {**still, **of_sab_dst}}


@pytest.mark.parametrize("ratio", [0.9985, 1.0, 1.0015])
def test_tuning_that_changes_nothing_is_told_with_the_keys_that_help(ratio):
    (text,) = notes(ARMS, found(work_ratio=ratio))
    assert "nothing in +SAB+DST." in text
    assert all(key in text for key in ("data.max_length", "attention.budget", "attention.block_size"))


@pytest.mark.parametrize(
    "figures", [{"work_ratio": 0.997}, {"work_ratio": 1.003}, {"coverage_change": -0.0001}, {"windows": 0}]
)
def test_tuning_that_changes_something_is_not(figures):
    assert notes(ARMS, found(**figures)) == []


def test_a_table_that_is_off_is_told():
    moved = found(work_ratio=0.9)
    assert notes(ARMS, moved, 0.2) == notes(ARMS, moved, None) == []
    (text,) = notes(ARMS, moved, 0.31)
    assert "off by 31%" in text
    assert "latency.budget_seconds" in text
