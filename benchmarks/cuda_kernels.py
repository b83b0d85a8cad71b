"""Compile every CUDA kernel for every architecture and list what it needs; no GPU is asked for.

python benchmarks/cuda_kernels.py                      # compile; spills and warnings are errors
python benchmarks/cuda_kernels.py --write              # and write benchmarks/results/cuda_kernels.md
python benchmarks/cuda_kernels.py --arch sm_90a        # one architecture only
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "csrc" / "attention" / "cuda"
PAGE = ROOT / "benchmarks" / "results" / "cuda_kernels.md"
FLAGS = ["-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-Werror", "all-warnings"]
FLAGS += ["-Xptxas", "-v", "-Xptxas", "-warn-spills", "-Xptxas", "-Werror"]


@dataclass(frozen=True)
class Architecture:
    """Limits of a multiprocessor (CUDA C++ Programming Guide, table of compute capabilities)."""

    shared: int  # bytes
    shared_per_block: int
    threads: int
    blocks: int


ARCHITECTURES = {
    "sm_80": Architecture(164 * 1024, 163 * 1024, 2048, 32),
    "sm_90a": Architecture(228 * 1024, 227 * 1024, 2048, 32),
    "sm_120": Architecture(100 * 1024, 99 * 1024, 1536, 24),
}

# Threads and shared memory as the launches have them: head_dim, then the largest tile of rows.
SIZES = """
#include <cstdio>
#include "attention/cuda/backward.cuh"
#include "attention/cuda/index.cuh"
#include "attention/cuda/layout.cuh"
#include "attention/cuda/pool.cuh"
#include "attention/cuda/query_gradient.cuh"
#include "attention/cuda/select.cuh"
using namespace sb::cuda;
template <int D> void Print() {
  std::printf("ForwardKernel %d %d %ld\\n", D, kSweepThreads, (long)ForwardShape<D>::Shared(512));
  std::printf("KeyGradientKernel %d %d %d\\n", D, kBackwardThreads, BackwardShape<D>::kShared);
  std::printf("QueryGradientKernel %d %d %d\\n", D, kSweepThreads, QueryGradientShape<D>::kShared);
  std::printf("SelectKernel %d %d %ld\\n", D, kSelectThreads, (long)SelectShape<Bf16, D>::Shared(136, true));
  std::printf("PoolKernel %d %d %d\\n", D, kPoolThreads, kPoolShared);
  std::printf("DeltaKernel %d %d 0\\n", D, kDeltaThreads);
}
int main() {
  Print<32>();
  Print<64>();
  Print<128>();
  std::printf("SumKernel 0 256 0\\n");
  std::printf("LayoutKernel 0 %d %d\\n", kScanThreads, kScanWarps * 8);
  std::printf("ScanKernel 0 %d %d\\n", kScanThreads, kScanWarps * 8);
  std::printf("CountKernel 0 %d %d\\n", kIndexThreads, kCountShared);
  std::printf("CellKernel 0 %d 0\\n", kIndexThreads);
  std::printf("PlaceKernel 0 %d %d\\n", kIndexThreads, kPlaceShared);
  std::printf("FillKernel 0 %d 0\\n", kIndexThreads);
}
"""


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel."""

    name: str
    registers: int
    spilled: int  # bytes


def compile_one(nvcc: str, source: Path, arch: str, folder: Path) -> list[Kernel]:
    cubin = folder / f"{source.stem}.{arch}.cubin"
    command = [nvcc, *FLAGS, f"-arch={arch}", "-cubin", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if re.search("error|warning|spill", line)]
        raise SystemExit(f"{source.name} for {arch} does not compile cleanly:\n" + "\n".join(lines[:20]))
    return parse(subprocess.run(["c++filt"], input=done.stderr, capture_output=True, text=True).stdout)


def parse(text: str) -> list[Kernel]:
    kernels, name, spilled = [], "", 0
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(?:void )?(.*?)\(", line):
            name = found[1].replace("sb::cuda::", "")
        elif found := re.search(r"(\d+) bytes spill stores", line):
            spilled = int(found[1])
        elif found := re.search(r"Used (\d+) registers", line):
            kernels.append(Kernel(name, int(found[1]), spilled))
    return kernels


def launch_sizes(folder: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Return threads and bytes of shared memory by kernel and head_dim."""
    source, program = folder / "sizes.cpp", folder / "sizes"
    source.write_text(SIZES)
    compiler = os.environ.get("CXX", "g++").split()
    emulator = [str(path) for path in (ROOT / "csrc" / "emulator").glob("*.cpp")]
    flags = ["-std=c++17", "-w", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*compiler, *flags, str(source), *emulator, "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split("\n")
    rows = [line.split() for line in lines if line]
    return {(name, int(d)): (int(threads), int(shared)) for name, d, threads, shared in rows}


def blocks_per_multiprocessor(
    limits: Architecture, registers: int, threads: int, shared: int
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


def table(kernels: dict[str, list[Kernel]], sizes: dict[tuple[str, int], tuple[int, int]]) -> list[str]:
    archs = list(kernels)
    lines = [
        "| kernel | threads | shared KB | " + " | ".join(f"{a} registers | blocks/SM" for a in archs) + " |",
        "|---|---|---|" + "---|---|" * len(archs),
    ]
    by_name = {arch: {kernel.name: kernel for kernel in kernels[arch]} for arch in archs}
    for name in sorted(by_name[archs[0]], key=sort_key):
        base = name.split("<")[0]
        dims = [int(x) for x in re.findall(r"\b(32|64|128)\b", name)]
        threads, shared = sizes[base, dims[0] if dims else 0]
        cells = []
        for arch in archs:
            kernel = by_name[arch][name]
            fit, limit = blocks_per_multiprocessor(ARCHITECTURES[arch], kernel.registers, threads, shared)
            cells.append(f"{kernel.registers} | {fit} ({limit})")
        lines.append(f"| `{name}` | {threads} | {shared / 1024:.1f} | " + " | ".join(cells) + " |")
    return lines


def sort_key(name: str) -> tuple[str, int, str]:
    return name.split("<")[0], int((re.findall(r"\b(32|64|128)\b", name) or ["0"])[0]), name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--arch", action="append", choices=list(ARCHITECTURES), help="may be repeated; all if left out"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit(
            "nvcc is not on PATH: the CUDA kernels cannot be compiled. To fix it, install the CUDA toolkit "
            "(its compiler is enough), or run the kernels on the emulator: make lab."
        )
    archs = options.arch or list(ARCHITECTURES)
    sources = sorted(KERNELS.glob("*.cu"))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        folder = Path(name)
        jobs = [
            (arch, pool.submit(compile_one, nvcc, source, arch, folder))
            for arch in archs
            for source in sources
        ]
        kernels: dict[str, list[Kernel]] = {arch: [] for arch in archs}
        for arch, job in jobs:
            kernels[arch] += job.result()
        sizes = launch_sizes(folder)
    for arch in archs:
        most = max(kernel.registers for kernel in kernels[arch])
        print(f"{arch}: {len(kernels[arch])} kernels, none spills, at most {most} registers")
    if not options.write:
        return
    if archs != list(ARCHITECTURES):
        sys.exit("--write goes with all architectures: the page compares them. To fix it, leave --arch out.")
    release = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release ([0-9.]+), V([0-9.]+)", release)
    PAGE.write_text(page(kernels, sizes, version[2] if version else "?"))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def page(
    kernels: dict[str, list[Kernel]], sizes: dict[tuple[str, int], tuple[int, int]], version: str
) -> str:
    lines = [
        "# What the CUDA kernels need",
        "",
        f"Written by `python benchmarks/cuda_kernels.py --write` with nvcc {version}; no GPU was used.",
        "Spills and warnings are errors there, so every kernel keeps all its variables in registers. Shared",
        "memory is that of a launch with tiles of 512 rows and, for selection, 128 blocks per sequence. Why",
        "the tiles are as they are: [docs/cuda_kernels.md](../../docs/cuda_kernels.md).",
        "",
        *table(kernels, sizes),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
