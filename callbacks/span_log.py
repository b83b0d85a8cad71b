"""A rank's span file: where it lies, and what happens when it cannot be written."""

from __future__ import annotations

import json
import socket
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sb_lightning.callbacks.run_files import run_directory
from sb_lightning.tracking.span_file import SpanWriter, span_path
from sb_lightning.tracking.spans import LANES

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from sb_lightning.balance.window_sync import WindowSync

__all__ = ["SpanLog"]


class SpanLog:
    """Writes lines as long as that works: a full disk must not end a training that needs none.

    Args:
        folder: Folder of the run.
        header: First line, without the time at which the run starts.
    """

    def __init__(self, folder: str, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self._path = span_path(Path(folder), header["rank"])
        self._header = header
        self._writer: SpanWriter | None = None

    @classmethod
    def sync_folder(cls, trainer: Trainer, sync: WindowSync) -> SpanLog:
        """Agree with the other ranks on a folder; all must call this.

        Args:
            trainer: A Trainer that has been set up.
            sync: Joins the ranks.
        """
        # Only rank zero's folder counts: the others may see another version number.
        mine = [str(run_directory(trainer)) if sync.rank == 0 else "", uuid.uuid4().hex[:8]]
        folder, session = json.loads(sync.gather_texts(json.dumps(mine))[0])
        header = {
            "session": session,
            "rank": sync.rank,
            "ranks": sync.ranks,
            "host": socket.gethostname(),
            "device": str(trainer.strategy.root_device),
            "lanes": LANES,
        }
        return cls(folder, header)

    def start(self) -> None:
        """Open the file; called when all ranks have passed the barrier."""
        try:
            self._writer = SpanWriter(self._path, {**self._header, "start_unix_s": time.time()})
        except OSError as error:
            self._give_up(error)

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines."""
        if self._writer is not None:
            try:
                self._writer.write(lines)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        warnings.warn(
            f"{self._path}: {error.strerror or error}: no more spans are written there.", stacklevel=2
        )
