"""The process of one rank: its threads, and what keeps it from outliving rank zero.

Imports neither torch nor Lightning at its top: a rank must leave Ctrl-C to rank zero from its first moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading

from sb_lightning._messages import explain

__all__ = ["follow_rank_zero", "set_threads"]

LAUNCHER = "SB_LAUNCHER_PID"
PR_SET_PDEATHSIG = 1
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def follow_rank_zero() -> bool:
    """Tell apart the rank that launches the others from a rank that it launched.

    Lightning starts the other ranks of a machine as the same command. Such a rank leaves Ctrl-C, which a
    terminal sends to all of them, to rank zero (see `LastCheckpoint`), and on Linux it ends when rank zero
    ends, however that happens.

    Returns:
        Whether this process was started by another `sb`.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher != str(os.getppid()):
        if launcher != str(os.getpid()) and "LOCAL_RANK" in os.environ and not _is_alive(launcher):
            # A rank whose launcher ended while this process started: nobody would ever join it.
            os._exit(1)
        os.environ[LAUNCHER] = str(os.getpid())
        return False
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher != str(os.getppid()):
        # It ended before the line above.
        os._exit(1)
    return True


def _is_alive(pid: str | None) -> bool:
    """Return whether a process runs; True where none is named."""
    if pid is None or not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def set_threads(threads: int | None) -> None:
    """Set the threads of this rank and of the ranks it will launch.

    torch is imported by now and has read its environment, hence the call; the ranks launched later read the
    environment, and Lightning, which would otherwise divide the cores among the ranks, respects it.

    Args:
        threads: Threads per rank; None leaves the choice to the environment or to Lightning.

    Raises:
        ValueError: If it is below 1.
    """
    if threads is None:
        return
    import torch
    from lightning.pytorch.utilities import rank_zero_warn

    if threads < 1:
        raise ValueError(
            explain(
                f"threads_per_rank is {threads}",
                "a rank needs a thread",
                "set threads_per_rank to 1 or more, or null",
            )
        )
    cores = os.cpu_count() or 1
    if threads > 16 * cores:
        raise ValueError(
            explain(
                f"threads_per_rank is {threads} on {cores} cores",
                "the threads would only wait for each other",
                "set threads_per_rank to at most the number of cores over the number of ranks",
            )
        )
    for name in THREAD_VARIABLES:
        found = os.environ.get(name)
        if found not in (None, str(threads)):
            rank_zero_warn(f"threads_per_rank={threads} replaces {name}={found} of the environment.")
        os.environ[name] = str(threads)
    torch.set_num_threads(threads)
