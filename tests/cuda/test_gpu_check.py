"""benchmarks/gpu_check.py without a GPU: its checks tried out on the CPU, and what becomes of bad ones."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import emulated
import pytest

from sb_lightning.attention.backends import backends

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_check  # noqa: E402

pytestmark = [
    pytest.mark.skipif(emulated.missing() != "", reason=emulated.missing() or "-"),
    pytest.mark.skipif(
        not backends()[0].available, reason="the extension, whose ops these are, is not built"
    ),
]


def run_script(*arguments):
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def test_the_checks_pass_on_a_cpu(tmp_path):
    sections = [section for section in gpu_check.SECTIONS_S if section != "times"]
    only = [word for section in sections for word in ("--only", section)]
    done = run_script("--device", "cpu", "--tiny", "--output", str(tmp_path), *only)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_cpu.json").read_text())
    status = {check["check"]: check["status"] for check in report["checks"]}
    assert {name.split()[0] for name in status} == set(sections)
    left_out = {name for name, what in status.items() if what != "passed"}
    assert left_out == {"sanitizer memcheck", "sanitizer racecheck", "offsets"}
    page = (tmp_path / "gpu_cpu.md").read_text()
    assert all(f"| {name} | {what} |" in page for name, what in status.items())


@pytest.mark.skipif(backends()[1].available, reason="a GPU runs the kernels here")
def test_without_a_gpu_it_says_so():
    done = run_script()
    assert done.returncode == 2
    assert "gpu_check: " in done.stderr
    assert "What to do: run benchmarks/gpu_check.sh where there is one" in done.stderr


def answer(connection, log):
    """Stand in for the process that makes the checks: some break, one ends it, one never answers."""
    with open(log, "a") as file:
        file.write("started\n")
    connection.send(
        (
            "",
            {"device": "Fake | GPU"},
            ["a one", "a fails", "a breaks", "a dies", "b hangs", "b two", "c late"],
        )
    )
    for name in iter(connection.recv, None):
        if name == "a dies":
            os._exit(3)
        if name == "b hangs":
            connection.recv()
        status = gpu_check.FAILED if name in ("a fails", "a breaks") else gpu_check.PASSED
        connection.send((gpu_check.Result(name, status, "1 | 2", 0.5), name == "a breaks"))


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LEAST_S", 1)
    clock = [0.0]

    def now():
        clock[0] += 1.0
        return clock[0]

    def make(total_s, target=answer):
        context = multiprocessing.get_context("fork")

        def start():
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, tmp_path / "log"))
            process.start()
            theirs.close()
            return ours, process

        return gpu_check.Supervisor(start, {"a": 20.0, "b": 1.0, "c": 20.0}, total_s, now)

    return make


def test_a_check_that_fails_dies_or_hangs_stops_no_other(supervise, tmp_path):
    supervisor = supervise(1000)
    found = {result.check: (result.status, result.figure) for result in supervisor.results()}
    assert found == {
        "a one": ("passed", "1 | 2"),
        "a fails": ("failed", "1 | 2"),
        "a breaks": ("failed", "1 | 2"),
        "a dies": ("failed", "its process ended without an answer"),
        "b hangs": ("failed", "no answer within 1 seconds"),
        "b two": ("left out", "the 1 seconds of 'b' are used up"),
        "c late": ("passed", "1 | 2"),
    }
    assert (tmp_path / "log").read_text() == "started\n" * 4
    page = gpu_check.write(tmp_path, supervisor.machine, [gpu_check.Result("x", "failed", "1 | 2")])
    assert page.name == "gpu_fake_gpu.md"
    assert "| x | failed | 0.0 | 1 \\| 2 |" in page.read_text()


def test_what_begins_after_the_time_is_left_out(supervise):
    results = list(supervise(5).results(["a", "c"]))
    statuses = ["passed", "failed", "left out", "left out", "left out"]
    assert [result.status for result in results] == statuses
    assert results[-1].figure == "all 5 seconds are used up"


def refuse(connection, log):
    connection.send(("no GPU", {}, []))


def end(connection, log):
    os._exit(1)


@pytest.mark.parametrize(("target", "message"), [(refuse, "no GPU"), (end, "ended before the first")])
def test_what_cannot_start_is_told(supervise, target, message):
    with pytest.raises(gpu_check.Refused, match=message):
        list(supervise(100, target).results())


def test_whatever_a_check_raises_is_its_result():
    from gpu_checks import LeftOut

    def fail(kind):
        def check(machine):
            raise kind("a\n  b")

        return check

    checks = {"x one": fail(AssertionError), "x two": fail(RuntimeError), "x three": fail(LeftOut)}
    checks["x four"] = lambda machine: ("fine", {"ms": 2.0})
    results = [gpu_check.make_check(checks, None, name) for name in checks]
    assert [(r.status, r.figure) for r in results] == [
        ("failed", "a b"),
        ("failed", "RuntimeError: a b"),
        ("left out", "a\n  b"),
        ("passed", "fine"),
    ]
    assert results[-1].values == {"ms": 2.0}
