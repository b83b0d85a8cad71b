"""Run the CUDA kernels as nvcc compiled them: their PTX, translated into C++, on the emulator.

    python tests/cuda/ptx_lane.py                          # some cases of every kernel
    python tests/cuda/ptx_lane.py few order=reverse        # one set of cases, with settings of the emulator
    python tests/cuda/ptx_lane.py --tsan tiny              # under ThreadSanitizer

A set of cases is one of csrc/tests/test_cuda_kernels.cpp or test_cuda_tuning.cpp, and its results are held
to the same tolerances as those of the kernels' source. nvcc is needed, a GPU is not. What this proves, and
what not: docs/cuda_emulator.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ptx.syntax import parse
from ptx.translate import translate

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "ptx"
FLAGS = ["-std=c++17", "-g1", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-ptx"]
# Functions around one instruction: who reads a message wants to know who called them.
WRAPPERS = ("attention/cuda/device.cuh", "/include/")
# Storage type and head_dim that a set of cases uses; a kernel that is built for others is left out.
EVERYTHING = tuple((dtype, d) for dtype in ("Bf16", "Fp16") for d in (32, 64, 128))
VARIANTS = {"tiny": (("Bf16", 64),), "long": (("Bf16", 32),), "ranks_tiny": (("Bf16", 32),)}
VARIANTS["few"] = VARIANTS["ranks_few"] = (("Bf16", 64), ("Fp16", 64), ("Bf16", 128))
VARIANTS["budgets_few"] = VARIANTS["budgets"] = ()
DEFAULT = ("few", "ranks_few", "budgets_few")
CASES = (*VARIANTS, "all", "ranks_all")
# The .cu files that the test programs need.
KERNELS = {"test_cuda_kernels": ("select", "index", "forward", "backward", "layout")}
KERNELS["test_cuda_tuning"] = ("coverage", "budget", "select", "layout")
# Every register of a kernel may have a place of its own on the stack.
STACK_KB = 512
TSAN = {"TSAN_OPTIONS": "atexit_sleep_ms=0 halt_on_error=1"}


def missing() -> str:
    """Return why the PTX lane cannot run here, or an empty string."""
    if not (ROOT / "csrc").is_dir():
        return "the kernels' sources are not here: the tests run on an installed package"
    if not nvcc():
        return "no nvcc, neither on PATH nor from PyPI: the CUDA compiler writes the PTX"
    if shutil.which("objcopy") is None:
        return "objcopy is not on PATH: it is part of binutils"
    return "" if shutil.which(compiler()[0]) else "no C++ compiler"


@functools.cache
def nvcc() -> str:
    """Return the path of the CUDA compiler, or an empty string."""
    sys.path.append(str(ROOT / "csrc"))
    from cuda_build import find_nvcc

    found = find_nvcc()
    return found.path if found else ""


def compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def translator() -> list[Path]:
    """Return the files that decide what becomes of PTX."""
    here = Path(__file__)
    return [here, *(here.parent / "ptx").glob("*.py"), ROOT / "csrc" / "emulator" / "ptx.h"]


def is_wanted(name: str, variants: tuple[tuple[str, int], ...]) -> bool:
    """Tell whether a kernel, by its mangled name, is for one of the variants or for all."""
    dtype, d = re.search(r"\d(Bf16|Fp16)E", name), re.search(r"Li(32|64|128)E", name)
    fits = ((not dtype or dtype[1] == v[0]) and (not d or int(d[1]) == v[1]) for v in variants)
    return not (dtype or d) or any(fits)


def run(command: list[str]) -> None:
    subprocess.run([str(word) for word in command], check=True)


def compile_kernels(
    tree: Path, source: Path, out: Path, variants: tuple[tuple[str, int], ...], arch: str, flags: list[str]
) -> Path:
    """Return an object file of a .cu whose host code launches what nvcc made of its kernels."""
    ptx, text = out / f"{source.stem}.ptx", out / f"{source.stem}.cpp"
    host, device = out / f"{source.stem}.host.o", out / f"{source.stem}.device.o"
    include = f"-I{tree / 'csrc'}"
    run([nvcc(), *NVCC_FLAGS, include, f"-arch={arch}", source, "-o", ptx])
    module = parse(ptx.read_text(), WRAPPERS)
    text.write_text(translate(module, ptx.name, lambda name: is_wanted(name, variants), str(tree)))
    # nvcc has optimised already.
    run([*compiler(), *FLAGS, *flags, "-O0", include, "-c", text, "-o", device])
    # The translated kernels have the kernels' names. These give way to them, none being inlined.
    run([*compiler(), *FLAGS, "-O0", include, "-x", "c++", "-c", source, "-o", host])
    run(["objcopy", "--weaken", host])
    target = out / f"{source.stem}.o"
    run(["ld", "-r", device, host, "-o", target])
    names = subprocess.run(["nm", target], capture_output=True, text=True, check=True).stdout
    for entry in module.entries:
        assert re.search(rf" T {re.escape(entry.name)}$", names, re.M), (
            f"{entry.name} is not the translated one"
        )
    return target


def build(test: str, variants: tuple[tuple[str, int], ...], arch: str, tsan: bool) -> Path:
    """Return a program of csrc/tests with the translated kernels; compile what has changed."""
    tags = ["all"] if variants == EVERYTHING else [f"{dtype}{d}" for dtype, d in variants] or ["none"]
    out = BUILD / "-".join([arch, *(["tsan"] if tsan else []), *tags])
    out.mkdir(parents=True, exist_ok=True)
    csrc = ROOT / "csrc"
    kernels = [csrc / "attention" / "cuda" / f"{name}.cu" for name in KERNELS[test]]
    others = [*sorted((csrc / "emulator").glob("*.cpp")), csrc / "tests" / f"{test}.cpp"]
    watched = ["-fsanitize=thread"] if tsan else []
    runtime = ["-DEMULATOR_TSAN", "-fno-tree-loop-distribute-patterns"] if tsan else []

    def compiled(source: Path) -> Path:
        target = out / f"{source.stem}.o"
        inputs = [*included(source, ROOT), *translator()]
        if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
            return target
        if source.suffix == ".cu":
            return compile_kernels(ROOT, source, out, variants, arch, watched)
        flags = ["-O3", *runtime] if source.parent.name == "emulator" else ["-O1", *watched]
        run([*compiler(), *FLAGS, *flags, f"-I{csrc}", "-c", source, "-o", target])
        return target

    # The longest first.
    order = sorted([*kernels, *others], key=lambda path: -path.stat().st_size * (1 + 9 * (path in kernels)))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, order))
    program = out / test
    run([*compiler(), *watched, *objects, "-o", program])
    return program


def included(source: Path, tree: Path) -> set[Path]:
    """Return the project's files that a source includes, itself too."""
    seen, todo = set(), [source]
    while todo:
        path = todo.pop()
        if path not in seen and path.exists():
            seen.add(path)
            todo += [tree / "csrc" / name for name in re.findall(r'#include "([^"]+)"', path.read_text())]
    return seen


def test_of(cases: str) -> str:
    """Return which program of csrc/tests has a set of cases."""
    return "test_cuda_tuning" if cases.startswith(("ranks", "budgets")) else "test_cuda_kernels"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CASES SETTINGS",
        help=f"one set of cases ({', '.join(CASES)}) and emulator settings; {', '.join(DEFAULT)} if left out",
    )
    parser.add_argument(
        "--arch",
        default="sm_90a",
        choices=["sm_80", "sm_90a", "sm_120"],
        help="whose PTX; sm_80 has other atomics",
    )
    parser.add_argument("--tsan", action="store_true", help="under ThreadSanitizer")
    options = parser.parse_args()
    if options.words and options.words[0] not in CASES:
        parser.error(f"no set of cases is called {options.words[0]!r}: pass one of {', '.join(CASES)}")
    if why := missing():
        raise SystemExit(
            f"{why}: the PTX lane cannot run. To fix it, run `make lab-ptx`, which installs nvcc."
        )
    failed = 0
    for cases in options.words[:1] or DEFAULT:
        variants = VARIANTS.get(cases, EVERYTHING)
        program = build(test_of(cases), variants, options.arch, options.tsan)
        fixed = ["setarch", "-R"] if options.tsan and shutil.which("setarch") else []
        settings = [f"stack_kb={STACK_KB}", *options.words[1:]]
        print(f"{options.arch} {cases}:", end=" ", flush=True)
        done = subprocess.run([*fixed, str(program), cases, *settings], env={**os.environ, **TSAN})
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
