"""`sb doctor`: what works on this machine, and why the rest does not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from sb_lightning import __version__
from sb_lightning.cli.checks import CHECKS, Check

__all__ = ["examine", "run"]

STYLES = {"ok": "green", "warn": "yellow", "red": "bold red", "info": "dim"}


def examine(checks: Iterable[Callable[[], Iterator[Check]]] = CHECKS) -> Iterator[Check]:
    """Run the checks one after another; one that breaks is a red line, not a traceback.

    Args:
        checks: Functions that yield lines.
    """
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Check(
                name=check.__name__.removeprefix("check_").replace("_", " "),
                status="red",
                detail=f"the check itself failed: {type(error).__name__}: {error}",
                fix="mend what the message names; if it names nothing, report it",
            )


def run(arguments: Sequence[str] = ()) -> int:
    """Print the report and return the exit code: 1 if a line is red.

    Args:
        arguments: Options of the command.
    """
    parser = argparse.ArgumentParser(
        prog="sb doctor",
        description="Look at versions, build, attention backends and two ranks. Exit code 1: a line is red.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    try:
        options = parser.parse_args(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    found: list[Check] = []
    for check in examine():
        found.append(check)
        if not options.json:
            _print(check)
    reds = sum(check.status == "red" for check in found)
    if options.json:
        report = {
            "version": 1,
            "sb_lightning": __version__,
            "ok": not reds,
            "checks": [asdict(check) for check in found],
        }
        print(json.dumps(report, indent=2))
    else:
        _print_verdict(reds)
    return 1 if reds else 0


def _print(check: Check) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    line = Text.assemble((f"{check.status:<5}", STYLES[check.status]), f"{check.name:<28}  {check.detail}")
    console.print(line)
    if check.fix:
        console.print(Text(f"{'':<5}{'':<28}  to fix it: {check.fix}"))


def _print_verdict(reds: int) -> None:
    print(f"\n{reds} red line{'s' if reds != 1 else ''}: see 'to fix it'." if reds else "\nNothing is red.")
    print("For a bug report, paste what this prints:\n\n    sb doctor --json\n")
