"""What the commands need to know of a run to measure it, and where its latency table is kept."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import PositiveFloat
from lightning.fabric.utilities.distributed import _suggested_max_num_threads
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from sb_lightning._messages import explain

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

    from sb_lightning.latency import LatencyTable
    from sb_lightning.latency.profiler import Conditions

__all__ = [
    "CannotMeasure",
    "LatencySettings",
    "cached_path",
    "check_length",
    "conditions_of",
    "doubts_about",
    "kept_samples",
    "table_of_run",
]

AUTO = "auto"
DEFAULT_MAX_LENGTH = 8192
PRECISIONS = {
    "32-true": ("float32", False),
    "16-mixed": ("float16", True),
    "bf16-mixed": ("bfloat16", True),
    "16-true": ("float16", False),
    "bf16-true": ("bfloat16", False),
    "64-true": ("float64", False),
}
"""Element type of the activations and whether autocast sets it, by Lightning's name."""


class CannotMeasure(ValueError):
    """A run that can be trained, but not measured; the message has three parts."""


@dataclass(frozen=True, kw_only=True)
class LatencySettings:
    """Where predicted times come from; read by `fit`."""

    table: str | None = None
    """Path of a table that `sb profile` wrote; `auto` measures this machine before the training, once for
    each model and number of ranks, and keeps the table in data.cache_dir; null measures nothing and counts
    operations."""
    budget_seconds: PositiveFloat = 20.0
    """Seconds that `auto` may measure; a table that is there is used, whatever its seconds."""


def conditions_of(
    trainer: Trainer,
    model: LightningModule,
    data: LightningDataModule | None,
    *,
    threads: int | None,
    ranks: int | None = None,
    max_length: int | None = None,
) -> Conditions:
    """Describe the run that a Trainer would start, as a profile measures it.

    Args:
        trainer: Tells device, ranks and precision.
        model: A `CausalLMModule`.
        data: Tells the longest sequence, and the size of the vocabulary where the model leaves it open; its
            corpus is made ready then, as the training would.
        threads: CPU threads of each rank; None does as Lightning does.
        ranks: Ranks that share the machine; the Trainer's devices if None.
        max_length: Longest sequence; that of the data if None.

    Raises:
        CannotMeasure: The model is of another kind, or precision or device cannot be measured.
    """
    from sb_lightning.latency.marks import TIMED_DEVICES
    from sb_lightning.latency.profiler import Conditions, ModelSpec
    from sb_lightning.training import CausalLMModule
    from sb_lightning.training.model import build_configuration

    if not isinstance(model, CausalLMModule):
        raise CannotMeasure(
            explain(
                f"the model is a {type(model).__name__}",
                "only CausalLMModule says which layers to measure",
                "call sb_lightning.latency.profile with the Hugging Face model itself",
            )
        )
    precision = str(trainer.precision)
    if precision not in PRECISIONS:
        raise CannotMeasure(
            explain(
                f"trainer.precision is {precision}",
                "the profile measures plain and autocast precisions",
                f"choose one of {', '.join(PRECISIONS)}",
            )
        )
    root = trainer.strategy.root_device
    if root.type not in TIMED_DEVICES:
        raise CannotMeasure(
            explain(
                f"the training runs on {root}",
                f"only steps on {' and '.join(TIMED_DEVICES)} can be timed",
                "set trainer.accelerator to one of these",
            )
        )
    if model.compile_layers:
        rank_zero_warn("model.compile is not measured: the latency table has the times of eager layers.")
    ranks = ranks or trainer.num_devices
    if threads is None and "OMP_NUM_THREADS" not in os.environ and ranks > 1:
        threads = _suggested_max_num_threads(ranks)
    dtype, mixed = PRECISIONS[precision]
    attention = model.attention
    config = build_configuration(
        model.architecture,
        model.pretrained,
        vocab_size=_vocab_size(model, data),
        max_length=getattr(data, "max_length", None),
    )
    import torch

    spec = ModelSpec(
        config=json.loads(config.to_json_string(use_diff=False)),
        block_size=attention.block_size if attention else None,
        dense_layers=tuple(sorted(set(attention.dense_layers))) if attention else (),
        backend=attention.backend if attention else None,
        dtype=dtype,
        mixed=mixed,
        device=str(root),
        threads=torch.get_num_threads() if threads is None else threads,
        activation_checkpointing=model.activation_checkpointing,
        loss_chunk_tokens=model.loss_chunk_tokens,
    )
    longest = max_length or int(getattr(data, "max_length", DEFAULT_MAX_LENGTH))
    devices = getattr(trainer.strategy, "parallel_devices", None) or [root]
    return Conditions.of(spec, max_length=longest, ranks=ranks, devices=[str(device) for device in devices])


def check_length(conditions: Conditions, key: str) -> None:
    """Make sure that the sequences are long enough to measure several lengths.

    Args:
        conditions: Of the run.
        key: Where the user sets the longest length.

    Raises:
        CannotMeasure: They are not.
    """
    from sb_lightning.latency.profiler.points import Grid

    least = Grid.least_max_length(conditions.fingerprint.block_size)
    if conditions.max_length < least:
        raise CannotMeasure(
            explain(
                f"{key} is {conditions.max_length}",
                f"a latency table begins with short sequences, and needs some of {least} tokens at least",
                f"set {key} to {least} or more",
            )
        )


def _vocab_size(model: Any, data: Any) -> int | None:
    """Return the tokenizer's size where the model's depends on it."""
    if data is None or model.pretrained is not None or "vocab_size" in (model.architecture or {}):
        return None
    if not getattr(data, "vocab_size", 0):
        data.prepare_data()
        data.setup()
    return int(data.vocab_size)


def cached_path(conditions: Conditions, cache_dir: str | Path) -> Path:
    """Return where the table of a run on this machine is kept."""
    key = {**asdict(conditions.fingerprint), **conditions.settings}
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return Path(cache_dir) / "latency" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def table_of_run(
    settings: LatencySettings,
    trainer: Trainer,
    model: LightningModule,
    data: LightningDataModule | None,
    *,
    threads: int | None,
) -> LatencyTable | None:
    """Return the table that `latency.table` asks for, measured now if need be; None if it asks for none.

    Args:
        settings: The `latency` keys.
        trainer: Of the run.
        model: Of the run.
        data: Of the run.
        threads: CPU threads of each rank.

    Raises:
        ValueError: There is no such file, or it is damaged.
        KeyboardInterrupt: With a message, if what was measured so far is kept.
    """
    from sb_lightning.latency import LatencyTable

    if settings.table is None:
        return None
    if settings.table != AUTO:
        if not Path(settings.table).exists():
            raise ValueError(
                explain(
                    f"latency.table is '{settings.table}'",
                    "there is no such file",
                    "write it with `sb profile --output`, or set latency.table to auto or null",
                )
            )
        table = LatencyTable.load(settings.table)
        table.label = f"{settings.table}, {table.label}"
        if (doubt := doubts_about(table)) is not None:
            rank_zero_warn(f"latency.table={settings.table}: {doubt}")
        try:
            _compare(table, conditions_of(trainer, model, data, threads=threads))
        except CannotMeasure as error:
            rank_zero_warn(f"Whether latency.table was measured on a run like this is not checked: {error}")
        return table
    try:
        conditions = conditions_of(trainer, model, data, threads=threads)
        check_length(conditions, "data.max_length")
    except CannotMeasure as error:
        rank_zero_warn(f"latency.table=auto measures nothing, and the training has no latency table: {error}")
        return None
    path = cached_path(conditions, getattr(data, "cache_dir", ".cache/sb_lightning"))
    cached = _load_cached(path)
    if cached is None and getattr(trainer, "fast_dev_run", False):
        rank_zero_info("latency.table=auto measures nothing under trainer.fast_dev_run.")
        return None
    if cached is None:
        cached = _measure(conditions, settings, path)
    else:
        off = cached.profile.get("errors", {}).get("table", {}).get("median")
        told = "" if off is None else f" (median error {off:.1%})"
        doubt = doubts_about(cached)
        warning = f" {doubt}" if doubt else ""
        rank_zero_info(f"Latency table: {path}{told}; delete it to measure again.{warning}")
    cached.label = f"{path}, {cached.label}"
    return cached


def doubts_about(table: LatencyTable) -> str | None:
    """Return why a table may be wrong, as its profile said when it was measured; None if it did not.

    Args:
        table: From a file.
    """
    from sb_lightning.latency.profiler.report import doubts

    try:
        return doubts(table.profile)
    except (KeyError, TypeError, AttributeError):
        # Written by something else than the profiler.
        return None


def _measure(conditions: Conditions, settings: LatencySettings, path: Path) -> LatencyTable:
    from sb_lightning.latency.profiler import run_profile
    from sb_lightning.latency.profiler.partial import load_partial, partial_path

    partial = partial_path(path)
    try:
        load_partial(partial, conditions.fingerprint, conditions.settings)
    except ValueError as error:
        # Its name is ours, and is made of the conditions: there is nothing in it that the user would miss.
        rank_zero_warn(f"An interrupted profile is measured from the start: {error}")
        partial.unlink()
    rank_zero_info("No latency table for this model on this machine yet: measuring it once.")
    try:
        return run_profile(conditions, budget_seconds=settings.budget_seconds, output=path)
    except KeyboardInterrupt:
        kept = kept_samples(path)
        raise KeyboardInterrupt(f"interrupted before the training began; {kept}") from None


def kept_samples(output: Path) -> str:
    """Return what an interrupted profile leaves, as the end of a sentence.

    Args:
        output: File of its table.
    """
    from sb_lightning.latency.profiler.partial import partial_path

    if partial_path(output).exists():
        return "what was measured is kept, and the same command goes on from there."
    return "nothing was measured yet."


def _load_cached(path: Path) -> LatencyTable | None:
    from sb_lightning.latency import LatencyTable

    try:
        return LatencyTable.load(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        rank_zero_warn(f"The cached latency table is measured anew: {error}")
        path.unlink()
        return None


def _compare(table: LatencyTable, conditions: Conditions) -> None:
    from sb_lightning.latency.fingerprint import Difference

    table.is_compared = True
    differences: list[object] = [*table.mismatch(conditions.fingerprint)]
    noted = table.profile.get("settings", {})
    differences += [
        Difference(key, noted[key], value)
        for key, value in conditions.settings.items()
        # A table may hold for sequences of any length; only of a model that was passed are weights counted.
        if key in noted and key not in ("max_length", "parameters") and noted[key] != value
    ]
    longest = table.measurements.lengths[-1]
    if longest < conditions.max_length:
        rank_zero_warn(
            explain(
                f"latency.table ends at {longest} tokens and data.max_length is {conditions.max_length}",
                "longer sequences are extrapolated",
                "measure again with `sb profile`, or set latency.table to auto",
            )
        )
    if differences:
        rank_zero_warn(
            explain(
                f"latency.table differs from this run in {', '.join(map(str, differences))}",
                "its times are those of another run",
                "measure again with `sb profile`, or set latency.table to auto",
            )
        )
