"""Which sequences each rank trains on: window plans, the batch sampler, its loader, the ranks' meeting."""

from sb_lightning.balance.budget_store import BudgetStore
from sb_lightning.balance.cell import Cell
from sb_lightning.balance.lengths import sequence_lengths
from sb_lightning.balance.loader import BalancedDataLoader
from sb_lightning.balance.planner import plan_window
from sb_lightning.balance.sampler import SparsityAwareBatchSampler
from sb_lightning.balance.window import (
    WindowPlan,
    epoch_permutation,
    num_micro_batches,
)
from sb_lightning.balance.window_sync import Gathered, SyncPart, WindowSync

__all__ = [
    "BalancedDataLoader",
    "BudgetStore",
    "Cell",
    "Gathered",
    "SparsityAwareBatchSampler",
    "SyncPart",
    "WindowPlan",
    "WindowSync",
    "epoch_permutation",
    "num_micro_batches",
    "plan_window",
    "sequence_lengths",
]
