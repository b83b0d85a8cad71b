"""The loggers that a configuration names: the default one, and the packages that others need."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from sb_lightning._messages import explain

__all__ = ["check_loggers", "csv_logger"]

# Any one of them will do; the first is the one to install.
PACKAGES = {
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
    "MLFlowLogger": ("mlflow", "mlflow_skinny"),
    "CometLogger": ("comet_ml",),
    "LitLogger": ("litlogger",),
}


def csv_logger(root: Any) -> dict[str, Any]:
    """Return the configuration of the default logger.

    Args:
        root: Folder of the runs; `runs` if None.
    """
    return {
        "class_path": f"{CSVLogger.__module__}.{CSVLogger.__qualname__}",
        "init_args": {
            "save_dir": str(root or "runs"),
            "name": "",
            "version": None,
            "prefix": "",
            "flush_logs_every_n_steps": 100,
        },
    }


def check_loggers(loggers: Any) -> None:
    """Refuse a logger whose package is missing, with the command that installs it.

    Args:
        loggers: The value of `trainer.logger`: one logger's configuration, several, or something else.

    Raises:
        RuntimeError: The package is not installed.
    """
    several = isinstance(loggers, Iterable) and not isinstance(loggers, (str, dict))
    for logger in loggers if several and not hasattr(loggers, "class_path") else [loggers]:
        path = logger.get("class_path", "") if hasattr(logger, "get") else ""
        name = str(path).rpartition(".")[2]
        packages = PACKAGES.get(name, ())
        if packages and not any(find_spec(package) for package in packages):
            raise RuntimeError(
                explain(
                    f"trainer.logger is {name}",
                    f"it needs the package {packages[0]}, which is not installed",
                    f"pip install {packages[0].replace('_', '-')}, or leave trainer.logger out to log to "
                    "metrics.csv",
                )
            )
