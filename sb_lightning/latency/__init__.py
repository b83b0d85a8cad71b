"""What a sequence costs at a budget: a measured table, one from counted operations, and micro-batches."""

from typing import TYPE_CHECKING, Any

from sb_lightning.latency.analytic import AnalyticCost
from sb_lightning.latency.cost_model import CostModel
from sb_lightning.latency.engine import ENGINE
from sb_lightning.latency.fingerprint import Fingerprint, ModelShape, current_fingerprint
from sb_lightning.latency.lattice import Measurements
from sb_lightning.latency.table import LatencyModel, LatencyTable

if TYPE_CHECKING:
    from sb_lightning.latency.profiler import profile

__all__ = [
    "ENGINE",
    "AnalyticCost",
    "CostModel",
    "Fingerprint",
    "LatencyModel",
    "LatencyTable",
    "Measurements",
    "ModelShape",
    "current_fingerprint",
    "profile",
]


def __getattr__(name: str) -> Any:
    # Measuring needs torch and transformers; looking times up needs neither.
    if name == "profile":
        from sb_lightning.latency.profiler import profile

        return profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
