"""The CUDA kernels on the emulator behind the ops of `sb`, for CPU tensors."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"
BUILD = ROOT / "build" / "emulator"
OPS = ("moba_select", "moba_index", "moba_forward", "moba_backward", "moba_attention")
OPS += ("moba_coverage", "moba_budget")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
FLAGS += ["-ffp-contract=off", f"-I{SOURCES}"]


def compiler() -> list[str]:
    """Return the C++ compiler's command; empty where there is none."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++" if shutil.which("g++") else "c++"]
    return command if shutil.which(command[0]) else []


def missing() -> str:
    """Return why the emulator cannot be built here, or an empty string."""
    if not (SOURCES / "emulator").is_dir():
        return "the sources of the emulator are not here: the tests run on an installed package"
    return "" if compiler() else "no C++ compiler: the emulator is built on this machine"


def _compile(source: Path, flags: list[str]) -> Path:
    target = BUILD / f"{source.stem}.o"
    newest = max(
        path.stat().st_mtime
        for folder in ("attention", "emulator", "tuning")
        for path in [
            *(SOURCES / folder).rglob("*.h"),
            *(SOURCES / folder).rglob("*.cuh"),
            source,
            Path(__file__),
        ]
    )
    if not target.exists() or target.stat().st_mtime < newest:
        part = target.with_suffix(f".{os.getpid()}.tmp")
        command = [*compiler(), *FLAGS, *flags, "-x", "c++", "-c", str(source), "-o", str(part)]
        subprocess.run(command, check=True)
        part.replace(target)
    return target


def build() -> Path:
    """Compile what has changed and return the library."""
    BUILD.mkdir(parents=True, exist_ok=True)
    folder = Path(torch.__file__).parent
    stable = [
        "-DSB_EMULATED",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        "-isystem",
        str(folder / "include"),
    ]
    kernels = sorted((SOURCES / "attention" / "cuda").glob("*.cu"))
    runtime = sorted((SOURCES / "emulator").glob("*.cpp"))
    work = [(path, []) for path in kernels] + [(path, ["-O3"]) for path in runtime]
    work += [(path, stable) for path in sorted((SOURCES / "attention" / "cuda").glob("*.cpp"))]
    library = BUILD / "libsb_emulated.so"
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(lambda job: _compile(*job), work))
        if not library.exists() or library.stat().st_mtime < max(o.stat().st_mtime for o in objects):
            part = library.with_suffix(f".{os.getpid()}.tmp")
            link = ["-shared", *map(str, objects), f"-L{folder / 'lib'}", "-ltorch_cpu", "-o", str(part)]
            subprocess.run([*compiler(), *link], check=True)
            part.replace(library)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """Load the emulated ops, which are those of namespace `sb_emulated`."""
    library = build()
    torch.ops.load_library(str(library))
    functions = ctypes.CDLL(str(library))
    functions.sb_emulator_launches.restype = ctypes.c_uint64
    return functions


def launches() -> int:
    """Return how many kernels have run."""
    return load().sb_emulator_launches()


@contextmanager
def emulated(settings: str = "") -> Iterator[None]:
    """Let the CUDA kernels run wherever the CPU kernels would; `settings` are the emulator's."""
    functions = load()
    assert functions.sb_emulator_configure(settings.encode()), f"unknown setting in {settings!r}"
    override = torch.library.Library("sb", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name in OPS:
                override.impl(name, getattr(torch.ops.sb_emulated, name), "CPU")
        yield
    finally:
        override._destroy()
