"""`sb trace`: the spans of a run as a Chrome trace and as a picture."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Write the files and return the exit code.

    Args:
        arguments: Options of the command.
    """
    parser = argparse.ArgumentParser(
        prog="sb trace",
        description="Write what each rank did when, as recorded by ImbalanceMonitor, as trace.json (open it "
        "in https://ui.perfetto.dev, which keeps it on your machine) and as trace.png.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="folder of the run, which holds spans/rank_*.jsonl")
    parser.add_argument("--output", type=Path, help="folder for the files; that of the run by default")
    parser.add_argument(
        "--window",
        type=int,
        action="append",
        metavar="N",
        help="window to draw, repeatable; by default the one of median imbalance and the worst",
    )
    parser.add_argument("--no-png", action="store_true", help="leave the picture out")
    try:
        options = parser.parse_args(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    from sb_lightning.cli.errors import report

    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            paths = write_trace(options.run, options.output, options.window, not options.no_png)
    except Exception as error:
        return report(error)
    for warning in found:
        print(f"sb: warning: {warning.message}", file=sys.stderr)
    for path in paths:
        print(path)
    return 0


def write_trace(
    folder: Path, output: Path | None = None, windows: Sequence[int] | None = None, png: bool = True
) -> list[Path]:
    """Write `trace.json` and `trace.png`, each whole or not at all, and return their paths.

    Args:
        folder: Folder of the run.
        output: Folder for the files; that of the run if None.
        windows: Windows to draw; None chooses.
        png: Whether to draw.

    Raises:
        FileNotFoundError: The run has no spans.
        OSError: Its spans cannot be read, or the folder for the files cannot be made.
        ValueError: A window is not among those of the run, or the spans cannot be read.
        RuntimeError: matplotlib is needed and not installed.
    """
    from sb_lightning._files import write_whole
    from sb_lightning._messages import explain
    from sb_lightning.tracking.gantt import draw_gantt
    from sb_lightning.tracking.span_file import read_spans
    from sb_lightning.tracking.trace import chrome_trace

    spans = read_spans(folder)
    known = {cell.window for cell in spans.cells}
    for window in windows or ():
        if window not in known:
            raise ValueError(
                explain(
                    f"--window is {window}",
                    f"the run has spans of the windows {min(known)} to {max(known)}",
                    "pass one of them",
                )
            )
    output = output or folder
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            explain(
                f"--output is '{output}'",
                f"no folder can be made there ({error.strerror or error})",
                "pass as --output a folder, or a path where one can be made",
            )
        ) from error
    paths = [output / "trace.json"]
    text = json.dumps(chrome_trace(spans), separators=(",", ":"), allow_nan=False)
    write_whole(paths[0], text + "\n")
    if png:
        paths.append(output / "trace.png")
        draw_gantt(spans, paths[1], [("window", window) for window in windows] if windows else None)
    return paths
