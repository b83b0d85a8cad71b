"""Which attention backends run here, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sb_lightning._messages import explain
from sb_lightning.attention.extension import EXTENSION

__all__ = ["Backend", "backends", "choose_backend"]

BACKENDS = ("cpu", "reference")


@dataclass(frozen=True)
class Backend:
    """One implementation of the attention ops."""

    name: str
    """What to pass as `backend=`."""
    available: bool
    """Whether it runs here."""
    reason: str
    """What runs, or why it was refused and what to do about it."""
    detail: dict[str, str] = field(default_factory=dict)
    """Facts for `sb doctor`."""


def backends() -> list[Backend]:
    """List all backends, the best first.

    Example:
        >>> [backend.name for backend in backends()]
        ['cpu', 'reference']
    """
    if EXTENSION.available:
        reason = f"C++ kernels for {EXTENSION.isa}"
        detail = {
            "isa": EXTENSION.isa,
            "path": str(EXTENSION.path),
            "threads": str(torch.get_num_threads()),
        }
    else:
        reason = f"{EXTENSION.refusal}; {EXTENSION.remedy}"
        detail = {"path": str(EXTENSION.path)} if EXTENSION.path else {}
    return [
        Backend("cpu", EXTENSION.available, reason, detail),
        Backend("reference", True, "plain torch on any device, quadratic in memory: for tests, slow"),
    ]


def choose_backend(name: str | None, device: str) -> str:
    """Return the backend to run for tensors of a device type.

    There is no fallback: where the fast backend was refused, the caller is told why.

    Raises:
        ValueError: No backend has that name.
        RuntimeError: The backend does not run here, or not on that device.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(
            explain(
                f"backend is {name!r}",
                "no backend has that name",
                f"pass one of {', '.join(map(repr, BACKENDS))}, or None for the best available",
            )
        )
    if name == "reference":
        return name
    if device != "cpu":
        raise RuntimeError(
            explain(
                f"q is on device '{device}'",
                "the kernels of this build run on the CPU only",
                "move q, k and v to the CPU, or pass backend='reference' (plain torch, slow)",
            )
        )
    if not EXTENSION.available:
        raise RuntimeError(
            explain(
                "backend 'cpu' was refused",
                EXTENSION.refusal,
                f"{EXTENSION.remedy}; or pass backend='reference' (plain torch, slow)",
            )
        )
    return "cpu"
