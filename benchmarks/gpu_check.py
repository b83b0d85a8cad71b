"""Checks the CUDA kernels on a GPU within five minutes; benchmarks/gpu_check.sh builds them first.

python benchmarks/gpu_check.py                         # all checks; a table, JSON and a page
python benchmarks/gpu_check.py --only budget --only graph
python benchmarks/gpu_check.py --device cpu --tiny     # try out the checks themselves, without a GPU
python benchmarks/gpu_check.py --shapes                # all ops on two shapes, for compute-sanitizer

The checks run in a process of their own: one that hangs or breaks the GPU's context costs itself, and the
next goes on in a new process. Exit code 0: none failed; 1: some did; 2: the kernels do not run here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
START_S = 120
"""What a process may take to import torch and reach the GPU."""
LEAST_S = 10
"""What a check may take that begins just before its section's time is up."""
PATIENCE_S = 3600.0
SECTIONS_S = {
    "ops": 50,
    "coverage": 20,
    "budget": 20,
    "dense": 20,
    "deterministic": 15,
    "graph": 15,
    "emulator": 30,
    "sanitizer": 90,
    "times": 60,
    "offsets": 20,
}
"""Most seconds of each section, in the order in which they run."""
PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"


@dataclass(frozen=True)
class Result:
    """What came of a check."""

    check: str
    status: str
    figure: str
    seconds: float = 0.0
    values: dict[str, float] = field(default_factory=dict)


def section_of(name: str) -> str:
    """Return the section of a check: its first word."""
    return name.split()[0]


def make_check(checks: dict[str, Callable[[Any], Any]], machine: Any, name: str) -> Result:
    """Make one check; whatever it raises is its result."""
    from gpu_checks import LeftOut

    start = time.perf_counter()
    values: dict[str, float] = {}
    try:
        figure = checks[name](machine)
        if isinstance(figure, tuple):
            figure, values = figure
        status = PASSED
    except LeftOut as reason:
        status, figure = LEFT_OUT, str(reason)
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        status, figure = FAILED, " ".join(text.split())[:600]
    return Result(name, status, figure, time.perf_counter() - start, values)


def work(connection: Connection, device: str, tiny: bool) -> None:
    """Make the checks that are asked for, one by one, until the GPU's context is broken or no more are."""
    import gpu_checks

    machine = gpu_checks.Machine(device, tiny)
    refusal = machine.refusal()
    connection.send((refusal, {} if refusal else machine.describe(), list(gpu_checks.CHECKS)))
    for name in iter(connection.recv, None):
        result = make_check(gpu_checks.CHECKS, machine, name)
        is_broken = machine.is_broken()
        connection.send((result, is_broken))
        if is_broken:
            return


class Refused(Exception):
    """The kernels do not run here; the text says why."""


class Supervisor:
    """Has checks made in a process of their own, within their times."""

    def __init__(
        self,
        start: Callable[[], tuple[Connection, BaseProcess]],
        sections_s: dict[str, float],
        total_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.start, self.sections_s, self.total_s, self.now = start, sections_s, total_s, now
        self.begin = now()
        self.machine: dict[str, str] = {}
        self.names: list[str] = []
        self._worker: tuple[Connection, BaseProcess] | None = None
        self._spent_s: dict[str, float] = {}

    def results(self, wanted: Iterable[str] | None = None) -> Iterator[Result]:
        """Yield the result of every check, section by section.

        Args:
            wanted: Sections; None for all.

        Raises:
            Refused: The kernels do not run here.
        """
        try:
            try:
                self._connection()
            except (EOFError, OSError):
                raise Refused(
                    "the process that makes the checks ended before the first, as told above"
                ) from None
            chosen = list(self.sections_s if wanted is None else wanted)
            for section in (section for section in self.sections_s if section in chosen):
                for name in (name for name in self.names if section_of(name) == section):
                    yield self._result(name)
        finally:
            self._stop()

    def _result(self, name: str) -> Result:
        section = section_of(name)
        total_left = self.total_s - (self.now() - self.begin)
        section_left = self.sections_s[section] - self._spent_s.get(section, 0.0)
        if total_left <= 0:
            return Result(name, LEFT_OUT, f"all {self.total_s:.0f} seconds are used up")
        if section_left <= 0:
            return Result(
                name, LEFT_OUT, f"the {self.sections_s[section]:.0f} seconds of '{section}' are used up"
            )
        began = self.now()
        result = self._ask(name, max(LEAST_S, min(section_left, total_left)))
        self._spent_s[section] = self._spent_s.get(section, 0.0) + self.now() - began
        return result

    def _ask(self, name: str, limit_s: float) -> Result:
        try:
            connection = self._connection()
            connection.send(name)
            if connection.poll(limit_s):
                result, is_broken = connection.recv()
                if is_broken:
                    self._stop()
                assert isinstance(result, Result)
                return result
            problem = f"no answer within {limit_s:.0f} seconds"
        except (EOFError, OSError):
            problem = "its process ended without an answer"
        self._stop()
        return Result(name, FAILED, problem)

    def _connection(self) -> Connection:
        if self._worker is not None and not self._worker[1].is_alive():
            self._stop()
        if self._worker is None:
            self._worker = self.start()
            if not self._worker[0].poll(START_S):
                raise EOFError
            refusal, self.machine, self.names = self._worker[0].recv()
            if refusal:
                raise Refused(refusal)
        return self._worker[0]

    def _stop(self) -> None:
        if self._worker is not None:
            connection, process = self._worker
            process.kill()
            process.join(10)
            connection.close()
            self._worker = None


def start_worker(device: str, tiny: bool) -> tuple[Connection, BaseProcess]:
    """Start the process that makes the checks."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, device, tiny), daemon=False)
    process.start()
    theirs.close()
    return ours, process


def verdict(results: list[Result]) -> str:
    counts = [f"{sum(r.status == s for r in results)} {s}" for s in (PASSED, FAILED, LEFT_OUT)]
    return ", ".join(counts)


def page(machine: dict[str, str], results: list[Result]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"# CUDA kernels on {machine.get('device', 'an unknown machine')}",
        "",
        "Written by `benchmarks/gpu_check.sh`; "
        + ", ".join(f"{name} {value}" for name, value in machine.items() if name != "device")
        + ".",
        "",
        f"**{verdict(results)}.**",
        "",
        "| check | result | seconds | figure |",
        "|---|---|---|---|",
    ]
    for r in results:
        figure = r.figure.replace("|", "\\|")
        lines.append(f"| {r.check} | {r.status} | {r.seconds:.1f} | {figure} |")
    return "\n".join(lines) + "\n"


def write(folder: Path, machine: dict[str, str], results: list[Result]) -> Path:
    """Write gpu_<machine>.json and .md and return the page's path."""
    name = re.sub("[^a-z0-9]+", "_", machine.get("device", "unknown").split("(")[0].lower()).strip("_")
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "verdict": verdict(results), "checks": [asdict(r) for r in results]}
    (folder / f"gpu_{name}.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    path = folder / f"gpu_{name}.md"
    path.write_text(page(machine, results), "utf-8")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try out the checks")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--only", action="append", choices=list(SECTIONS_S), help="a section; several times")
    parser.add_argument("--total-s", type=float, default=285, help="seconds for all checks")
    parser.add_argument("--output", type=Path, help="folder of the results, instead of benchmarks/results")
    parser.add_argument("--shapes", action="store_true", help="run all ops on two shapes, and nothing else")
    options = parser.parse_args(arguments)
    if options.shapes:
        import gpu_checks

        gpu_checks.tools.run_shapes(gpu_checks.Machine(options.device, options.tiny))
        return 0
    # Whoever tries out the checks waits for them.
    on_gpu = options.device == "cuda"
    limits = {name: float(limit_s) if on_gpu else PATIENCE_S for name, limit_s in SECTIONS_S.items()}
    total_s = options.total_s if on_gpu else PATIENCE_S
    supervisor = Supervisor(lambda: start_worker(options.device, options.tiny), limits, total_s)
    results: list[Result] = []
    try:
        for result in supervisor.results(options.only):
            results.append(result)
            print(f"{result.status:<9} {result.check:<32} {result.figure}", flush=True)
    except Refused as reason:
        print(
            f"\ngpu_check: {reason}.\n"
            "  Why it matters: the checks run the kernels, on a GPU of compute capability 8.0 or later.\n"
            "  What to do: run benchmarks/gpu_check.sh where there is one, with a torch built for CUDA; "
            "benchmarks/gpu_check.py --device cpu --tiny tries out the checks themselves.",
            file=sys.stderr,
        )
        return 2
    print(verdict(results))
    folder = options.output or (RESULTS if on_gpu else None)
    if folder is not None:
        print(f"written: {write(folder, supervisor.machine, results)}")
    return int(any(result.status == FAILED for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
