"""Checkpoint files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from sb_lightning._messages import explain

__all__ = ["AtomicCheckpointIO"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its final place, then renames it; and says what is wrong with a bad file.

    Lightning stages local files in the system's temporary folder. Where that is another file system, the last
    step is a copy, and a full disk or a kill in its middle destroys the checkpoint that was there before.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.training import AtomicCheckpointIO
        trainer = Trainer(plugins=[AtomicCheckpointIO()])
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write the file whole or not at all.

        Args:
            checkpoint: What to save.
            path: The file; a place that is no local path is left to Lightning.
            storage_options: None; Lightning refuses others.

        Raises:
            OSError: The file cannot be written; what was there before is untouched.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except (OSError, RuntimeError) as error:
            raise OSError(
                explain(
                    f"the checkpoint {target} cannot be written ({error})",
                    "the file that was there before, if any, is untouched",
                    "free space there, or set trainer.default_root_dir to another place",
                )
            ) from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ValueError: The file is no checkpoint of Lightning's.
        """
        change = "pass the path of a whole checkpoint, such as last.ckpt in the checkpoints folder of a run"
        try:
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        except FileNotFoundError:
            raise
        except (
            OSError,
            RuntimeError,
            EOFError,
            KeyError,
            ValueError,
            TypeError,
            pickle.UnpicklingError,
        ) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise ValueError(explain(f"{path} cannot be read as a checkpoint", reason, change)) from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError(explain(f"{path} is no Lightning checkpoint", "it has no state_dict", change))
        return checkpoint
