"""Lightning callbacks; import them from `sb_lightning.callbacks`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sb_lightning.callbacks.balanced_sampling import BalancedSampling
    from sb_lightning.callbacks.checkpoint import LastCheckpoint
    from sb_lightning.callbacks.imbalance_monitor import ImbalanceMonitor
    from sb_lightning.callbacks.model_line import ModelLine
    from sb_lightning.callbacks.predictions import PredictionWriter
    from sb_lightning.callbacks.progress import TrainingProgress
    from sb_lightning.callbacks.sparse_balance import SparseBalanceCallback
    from sb_lightning.callbacks.summary import RunSummary
    from sb_lightning.callbacks.window_meetings import WindowMeetings

__all__ = [
    "BalancedSampling",
    "ImbalanceMonitor",
    "LastCheckpoint",
    "ModelLine",
    "PredictionWriter",
    "RunSummary",
    "SparseBalanceCallback",
    "TrainingProgress",
    "WindowMeetings",
]

_HOME = {
    "BalancedSampling": "balanced_sampling",
    "ImbalanceMonitor": "imbalance_monitor",
    "LastCheckpoint": "checkpoint",
    "ModelLine": "model_line",
    "PredictionWriter": "predictions",
    "RunSummary": "summary",
    "SparseBalanceCallback": "sparse_balance",
    "TrainingProgress": "progress",
    "WindowMeetings": "window_meetings",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"sb_lightning.callbacks.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
