"""Measures training steps of a model on this machine, and makes a latency table of them."""

from sb_lightning.latency.profiler.conditions import Conditions
from sb_lightning.latency.profiler.result import check_output
from sb_lightning.latency.profiler.run import profile, run_profile
from sb_lightning.latency.profiler.spec import ModelSpec

__all__ = ["Conditions", "ModelSpec", "check_output", "profile", "run_profile"]
