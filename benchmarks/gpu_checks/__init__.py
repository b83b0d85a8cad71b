"""The checks of benchmarks/gpu_check.py; each module enters its own into `CHECKS`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The package of this checkout, and what its tests share.
sys.path[:0] = [str(ROOT / folder) for folder in (".", "tests/attention", "tests/cuda")]

from gpu_checks import against_cpu, graphs, ops, tools  # noqa: E402
from gpu_checks.machine import CHECKS, LeftOut, Machine  # noqa: E402

__all__ = ["CHECKS", "LeftOut", "Machine", "against_cpu", "graphs", "ops", "tools"]
