"""The states from which arms go on: written whole, and read before any other rank is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sb_lightning._messages import explain
from sb_lightning.compare.folder import ANEW, ComparisonFolder, writing
from sb_lightning.compare.results import Round
from sb_lightning.training import AtomicCheckpointIO

__all__ = ["StateIO", "check_state_files"]


class StateIO(AtomicCheckpointIO):
    """Says of a state that cannot be written what helps a comparison.

    Args:
        folder: Of the comparison.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the state whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        except OSError as error:
            with writing(self.folder):
                # The reason itself, not the advice for a checkpoint of a training.
                raise OSError(f"{path}: {error.__cause__ or error}") from error


def check_state_files(folder: ComparisonFolder, rounds: list[Round]) -> None:
    """Read the states after the last round; for rank zero, which then says once what is wrong.

    Args:
        folder: Of the comparison.
        rounds: Those that are finished.

    Raises:
        ValueError: A state is gone, damaged or of another round.
    """
    folder.check_states(rounds)
    for name, windows in rounds[-1].windows.items() if rounds else ():
        file = folder.state(rounds[-1].number, name)
        # Some strategies leave a folder of many files.
        if file.is_dir():
            continue
        wanted = windows[-1].number + 1
        found = _window_of(file)
        if found != wanted:
            raise ValueError(
                explain(
                    f"{file} has trained {found} windows, and {name} goes on at window {wanted}",
                    "the state belongs to another round",
                    ANEW,
                )
            )


def _window_of(file: Path) -> int:
    """Return how many windows the state of an arm has trained."""
    try:
        # As Lightning reads it afterwards; without copying the weights.
        checkpoint = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        return int(checkpoint["global_step"])
    except Exception as error:
        # Whatever bytes can raise that are read as a pickle.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ComparisonFolder.damaged(file, reason) from error
