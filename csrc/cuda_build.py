"""Finds nvcc and compiles the CUDA kernels, for setup.py and for benchmarks/cuda_kernels.py.

An object is compiled once: its name holds a digest of the compiler, the flags and all that its source
includes, and what ptxas said of it lies beside it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent
KERNELS = CSRC / "attention" / "cuda"
# sm_86 and sm_89 run the code for sm_80; the PTX is compiled by the driver of a GPU that is not here.
ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")
GENCODE = {name: f"-gencode=arch={name.replace('sm', 'compute')},code={name}" for name in ARCHITECTURES}
PTX = "-gencode=arch=compute_90,code=compute_90"
FLAGS = ["-std=c++17", "-O3", f"-I{CSRC}", "-Xcompiler=-fPIC,-fvisibility=hidden"]
FLAGS += ["-Xptxas", "-v", "-Xptxas", "-warn-spills"]
STRICT = ["-Werror", "all-warnings", "-Xptxas", "-Werror"]


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler."""

    path: str
    release: str
    """Of CUDA, such as "13.0"; "unknown" where nvcc does not say."""
    version: str
    """All that `nvcc --version` prints."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those of `ARCHITECTURES` that it knows."""
        numbers = [int(number) for number in re.findall(r"\d+", self.release)]
        return tuple(name for name in ARCHITECTURES if name != "sm_120" or numbers >= [12, 8])


def find_nvcc() -> Nvcc | None:
    """Return the compiler that NVCC names, else that on PATH or of the wheels from PyPI, else None."""
    wanted = os.environ.get("NVCC") or "nvcc"
    path = shutil.which(wanted)
    if path is None and wanted == "nvcc":
        folder = Path(sysconfig.get_path("purelib")) / "nvidia"
        path = next((str(found) for found in sorted(folder.glob("cu*/bin/nvcc"), reverse=True)), None)
    if path is None:
        return None
    told = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release ([0-9]+\.[0-9]+)", told)
    return Nvcc(path, found[1] if found else "unknown", told)


def runtime_folders(nvcc: Nvcc) -> list[str]:
    """Return the folders that hold the static CUDA runtime: where nvcc itself looks, and the wheels' own."""
    plan = [nvcc.path, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    told = subprocess.run(plan, capture_output=True, text=True).stderr
    here = re.search(r"_HERE_=(.*)", told)
    folders = [Path(folder) for folder in re.findall(r'"-L([^"]+)"', told)]
    folders += [Path(here[1]).parent / "lib"] if here else []
    return [str(folder.resolve()) for folder in folders if (folder / "libcudart_static.a").exists()]


def included(source: Path) -> list[Path]:
    """Return the project's files that a source includes, and itself."""
    seen: set[Path] = set()
    todo = [source]
    while todo:
        path = todo.pop()
        if path not in seen and path.exists():
            seen.add(path)
            todo += [CSRC / name for name in re.findall(r'#include "([^"]+)"', path.read_text("utf-8"))]
    return sorted(seen)


@dataclass(frozen=True)
class Compiled:
    """An object file of all architectures."""

    source: Path
    target: Path
    log: str
    """What ptxas says of its kernels."""


def compile_kernels(nvcc: Nvcc, out: Path, strict: bool = False) -> list[Compiled]:
    """Compile what has changed and return all objects.

    Args:
        nvcc: The compiler.
        out: Folder of the objects.
        strict: Let spills and warnings be errors.

    Raises:
        subprocess.CalledProcessError: A kernel does not compile; `stderr` says why.
    """
    out.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *(GENCODE[name] for name in nvcc.architectures), PTX]

    def compile_one(source: Path) -> Compiled:
        digest = hashlib.sha256(repr((nvcc.version, flags)).encode())
        for path in included(source):
            digest.update(str(path.relative_to(CSRC)).encode() + path.read_bytes())
        target = out / f"{source.stem}.{digest.hexdigest()[:16]}.o"
        log = target.with_suffix(".log")
        done = target.exists() and log.exists()
        if not done or (strict and re.search("warning|error", log.read_text("utf-8"))):
            part = target.with_suffix(f".{os.getpid()}.tmp")
            command = [nvcc.path, *flags, *(STRICT if strict else []), "-c", str(source), "-o", str(part)]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
            for old in out.glob(f"{source.stem}.*.[ol]*"):
                old.unlink(missing_ok=True)
            log.write_text(told, "utf-8")
            part.replace(target)
        return Compiled(source, target, log.read_text("utf-8"))

    # The longest first, so that all cores end together.
    sources = sorted(KERNELS.glob("*.cu"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return sorted(pool.map(compile_one, sources), key=lambda one: one.source)
