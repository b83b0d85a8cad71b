"""`sb compare`: batching and tuning, apart and together, measured side by side on this machine."""

from __future__ import annotations

import argparse
import copy
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException

from sb_lightning._messages import explain
from sb_lightning.cli.compare_checks import (
    arguments_of,
    check,
    config_of,
    folder_option,
    minutes_option,
    seed_of,
    settings_of,
    trainer_options,
)
from sb_lightning.cli.compare_ends import Ending
from sb_lightning.cli.compare_progress import Teller, counted, too_short
from sb_lightning.cli.compare_table import describe_table, table_error, table_of_comparison
from sb_lightning.cli.launch import follow_rank_zero
from sb_lightning.cli.noise import hide_noise
from sb_lightning.cli.profile import ProfileCLI
from sb_lightning.compare.arms import STUDIES, Arm, select_arms
from sb_lightning.compare.schedule import Schedule

if TYPE_CHECKING:
    from sb_lightning.compare.engine import Comparison
    from sb_lightning.compare.folder import ComparisonFolder
    from sb_lightning.compare.results import Round
    from sb_lightning.latency import LatencyTable

__all__ = ["run"]

DESCRIPTION = """\
Train the same windows (optimizer steps) in several ways, a few windows each in turns, and measure who waits
for whom, how long a window takes and what becomes of the loss. Writes results.json, results.md and
results.png. An interrupted comparison goes on when it is called again.

All keys of `sb fit` are understood (sb fit --help); trainer.max_steps is the number of windows per arm."""
DEFAULT_MINUTES = 15.0
LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")


class CompareCLI(ProfileCLI):
    """Reads the command line of `fit`, and builds what it describes without running it."""

    command = "sb compare"

    def parser_options(self) -> dict[str, Any]:
        """Return the texts of `sb fit` with this command's name."""
        options: dict[str, Any] = copy.deepcopy(super().parser_options())
        options["fit"]["usage"] = "sb compare --output FOLDER [options] [--config FILE ...] [--key value ...]"
        return options

    @property
    def uses_latency(self) -> bool:
        """Windows are planned by the table."""
        return True


def run(
    arguments: Sequence[str],
    model_class: type[LightningModule] | None = None,
    datamodule_class: type[LightningDataModule] | None = None,
) -> int:
    """Compare, write and return the exit code.

    Args:
        arguments: Options of the command.
        model_class: The LightningModule; `CausalLMModule` if None.
        datamodule_class: The LightningDataModule; `CompareData`, which knows the presets, if None.
    """
    started = time.perf_counter()
    is_launched = follow_rank_zero()
    hide_noise()
    try:
        options, rest = _parse(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    ending = Ending(options.output, is_launched=is_launched)
    try:
        _compare(options, rest, arguments, started, ending, model_class, datamodule_class)
    except SIGTERMException:
        ending.interrupted("ended by SIGTERM")
        return 143
    except SystemExit as stop:
        # --print_config, a wrong key, and Lightning's end after Ctrl-C.
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        if options.has_begun:
            ending.interrupted()
        return stop.code or 0
    except KeyboardInterrupt as interrupt:
        # With a text where a table was being measured.
        if str(interrupt):
            print(f"sb: {interrupt}", file=sys.stderr)
        else:
            ending.interrupted()
        return 130
    except Exception as error:
        return ending.error(error)
    return 0


def _compare(
    options: argparse.Namespace,
    rest: Sequence[str],
    arguments: Sequence[str],
    started: float,
    ending: Ending,
    model_class: type[LightningModule] | None,
    datamodule_class: type[LightningDataModule] | None,
) -> None:
    names = None if options.arms is None else [name for name in options.arms.split(",") if name]
    arms = select_arms(options.study, names)

    from sb_lightning.compare.data import CompareData
    from sb_lightning.compare.folder import ComparisonFolder
    from sb_lightning.training import CausalLMModule

    described = CompareCLI(
        model_class or CausalLMModule, datamodule_class or CompareData, args=["fit", *rest]
    )
    trainer = trainer_options(described)
    check(described, trainer, options.preset)
    folder = ComparisonFolder(options.output)
    if described.trainer.global_rank != 0:
        comparison = _comparison(described, options, arms, folder, trainer, None, started)
        _hush()
        options.has_begun = True
        comparison.run(started)
        return
    with folder.held():
        about = _about(described, options, arguments)
        folder.begin(settings_of(described, options, arms, trainer, about["machine"]))
        # Before the table is measured, which may take minutes.
        has_rounds = bool(folder.rounds())
        about.update(_about_data(described, options))
        table = _table(described, folder, has_rounds=has_rounds)
        about["latency_table"] = describe_table(table)
        comparison = _comparison(described, options, arms, folder, trainer, table, started)
        rounds = comparison.finished()
        _hush()
        print(_opening(comparison, options, len(rounds)), flush=True)
        options.has_begun = True
        rounds = comparison.run(started, rounds, ending.rank_lost)
        _finish(comparison, options, rounds, about, table_error(table), started)


def _finish(
    comparison: Comparison,
    options: argparse.Namespace,
    rounds: Sequence[Round],
    about: Mapping[str, Any],
    error: float | None,
    started: float,
) -> None:
    from sb_lightning.compare.notes import notes
    from sb_lightning.compare.report import is_measured, tables, write_report
    from sb_lightning.compare.results import summarize

    arms, total = comparison.arms, comparison.schedule.num_rounds
    if not is_measured(rounds):
        seconds = rounds[-1].seconds if rounds else 0.0
        elapsed_s = time.perf_counter() - started
        raise ValueError(explain(*too_short(options.minutes, elapsed_s, seconds, len(arms))))
    with_goals = options.preset is not None
    written = write_report(
        options.output,
        options.study,
        arms,
        rounds,
        about,
        table_error=error,
        with_goals=with_goals,
        with_picture=not options.no_png,
    )
    found = summarize(arms, rounds)
    rest_of_it = "" if len(rounds) == total else "; the same command goes on for more"
    print(f"\n{tables(found, notes(arms, found, error), with_goals=with_goals)}")
    print(f"{len(rounds) - 1} of {total - 1} rounds counted{rest_of_it}.\n")
    print("\n".join(map(str, written)))


def _hush() -> None:
    """Leave out what Lightning says every few windows of how it starts and ends."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _comparison(
    described: CompareCLI,
    options: argparse.Namespace,
    arms: Sequence[Arm],
    folder: ComparisonFolder,
    trainer: dict[str, Any],
    table: LatencyTable | None,
    started: float,
) -> Comparison:
    from sb_lightning.compare.data import PRESETS, CompareData
    from sb_lightning.compare.engine import Comparison

    model, data = described.model, described.datamodule
    given = arguments_of(model)
    usual = given["attention"]["budget"]

    def make_module(budget: int) -> LightningModule:
        attention = {**given["attention"], "budget": budget}
        made: LightningModule = type(model)(**{**copy.deepcopy(given), "attention": attention})
        return made

    def make_data(arm: Arm) -> LightningDataModule:
        # A last window of an epoch that is not full does not compare with the others.
        changed: dict[str, Any] = {"policy": arm.policy, "tail": "drop"}
        if arm.sequences is not None:
            changed["sequences_per_micro_batch"] = arm.sequences
        made: Any = type(data)(**{**arguments_of(data), **changed})
        made.latency = table
        if isinstance(made, CompareData) and options.preset is not None:
            made.preset = PRESETS[options.preset]
        return made  # type: ignore[no-any-return]

    schedule = Schedule(windows=trainer["max_steps"])
    return Comparison(
        arms=arms,
        schedule=schedule,
        folder=folder,
        make_module=make_module,
        data={arm.name: make_data(arm) for arm in arms},
        trainer_options={**trainer, "default_root_dir": options.output},
        usual_budget=usual,
        seed=seed_of(described),
        limit_s=60 * options.minutes,
        listener=Teller(schedule, arms, 60 * options.minutes, started),
    )


def _table(described: CompareCLI, folder: ComparisonFolder, *, has_rounds: bool) -> LatencyTable | None:
    from sb_lightning.cli.latency import table_of_run

    assert described.subcommand is not None
    settings = described.config_init[described.subcommand]["latency"]

    def measure() -> LatencyTable | None:
        return table_of_run(
            settings,
            described.trainer,
            described.model,
            described.datamodule,
            threads=config_of(described)["threads_per_rank"],
        )

    return table_of_comparison(folder, settings, measure, has_rounds=has_rounds)


def _opening(comparison: Comparison, options: argparse.Namespace, before: int) -> str:
    schedule = comparison.schedule
    text = (
        f"{STUDIES[options.study].title}: {counted(len(comparison.arms), 'arm')}, "
        f"{counted(schedule.num_rounds, 'round')} of {schedule.windows_per_round} windows, for at most "
        f"{options.minutes:g} minute{'' if options.minutes == 1 else 's'}"
    )
    return text + (f"; goes on after round {before - 1}" if before else "")


def _about(described: CompareCLI, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    import torch

    from sb_lightning import __version__
    from sb_lightning.latency.fingerprint import processor_name

    root = described.trainer.strategy.root_device
    name = torch.cuda.get_device_name(root) if root.type == "cuda" else processor_name()
    ranks = described.trainer.world_size
    micro_batches = config_of(described)["trainer"]["accumulate_grad_batches"]
    attention = arguments_of(described.model)["attention"]
    budget, block = attention["budget"], attention["block_size"]
    return {
        "command": f"sb compare {shlex.join(arguments)}",
        "machine": f"{name}, {os.cpu_count()} cores, {ranks} ranks on {root.type}",
        "data": options.preset or "as configured",
        "window": f"{ranks} ranks x {micro_batches} micro-batches",
        "k0": f"{counted(budget, 'block')} of {block} keys, {budget * block:,} tokens",
        "versions": f"sb_lightning {__version__}, torch {torch.__version__}",
    }


def _about_data(described: CompareCLI, options: argparse.Namespace) -> dict[str, str]:
    """Return, and print, the lengths that a preset has cut the text to."""
    from sb_lightning.compare.data import PRESETS, describe_lengths

    if options.preset is None:
        return {}
    data: Any = described.datamodule
    data.preset = PRESETS[options.preset]
    data.prepare_data()
    data.setup()
    text = describe_lengths(data.train_dataset.lengths)
    print(f"cut to the lengths of {options.preset}: {text}", flush=True)
    return {"sequences": text}


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="sb compare",
        usage="sb compare --output FOLDER [options] [--config FILE ...] [--key value | --key=value ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--output", type=folder_option, required=True, metavar="FOLDER",
        help="results, and what it takes to go on")  # fmt: skip
    add("--preset", choices=("longtail", "bimodal"), help="cut the text to lengths of that shape, up to "
        "data.max_length (the documents as they are)")  # fmt: skip
    add("--study", choices=tuple(STUDIES), default="table2", help="what is compared (table2)")
    add("--arms", metavar="NAME,...", help="some of the study's arms (all): for table2, "
        + ",".join(arm.name for arm in STUDIES["table2"].arms))  # fmt: skip
    add("--minutes", type=minutes_option, default=DEFAULT_MINUTES, metavar="M",
        help="what this call may take in all, measuring the latency table and starting the ranks included "
        f"({DEFAULT_MINUTES:g})")  # fmt: skip
    add("--no-png", action="store_true", help="leave the picture out")
    parser.set_defaults(has_begun=False)
    return parser.parse_known_args(arguments)
