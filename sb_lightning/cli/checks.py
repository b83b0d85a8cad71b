"""What `sb doctor` looks at: one small function per question, each returning one or more `Check`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse

import sb_lightning
from sb_lightning.cli.gloo_pair import run_pair

__all__ = ["CHECKS", "Check"]

Status = Literal["ok", "warn", "red", "info"]
DISTRIBUTION = "sb-lightning"
BLOCKED_LIGHTNING = {"2.6.2", "2.6.3"}
# Looked at where the package is not installed, so that nothing says what it needs.
WITHOUT_METADATA = (
    "torch>=2.11",
    "lightning>=2.6.1,<3",
    "transformers",
    "tokenizers",
    "numpy",
    "jsonargparse<5",
)
# Looked at although training needs none of them.
TOOLS = ("pytorch-lightning", "pybind11")
# What a tool is for, where it is missing.
OPTIONAL = {
    "pybind11": "not installed (optional: only needed to build what uses it)",
}
GLOO_TIMEOUT_S = 60.0
BUILD = (
    "python setup.py build_ext --inplace (in a checkout), or "
    f"pip install --no-build-isolation --force-reinstall --no-deps {DISTRIBUTION}"
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    """What was looked at."""
    status: Status
    """`red`: training will fail or must not be trusted; `warn`: it may; `info`: neither good nor bad."""
    detail: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty if there is nothing to do."""


def check_python() -> Iterator[Check]:
    """Look at the interpreter."""
    found = ".".join(map(str, sys.version_info[:3]))
    is_old = sys.version_info < (3, 10)
    yield Check(
        name="python",
        status="red" if is_old else "ok",
        detail=f"{found} at {sys.executable}",
        fix="install Python 3.10 or later" if is_old else "",
    )


def check_packages() -> Iterator[Check]:
    """Compare the installed versions with what this package asks for."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        yield Check(
            name=DISTRIBUTION,
            status="red",
            detail="not installed: it is imported from a folder, and the versions it needs are not known",
            fix="pip install --no-build-isolation -e . (in the checkout)",
        )
        requirements = [Requirement(text) for text in WITHOUT_METADATA]
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            allowed = requirement.specifier
            version = _version(requirement.name)
            is_right = version is not None and allowed.contains(version, prereleases=True)
            yield Check(
                name=requirement.name,
                status="ok" if is_right else "red",
                detail=f"{version or 'not installed'}"
                + ("" if is_right else f", but {allowed or 'any version'} is needed"),
                fix="" if is_right else f"pip install '{requirement.name}{allowed}'",
            )
    for name in TOOLS:
        yield Check(name=name, status="info", detail=_version(name) or OPTIONAL.get(name, "not installed"))


def check_blocked_lightning() -> Iterator[Check]:
    """Look for the releases of Lightning that were malware (GHSA-w37p-236h-pfx3)."""
    for name in ("lightning", "pytorch-lightning"):
        version = _version(name)
        if version in BLOCKED_LIGHTNING:
            yield Check(
                name=f"{name} {version}",
                status="red",
                detail="this release was malware (GHSA-w37p-236h-pfx3): secrets of this machine may be known",
                fix=f"pip uninstall {name}, install 2.6.6 or later, and change those secrets",
            )


def check_location() -> Iterator[Check]:
    """Find out which copy of the package runs, and whether another one stands in its way."""
    imported = Path(sb_lightning.__file__).resolve().parent
    installed = _installed_location()
    if installed is not None and installed != imported:
        yield Check(
            name="package",
            status="red",
            detail=f"imported from {imported}, which hides the one installed in {installed}",
            fix="run from another folder, or remove that folder from PYTHONPATH",
        )
        return
    yield Check(name="package", status="ok", detail=f"{sb_lightning.__version__} in {imported}")
    folders = {Path(entry or ".").resolve() / "sb_lightning" for entry in ("", *sys.path)}
    for folder in sorted(folders - {imported}):
        if (folder / "__init__.py").exists() and folder.resolve() != imported:
            yield Check(
                name="another package",
                status="warn",
                detail=f"{folder} is a second copy, which `python -m sb_lightning` takes there",
                fix="nothing if you meant that copy: Python looks in the current folder first, so "
                "commands that run in a clone use the clone, not what pip has installed; to use the "
                "installed one, run from another folder (to work on the clone: pip install "
                "--no-build-isolation -e .)",
            )


def check_backends() -> Iterator[Check]:
    """List the attention backends, each with its reason."""
    from sb_lightning.attention import backends

    for backend in backends():
        details = "".join(f"; {name} {value}" for name, value in backend.detail.items())
        is_needed = backend.name in ("cpu", "reference")
        yield Check(
            name=f"attention backend {backend.name}",
            status="ok" if backend.available else "red" if is_needed else "info",
            detail=f"{'available' if backend.available else 'not available'}: {backend.reason}{details}",
            fix=BUILD if is_needed and not backend.available else "",
        )


def check_latency_engine() -> Iterator[Check]:
    """Find out what looks predicted times up."""
    from sb_lightning.latency import ENGINE
    from sb_lightning.latency.engine import REBUILD

    yield Check(
        name="latency engine",
        status="ok" if ENGINE.available else "warn",
        detail=f"{ENGINE.name}: {ENGINE.reason.removesuffix(f'; {REBUILD}')}",
        fix="" if ENGINE.available else BUILD,
    )


def check_extension() -> Iterator[Check]:
    """Look for the built extension."""
    folder = Path(sb_lightning.__file__).parent
    files = sorted(folder.glob("_attention*.so"))
    if not files:
        yield Check(name="extension", status="red", detail=f"no _attention*.so in {folder}", fix=BUILD)
    for file in files:
        yield Check(name="extension", status="ok", detail=f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
    if len(files) > 1:
        yield Check(
            name="extensions",
            status="warn",
            detail=f"{len(files)} files; Python takes the first that fits it",
            fix="delete all of them and build again",
        )


def check_compiler() -> Iterator[Check]:
    """Look for the C++ compiler that a build would use."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++" if shutil.which("g++") else "c++"]
    if shutil.which(command[0]) is None:
        yield Check(
            name="compiler",
            status="warn",
            detail=f"'{command[0]}' is not on PATH: the kernels cannot be rebuilt here",
            fix="apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or point CXX at one",
        )
        return
    yield Check(name="compiler", status="ok", detail=_first_line([*command, "--version"]))


def check_build_tools() -> Iterator[Check]:
    """Look for what speeds up or extends a build."""
    for tool, flag in (("ninja", "--version"), ("cmake", "--version"), ("nvcc", "--version")):
        # Tools that pip has installed lie beside the interpreter, which need not be on PATH.
        path = shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent))
        detail = f"{_last_line([path, flag])} at {path}" if path else "not found"
        yield Check(name=tool, status="info", detail=detail)


def check_processor() -> Iterator[Check]:
    """Look at the cores, threads and instruction set, and at the accelerator."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = (
        f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}, torch uses {torch.get_num_threads()}"
    )
    yield Check(
        name="processor", status="info", detail=f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    )
    yield Check(name="threads", status="info", detail=threads)
    has_cuda = torch.cuda.is_available()
    built = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch built without CUDA"
    yield Check(
        name="gpu",
        status="info",
        detail=f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        if has_cuda
        else f"none; {built}",
    )


def check_gloo() -> Iterator[Check]:
    """Let two processes meet, as the ranks of a training on CPUs do."""
    problem = run_pair(GLOO_TIMEOUT_S)
    yield Check(
        name="two ranks (gloo)",
        status="red" if problem else "ok",
        detail=problem or "two processes added up a tensor over the loopback interface",
        fix="allow connections to 127.0.0.1 (firewall, container, proxy), or set GLOO_SOCKET_IFNAME=lo"
        if problem
        else "",
    )


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_python,
    check_packages,
    check_blocked_lightning,
    check_location,
    check_extension,
    check_backends,
    check_latency_engine,
    check_compiler,
    check_build_tools,
    check_processor,
    check_gloo,
)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _installed_location() -> Path | None:
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return Path(unquote(urlparse(origin["url"]).path), "sb_lightning").resolve()
    return Path(str(distribution.locate_file("sb_lightning"))).resolve()


def _lines(command: list[str]) -> list[str]:
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return (result.stdout + result.stderr).strip().splitlines() or ["says nothing"]


def _first_line(command: list[str]) -> str:
    return _lines(command)[0]


def _last_line(command: list[str]) -> str:
    lines = _lines(command)
    # cmake ends with advertising, nvcc begins with a copyright.
    return lines[0] if command[0].endswith("cmake") else lines[-1]
