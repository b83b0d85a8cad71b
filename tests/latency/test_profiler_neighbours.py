"""The other ranks: programs that end, say nothing, or work; nothing waits for them without a limit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from fake_machine import conditions

from sb_lightning.latency.profiler.neighbours import Neighbours

READY = "print('ready', flush=True); "
STAYS = "import sys; sys.stdin.read()"


def neighbours(program, count=1, **arguments):
    return Neighbours(
        count, conditions().spec, [64], command=[sys.executable, "-S", "-c", program], **arguments
    )


def processes(group):
    return list(group._processes)


def test_they_are_at_work_inside_and_gone_outside():
    group = neighbours(READY + STAYS, count=2)
    with group:
        started = processes(group)
        group.check()
        assert [process.poll() for process in started] == [None, None]
    assert all(process.poll() is not None for process in started)


def test_one_that_ends_while_it_starts_is_an_error_with_its_last_words():
    program = "import sys; print('no memory left', file=sys.stderr); sys.exit(3)"
    with (
        pytest.raises(RuntimeError, match=r"ended with exit code 3 \(no memory left\).*with fewer ranks"),
        neighbours(program),
    ):
        pass


def test_one_that_says_nothing_is_not_waited_for():
    group = neighbours(STAYS, count=2, start_seconds=0.2)
    with pytest.raises(RuntimeError, match="was not at work within 0 s"), group:
        pass
    assert processes(group) == []


def test_one_that_ends_at_work_is_noticed_at_the_next_step():
    with neighbours(READY + "import sys; sys.stdin.read(); sys.exit('gone')") as group:
        (process,) = processes(group)
        process.stdin.close()
        process.wait(10)
        with pytest.raises(RuntimeError, match=r"ended with exit code 1 \(gone\)"):
            group.check()


def test_it_ends_when_the_process_that_measures_is_gone():
    # The real program: its input closes, as the death of its parent closes it.
    spec = conditions(config={**conditions().spec.config, "vocab_size": 64, "hidden_size": 64,
                              "num_attention_heads": 2, "num_key_value_heads": 1}).spec  # fmt: skip
    with Neighbours(1, spec, [16, 32]) as group:
        (process,) = processes(group)
        group.check()
        process.stdin.close()
        assert process.wait(30) == 0


CHATTY = """
from sb_lightning.latency.profiler import neighbour, step
original, steps = step.StepProbe.run, []
def run(self, point):
    # More than a pipe holds.
    print("word " * 40_000, flush=True)
    steps.append(point)
    if len(steps) == 3:
        raise SystemExit("talked enough")
    return original(self, point)
step.StepProbe.run = run
neighbour.main()
"""


def test_one_that_prints_much_is_not_blocked():
    spec = conditions(config={**conditions().spec.config, "vocab_size": 64, "hidden_size": 64,
                              "num_attention_heads": 2, "num_key_value_heads": 1}).spec  # fmt: skip
    with Neighbours(1, spec, [16, 32], command=[sys.executable, "-c", CHATTY]) as group:
        (process,) = processes(group)
        assert process.wait(30) == 1
        with pytest.raises(RuntimeError, match="talked enough"):
            group.check()


def test_one_that_does_not_end_when_killed_does_not_hide_the_error(monkeypatch):
    with neighbours(READY + STAYS) as group:
        (process,) = processes(group)
        waited = []

        def wait(timeout=None):
            waited.append(timeout)
            raise subprocess.TimeoutExpired("neighbour", timeout)

        monkeypatch.setattr(process, "wait", wait)
        with pytest.raises(RuntimeError, match="a neighbour process of the profile ended with exit code 7"):
            group._fail(process, "ended with exit code 7")
        group._end()
        assert len(waited) == 2
        assert process.stdin.closed
        assert process.stdout.closed
        monkeypatch.undo()
        process.wait(10)


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", ["cpu"] * 3, ["cpu", "cpu", "cpu"]),
        ("cuda:0", [], ["cuda:1", "cuda:2", "cuda:3"]),
        ("cuda", [], ["cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:2", [], ["cuda:3", "cuda:0", "cuda:1"]),
        ("cuda:2", ["cuda:2", "cuda:3"], ["cuda:3", "cuda:0", "cuda:1"]),
        ("cuda:3", ["cuda:3", "cuda:1", "cuda:0"], ["cuda:1", "cuda:0", "cuda:2"]),
    ],
)
def test_each_has_a_gpu_of_the_run(monkeypatch, device, given, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    spec = replace(conditions().spec, device=device)
    assert Neighbours(3, spec, [64], devices=given).devices == expected
    # More ranks than GPUs share them in turn.
    if device != "cpu":
        assert (
            Neighbours(4, spec, [64], devices=given).devices[3] == f"cuda:{torch.device(device).index or 0}"
        )


def test_an_error_inside_ends_them_too():
    group = neighbours(READY + STAYS)
    started = []

    def fail():
        with group:
            started.extend(processes(group))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert started[0].poll() is not None
