"""What `sb plan` plans for: the windows that `sb fit` would train on with the same options."""

from __future__ import annotations

import argparse
import copy
import shlex
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from numpy.typing import NDArray

from sb_lightning._messages import explain
from sb_lightning.balance import SparsityAwareBatchSampler
from sb_lightning.cli.latency import (
    AUTO,
    CannotMeasure,
    LatencySettings,
    cached_path,
    conditions_of,
    doubts_about,
    table_of_run,
)
from sb_lightning.cli.plan_source import PlanSource, given_lengths, load_table, no_windows
from sb_lightning.cli.train import PARSER_OPTIONS, TrainingCLI
from sb_lightning.data.latency import analytic_cost, model_budget
from sb_lightning.data.trainer import data_parallel, max_batches
from sb_lightning.latency import LatencyTable
from sb_lightning.latency.table import LatencyModel

__all__ = ["source_of_configuration"]

Lengths = NDArray[np.int64]
# What a data module of any kind may say of its plans.
PLAN_SETTINGS = (
    "sequences_per_micro_batch",
    "policy",
    "objective",
    "tail",
    "seed",
    "max_tokens",
    "overflow",
    "equal_counts",
)


class PlanCLI(TrainingCLI):
    """Reads the command line of `fit`, and builds what it describes without running it."""

    command = "sb plan"
    why_no_trainer: str | None = None
    """Why this machine cannot make the Trainer of the configuration, if it cannot."""

    def parser_options(self) -> dict[str, Any]:
        """Return the texts of `sb fit` with this command's name."""
        options: dict[str, Any] = copy.deepcopy(PARSER_OPTIONS)
        options["fit"]["usage"] = "sb plan [options] [--config FILE ...] [--key value | --key=value ...]"
        return options

    def before_instantiate_classes(self) -> None:
        """Leave out what only a training needs."""
        assert self.subcommand is not None
        trainer = self.config[self.subcommand]["trainer"]
        # An end, so that nothing is said of a training without one.
        trainer["max_epochs"] = 1
        super().before_instantiate_classes()
        trainer["logger"] = False
        trainer["callbacks"] = None

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer; where the machine of the training is another one, what a plan needs of it."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, MisconfigurationException) as error:
            assert self.subcommand is not None
            self.why_no_trainer = str(error.__cause__ or error).split("\n")[0].rstrip(".")
            config = self.config_init[self.subcommand]["trainer"]
            kept = (
                "accumulate_grad_batches",
                "limit_train_batches",
                "fast_dev_run",
                "use_distributed_sampler",
            )
            return Trainer(
                accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, **{name: config[name] for name in kept},
            )  # fmt: skip

    def _run_subcommand(self, subcommand: str) -> None:
        """Train nothing."""

    @property
    def settings(self) -> Any:
        """The values of all keys."""
        assert self.subcommand is not None
        return self.config_init[self.subcommand]


def source_of_configuration(
    arguments: Sequence[str],
    options: argparse.Namespace,
    model_class: type[LightningModule],
    datamodule_class: type[LightningDataModule],
) -> PlanSource:
    """Return what `sb fit` would plan with these arguments, but for the options of `sb plan`.

    Args:
        arguments: Options of `sb fit`.
        options: Those of `sb plan`.
        model_class: The LightningModule.
        datamodule_class: The LightningDataModule.

    Raises:
        ValueError: A setting is wrong, or the data are not planned by our sampler.
    """
    cli = PlanCLI(model_class, datamodule_class, args=["fit", *arguments])
    notes: list[str] = []
    data, model, trainer = cli.datamodule, cli.model, cli.trainer
    ranks = options.ranks or _ranks(cli, notes)
    accumulate = options.accumulate or int(trainer.accumulate_grad_batches)
    given = given_lengths(options)
    targets: Lengths | None = None
    ids: Lengths | None = None
    if given is None:
        if data is None:
            raise ValueError(
                no_windows("the configuration has no data", "set data.* keys, or pass --lengths")
            )
        data.prepare_data()
        data.setup("fit")
        table = _table(cli, notes, arguments)
        planned = _planned_by(data, trainer, table)
        lengths, targets, ids = planned.lengths, planned.target_tokens, planned.sequence_ids
        plan_options = {name: getattr(planned, name) for name in PLAN_SETTINGS}
        description = getattr(getattr(data, "corpus", None), "source", type(data).__name__)
    else:
        lengths, description = given
        lengths = _cut(lengths, data, notes)
        table = _table(cli, notes, arguments)
        plan_options = {name: getattr(data, name) for name in PLAN_SETTINGS if hasattr(data, name)}
    if options.objective is not None:
        plan_options["objective"] = options.objective

    def build(limit: int | None) -> SparsityAwareBatchSampler:
        return SparsityAwareBatchSampler(
            lengths, targets, sequence_ids=ids, ranks=ranks, rank=0, accumulate=accumulate, latency=table,
            budget=model_budget(model), max_batches=limit, **plan_options,
        )  # fmt: skip

    whole = build(None)
    sampler = build(max_batches(whole.num_batches, trainer.limit_train_batches))
    return PlanSource(sampler=sampler, description=description, notes=tuple(notes))


def _ranks(cli: PlanCLI, notes: list[str]) -> int:
    """Return the data-parallel ranks of the training."""
    if cli.why_no_trainer is None:
        return data_parallel(cli.trainer)[0]
    config = cli.settings["trainer"]
    devices = config["devices"]
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    count = len(devices) if isinstance(devices, list) else devices
    if not isinstance(count, int) or count < 1:
        raise ValueError(
            explain(
                f"trainer.devices is {devices}, and no Trainer can be made here ({cli.why_no_trainer})",
                "the number of ranks is not known",
                "pass --ranks",
            )
        )
    ranks = count * int(config["num_nodes"] or 1)
    notes.append(
        f"this machine cannot run the training ({cli.why_no_trainer}): planned for trainer.devices x "
        f"trainer.num_nodes = {ranks} ranks"
    )
    return ranks


def _table(cli: PlanCLI, notes: list[str], arguments: Sequence[str]) -> LatencyModel:
    """Return what `latency.table` says, without measuring anything."""
    settings: LatencySettings = cli.settings["latency"]
    threads = cli.settings["threads_per_rank"]
    if settings.table not in (None, AUTO):
        if cli.why_no_trainer is not None:
            return load_table(settings.table, notes)
        found = table_of_run(settings, cli.trainer, cli.model, cli.datamodule, threads=threads)
        assert found is not None
        return found
    if settings.table == AUTO and cli.why_no_trainer is None:
        table, note = _cached(cli, threads, arguments)
        if note:
            notes.append(note)
        if table is not None:
            return table
    elif settings.table == AUTO:
        notes.append("latency.table=auto: the machine of the training is another one; operations are counted")
    data = cli.datamodule
    if data is not None and not getattr(data, "vocab_size", 0) and _needs_vocabulary(cli.model):
        data.prepare_data()
        data.setup("fit")
    return analytic_cost(
        cli.model, vocab_size=getattr(data, "vocab_size", 0), max_length=getattr(data, "max_length", 8192)
    )


def _needs_vocabulary(model: Any) -> bool:
    architecture = getattr(model, "architecture", None)
    return architecture is not None and "vocab_size" not in architecture


def _cached(cli: PlanCLI, threads: int | None, arguments: Sequence[str]) -> tuple[LatencyTable | None, str]:
    """Return the table that a training has left and what is doubtful about it, or why there is none."""
    counted = "operations are counted"
    try:
        conditions = conditions_of(cli.trainer, cli.model, cli.datamodule, threads=threads)
    except CannotMeasure as error:
        return None, f"latency.table=auto: {counted} ({error})"
    path = cached_path(conditions, getattr(cli.datamodule, "cache_dir", ".cache/sb_lightning"))
    try:
        table = LatencyTable.load(path)
    except FileNotFoundError:
        keys = [key for key in arguments if not key.startswith("--latency.table=")]
        command = shlex.join(["sb", "profile", *keys, "--output", str(path)])
        return None, f"latency.table=auto: not measured yet, so {counted}. To measure: {command}"
    except ValueError as error:
        return None, f"latency.table=auto: {counted} (the cached table is damaged: {error})"
    table.label = f"{path}, {table.label}"
    return table, doubts_about(table) or ""


def _planned_by(data: Any, trainer: Trainer, table: LatencyModel) -> SparsityAwareBatchSampler:
    """Return the sampler that a data module would train with."""
    data.trainer = trainer
    if hasattr(data, "latency"):
        data.latency = table
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*got no latency table")
        loader = data.train_dataloader()
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, SparsityAwareBatchSampler):
        raise ValueError(
            no_windows(
                f"the data module {type(data).__name__} trains with a {type(sampler or loader).__name__}",
                "return a BalancedDataLoader with a SparsityAwareBatchSampler, or pass --lengths",
            )
        )
    return sampler


def _cut(lengths: Lengths, data: Any, notes: list[str]) -> Lengths:
    """Return the lengths that are left of documents of these, as the data module would cut them."""
    longest, way = getattr(data, "max_length", None), getattr(data, "overlong", None)
    if longest is None or way is None or int(lengths.max()) <= longest:
        return lengths
    is_long = lengths > longest
    notes.append(
        f"data.max_length={longest} with data.overlong={way} cuts {is_long.sum():,} of {len(lengths):,}"
    )
    if way == "truncate":
        return np.asarray(np.minimum(lengths, longest), dtype=np.int64)
    if way == "drop":
        return np.asarray(lengths[~is_long], dtype=np.int64)
    pieces = -(-lengths // longest)
    last = lengths - (pieces - 1) * longest
    cut = np.full(int(pieces.sum()), longest, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = last
    return cut
