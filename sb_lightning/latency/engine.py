"""Which `LatencyTable` computes: the C++ module `_core`, or its twin in plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

__all__ = ["ENGINE", "Engine", "EngineTable"]

SCHEMA_VERSION = 2
"""Version of the interface that this package calls; csrc/core/bindings.cpp holds the same number."""

REBUILD = (
    "python setup.py build_ext --inplace (in a source tree), or "
    "pip install --no-build-isolation --force-reinstall --no-deps sb-lightning"
)


@dataclass(frozen=True)
class Engine:
    """What became of the C++ module."""

    name: str
    """`C++` or `Python`."""
    reason: str
    """What runs, or why the C++ module was refused and what to do about it."""

    @property
    def available(self) -> bool:
        """Whether the C++ module runs; the twin is some hundred times slower."""
        return self.name == "C++"


def _load() -> Engine:
    slowly = "latency tables run in plain Python, slowly"
    spec = find_spec("sb_lightning._core")
    # Only the one beside this package: an editable install elsewhere would lend its own.
    if spec is None or Path(str(spec.origin)).resolve().parent != Path(__file__).resolve().parents[1]:
        return Engine("Python", f"{slowly}: the C++ module _core is not built; {REBUILD}")
    try:
        _core = import_module("sb_lightning._core")
    except ImportError as error:
        return Engine("Python", f"{slowly}: _core does not load ({error}); {REBUILD}")
    version = getattr(_core, "SCHEMA_VERSION", None)
    if version != SCHEMA_VERSION:
        found = f"_core was built from other sources (interface {version}, not {SCHEMA_VERSION})"
        return Engine("Python", f"{slowly}: {found}; {REBUILD}")
    return Engine("C++", "latency tables run in C++")


ENGINE = _load()
"""The engine of this process."""

if TYPE_CHECKING:
    from sb_lightning.latency.reference import LatencyTable as EngineTable
elif ENGINE.available:
    from sb_lightning._core import LatencyTable as EngineTable
else:
    from sb_lightning.latency.reference import LatencyTable as EngineTable
