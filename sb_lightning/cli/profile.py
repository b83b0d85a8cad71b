"""`sb profile`: measure the training steps of a configuration on this machine."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from sb_lightning.cli.errors import report
from sb_lightning.cli.latency import check_length, conditions_of, kept_samples
from sb_lightning.cli.noise import hide_noise
from sb_lightning.cli.train import PARSER_OPTIONS, TrainingCLI

__all__ = ["run"]

DESCRIPTION = """\
Measure training steps of the model that `sb fit` would train with the same options, and write their
times as a latency table (JSON) with a picture of its errors (PNG) beside it. Nothing is trained. An
interrupted profile goes on where it stopped when it is called again.

All keys of `sb fit` are understood (sb fit --help): --config FILE, --model.attention.block_size=128,
--trainer.precision=bf16-mixed and so on."""


class ProfileCLI(TrainingCLI):
    """Reads the command line of `fit`, and builds what it describes without running it."""

    command = "sb profile"

    def parser_options(self) -> dict[str, Any]:
        """Return the texts of `sb fit` with this command's name."""
        options: dict[str, Any] = copy.deepcopy(PARSER_OPTIONS)
        options["fit"]["usage"] = (
            "sb profile [--output FILE] [--config FILE ...] [--key value | --key=value ...]"
        )
        return options

    @property
    def uses_latency(self) -> bool:
        """A profile has options of its own."""
        return False

    def before_instantiate_classes(self) -> None:
        """Leave out what only a training needs."""
        super().before_instantiate_classes()
        assert self.subcommand is not None
        trainer = self.config[self.subcommand]["trainer"]
        trainer["logger"] = False
        trainer["callbacks"] = None

    def _run_subcommand(self, subcommand: str) -> None:
        """Train nothing."""


def run(
    arguments: Sequence[str],
    model_class: type[LightningModule] | None = None,
    datamodule_class: type[LightningDataModule] | None = None,
) -> int:
    """Measure, write the table and return the exit code.

    Args:
        arguments: Options of the command.
        model_class: The LightningModule; `CausalLMModule` if None.
        datamodule_class: The LightningDataModule; `TextDataModule` if None.
    """
    hide_noise()
    parser = _parser()
    try:
        options, rest = parser.parse_known_args(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        from sb_lightning.data import TextDataModule
        from sb_lightning.latency.profiler import check_output
        from sb_lightning.training import CausalLMModule

        check_output(options.output)
        described = ProfileCLI(
            model_class or CausalLMModule, datamodule_class or TextDataModule, args=["fit", *rest]
        )
        _measure(described, options)
    except SystemExit as stop:
        # --print_config, or a wrong key.
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except KeyboardInterrupt:
        print(f"sb: interrupted; {kept_samples(options.output)}", file=sys.stderr)
        return 130
    except Exception as error:
        return report(error)
    return 0


def _measure(described: ProfileCLI, options: argparse.Namespace) -> None:
    from sb_lightning.latency.profiler import run_profile

    assert described.subcommand is not None
    conditions = conditions_of(
        described.trainer,
        described.model,
        described.datamodule,
        threads=described.config[described.subcommand]["threads_per_rank"],
        ranks=options.ranks,
        max_length=options.max_length,
    )
    check_length(conditions, "--max-length" if options.max_length else "data.max_length")
    run_profile(conditions, budget_seconds=options.budget_seconds, output=options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sb profile",
        usage="sb profile [--output FILE] [--ranks N] [--budget-seconds S] [--max-length L] "
        "[--config FILE ...] [--key value | --key=value ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("table.json"), metavar="FILE", help="the table (table.json)"
    )
    parser.add_argument(
        "--ranks", type=_positive(int), metavar="N",
        help="ranks that share this machine, so many processes run at a time (trainer.devices)",
    )  # fmt: skip
    parser.add_argument(
        "--budget-seconds", "--budget_seconds", type=_positive(float), default=60.0, metavar="S",
        help="seconds of measuring; starting takes some more (60)",
    )  # fmt: skip
    parser.add_argument(
        "--max-length", "--max_length", type=_positive(int), metavar="L",
        help="longest sequence in tokens (data.max_length)",
    )  # fmt: skip
    return parser


def _positive(kind: type[int] | type[float]) -> Any:
    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"'{text}': a number above 0 is wanted")
        return value

    return convert
