"""Compile every CUDA kernel for every architecture and list what it needs; no GPU is asked for.

python benchmarks/cuda_kernels.py                      # compile; spills and warnings are errors
python benchmarks/cuda_kernels.py --write              # and write benchmarks/results/cuda_kernels.md

What has not changed since is not compiled again; the objects are those that SB_BUILD_CUDA=1 links. Threads
and shared memory are read off the launches in csrc/attention/cuda/*.cu: a new kernel needs no word here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "csrc"))

from cuda_build import ARCHITECTURES, KERNELS, Compiled, compile_kernels, find_nvcc  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "cuda_kernels.md"
REASONS = ROOT / "docs" / "cuda_kernels.md"
DTYPES, HEAD_DIMS = ("Bf16", "Fp16"), (32, 64, 128)
# What a launch depends on besides dtype and head_dim.
EXAMPLE = {"tile_rows": "512L", "num_blocks": "128L", "stride": "136L", "in_shared": "true"}


@dataclass(frozen=True)
class Multiprocessor:
    """Limits (CUDA C++ Programming Guide, table of compute capabilities)."""

    shared: int  # bytes
    threads: int
    blocks: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(164 * 1024, 2048, 32),
    "sm_90a": Multiprocessor(228 * 1024, 2048, 32),
    "sm_120": Multiprocessor(100 * 1024, 1536, 24),
}


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel."""

    name: str
    arch: str
    registers: int


@dataclass(frozen=True)
class Launch:
    """How a source launches a kernel, in C++."""

    name: str
    threads: str
    shared: str
    aliases: tuple[str, ...]


def parse(compiled: Compiled) -> list[Kernel]:
    """Return the kernels of all architectures that a log of ptxas tells of."""
    log = subprocess.run(["c++filt"], input=compiled.log, capture_output=True, text=True, check=True).stdout
    kernels, name, arch = [], "", ""
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(?:void )?(.*?)\(.*' for '(\w+)'", line):
            name, arch = found[1].replace("sb::cuda::", ""), found[2]
        elif found := re.search(r"Used (\d+) registers", line):
            kernels.append(Kernel(name, arch, int(found[1])))
    return kernels


def launches(source: str) -> list[Launch]:
    """Return the calls of `Run` in a source: name, kernel, grid, threads, shared, machine, arguments."""
    aliases = tuple(re.findall(r"using \w+ = \w+<[^;]*\bD>;", source))
    found = []
    for start in re.finditer(r"\bRun\((?=\")", source):
        words, depth, word = [], 0, ""
        for sign in source[start.end() :].replace("->", "."):
            depth += (sign in "([{<") - (sign in ")]}>")
            if depth < 0:
                break
            if sign == "," and depth == 0:
                words.append(" ".join(word.split()))
                word = ""
            else:
                word += sign
        found.append(Launch(words[0].strip('"'), words[3], words[4], aliases))
    return found


def launch_sizes(found: list[Launch]) -> dict[tuple[str, str, int], tuple[int, int]]:
    """Return threads and bytes of shared memory by kernel, dtype and head_dim."""
    sizes = measure_launches(found)
    if sizes is None:
        sizes = {}
        for launch in found:
            one = measure_launches([launch])
            if one is None:
                print(f"the launch of {launch.name} depends on more than EXAMPLE in {__file__} names")
            sizes |= one or {}
    return sizes


def measure_launches(found: list[Launch]) -> dict[tuple[str, str, int], tuple[int, int]] | None:
    headers = [*sorted(KERNELS.glob("*.cuh")), KERNELS / "launch.h"]
    lines = ["#include <cstdio>", *(f'#include "{path}"' for path in headers), "using namespace sb::cuda;"]
    for i, launch in enumerate(found):
        lines += [f"template <class E, int D> void Print{i}(const char* dtype) {{", *launch.aliases]
        lines += [f"[[maybe_unused]] const auto {name} = {value};" for name, value in EXAMPLE.items()]
        values = f"long({launch.threads}), long({launch.shared})"
        lines.append(f'std::printf("{launch.name} %s %d %ld %ld\\n", dtype, D, {values}); }}')
    lines.append("int main() {")
    for i in range(len(found)):
        lines += [f'Print{i}<{dtype}, {dim}>("{dtype}");' for dtype in DTYPES for dim in HEAD_DIMS]
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "sizes.cpp", Path(folder) / "sizes"
        source.write_text("\n".join([*lines, "}"]))
        compiler = os.environ.get("CXX", "g++").split()
        emulator = [str(path) for path in (ROOT / "csrc" / "emulator").glob("*.cpp")]
        command = [*compiler, "-std=c++17", "-w", f"-I{ROOT / 'csrc'}", str(source), *emulator]
        if subprocess.run([*command, "-o", str(program)], capture_output=True).returncode != 0:
            return None
        told = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in told.splitlines()]
    return {
        (name, dtype, int(dim)): (int(threads), int(shared)) for name, dtype, dim, threads, shared in rows
    }


def blocks_per_multiprocessor(
    limits: Multiprocessor, registers: int, threads: int, shared: int
) -> tuple[int, str]:
    """Return how many blocks of threads fit, and what limits them."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    fit = {
        "registers": 65536 // 4 // per_warp * 4 // warps,
        "shared memory": limits.shared // (-(-(shared + 1024) // 128) * 128),
        "threads": limits.threads // (warps * 32),
        "blocks": limits.blocks,
    }
    least = min(fit, key=lambda what: fit[what])
    return fit[least], least


def variant(name: str) -> tuple[str, str, int]:
    """Return the name without its arguments, its dtype and its head_dim, where it has them."""
    dtype, dim = re.search(r"Bf16|Fp16", name), re.search(r"\b(32|64|128)\b", name)
    return name.split("<")[0], dtype[0] if dtype else "Bf16", int(dim[0]) if dim else 64


def table(kernels: list[Kernel], sizes: dict[tuple[str, str, int], tuple[int, int]]) -> list[str]:
    lines = [
        "| kernel | threads | shared KB | "
        + " | ".join(f"{arch} registers | blocks/SM, warps/SM (limit)" for arch in ARCHITECTURES)
        + " |",
        "|---|---|---|" + "---|---|" * len(ARCHITECTURES),
    ]
    registers = {(kernel.name, kernel.arch): kernel.registers for kernel in kernels}

    def order(name: str) -> tuple[str, int, str]:
        base, _, dim = variant(name)
        return base, dim, name

    for name in sorted({kernel.name for kernel in kernels}, key=order):
        size = sizes.get(variant(name))
        cells = []
        for arch in ARCHITECTURES:
            used = registers[name, arch]
            if size is None:
                cells.append(f"{used} | ?")
                continue
            fit, limit = blocks_per_multiprocessor(MULTIPROCESSORS[arch], used, *size)
            cells.append(f"{used} | {fit}, {fit * -(-size[0] // 32)} ({limit})")
        threads, shared = (size[0], f"{size[1] / 1024:.1f}") if size else ("?", "?")
        lines.append(f"| `{name}` | {threads} | {shared} | " + " | ".join(cells) + " |")
    return lines


def reasons() -> str:
    """Return what docs/cuda_kernels.md says about the tiles."""
    found = re.search(r"^## Why these tiles\n+(.*?)(?=^## |\Z)", REASONS.read_text("utf-8"), re.M | re.S)
    if found is None:
        raise SystemExit(
            f"{REASONS} has no section 'Why these tiles': the page repeats it. To fix it, write it."
        )
    return found[1].strip()


def page(kernels: list[Kernel], sizes: dict[tuple[str, str, int], tuple[int, int]], version: str) -> str:
    lines = [
        "# What the CUDA kernels need",
        "",
        f"Written by `python benchmarks/cuda_kernels.py --write` with nvcc {version}; no GPU was used.",
        "Spills and warnings are errors there, so every kernel keeps all its variables in registers. Shared",
        "memory is that of a launch with tiles of 512 rows and, for selection and coverage, 128 blocks per",
        "sequence. Blocks and warps per multiprocessor (SM) are what registers, shared memory and threads",
        "leave room for, and the limit is the scarcest of them.",
        "",
        *table(kernels, sizes),
        "",
        "## Why these tiles",
        "",
        "From [docs/cuda_kernels.md](../../docs/cuda_kernels.md):",
        "",
        reasons(),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit(
            "nvcc is not on PATH and in no wheel here: the CUDA kernels cannot be compiled. To fix it, "
            "install the toolkit or `pip install --no-deps -r requirements/nvcc.txt`, or run the kernels "
            "on the emulator: make lab."
        )
    if nvcc.architectures != ARCHITECTURES:
        raise SystemExit(
            f"nvcc ({nvcc.path}) is of CUDA {nvcc.release} and knows no sm_120: the kernels are compiled for "
            f"{', '.join(ARCHITECTURES)}. To fix it, take CUDA 12.8 or later."
        )
    try:
        compiled = compile_kernels(nvcc, ROOT / "build" / "cuda", strict=True)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if re.search("error|warning|spill", line)]
        lines = [line for line in lines if " 0 bytes spill stores" not in line]
        raise SystemExit(f"{error.cmd[-3]} does not compile cleanly:\n" + "\n".join(lines[:20])) from None
    kernels = [kernel for one in compiled for kernel in parse(one)]
    for arch in ARCHITECTURES:
        registers = [kernel.registers for kernel in kernels if kernel.arch == arch]
        print(f"{arch}: {len(registers)} kernels, none spills, at most {max(registers)} registers")
    sources = [path.read_text("utf-8") for path in sorted(KERNELS.glob("*.cu"))]
    found = re.search(r"V([0-9.]+)", nvcc.version)
    sizes = launch_sizes([launch for source in sources for launch in launches(source)])
    text = page(kernels, sizes, found[1] if found else nvcc.release)
    if options.write:
        PAGE.write_text(text, "utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    elif not PAGE.exists() or text != PAGE.read_text("utf-8"):
        print(f"{PAGE.relative_to(ROOT)} tells of other kernels or another nvcc: --write writes it anew")


if __name__ == "__main__":
    main()
