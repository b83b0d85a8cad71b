"""What the data module reads from a Trainer, and what it refuses in one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from sb_lightning._messages import explain

__all__ = ["check_accumulation", "check_trainer", "data_parallel", "max_batches", "sync_data_check"]


def data_parallel(trainer: Trainer | None) -> tuple[int, int]:
    """Return the number of data-parallel ranks and which one this is; ranks that share a batch count once."""
    if trainer is None:
        return 1, 0
    known = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    if known is None:
        return trainer.world_size, trainer.global_rank
    return int(known["num_replicas"]), int(known["rank"])


def max_batches(num_batches: int, limit: int | float) -> int | None:
    """Return how many micro-batches of an epoch the Trainer runs, counted as it does; None for all.

    Args:
        num_batches: Micro-batches of a whole epoch.
        limit: ``Trainer.limit_train_batches``: a number of micro-batches, or a share as a float;
            ``fast_dev_run`` sets it too.

    Example:
        >>> max_batches(10, 3), max_batches(10, 0.25), max_batches(10, 1.0), max_batches(10, 99)
        (3, 2, None, None)
    """
    count = limit if isinstance(limit, int) else int(num_batches * limit)
    return int(count) if 0 < count < num_batches else None


def check_trainer(trainer: Any) -> None:
    """Refuse what would undo the plan of the windows.

    Raises:
        MisconfigurationException: Names the setting to change.
    """
    check_accumulation(trainer)
    if trainer.overfit_batches > 0:
        raise MisconfigurationException(
            explain(
                f"Trainer(overfit_batches={trainer.overfit_batches})",
                "Lightning would replace the sampler that plans the windows",
                "use trainer.limit_train_batches",
            )
        )


def check_accumulation(trainer: Any) -> None:
    """Refuse a number of micro-batches per optimizer step that changes during the training.

    Raises:
        MisconfigurationException: Names the callback to remove.
    """
    # Of either package.
    if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
        raise MisconfigurationException(
            explain(
                "trainer.callbacks holds a GradientAccumulationScheduler",
                "windows are planned for one number of micro-batches per optimizer step",
                "remove it and set trainer.accumulate_grad_batches",
            )
        )


def sync_data_check(trainer: Trainer, data: dict[str, str]) -> None:
    """Compare what the ranks have opened: ranks with other data would plan other windows, unnoticed.

    Args:
        trainer: The Trainer whose ranks are compared.
        data: Names of the content; one small gather over all ranks.

    Raises:
        RuntimeError: On every rank, if any two differ.
    """
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    found: list[dict[str, str] | None] = [None] * trainer.world_size
    dist.all_gather_object(found, data)
    others = [rank for rank, name in enumerate(found) if name != found[0]]
    if others:
        raise RuntimeError(
            explain(
                f"rank {others[0]} has opened other data than rank 0 ({found[others[0]]} and {found[0]})",
                "the ranks would plan different windows",
                "make data.source, the tokenizer and its version the same on all machines, and build "
                "data.cache_dir again",
            )
        )
