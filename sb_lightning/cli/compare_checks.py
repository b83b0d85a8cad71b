"""What `sb compare` takes from a configuration, and what it refuses before anything is started."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sb_lightning._messages import explain
from sb_lightning.compare.arms import Arm
from sb_lightning.compare.schedule import WINDOWS_PER_ROUND

if TYPE_CHECKING:
    from sb_lightning.cli.profile import ProfileCLI

__all__ = [
    "arguments_of",
    "check",
    "config_of",
    "folder_option",
    "minutes_option",
    "seed_of",
    "settings_of",
    "trainer_options",
]

TRAINER_KEYS = (
    "accelerator", "devices", "num_nodes", "strategy", "precision", "accumulate_grad_batches", "max_steps",
    "gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark",
)  # fmt: skip
# Of strategies that start ranks by copying this process in the middle of its work.
COPYING = ("_spawn", "_fork", "_notebook")


def trainer_options(described: ProfileCLI) -> dict[str, Any]:
    """Return what each segment's Trainer is made with."""
    trainer = config_of(described)["trainer"]
    found = {key: trainer[key] for key in TRAINER_KEYS if trainer[key] is not None}
    for key in ("accelerator", "strategy"):
        if not isinstance(found.get(key, "auto"), str):
            raise ValueError(
                explain(
                    f"trainer.{key} is an object",
                    "every few windows a new Trainer is made, and it cannot be shared",
                    f"name it: trainer.{key}=ddp" if key == "strategy" else f"name it: trainer.{key}=cpu",
                )
            )
    return found


def check(described: ProfileCLI, trainer: dict[str, Any], preset: str | None) -> None:
    """Refuse what cannot be compared.

    Args:
        described: The configuration.
        trainer: As `trainer_options` returns it.
        preset: Name of the preset; None for the documents as they are.

    Raises:
        ValueError: The message names the key.
    """
    _check_kinds(described, preset)
    max_steps = trainer.get("max_steps", -1)
    if max_steps <= WINDOWS_PER_ROUND:
        raise ValueError(
            explain(
                f"trainer.max_steps is {max_steps}",
                f"it is the number of windows that every arm trains, and the first {WINDOWS_PER_ROUND} (a "
                "round) warm up and are not counted",
                f"set trainer.max_steps to more than {WINDOWS_PER_ROUND}, such as 200; --minutes ends the "
                "comparison earlier",
            )
        )
    if trainer.get("accumulate_grad_batches", 1) < 1:
        raise ValueError(
            explain(
                f"trainer.accumulate_grad_batches is {trainer['accumulate_grad_batches']}",
                "it counts the micro-batches of a window",
                "set trainer.accumulate_grad_batches to 1 or more",
            )
        )
    if described.trainer.world_size < 2:
        raise ValueError(
            explain(
                "trainer.devices is 1",
                "a rank alone waits for nobody: there is nothing to balance",
                "set trainer.devices to 2 or more",
            )
        )
    launcher = type(described.trainer.strategy.launcher).__name__
    strategy = trainer.get("strategy", "auto")
    if "MultiProcessing" in launcher or strategy.endswith(COPYING):
        raise ValueError(
            explain(
                f"trainer.strategy is {strategy}",
                "its ranks are copies of one process and end with every Trainer, of which a comparison makes "
                "many",
                "set trainer.strategy to ddp, and call this from a terminal",
            )
        )


def _check_kinds(described: ProfileCLI, preset: str | None) -> None:
    from sb_lightning.compare.data import CompareData
    from sb_lightning.data import TextDataModule
    from sb_lightning.training import CausalLMModule

    model, data = described.model, described.datamodule
    if not isinstance(model, CausalLMModule) or not isinstance(data, TextDataModule):
        raise ValueError(
            explain(
                f"the comparison got a {type(model).__name__} and a {type(data).__name__}",
                "it changes policy and budget of a CausalLMModule and a TextDataModule from arm to arm",
                "use these, or measure your own project with ImbalanceMonitor",
            )
        )
    if preset is not None and not isinstance(data, CompareData):
        raise ValueError(
            explain(
                f"--preset is {preset} and the data are a {type(data).__name__}",
                "only CompareData cuts text to lengths",
                "leave --preset out, or derive the data module from sb_lightning.compare.data.CompareData",
            )
        )
    if model.attention is None:
        raise ValueError(
            explain(
                "model.attention is null",
                "dense attention has no budget to tune",
                "set model.attention.block_size and model.attention.budget",
            )
        )


def settings_of(
    described: ProfileCLI,
    options: argparse.Namespace,
    arms: Sequence[Arm],
    trainer: dict[str, Any],
    machine: str,
) -> dict[str, Any]:
    """Return all that the figures depend on, but for the table, which is kept."""
    found: dict[str, Any] = {
        "study": options.study,
        "arms": [arm.name for arm in arms],
        "preset": options.preset,
        "machine": machine,
        "seed_everything": seed_of(described),
        "threads_per_rank": config_of(described)["threads_per_rank"],
    }
    given: dict[str, Any] = {"trainer": trainer, "model": arguments_of(described.model)}
    given["data"] = arguments_of(described.datamodule)
    for place, values in given.items():
        found.update({f"{place}.{key}": _plain(value) for key, value in values.items()})
    return found


def arguments_of(made: Any) -> dict[str, Any]:
    """Return what a module or a data module was made with; Lightning notes more there."""
    return {key: copy.deepcopy(value) for key, value in made.hparams.items() if not key.startswith("_")}


def config_of(described: ProfileCLI) -> Any:
    """Return the keys of `sb fit`."""
    assert described.subcommand is not None
    return described.config[described.subcommand]


def seed_of(described: ProfileCLI) -> int:
    """Return `seed_everything` as a number."""
    seed = config_of(described)["seed_everything"]
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else 0


def folder_option(text: str) -> Path:
    """Read --output."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(
            explain(f"it is {text!r}", "no folder can have this name", "pass a folder, such as runs/longtail")
        )
    return Path(text)


def minutes_option(text: str) -> float:
    """Read --minutes."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            explain(f"it is {text!r}", "it is a time", "pass a number of minutes above 0, such as 15")
        )
    return value


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, list, dict, type(None))) else str(value)
