"""From a project's own DataLoader to a balanced one, which fits the Trainer that draws from it."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from sb_lightning._messages import explain
from sb_lightning.balance import BalancedDataLoader, SparsityAwareBatchSampler
from sb_lightning.balance.lengths import LengthSource
from sb_lightning.data.trainer import check_trainer, data_parallel
from sb_lightning.latency.analytic import AnalyticCost
from sb_lightning.latency.table import LatencyModel

__all__ = ["balance_loader"]

T = TypeVar("T")
# Of a model with dense attention: its times do not depend on it.
ANY_BLOCK_SIZE = 128
KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
"""What a DataLoader does besides choosing samples."""


def balance_loader(
    loader: DataLoader[T], lengths: LengthSource, *, trainer: Any, add_plan: bool = False, **options: Any
) -> BalancedDataLoader:
    """Deal the samples of a training DataLoader so that all ranks have equally much to do.

    For `train_dataloader` of a project with its own data. Data set, collate function, workers and batch
    size stay those of the loader; what the plan and the Trainer must agree on is read from the Trainer:
    ranks, `accumulate_grad_batches`, the budget where the model is sparse. An optimizer step has the samples
    that it would have had with the `DistributedSampler` that Lightning makes for several ranks, in batches of
    equal size (`equal_counts`): with a batch size of 1, a loss that is a mean per micro-batch gives the same
    step as before, up to rounding. docs/sampler.md says what holds of others.

    Args:
        loader: A DataLoader with a batch size, usually with `shuffle=True`.
        lengths: Tokens of each sample: a list or array, the name of a column of the loader's data set, or a
            function of a sample, which then reads all of them.
        trainer: The Trainer that will draw from it: `self.trainer`.
        add_plan: Add its place in the plan to each batch, see `BalancedDataLoader`.
        **options: Arguments of `SparsityAwareBatchSampler`, in place of what is found here: `latency`,
            `policy`, `max_tokens` and so on.

    Raises:
        ValueError: The loader chooses samples in a way that a plan would undo.
        TypeError: It is no DataLoader, or its data set cannot be indexed.
        MisconfigurationException: The Trainer would undo the plan.

    Example::

        def train_dataloader(self):
            loader = DataLoader(self.documents, batch_size=1, shuffle=True, collate_fn=pad, num_workers=2)
            return balance_loader(loader, self.lengths, trainer=self.trainer, latency="table.json")
    """
    from sb_lightning.attention.huggingface import sparse_bases

    _check(loader)
    check_trainer(trainer)
    ranks, rank = data_parallel(trainer)
    found: dict[str, Any] = {
        "ranks": ranks,
        "rank": rank,
        "accumulate": trainer.accumulate_grad_batches,
        "sequences_per_micro_batch": loader.batch_size,
        "equal_counts": True,
        "tail": "drop" if loader.drop_last else "partial",
        # That of the sampler which Lightning would have made.
        "seed": int(os.environ.get("PL_GLOBAL_SEED", 0)),
    }
    module = getattr(trainer, "lightning_module", None)
    bases = [] if module is None else sparse_bases(module)
    if bases:
        found["budget"] = bases[0].sb_settings.budget
    if options.get("latency") is None and options.get("policy", "latency") == "latency":
        found["latency"] = _counted_operations(module)
        options.pop("latency", None)
    if callable(lengths) or isinstance(lengths, str):
        found["dataset"] = loader.dataset
    sampler = SparsityAwareBatchSampler(lengths, **{**found, **options})
    if len(sampler.lengths) != len(loader.dataset):  # type: ignore[arg-type]
        raise ValueError(
            explain(
                f"{len(sampler.lengths)} lengths, and {len(loader.dataset)} samples in the loader's data set",  # type: ignore[arg-type]
                "samples are dealt by their lengths",
                "pass lengths with one entry per sample, in their order",
            )
        )
    kept = {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}
    return BalancedDataLoader(loader.dataset, batch_sampler=sampler, add_plan=add_plan, **kept)


def _counted_operations(module: Any) -> LatencyModel | None:
    """Return the times of a module's transformers model by its sizes; None where there is no such model."""
    from transformers import PreTrainedModel

    from sb_lightning.attention.huggingface import sparse_bases

    parts = [] if module is None else list(module.modules())
    model: Any = next((part for part in parts if isinstance(part, PreTrainedModel)), None)
    if model is None:
        return None
    settings = next((base.sb_settings for base in sparse_bases(model)), None)
    try:
        cost = AnalyticCost.from_config(
            model.config.get_text_config(),
            block_size=ANY_BLOCK_SIZE if settings is None else settings.block_size,
            dense_layers=() if settings is None else settings.dense_layers,
        )
    except AttributeError:
        # A configuration with other names.
        return None
    rank_zero_warn(
        f"balance_loader got no latency table: it goes by the counted operations of {type(model).__name__}. "
        "Pass latency='table.json'; sb_lightning.latency.profile(model, output='table.json') measures one."
    )
    return cost


def _check(loader: Any) -> None:
    """Refuse a loader whose choice of samples a plan would undo."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            explain(
                f"loader is a {type(loader).__name__}"
                + (" over an IterableDataset" if isinstance(loader, DataLoader) else ""),
                "samples are chosen by their number, and windows planned from the lengths of all of them",
                "pass a torch.utils.data.DataLoader over a data set with __len__ and __getitem__",
            )
        )
    sampler: Any = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler or getattr(sampler, "replacement", False):
        raise ValueError(
            explain(
                f"the loader's samples are chosen by a {type(sampler).__name__} and a "
                f"{type(loader.batch_sampler).__name__}",
                "the plan would take their place",
                "pass a loader with batch_size and shuffle, or make a SparsityAwareBatchSampler yourself",
            )
        )
    if type(sampler) is SequentialSampler:
        rank_zero_warn("balance_loader: the loader does not shuffle, and the balanced one does, by its seed.")
    elif type(sampler) not in (RandomSampler, DistributedSampler):
        raise ValueError(
            explain(
                f"the loader's sampler is a {type(sampler).__name__}",
                "the plan would take its place",
                "pass a loader with shuffle, or make a SparsityAwareBatchSampler yourself",
            )
        )
