"""A pool of two processes joined by gloo, started once per test run: Trainers run inside it.

Starting a fresh pair of ranks costs some ten seconds of imports, so every test of two ranks shares these.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

RANKS = 2
TIMEOUT_SECONDS = 60


class GlooPool:
    """Runs a function of a test module on both ranks and returns both results.

    The ranks are no daemons, so that a DataLoader in them may start workers; they end when the pipe closes.
    """

    def __init__(self) -> None:
        self.workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
        """Call `function(*args)` on every rank; fail with the traceback of the first rank that raised."""
        if not self.workers:
            self._start()
        for _, pipe in self.workers:
            pipe.send((sys.path, os.getcwd(), function, args))
        replies = []
        for rank, (process, pipe) in enumerate(self.workers):
            try:
                if not pipe.poll(timeout):
                    raise AssertionError(f"rank {rank} did not answer within {timeout} s")
                replies.append(pipe.recv())
            except (AssertionError, EOFError) as error:
                self.close()
                raise AssertionError(f"rank {rank}: {error!r}, exit code {process.exitcode}") from error
        for rank, (failed, value) in enumerate(replies):
            if failed:
                # The ranks may be out of step now: the next test gets fresh ones.
                self.close()
                raise AssertionError(f"rank {rank} raised:\n{value}")
        return [value for _, value in replies]

    def close(self) -> None:
        for process, _ in self.workers:
            process.kill()
        for process, _ in self.workers:
            process.join()
        self.workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, there))
            process.start()
            there.close()
            self.workers.append((process, here))


def _serve(rank: int, port: int, pipe: Connection) -> None:
    # What Lightning's launcher sets: with LOCAL_RANK given it starts no processes of its own.
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        NODE_RANK="0",
        OMP_NUM_THREADS="1",
    )
    # As in a rank of a real run: a spawned process would spawn the workers of its loaders too, slowly.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    while True:
        try:
            path, folder, function, args = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        os.chdir(folder)
        # A rank that hangs tells where before the pool gives up on it.
        faulthandler.dump_traceback_later(TIMEOUT_SECONDS - 5, file=sys.__stderr__)
        try:
            pipe.send((False, function(*args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
