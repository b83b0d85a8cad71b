"""Loading of the C++ extension, once, without ever breaking an import of the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

__all__ = ["EXTENSION", "REBUILD", "SCHEMA_VERSION", "Extension", "find_extension", "load_extension"]

SCHEMA_VERSION = "2"
"""Version of the op schemas that this package calls; csrc/attention/bindings.cpp holds the same number."""

REBUILD = (
    "python setup.py build_ext --inplace (in a source tree), or "
    "pip install --no-build-isolation --force-reinstall --no-deps sb-lightning"
)
"""The command that builds the extension anew."""

_MARKER = re.compile(rb"sb_lightning attention schema ([0-9]+);")


@dataclass(frozen=True)
class Extension:
    """What became of the extension."""

    path: Path | None
    """The file, if there is one."""
    isa: str
    """The instruction set whose kernels run, or an empty string where the extension was refused."""
    refusal: str
    """Why the extension was refused; empty where it runs."""
    remedy: str = ""
    """What to do about it."""

    @property
    def available(self) -> bool:
        """Whether the ops of namespace `sb` are registered and run."""
        return not self.refusal


def find_extension(package: Path) -> Path | None:
    """Return the extension's file in the folder of the package, or None."""
    for suffix in EXTENSION_SUFFIXES:
        path = package / f"_attention{suffix}"
        if path.exists():
            return path
    return None


def load_extension(path: Path | None) -> Extension:
    """Load the extension, or say why not.

    The file is read before it is loaded: the ops of one that was built from other sources would
    otherwise be registered before anybody could look at their schemas.
    """
    if path is None:
        return Extension(None, "", "the C++ extension is not built", f"build it with: {REBUILD}")
    rebuild = f"rebuild it with: {REBUILD}"
    try:
        found = _MARKER.search(path.read_bytes())
    except OSError as error:
        return Extension(path, "", f"{path} cannot be read ({error})", rebuild)
    if found is None:
        return Extension(
            path, "", f"{path} is no build of this extension (it has no schema version)", rebuild
        )
    version = found.group(1).decode()
    if version != SCHEMA_VERSION:
        refusal = (
            f"{path} was built from other sources (op schemas {version}, this package needs {SCHEMA_VERSION})"
        )
        return Extension(path, "", refusal, rebuild)
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except (OSError, ImportError, RuntimeError) as error:
        return Extension(path, "", f"{path} cannot be loaded ({error})", rebuild)
    try:
        isa = torch.ops.sb.cpu_isa()
    except RuntimeError as error:
        refusal, _, remedy = str(error).splitlines()[0].partition(". To fix it, ")
        return Extension(path, "", refusal, remedy.rstrip(".") or rebuild)
    return Extension(path, isa, "")


EXTENSION = load_extension(find_extension(Path(__file__).resolve().parent.parent))
"""The extension of this process."""
