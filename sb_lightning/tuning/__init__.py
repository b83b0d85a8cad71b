"""Which attention budget each sequence gets: coverage curves, the choice within a time, and its anchor."""

from sb_lightning.tuning.anchors import anchor_latency
from sb_lightning.tuning.budgets import choose_budgets
from sb_lightning.tuning.coverage import coverage_curve, sampled_rows
from sb_lightning.tuning.target import SparseTarget

__all__ = ["SparseTarget", "anchor_latency", "choose_budgets", "coverage_curve", "sampled_rows"]
