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
        loader: A DataLoader with a batch size, usually with `shuffle=True`. Where it has a
            `DistributedSampler`, the plan takes over its seed.
        lengths: Tokens of each sample: a list or array, the name of a column of the loader's data set, or a
            function of a sample, which then reads all of them.
        trainer: The Trainer that will draw from it: `self.trainer`.
        add_plan: Add its place in the plan to each batch, see `BalancedDataLoader`.
        **options: Arguments of `SparsityAwareBatchSampler`, in place of what is found here: `latency`,
            `policy`, `max_tokens` and so on.

    Raises:
        ValueError: The loader chooses samples in a way that a plan would undo.
        TypeError: It is no DataLoader, its data set cannot be indexed, or there is no Trainer.
        MisconfigurationException: The Trainer would undo the plan.

    Example::

        def train_dataloader(self):
            loader = DataLoader(self.documents, batch_size=1, shuffle=True, collate_fn=pad, num_workers=2)
            return balance_loader(loader, self.lengths, trainer=self.trainer, latency="table.json")
    """
    from sb_lightning.attention.huggingface import sparse_bases

    if lengths is None:
        raise TypeError(
            explain(
                "lengths of balance_loader is None",
                "samples are dealt by how many tokens each has",
                "pass as lengths a list with the tokens of each sample, the name of a column of the "
                "data set, or a function of a sample",
            )
        )
    batches = _batches(loader)
    if not hasattr(trainer, "accumulate_grad_batches"):
        raise TypeError(
            explain(
                f"trainer is {'None' if trainer is None else f'a {type(trainer).__name__}'}",
                "ranks and the micro-batches of an optimizer step are read from it",
                "pass trainer=self.trainer in train_dataloader()",
            )
        )
    check_trainer(trainer)
    ranks, rank = data_parallel(trainer)
    chosen = _chosen(loader, batches, ranks, rank)
    found: dict[str, Any] = {
        "ranks": ranks,
        "rank": rank,
        "accumulate": trainer.accumulate_grad_batches,
        "sequences_per_micro_batch": batches.batch_size,
        "equal_counts": True,
        "tail": "drop" if batches.drop_last or getattr(chosen, "drop_last", False) else "partial",
        # Without one of its own, that of the sampler which Lightning would have made.
        "seed": int(getattr(chosen, "seed", os.environ.get("PL_GLOBAL_SEED", 0))),
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
    if sampler.sequences_per_micro_batch > 1:
        _warn_of_large_batches(sampler, add_plan)
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
        f"balance_loader got no latency table (latency='table.json'): it counts the operations of "
        f"{type(model).__name__}. sb_lightning.latency.profile measures one."
    )
    return cost


def _warn_of_large_batches(sampler: SparsityAwareBatchSampler, add_plan: bool) -> None:
    """Say what holds of several samples per micro-batch, see docs/sampler.md; who pads cannot be seen."""
    said = ""
    if sampler.policy != "length":
        said += (
            " If your collate_fn pads to the longest of them, the padding is not in the planned costs: pack, "
            "or set batch_size=1 and accumulate more, or pass policy='length'."
        )
    if not add_plan:
        said += (
            " A loss that is a mean per micro-batch weighs samples unevenly: pass add_plan=True and scale "
            "the sum of token losses by sb_lightning.training.window_loss_scale."
        )
    if said:
        rank_zero_warn(
            f"balance_loader: micro-batches have {sampler.sequences_per_micro_batch} samples.{said} "
            "See docs/sampler.md."
        )


def _batches(loader: Any) -> BatchSampler:
    """Return what makes the batches of a loader; refuse one whose batches a plan would undo."""
    is_loader = isinstance(loader, DataLoader)
    is_stream = is_loader and isinstance(loader.dataset, IterableDataset)
    if not is_loader or is_stream or not hasattr(loader.dataset, "__len__"):
        over = "an IterableDataset" if is_stream else "a data set without __len__"
        raise TypeError(
            explain(
                f"loader is a {type(loader).__name__}" + (f" over {over}" if is_loader else ""),
                "samples are chosen by their number, and windows planned from the lengths of all of them",
                "pass a torch.utils.data.DataLoader over a data set with __len__ and __getitem__",
            )
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            explain(
                f"the loader's samples are chosen by a {type(loader.sampler).__name__} and a "
                f"{type(loader.batch_sampler).__name__}",
                "the plan would take their place",
                "pass a loader with batch_size and shuffle, or make a SparsityAwareBatchSampler yourself",
            )
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            explain(
                f"loader is a {type(loader).__name__}, which has its own __iter__",
                "batches come from a BalancedDataLoader instead, which would not call it",
                "pass a torch.utils.data.DataLoader, and do in its collate_fn what __iter__ does",
            )
        )
    return loader.batch_sampler


def _chosen(loader: Any, batches: BatchSampler, ranks: int, rank: int) -> Any:
    """Return what chooses the samples of a loader; refuse one whose choice a plan would undo."""
    sampler: Any = batches.sampler
    kind = type(sampler)
    if kind not in (SequentialSampler, RandomSampler, DistributedSampler):
        raise ValueError(
            explain(
                f"the loader's sampler is a {kind.__name__}",
                "the plan would take its place",
                "pass a loader with shuffle, or make a SparsityAwareBatchSampler yourself",
            )
        )
    count = len(loader.dataset)
    found = len(sampler.dataset if kind is DistributedSampler else sampler)
    if getattr(sampler, "replacement", False) or found != count:
        how = "with replacement=True" if getattr(sampler, "replacement", False) else f"of {found} samples"
        raise ValueError(
            explain(
                f"the loader's sampler is a {kind.__name__} {how}, and its data set has {count}",
                "a plan deals every sample of the data set once in each epoch",
                "pass a loader with shuffle=True; a torch.utils.data.Subset leaves samples out, and "
                "trainer.limit_train_batches shortens an epoch",
            )
        )
    if kind is DistributedSampler and not sampler.shuffle:
        raise ValueError(
            explain(
                "the loader's sampler is a DistributedSampler with shuffle=False",
                "the balanced loader shuffles, so that any sequences may meet in a window",
                "pass shuffle=True to the DistributedSampler, or a loader with shuffle=True in its place",
            )
        )
    if kind is DistributedSampler and (sampler.num_replicas, sampler.rank) != (ranks, rank):
        raise ValueError(
            explain(
                f"the loader's DistributedSampler is that of rank {sampler.rank} of {sampler.num_replicas}, "
                f"and this is data-parallel rank {rank} of {ranks}",
                "a plan is made for the Trainer's ranks",
                f"pass num_replicas={ranks} and rank={rank} to it, or a loader with shuffle=True",
            )
        )
    if kind is SequentialSampler:
        rank_zero_warn("balance_loader: the loader does not shuffle, and the balanced one does, by its seed.")
    return sampler
