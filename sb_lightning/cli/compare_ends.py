"""How `sb compare` ends before its time: one message, on rank zero, and what is kept."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path

from sb_lightning._messages import explain
from sb_lightning.cli.compare_progress import counted
from sb_lightning.cli.errors import report
from sb_lightning.compare.folder import ComparisonFolder

__all__ = ["Ending"]

# What gloo, NCCL and torch say where another rank has left; torch raises plain RuntimeErrors for gloo.
LOST = re.compile(
    r"gloo|nccl|process ?group|connection (closed|reset|refused)|broken pipe|store.*(closed|timeout)", re.I
)
# Rank zero mostly notices by itself, where it waits for the rank that is gone.
GRACE_S = 5.0


class Ending:
    """Says on rank zero why a comparison has ended; a rank that rank zero has started leaves it to that.

    Args:
        output: Folder of the comparison.
        is_launched: Whether rank zero has started this process.
    """

    def __init__(self, output: Path, *, is_launched: bool) -> None:
        self.output = output
        self.is_launched = is_launched
        self._once = threading.Lock()

    @property
    def kept(self) -> str:
        """What of the comparison is left, as the end of a sentence."""
        found = ComparisonFolder(self.output).num_rounds
        if not found:
            return "no round is finished yet; the same command begins anew."
        are = "is" if found == 1 else "are"
        return f"{counted(found, 'round')} {are} kept in {self.output}; the same command goes on from there."

    def interrupted(self, why: str = "interrupted") -> None:
        """Say that somebody has ended it."""
        if self._may_speak():
            print(f"sb: {why}: {self.kept}", file=sys.stderr, flush=True)

    def error(self, error: Exception) -> int:
        """Print an error and return the exit code, 1."""
        if _is_about_another_rank(error):
            if not self._may_speak():
                return 1
            told = self._lost()
            told.__cause__ = error
            return report(told)
        # Its own fault, which rank zero cannot know.
        self._may_speak()
        return report(error)

    def rank_lost(self) -> None:
        """Say so where rank zero does not notice by itself; runs in a thread, before the process is ended."""
        time.sleep(GRACE_S)
        if self._may_speak():
            report(self._lost())
        sys.stderr.flush()

    def _lost(self) -> RuntimeError:
        return RuntimeError(
            explain(
                "another rank has ended",
                f"all ranks train a window together; {self.kept.rstrip('.')}",
                "see what that rank has printed; if nothing, the system may have ended it for want of memory "
                "(dmesg). Then call the same command again",
            )
        )

    def _may_speak(self) -> bool:
        """Return whether nothing has been said yet, and is this rank's to say."""
        is_first = self._once.acquire(blocking=False)
        return is_first and (not self.is_launched or os.environ.get("SB_TRACEBACK", "0") not in ("", "0"))


def _is_about_another_rank(error: BaseException | None) -> bool:
    """Return whether an error only says that another rank does not answer any more."""
    while error is not None and "To fix it, " not in str(error):
        is_own = "address already in use" in str(error).lower()
        if isinstance(error, RuntimeError) and not is_own and LOST.search(str(error)):
            return True
        error = error.__cause__
    return False
