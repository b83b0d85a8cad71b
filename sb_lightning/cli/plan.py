"""`sb plan`: what each policy would gain, predicted without training."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sb_lightning._messages import explain

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

    from sb_lightning.cli.plan_source import PlanSource

__all__ = ["run"]

DESCRIPTION = """\
Predict, without training, what each policy would make of the windows (optimizer steps) of a
configuration: their times, who waits how long, and what to choose. Writes plan.png.

All keys of `sb fit` are understood (sb fit --help). With --lengths or --preset the data are those
lengths, and no configuration is needed."""
PLANNED_WINDOWS = 1000
PRESET_SEQUENCES = 100_000
MOST = 2**31 - 1


def run(
    arguments: Sequence[str],
    model_class: type[LightningModule] | None = None,
    datamodule_class: type[LightningDataModule] | None = None,
) -> int:
    """Plan, print, write and return the exit code.

    Args:
        arguments: Options of the command.
        model_class: The LightningModule; `CausalLMModule` if None.
        datamodule_class: The LightningDataModule; `TextDataModule` if None.
    """
    from sb_lightning.cli.errors import report

    try:
        options, rest = _parse(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    written: list[Path] = []
    try:
        from sb_lightning.cli.noise import hide_noise

        hide_noise()
        _plan(options, rest, model_class, datamodule_class, written)
    except SystemExit as stop:
        # --print_config, or a wrong key.
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except KeyboardInterrupt:
        kept = f"written before: {', '.join(map(str, written))}" if written else "nothing was written"
        print(f"sb: interrupted; {kept}.", file=sys.stderr)
        return 130
    except Exception as error:
        return report(error)
    return 0


def _plan(
    options: argparse.Namespace,
    rest: Sequence[str],
    model_class: type[LightningModule] | None,
    datamodule_class: type[LightningDataModule] | None,
    written: list[Path],
) -> None:
    from sb_lightning.balance.figures import explain_policies, spread_windows
    from sb_lightning.cli import plan_report as report

    policies = _policies(options.policies)
    picture = None if options.no_png else options.output / "plan.png"
    if picture is not None:
        report.check_folder(options.output, "--output")
    if options.json is not None:
        report.check_folder(options.json.parent, "the folder of --json")
        if options.json.is_dir():
            raise ValueError(
                explain(
                    f"--json is '{options.json}'", "it is a folder", "name a file, such as plan.json in it"
                )
            )
    source = _source(options, rest, model_class, datamodule_class)
    sampler = source.sampler
    sampler.set_epoch(options.epoch)
    lengths = sampler.lengths
    if len(lengths) < sampler.window_size:
        raise ValueError(
            explain(
                f"{len(lengths):,} sequences, and a window of {sampler.ranks} ranks x {sampler.accumulate} "
                f"micro-batches x {sampler.sequences_per_micro_batch} sequences has {sampler.window_size:,}",
                "there is not one whole window to plan",
                "use more sequences, or lower --ranks or --accumulate",
            )
        )
    found = report.describe_lengths(lengths)
    print(
        f"{source.description}: {found['sequences']:,} sequences, {found['tokens']:,} tokens; "
        f"p50 {found['p50']:,}, p90 {found['p90']:,}, p99 {found['p99']:,}, longest {found['max']:,}"
    )
    for note in source.notes:
        print(f"note: {note}")
    print(f"\n{report.histogram(lengths)}\n", flush=True)
    windows = spread_windows(sampler.num_windows, None if options.all else options.windows or PLANNED_WINDOWS)
    with report.progress_of_plans(f"planning {len(windows):,} windows") as progress:
        explanation = explain_policies(sampler, policies, windows, progress)
    print(explanation, flush=True)
    if picture is not None:
        report.draw(sampler, explanation, source.description, picture)
        written.append(picture)
    if options.json is not None:
        report.write_document(options.json, report.plan_document(explanation, lengths, source.description))
        written.append(options.json)
    if written:
        print("\n" + "\n".join(map(str, written)))


def _source(
    options: argparse.Namespace,
    rest: Sequence[str],
    model_class: type[LightningModule] | None,
    datamodule_class: type[LightningDataModule] | None,
) -> PlanSource:
    if not rest:
        from sb_lightning.cli.plan_source import source_of_lengths

        return source_of_lengths(options)
    from sb_lightning.cli.plan_config import source_of_configuration
    from sb_lightning.data import TextDataModule
    from sb_lightning.training import CausalLMModule

    for name, key in (("block_size", "model.attention.block_size"), ("budget", "model.attention.budget")):
        if getattr(options, name) is not None:
            raise ValueError(
                explain(
                    f"--{name.replace('_', '-')} is given beside keys of a configuration",
                    "the configuration says which model it is",
                    f"pass --{key}",
                )
            )
    keys = [*rest, f"--latency.table={options.table}"] if options.table is not None else list(rest)
    return source_of_configuration(
        keys, options, model_class or CausalLMModule, datamodule_class or TextDataModule
    )


def _policies(text: str) -> list[str]:
    from sb_lightning.balance.policies import POLICIES

    policies = [policy.strip() for policy in text.split(",") if policy.strip()]
    for policy in policies:
        if policy not in POLICIES:
            close = difflib.get_close_matches(policy, POLICIES, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                explain(
                    f"--policies names '{policy}'{hint}",
                    "there is no such policy",
                    f"pass some of {', '.join(POLICIES)}",
                )
            )
    if not policies:
        raise ValueError(
            explain(
                "--policies is empty", "there is nothing to compare", f"pass some of {', '.join(POLICIES)}"
            )
        )
    return policies


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="sb plan",
        usage="sb plan [options] [--config FILE ...] [--key value | --key=value ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--policies", default="random,length,tokens,latency", metavar="P,...",
        help="of random, length, tokens, flops, latency (all but flops)")  # fmt: skip
    add("--ranks", type=_count, metavar="R", help="data-parallel ranks (trainer.devices; 8)")
    add("--accumulate", type=_count, metavar="A",
        help="micro-batches per rank and step (trainer.accumulate_grad_batches; 4)")  # fmt: skip
    add("--objective", choices=("ddp", "fsdp"), help="how ranks meet (data.objective; ddp)")
    add("--windows", type=_count, metavar="N", help=f"windows to plan, evenly spread ({PLANNED_WINDOWS})")
    add("--all", action="store_true", help="plan every window of the epoch")
    add("--epoch", type=_epoch, default=0, metavar="E", help="whose order of sequences (0)")
    add("--lengths", type=Path, metavar="FILE",
        help="tokens of each sequence: a number per line, a JSON list, .npy, .jsonl, .parquet")  # fmt: skip
    add("--preset", metavar="NAME", help="synthetic lengths: magi, longalign, chatqa2, llama3, ...")
    add("--column", default="length", metavar="NAME", help="of a .jsonl or .parquet --lengths (length)")
    add(
        "--sequences",
        type=_count,
        default=PRESET_SEQUENCES,
        metavar="N",
        help="to draw from --preset (100000)",
    )
    add(
        "--block-size",
        "--block_size",
        type=_count,
        metavar="B",
        help="keys per block, without a configuration (128)",
    )
    add("--budget", type=_count, metavar="K", help="blocks a query attends, without a configuration (all)")
    add("--latency.table", dest="table", metavar="FILE", help="latency table that `sb profile` wrote")
    add("--output", type=Path, default=Path(), metavar="FOLDER", help="where plan.png goes (.)")
    add("--no-png", action="store_true", help="leave the picture out")
    add("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options, rest = parser.parse_known_args(arguments)
    if options.all and options.windows is not None:
        why = "the one plans every window, the other some of them"
        parser.error(explain("--windows and --all are both given", why, "leave one of them out"))
    if options.lengths is not None and options.preset is not None:
        why = "either is all the data"
        parser.error(explain("--lengths and --preset are both given", why, "leave one of them out"))
    return options, rest


def _count(text: str) -> int:
    return _number(text, 1)


def _epoch(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= MOST:
        raise argparse.ArgumentTypeError(
            explain(f"it is {text!r}", "it is counted in whole numbers", f"pass one from {least} to {MOST:,}")
        )
    return value
