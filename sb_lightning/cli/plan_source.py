"""What `sb plan` plans for: windows of given lengths, without a configuration."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sb_lightning._messages import explain
from sb_lightning.balance import SparsityAwareBatchSampler
from sb_lightning.balance.costs import GENERIC_SHAPE
from sb_lightning.cli.plan_lengths import read_lengths
from sb_lightning.data.length_presets import LENGTH_PRESETS, sample_lengths
from sb_lightning.latency import AnalyticCost, LatencyTable
from sb_lightning.latency.table import LatencyModel

__all__ = ["PlanSource", "given_lengths", "load_table", "no_windows", "source_of_lengths"]

Lengths = NDArray[np.int64]
DEFAULT_RANKS, DEFAULT_ACCUMULATE = 8, 4


@dataclass(frozen=True, kw_only=True)
class PlanSource:
    """What is planned."""

    sampler: SparsityAwareBatchSampler
    """The windows and what they are predicted to cost."""
    description: str
    """Where the lengths come from."""
    notes: tuple[str, ...] = ()
    """What the user should know of how this differs from the training."""


def source_of_lengths(options: argparse.Namespace) -> PlanSource:
    """Return what is planned for lengths alone, with a model of usual size.

    Args:
        options: Those of `sb plan`.

    Raises:
        ValueError: No lengths are given, or they are wrong.
    """
    given = given_lengths(options)
    if given is None:
        raise ValueError(
            no_windows(
                "neither a configuration nor lengths are given", "pass --config, --lengths or --preset"
            )
        )
    shape = replace(GENERIC_SHAPE, block_size=options.block_size or GENERIC_SHAPE.block_size)
    notes: list[str] = []
    if options.table in (None, "null"):
        table: LatencyModel = AnalyticCost(shape)
    elif options.table == "auto":
        raise ValueError(
            explain(
                "--latency.table is auto",
                "a table is kept for each configuration",
                "pass a path, or --config",
            )
        )
    else:
        table = load_table(options.table, notes)
    sampler = SparsityAwareBatchSampler(
        given[0],
        ranks=options.ranks or DEFAULT_RANKS,
        rank=0,
        accumulate=options.accumulate or DEFAULT_ACCUMULATE,
        latency=table,
        budget=options.budget,
        objective=options.objective or "ddp",
    )
    return PlanSource(sampler=sampler, description=given[1], notes=tuple(notes))


def given_lengths(options: argparse.Namespace) -> tuple[Lengths, str] | None:
    """Return the lengths that the options name, and where they come from; None if they name none.

    Raises:
        ValueError: There are no such lengths, or something is wrong with them.
    """
    if options.lengths is not None:
        return read_lengths(options.lengths, options.column), str(options.lengths)
    if options.preset is not None:
        lengths = sample_lengths(options.preset, options.sequences)
        return lengths, f"preset {options.preset} ({LENGTH_PRESETS[options.preset].description})"
    return None


def load_table(path: str, notes: list[str]) -> LatencyTable:
    """Return the table in a file.

    Args:
        path: The file.
        notes: Takes in that the table may be wrong, where its profile says so.

    Raises:
        ValueError: There is no such file, or it is damaged.
    """
    try:
        table = LatencyTable.load(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(
            explain(
                f"latency.table is '{path}'",
                "there is no such file",
                "write it with `sb profile --output`, or leave it out",
            )
        ) from error
    # It imports torch.
    from sb_lightning.cli.latency import doubts_about

    if (doubt := doubts_about(table)) is not None:
        notes.append(f"{path}: {doubt}")
    table.label = f"{path}, {table.label}"
    return table


def no_windows(found: str, change: str) -> str:
    """Return the message that there is nothing to plan."""
    return explain(found, "there are no windows to plan", change)
