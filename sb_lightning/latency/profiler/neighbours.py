"""The other ranks of a machine: processes that run the same kind of steps while this one is timed."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import IO

from sb_lightning._messages import explain
from sb_lightning.latency.profiler.spec import ModelSpec

__all__ = ["Neighbours", "devices_of_neighbours"]

READY = b"ready\n"
START_SECONDS = 180.0
END_SECONDS = 5.0
SHOWN_CHARACTERS = 600


class Neighbours:
    """Processes that load the machine; a context manager that ends them however it is left.

    Each runs random points of the grid until its standard input closes, which the end of this process does
    too: none outlives it. Nothing is waited for without a limit.

    Args:
        count: How many.
        spec: What they run; its device is that of the process that is timed.
        lengths: Lengths that they draw from.
        devices: Devices of the run's ranks, as torch names them; where they are not known, neighbours take
            the GPUs after that of `spec`.
        start_seconds: Longest time until all are at work.
        command: The program of a neighbour; replaced in tests.

    Raises:
        RuntimeError: One ended, or did not begin in time; the message has its last words.
    """

    def __init__(
        self,
        count: int,
        spec: ModelSpec,
        lengths: Sequence[int],
        *,
        devices: Sequence[str] = (),
        start_seconds: float = START_SECONDS,
        command: Sequence[str] = (sys.executable, "-m", "sb_lightning.latency.profiler.neighbour"),
    ) -> None:
        self.count = count
        self.spec = spec
        self.lengths = list(lengths)
        self.devices = devices_of_neighbours(spec.device, count, devices)
        self.start_seconds = start_seconds
        self.command = list(command)
        self._processes: dict[subprocess.Popen[bytes], IO[bytes]] = {}

    def __enter__(self) -> Neighbours:
        try:
            for rank in range(1, self.count + 1):
                self._start(rank)
            deadline = time.monotonic() + self.start_seconds
            for process in self._processes:
                self._wait_until_ready(process, deadline)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def check(self) -> None:
        """Make sure that all are still at work.

        Raises:
            RuntimeError: One has ended.
        """
        for process in self._processes:
            if process.poll() is not None:
                self._fail(process, f"ended with exit code {process.returncode}")

    def _start(self, rank: int) -> None:
        threads = str(self.spec.threads)
        # A file, not a pipe: a neighbour that says much must not wait for somebody to listen.
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        process = subprocess.Popen(
            self.command,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        self._processes[process] = errors
        assert process.stdin is not None
        spec = replace(self.spec, device=self.devices[rank - 1])
        text = f"{spec.to_json()}\n{rank} {' '.join(map(str, self.lengths))}\n"
        # Where it has ended already, its last words are asked for while waiting for it.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(text.encode())
            process.stdin.flush()

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            seen = b""
            while READY not in seen:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._fail(process, f"was not at work within {self.start_seconds:.0f} s")
                chunk = os.read(process.stdout.fileno(), 4096)
                if not chunk:
                    _wait(process)
                    code = process.returncode
                    self._fail(
                        process, "closed its output" if code is None else f"ended with exit code {code}"
                    )
                seen += chunk

    def _fail(self, process: subprocess.Popen[bytes], what: str) -> None:
        process.kill()
        _wait(process)
        errors = self._processes[process]
        errors.seek(0)
        words = " ".join(errors.read().decode(errors="replace").split())[-SHOWN_CHARACTERS:]
        raise RuntimeError(
            explain(
                f"a neighbour process of the profile {what} ({words or 'it said nothing'})",
                "times measured without the other ranks at work would be too short",
                "free memory or mend what it names, or profile with fewer ranks",
            )
        )

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process, errors in self._processes.items():
            _wait(process)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            errors.close()
        self._processes.clear()


def devices_of_neighbours(device: str, count: int, devices: Sequence[str] = ()) -> list[str]:
    """Return where each neighbour runs: on a GPU of its own where there are enough.

    Args:
        device: Where the process runs that is timed.
        count: Neighbours.
        devices: Devices of the run's ranks; GPUs that are not among them come after these.
    """
    import torch

    if torch.device(device).type != "cuda":
        return [device] * count
    first = torch.device(device).index
    first = torch.cuda.current_device() if first is None else first
    others = (f"cuda:{(first + i) % torch.cuda.device_count()}" for i in range(torch.cuda.device_count()))
    order = list(dict.fromkeys([f"cuda:{first}", *devices, *others]))
    return [order[rank % len(order)] for rank in range(1, count + 1)]


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Give a process some time to end; one that hangs in the system must not hide why it was ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
