"""Where a run keeps its files, and how they are written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import Logger

__all__ = ["files_of_run", "log_place", "run_directory", "write_json"]


def run_directory(trainer: Trainer) -> Path:
    """Return the folder of this run: the one that holds its `checkpoints`, for any logger.

    `trainer.log_dir` is a broadcast, which must not be called on one rank only, and for some loggers it is
    the folder of all runs; this is neither. Only rank zero's answer counts: other ranks may see another
    version number.

    Args:
        trainer: A Trainer that has been set up.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    own = getattr(logger, "log_dir", None)
    if own is not None:
        return Path(own)
    version = logger.version
    name = version if isinstance(version, str) else f"version_{version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name or ""), name)


def log_place(logger: Logger) -> str | None:
    """Return where a logger's records are: a folder, or the address of a service; None if it does not say.

    Args:
        logger: A logger in use, on rank zero.
    """
    # The folder of all runs comes last: some loggers keep a run elsewhere and know it by its experiment.
    experiment = None if getattr(logger, "log_dir", None) else getattr(logger, "experiment", None)
    for owner, name in ((logger, "log_dir"), (experiment, "url"), (experiment, "dir"), (logger, "save_dir")):
        place = getattr(owner, name, None)
        if isinstance(place, (str, os.PathLike)) and str(place):
            return str(place) if "://" in str(place) else os.path.normpath(place)
    return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all, making its folder.

    Args:
        path: The file.
        content: What json can write; a number that is not finite is an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def files_of_run(trainer: Trainer, directory: Path | None) -> dict[str, Any]:
    """Return where a run has put what, as JSON can write it.

    Args:
        trainer: A Trainer that has been set up.
        directory: The run's folder; None if nothing is written there.
    """
    checkpoints: list[str] = []
    for callback in trainer.checkpoint_callbacks:
        for path in (getattr(callback, "best_model_path", ""), getattr(callback, "last_model_path", "")):
            name = os.path.normpath(path) if path else ""
            if name and name not in checkpoints and Path(name).exists():
                checkpoints.append(name)
    config = directory and directory / "config.yaml"
    return {
        "checkpoints": checkpoints,
        "logs": [place for logger in trainer.loggers if (place := log_place(logger))] if directory else [],
        "config": str(config) if config and config.exists() else None,
        "summary": str(directory / "summary.json") if directory else None,
    }
