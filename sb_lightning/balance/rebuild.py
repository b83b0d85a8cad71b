"""What is said to a framework that would rebuild the batch sampler around a sampler of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sb_lightning._messages import explain

__all__ = ["refuse_rebuild"]


def refuse_rebuild(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that only Lightning passes, when it puts a sampler of its own into a batch sampler.

    It does so for what has a ``batch_size`` and a ``drop_last``. Its own message would only speak of
    unexpected arguments.

    Args:
        arguments: Keyword arguments of the batch sampler.

    Raises:
        TypeError: Names the settings that lead here.
    """
    if {"batch_size", "drop_last"} <= arguments.keys():
        raise TypeError(
            explain(
                "Lightning would rebuild the SparsityAwareBatchSampler around a sampler of its own",
                "the plan of the windows would be lost",
                "use sb_lightning.balance.BalancedDataLoader, or set Trainer(use_distributed_sampler=False) "
                "for a plain DataLoader; in place of Trainer(overfit_batches=...) set limit_train_batches; "
                "for Trainer.predict give a plain DataLoader without this sampler",
            )
        )
