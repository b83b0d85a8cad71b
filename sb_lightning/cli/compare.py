"""`sb compare`: batching and tuning, apart and together, measured side by side on this machine."""

from __future__ import annotations

import argparse
import copy
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException

from sb_lightning._messages import explain
from sb_lightning.cli.errors import report
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
TRAINER_KEYS = (
    "accelerator", "devices", "num_nodes", "strategy", "precision", "accumulate_grad_batches", "max_steps",
    "gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark",
)  # fmt: skip
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
    follow_rank_zero()
    hide_noise()
    try:
        options, rest = _parse(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    kept = f"finished rounds are kept in {options.output}; the same command goes on from there."
    try:
        _compare(options, rest, arguments, started, model_class, datamodule_class)
    except SIGTERMException:
        print(f"sb: ended by SIGTERM; {kept}", file=sys.stderr)
        return 143
    except SystemExit as stop:
        # --print_config, a wrong key, and Lightning's end after Ctrl-C.
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        if options.has_begun:
            print(f"sb: interrupted; {kept}", file=sys.stderr)
        return stop.code or 0
    except KeyboardInterrupt as interrupt:
        print(f"sb: {str(interrupt) or 'interrupted; ' + kept}", file=sys.stderr)
        return 130
    except Exception as error:
        return report(error)
    return 0


def _compare(
    options: argparse.Namespace,
    rest: Sequence[str],
    arguments: Sequence[str],
    started: float,
    model_class: type[LightningModule] | None,
    datamodule_class: type[LightningDataModule] | None,
) -> None:
    names = None if options.arms is None else [name for name in options.arms.split(",") if name]
    arms = select_arms(options.study, names)

    from sb_lightning.compare.data import CompareData
    from sb_lightning.compare.folder import ComparisonFolder
    from sb_lightning.compare.report import is_measured, tables, write_report
    from sb_lightning.compare.results import summarize
    from sb_lightning.training import CausalLMModule

    described = CompareCLI(
        model_class or CausalLMModule, datamodule_class or CompareData, args=["fit", *rest]
    )
    trainer = _trainer_options(described)
    _check(described, trainer, arms)
    folder = ComparisonFolder(options.output)
    is_first = described.trainer.global_rank == 0
    about, table = {}, None
    if is_first:
        about = _about(described, options, arms, arguments)
        folder.begin(_settings(described, options, arms, trainer, about["machine"]))
        table = _table(described, options, folder)
    comparison = _comparison(described, options, arms, folder, trainer, table, started)
    for name in LOGGERS:
        # Lightning says for every few windows how it starts and ends.
        logging.getLogger(name).setLevel(logging.WARNING)
    before = len(folder.rounds()) if is_first else 0
    if is_first:
        print(_opening(comparison, options, before), flush=True)
    options.has_begun = True
    rounds = comparison.run(started)
    if not is_first:
        return
    if not is_measured(rounds):
        seconds = rounds[-1].seconds if rounds else 0.0
        raise ValueError(
            explain(
                f"--minutes is {options.minutes:g}, and a round of {len(arms)} arms takes {seconds:,.0f} s",
                "the first round warms up and is not counted, so nothing has been measured yet",
                f"call the same command again, which goes on, or pass --minutes {2.5 * seconds / 60 + 1:.0f}",
            )
        )
    written = write_report(
        options.output, options.study, arms, rounds, about, with_picture=not options.no_png
    )
    is_done = len(rounds) == comparison.schedule.num_rounds
    rest_of_it = "" if is_done else "; the same command goes on for more"
    counted = (len(rounds) - 1, comparison.schedule.num_rounds - 1)
    print(f"\n{tables(summarize(arms, rounds))}\n{counted[0]} of {counted[1]} rounds counted{rest_of_it}.\n")
    print("\n".join(map(str, written)))


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
    given = _arguments(model)
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
        made: Any = type(data)(**{**_arguments(data), **changed})
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
        seed=_seed(described),
        limit_s=60 * options.minutes,
        listener=Teller(schedule, arms, 60 * options.minutes, started),
    )


class Teller:
    """Prints how far a comparison is.

    Args:
        schedule: Of the comparison.
        arms: What is compared.
        limit_s: What the launch may take.
        started: When it began.
    """

    def __init__(self, schedule: Schedule, arms: Sequence[Arm], limit_s: float, started: float) -> None:
        self._schedule, self._arms = schedule, arms
        self._limit_s, self._started = limit_s, started
        self._done = 0
        self._since = 0.0

    def segment(self, number: int, arm: Arm, result: Any) -> None:
        """Show the arm that has run, where there is a terminal."""
        self._done += 1
        if sys.stdout.isatty():
            mean = sum(w.wall_ms for w in result.windows) / len(result.windows)
            place = (self._done - 1) % len(self._arms) + 1
            text = f"round {number}, {place} of {len(self._arms)}: {arm.label} {mean:,.0f} ms per window"
            print(f"\r\x1b[2K{text}", end="", flush=True)

    def round(self, rounds: Sequence[Round]) -> None:
        """Tell about a finished round, and when all will be done."""
        last, total = rounds[-1], self._schedule.num_rounds
        means = []
        for arm in self._arms:
            windows = last.windows[arm.name]
            means.append(f"{arm.label} {sum(w.wall_ms for w in windows) / len(windows):,.0f}")
        elapsed = time.perf_counter() - self._started
        left_rounds = (total - len(rounds)) * last.seconds
        # Whole rounds only, so it ends a little before the limit.
        left = min(left_rounds, max(self._limit_s - elapsed, 0.0))
        note = " (warms up, not counted)" if last.number == 0 else ""
        start = "\r\x1b[2K" if sys.stdout.isatty() else ""
        print(
            f"{start}round {last.number} of {total - 1}{note}: ms per window: {', '.join(means)}; "
            f"{last.seconds:.0f} s; {elapsed / 60:.1f} min so far, at most {left / 60:.1f} min left",
            flush=True,
        )


def _opening(comparison: Comparison, options: argparse.Namespace, before: int) -> str:
    schedule = comparison.schedule
    text = (
        f"{STUDIES[options.study].title}: {len(comparison.arms)} arms, {schedule.num_rounds} rounds of "
        f"{schedule.windows_per_round} windows, for at most {options.minutes:g} minutes"
    )
    return text + (f"; goes on after round {before - 1}" if before else "")


def _trainer_options(described: CompareCLI) -> dict[str, Any]:
    assert described.subcommand is not None
    config = described.config[described.subcommand]["trainer"]
    found = {key: config[key] for key in TRAINER_KEYS if config[key] is not None}
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


def _check(described: CompareCLI, trainer: dict[str, Any], arms: Sequence[Arm]) -> None:
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
    if model.attention is None:
        raise ValueError(
            explain(
                "model.attention is null",
                "dense attention has no budget to tune",
                "set model.attention.block_size and model.attention.budget",
            )
        )
    if trainer.get("max_steps", -1) < 1:
        raise ValueError(
            explain(
                f"trainer.max_steps is {trainer.get('max_steps')}",
                "it is the number of windows that every arm trains",
                "set trainer.max_steps, such as 200; --minutes ends the comparison earlier",
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


def _settings(
    described: CompareCLI,
    options: argparse.Namespace,
    arms: Sequence[Arm],
    trainer: dict[str, Any],
    machine: str,
) -> dict[str, Any]:
    """Return all that the figures depend on."""
    found: dict[str, Any] = {
        "study": options.study,
        "arms": [arm.name for arm in arms],
        "preset": options.preset,
        "machine": machine,
        "seed_everything": _seed(described),
        "threads_per_rank": _config(described)["threads_per_rank"],
    }
    given: dict[str, Any] = {"trainer": trainer, "model": _arguments(described.model)}
    given["data"] = _arguments(described.datamodule)
    for place, values in given.items():
        found.update({f"{place}.{key}": _plain(value) for key, value in values.items()})
    return found


def _arguments(made: Any) -> dict[str, Any]:
    """Return what a module or a data module was made with; Lightning notes more there."""
    return {key: copy.deepcopy(value) for key, value in made.hparams.items() if not key.startswith("_")}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, list, dict, type(None))) else str(value)


def _about(
    described: CompareCLI, options: argparse.Namespace, arms: Sequence[Arm], arguments: Sequence[str]
) -> dict[str, Any]:
    import torch

    from sb_lightning import __version__
    from sb_lightning.latency.fingerprint import processor_name

    root = described.trainer.strategy.root_device
    name = torch.cuda.get_device_name(root) if root.type == "cuda" else processor_name()
    ranks = described.trainer.world_size
    micro_batches = _config(described)["trainer"]["accumulate_grad_batches"]
    return {
        "command": f"sb compare {shlex.join(arguments)}",
        "machine": f"{name}, {os.cpu_count()} cores, {ranks} ranks on {root.type}",
        "data": options.preset or "as configured",
        "window": f"{ranks} ranks x {micro_batches} micro-batches",
        "versions": f"sb_lightning {__version__}, torch {torch.__version__}",
    }


def _config(described: CompareCLI) -> Any:
    assert described.subcommand is not None
    return described.config[described.subcommand]


def _seed(described: CompareCLI) -> int:
    seed = _config(described)["seed_everything"]
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else 0


def _table(
    described: CompareCLI, options: argparse.Namespace, folder: ComparisonFolder
) -> LatencyTable | None:
    """Return the table that the comparison has begun with, or that the configuration asks for."""
    from sb_lightning.cli.latency import table_of_run
    from sb_lightning.latency import LatencyTable

    if folder.table.exists():
        return LatencyTable.load(folder.table)
    assert described.subcommand is not None
    table = table_of_run(
        described.config_init[described.subcommand]["latency"],
        described.trainer,
        described.model,
        described.datamodule,
        threads=_config(described)["threads_per_rank"],
    )
    if table is not None:
        table.save(folder.table)
    return table


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="sb compare",
        usage="sb compare --output FOLDER [options] [--config FILE ...] [--key value | --key=value ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FOLDER", help="results, and what it takes to go on")
    add("--preset", choices=("longtail", "bimodal"), help="cut the text to lengths of that shape, up to "
        "data.max_length (the documents as they are)")  # fmt: skip
    add("--study", choices=tuple(STUDIES), default="table2", help="what is compared (table2)")
    add("--arms", metavar="NAME,...", help="some of the study's arms (all): for table2, "
        + ",".join(arm.name for arm in STUDIES["table2"].arms))  # fmt: skip
    add("--minutes", type=_minutes, default=DEFAULT_MINUTES, metavar="M",
        help=f"what this call may take ({DEFAULT_MINUTES:g})")  # fmt: skip
    add("--no-png", action="store_true", help="leave the picture out")
    parser.set_defaults(has_begun=False)
    return parser.parse_known_args(arguments)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            explain(f"it is {text!r}", "it is a time", "pass a number of minutes above 0, such as 15")
        )
    return value
