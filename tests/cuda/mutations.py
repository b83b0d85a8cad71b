"""Plant known bugs in the CUDA kernels, one at a time, and see that the named mode catches each.

    python tests/cuda/mutations.py              # all of tests/cuda/mutations/*.patch
    python tests/cuda/mutations.py NAME ...     # some

A patch says in its first line how it is caught: `mode: BUILD CASES SETTINGS...`, with a build of plain, asan,
tsan or ptx and the arguments of csrc/tests/test_cuda_kernels.cpp, or of test_cuda_tuning.cpp where the set of
cases is one of its own. The clean kernels must pass the same modes. Build ptx runs what nvcc makes of the
kernels (ptx_lane.py), for bugs in inline assembly, which no other build sees.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ptx_lane

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).resolve().parent / "mutations"
CACHE = ROOT / "build" / "mutations"
BASE = ["-std=c++17", "-g", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
# Of the kernels, and of the runtime, which ThreadSanitizer must not instrument.
BUILDS = {
    "plain": ([], []),
    "asan": (["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"], ["-fsanitize=address"]),
    "tsan": (["-fsanitize=thread"], ["-DEMULATOR_TSAN", "-fno-tree-loop-distribute-patterns"]),
    "ptx": ([], []),
}
# The test programs, by their sets of cases.
PROGRAMS = {
    "test_cuda_kernels": ("tiny", "long", "few", "all"),
    "test_cuda_tuning": ("ranks_tiny", "ranks_few", "ranks_all", "budgets_few", "budgets"),
}
# What the clean kernels take is a sixth; lanes that disagree may wait for each other for ever.
LIMIT_S = 120
ENVIRONMENT = {"TSAN_OPTIONS": "atexit_sleep_ms=0 halt_on_error=1"}


@dataclass(frozen=True)
class Mutation:
    """A planted bug and what catches it."""

    patch: Path
    build: str
    arguments: list[str]

    @property
    def name(self) -> str:
        """The file's name."""
        return self.patch.stem

    @property
    def program(self) -> str:
        """The test program that has the set of cases."""
        return next(name for name, sets in PROGRAMS.items() if self.arguments[0] in sets)


def read(patch: Path) -> Mutation:
    first = patch.read_text().splitlines()[0]
    found = re.fullmatch(r"mode: (plain|asan|tsan|ptx) (.*)", first)
    if found is None:
        raise SystemExit(f"{patch.name}: its first line is no 'mode: BUILD CASES SETTINGS...'")
    return Mutation(patch, found[1], found[2].split())


def compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def sources(tree: Path) -> list[Path]:
    kernels = sorted((tree / "csrc/attention/cuda").glob("*.cu"))
    runtime = sorted((tree / "csrc/emulator").glob("*.cpp"))
    return [*kernels, *runtime, *(tree / f"csrc/tests/{name}.cpp" for name in PROGRAMS)]


def compile_one(tree: Path, source: Path, build: str, out: Path) -> Path:
    if build == "ptx" and source.suffix == ".cu":
        return ptx_lane.compile_kernels(tree, source, out, ptx_lane.VARIANTS["tiny"], "sm_90a", [])
    is_runtime = source.parent.name == "emulator"
    flags = BUILDS[build][1 if is_runtime else 0]
    target = out / f"{source.stem}.o"
    command = [
        *compiler(),
        *BASE,
        *flags,
        f"-I{tree / 'csrc'}",
        "-x",
        "c++",
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)
    return target


def included(source: Path, tree: Path) -> set[Path]:
    """Return the project's files that a source includes, itself too."""
    seen, todo = set(), [source]
    while todo:
        path = todo.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        todo += [tree / "csrc" / name for name in re.findall(r'#include "([^"]+)"', path.read_text())]
    return {path.relative_to(tree) for path in seen}


def link(objects: list[Path], build: str, test: str, program: Path) -> None:
    mine = [str(path) for path in objects if path.stem == test or path.stem not in PROGRAMS]
    subprocess.run([*compiler(), *BUILDS[build][0], *mine, "-o", str(program)], check=True)


def run(program: Path, mutation: Mutation) -> str:
    """Return what was found, or an empty string."""
    stacks = {"tsan": 32, "ptx": ptx_lane.STACK_KB}
    extra = [f"stack_kb={stacks[mutation.build]}"] if mutation.build in stacks else []
    fixed = ["setarch", "-R"] if mutation.build == "tsan" and can_fix_addresses() else []
    try:
        done = subprocess.run(
            [*fixed, str(program), *mutation.arguments, *extra],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, **ENVIRONMENT},
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    lines = (done.stdout + done.stderr).splitlines()
    for told in ("SUMMARY", "stopped:|emulator:", "runtime error", r"^\S*(test_cuda_\w+.cpp|cuda_case.h):"):
        for line in lines:
            if re.search(told, line):
                return line.strip().replace(f"{ROOT}/", "")
    return f"exit code {done.returncode}"


def can_fix_addresses() -> bool:
    return shutil.which("setarch") is not None and subprocess.run(["setarch", "-R", "true"]).returncode == 0


def clean_objects(build: str, pool: ThreadPoolExecutor) -> dict[Path, Path]:
    """Compile the kernels as they are; by path within the tree."""
    out = CACHE / build
    out.mkdir(parents=True, exist_ok=True)

    def fresh(source: Path) -> Path:
        target = out / f"{source.stem}.o"
        inputs = [ROOT / path for path in included(source, ROOT)]
        inputs += ptx_lane.translator() if build == "ptx" else []
        newest = max(path.stat().st_mtime for path in inputs)
        return (
            target
            if target.exists() and target.stat().st_mtime > newest
            else compile_one(ROOT, source, build, out)
        )

    files = sources(ROOT)
    return {s.relative_to(ROOT): o for s, o in zip(files, pool.map(fresh, files), strict=True)}


def plant(mutation: Mutation, clean: dict[Path, Path]) -> str:
    """Build and run with the bug; return what caught it."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        shutil.copytree(ROOT / "csrc", tree / "csrc")
        with mutation.patch.open() as text:
            done = subprocess.run(
                ["patch", "-p1", "-s", "-F0"], stdin=text, cwd=tree, capture_output=True, text=True
            )
        if done.returncode != 0:
            raise SystemExit(
                f"{mutation.patch.name} does not apply: the kernels have changed. Plant the bug anew."
            )
        changed = {
            Path(line[6:].split("\t")[0])
            for line in mutation.patch.read_text().splitlines()
            if line[:6] == "+++ b/"
        }
        objects = []
        for path, ready in clean.items():
            if path.suffix == ".cu" and path.stem not in ptx_lane.KERNELS[mutation.program]:
                continue
            again = included(tree / path, tree) & changed
            objects.append(compile_one(tree, tree / path, mutation.build, tree) if again else ready)
        link(objects, mutation.build, mutation.program, tree / "program")
        return run(tree / "program", mutation)


def main(names: list[str]) -> int:
    mutations = [read(path) for path in sorted(PATCHES.glob("*.patch")) if not names or path.stem in names]
    if why := ptx_lane.missing():
        print(f"bugs for build ptx are left out: {why}")
        mutations = [mutation for mutation in mutations if mutation.build != "ptx"]
    missed = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        clean = {build: clean_objects(build, pool) for build in sorted({m.build for m in mutations})}
        for build, test in {(m.build, m.program) for m in mutations}:
            link(list(clean[build].values()), build, test, CACHE / f"clean_{build}_{test}")
        modes = {(m.build, *m.arguments): m for m in mutations}
        for mode, found in zip(
            modes,
            pool.map(lambda m: run(CACHE / f"clean_{m.build}_{m.program}", m), modes.values()),
            strict=True,
        ):
            if found:
                print(f"the clean kernels fail in mode {' '.join(mode)}: {found}")
                missed += 1
        for mutation, found in zip(
            mutations, pool.map(lambda m: plant(m, clean[m.build]), mutations), strict=True
        ):
            missed += not found
            mode = " ".join([mutation.build, *mutation.arguments])
            print(f"{'caught' if found else 'MISSED'} {mutation.name} by {mode}: {found[:140]}", flush=True)
    print(f"{len(mutations)} bugs planted, {missed} problems")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
