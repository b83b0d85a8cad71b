"""Which sequences each rank trains on: plans of windows, the batch sampler and its loader."""

from sb_lightning.balance.loader import BalancedDataLoader
from sb_lightning.balance.sampler import Cell, SparsityAwareBatchSampler
from sb_lightning.balance.window import (
    WindowPlan,
    epoch_permutation,
    num_micro_batches,
    plan_random_window,
    window_members,
)

__all__ = [
    "BalancedDataLoader",
    "Cell",
    "SparsityAwareBatchSampler",
    "WindowPlan",
    "epoch_permutation",
    "num_micro_batches",
    "plan_random_window",
    "window_members",
]
