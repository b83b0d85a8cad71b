"""Which sequences each rank trains on: window plans, the batch sampler, its loader, the ranks' meeting."""

from sb_lightning.balance.loader import BalancedDataLoader
from sb_lightning.balance.sampler import Cell, SparsityAwareBatchSampler
from sb_lightning.balance.window import (
    WindowPlan,
    epoch_permutation,
    num_micro_batches,
    plan_random_window,
    window_members,
)
from sb_lightning.balance.window_sync import Gathered, SyncPart, WindowSync

__all__ = [
    "BalancedDataLoader",
    "Cell",
    "Gathered",
    "SparsityAwareBatchSampler",
    "SyncPart",
    "WindowPlan",
    "WindowSync",
    "epoch_permutation",
    "num_micro_batches",
    "plan_random_window",
    "window_members",
]
