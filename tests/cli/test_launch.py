"""A launched rank never outlives its launcher, and threads have a bound."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sb_lightning.cli.launch import set_threads

BECOMES_A_RANK = """
import os
from sb_lightning.cli.launch import follow_rank_zero
print("follows" if follow_rank_zero() else "launches", os.environ["SB_LAUNCHER_PID"] == str(os.getpid()))
"""


def rank(**environment):
    return subprocess.run(
        [sys.executable, "-c", BECOMES_A_RANK],
        env={**{k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return str(process.pid)


def test_a_rank_whose_launcher_ended_while_it_started_ends_too():
    result = rank(SB_LAUNCHER_PID=ended_process(), LOCAL_RANK="1")
    assert (result.returncode, result.stdout) == (1, "")


def test_a_stale_variable_makes_no_rank():
    result = rank(SB_LAUNCHER_PID=ended_process())
    assert (result.returncode, result.stdout) == (0, "launches True\n")


def test_a_rank_follows_its_parent():
    result = rank(SB_LAUNCHER_PID=str(os.getpid()), LOCAL_RANK="1")
    assert (result.returncode, result.stdout) == (0, "follows False\n")


def test_a_rank_of_another_launcher_launches_nothing_twice():
    # torchrun sets LOCAL_RANK and knows nothing of us.
    result = rank(LOCAL_RANK="1", SB_LAUNCHER_PID="")
    assert (result.returncode, result.stdout) == (0, "launches True\n")


def test_threads_far_above_the_cores_are_refused():
    with pytest.raises(ValueError, match=r"threads_per_rank is 99999 on \d+ cores"):
        set_threads(99999)
