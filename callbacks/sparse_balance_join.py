"""What `SparseBalanceCallback` finds in a run: sparse models, the sampler, the latency table, the monitor."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

from sb_lightning._messages import explain
from sb_lightning.attention.huggingface import sparse_bases
from sb_lightning.balance import SparsityAwareBatchSampler
from sb_lightning.balance.costs import latency_model
from sb_lightning.callbacks.imbalance_monitor import ImbalanceMonitor
from sb_lightning.data.position import training_loaders
from sb_lightning.data.trainer import data_parallel
from sb_lightning.latency.analytic import AnalyticCost
from sb_lightning.latency.fingerprint import Difference, Fingerprint, ModelShape, processor_name
from sb_lightning.latency.table import LatencyModel, LatencyTable

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["find_bases", "find_monitor", "find_sampler", "find_table"]


def find_bases(pl_module: LightningModule) -> list[Any]:
    """Return the sparse base models of a module.

    Raises:
        MisconfigurationException: There is none, or they differ.
    """
    bases = sparse_bases(pl_module)
    if not bases:
        raise MisconfigurationException(
            explain(
                f"{type(pl_module).__name__} holds no model with sparse attention",
                "SparseBalanceCallback tunes the budget of MoBA attention, and dense attention has none",
                "call sb_lightning.attention.sparsify(model, block_size=..., budget=...) where the model is "
                "made, set model.attention in the configuration, or remove the callback",
            )
        )
    found = {(base.sb_settings.block_size, base.sb_settings.budget) for base in bases}
    if len(found) > 1:
        raise MisconfigurationException(
            explain(
                f"{type(pl_module).__name__} holds sparse models of different (block_size, budget): "
                + ", ".join(map(str, sorted(found))),
                "one table of times and one budget k0 serve all forwards",
                "call sparsify() with the same block_size and budget for all of them",
            )
        )
    return bases


def find_sampler(trainer: Trainer, pl_module: LightningModule) -> SparsityAwareBatchSampler | None:
    """Return the sampler that plans the windows of a training, if one does.

    Raises:
        MisconfigurationException: Its windows are not the Trainer's.
    """
    named = [getattr(callback, "sampler", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    shown = [getattr(loader, "batch_sampler", None) for loader in training_loaders(trainer)]
    for sampler in [*shown, *named]:
        if not isinstance(sampler, SparsityAwareBatchSampler):
            continue
        ranks, rank = data_parallel(trainer)
        accumulate = trainer.accumulate_grad_batches
        if (sampler.ranks, sampler.rank) != (ranks, rank):
            raise MisconfigurationException(
                explain(
                    f"the SparsityAwareBatchSampler was made for rank {sampler.rank} of {sampler.ranks}, and "
                    f"this is data-parallel rank {rank} of {ranks}",
                    "its plan is another rank's",
                    f"make it in train_dataloader(), where the ranks are known, or pass ranks={ranks} and "
                    "rank= to it",
                )
            )
        if pl_module.automatic_optimization and sampler.accumulate != accumulate:
            raise MisconfigurationException(
                explain(
                    f"SparsityAwareBatchSampler(accumulate={sampler.accumulate}) and "
                    f"Trainer(accumulate_grad_batches={accumulate})",
                    "a planned window would not be one optimizer step",
                    f"pass accumulate={accumulate} to the sampler, or change accumulate_grad_batches",
                )
            )
        return sampler
    return None


def find_table(
    given: LatencyModel | str | Path | None,
    sampler: SparsityAwareBatchSampler | None,
    base: Any,
    trainer: Trainer,
) -> LatencyModel:
    """Return what predicts times: what is given, the sampler's table, or counted operations of the model.

    A table that was given is compared with the run, and the sampler's with the model: one warning names what
    differs.

    Raises:
        ValueError: There is no such file, or the table is of another block size.
        TypeError: What was given is no table.
    """
    block_size = int(base.sb_settings.block_size)
    if given is not None:
        table = _load(given)
        if table.block_size != block_size:
            raise ValueError(
                explain(
                    f"table has block_size {table.block_size}, and the model's attention {block_size}",
                    "a budget counts blocks, so its times would be those of other budgets",
                    "measure a table for this model with `sb profile`, or call sparsify() with the table's "
                    "block_size",
                )
            )
        shared = None if sampler is None else sampler.costs.table
        if shared is None or shared.measurements != table.measurements:
            _warn_of_differences(table, base, trainer)
            return table
        if not _is_compared(shared):
            _warn_of_differences(table, base, trainer)
        # One object: what the sampler learns of it holds for both.
        return shared
    if sampler is not None and sampler.costs.table.block_size == block_size:
        if not sampler.costs.is_generic and not _is_compared(sampler.costs.table):
            _warn_of_differences(sampler.costs.table, base, None)
        return sampler.costs.table
    rank_zero_warn(
        "SparseBalanceCallback got no latency table"
        + (" that fits the model" if sampler is not None else "")
        + ": it goes by counted operations, which say less about the time of a step. Pass "
        "table='table.json'; `sb profile` measures one, or sb_lightning.latency.profile(model, "
        "output='table.json')."
    )
    shape = _shape_of(base)
    if shape is None:
        raise ValueError(
            explain(
                f"the configuration of {type(base).__name__} does not tell the sizes of its layers",
                "without a latency table times are counted from them",
                "pass table='table.json'; `sb profile` measures one, or sb_lightning.latency.profile(model, "
                "output='table.json')",
            )
        )
    return AnalyticCost(shape)


def find_monitor(trainer: Trainer) -> ImbalanceMonitor:
    """Return the callback that measures a training.

    Raises:
        MisconfigurationException: There is none.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, ImbalanceMonitor):
            return callback
    raise MisconfigurationException(
        explain(
            "recalibrate is true, and the Trainer has no ImbalanceMonitor",
            "nothing measures the times",
            "add sb_lightning.callbacks.ImbalanceMonitor() to its callbacks, or set recalibrate: false",
        )
    )


def _load(given: LatencyModel | str | Path) -> LatencyModel:
    if isinstance(given, (str, Path)) and not Path(given).is_file():
        raise ValueError(
            explain(
                f"table is '{given}'",
                "there is no such file",
                "write one with `sb profile --output`, or pass an AnalyticCost",
            )
        )
    return latency_model(given)


def _shape_of(base: Any) -> ModelShape | None:
    """Return the sizes of a sparse base model; None where its configuration has other names for them."""
    sparse = base.sb_settings
    try:
        return ModelShape.from_config(
            base.config.get_text_config(), block_size=sparse.block_size, dense_layers=sparse.dense_layers
        )
    except AttributeError:
        return None


def _warn_of_differences(table: LatencyModel, base: Any, trainer: Trainer | None) -> None:
    """Name what a table and this run differ in: the model, and given a Trainer also the device."""
    measured: ModelShape | None = getattr(table, "fingerprint", None) or getattr(table, "shape", None)
    shape = _shape_of(base)
    if measured is None or shape is None:
        return
    pairs = {
        field.name: (getattr(measured, field.name), getattr(shape, field.name)) for field in fields(shape)
    }
    if isinstance(measured, Fingerprint) and trainer is not None:
        device = trainer.strategy.root_device
        pairs["device"] = measured.device, device.type
        if device.type == "cpu":
            pairs["processor"] = measured.processor, processor_name()
    different = [str(Difference(name, *pair)) for name, pair in pairs.items() if pair[0] != pair[1]]
    if different:
        rank_zero_warn(
            explain(
                f"SparseBalanceCallback: the latency table differs from this run in {', '.join(different)}",
                "its times are those of another run",
                "measure one for this run with `sb profile` or sb_lightning.latency.profile(model), and pass "
                "it as table",
            )
        )


def _is_compared(table: LatencyModel) -> bool:
    """Return whether `sb` has told already what a table and this run differ in."""
    return isinstance(table, LatencyTable) and table.is_compared
