"""Which planner runs: the C++ module `_core`, or its twin in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sb_lightning.latency.engine import ENGINE

__all__ = ["lower_bound_us", "plan_cells"]

if TYPE_CHECKING:
    from sb_lightning.balance.reference import lower_bound_us, plan_cells
elif ENGINE.available:
    from sb_lightning._core import lower_bound_us, plan_cells
else:
    from sb_lightning.balance.reference import lower_bound_us, plan_cells
