"""Two processes on this machine that add up a tensor with gloo, as two ranks of a training do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

__all__ = ["run_pair"]

RANKS = 2
# Runs with nothing of this package: the point is torch and the network of this machine.
PROGRAM = """
import torch
from datetime import timedelta
torch.distributed.init_process_group("gloo", timeout=timedelta(seconds={timeout}))
total = torch.full((3,), 1.0 + torch.distributed.get_rank())
torch.distributed.all_reduce(total)
assert total.tolist() == [3.0] * 3, total
torch.distributed.destroy_process_group()
print("sum is right")
"""


def run_pair(timeout_s: float) -> str | None:
    """Start two ranks that meet over the loopback interface.

    Args:
        timeout_s: After this time both are ended.

    Returns:
        None if both computed the sum, else what went wrong.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [_start(rank, port, timeout_s) for rank in range(RANKS)]
    try:
        outputs = [rank.communicate(timeout=timeout_s) for rank in ranks]
    except subprocess.TimeoutExpired:
        return f"the ranks did not meet within {timeout_s:.0f} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        if rank.returncode:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            return f"rank {number} ended with exit code {rank.returncode}: {last}"
    return None


def _start(rank: int, port: int, timeout_s: float) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(timeout=timeout_s)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
