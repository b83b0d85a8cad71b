"""How an error ends: in one readable message if it is the user's to mend, else with its traceback."""

from __future__ import annotations

import os
import sys
import traceback

from sb_lightning._messages import explain

__all__ = ["report"]

# The third part of every text that `sb_lightning._messages.explain` makes.
FIX = "To fix it, "


def report(error: Exception) -> int:
    """Print an error and return the exit code, 1.

    `SB_TRACEBACK=1` shows the traceback of every error.

    Args:
        error: What a command raised.
    """
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    prefix = "" if rank == "0" else f"[rank {rank}] "
    error = _known(error)
    is_for_user = FIX in str(error) or type(error).__name__ == "MisconfigurationException"
    if not is_for_user or os.environ.get("SB_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    if is_for_user:
        print(f"{prefix}sb: error: {error}", file=sys.stderr)
    return 1


def _known(error: Exception) -> Exception:
    """Say what to do about errors of other packages that a user can mend."""
    if type(error).__module__.startswith("wandb.") and "API key" in str(error):
        return RuntimeError(
            explain(
                "trainer.logger is WandbLogger",
                "wandb knows no API key",
                "run `wandb login`, or set trainer.logger.init_args.offline to true",
            )
        )
    if isinstance(error, OSError) and error.errno is not None and FIX not in str(error):
        return OSError(
            explain(
                str(error),
                "the file system refused it",
                "free space there or grant the right, or move what lies there (trainer.default_root_dir, "
                "data.cache_dir, --output)",
            )
        )
    return error
