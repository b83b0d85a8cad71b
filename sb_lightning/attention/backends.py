"""Which attention backends run here, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sb_lightning._messages import explain
from sb_lightning.attention.extension import EXTENSION, REBUILD

__all__ = ["Backend", "backends", "choose_backend"]

BACKENDS = ("cpu", "cuda", "reference")


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
    """List all backends: the kernels of each kind of device, and last what runs everywhere.

    Example:
        >>> [backend.name for backend in backends()]
        ['cpu', 'cuda', 'reference']
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
        _cuda_backend(),
        Backend("reference", True, "plain torch on any device, quadratic in memory: for tests, slow"),
    ]


def _cuda_backend() -> Backend:
    if not EXTENSION.available:
        return Backend("cuda", False, f"{EXTENSION.refusal}; {EXTENSION.remedy}")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("sb::moba_attention", "CUDA"):
        return Backend(
            "cuda",
            False,
            "the C++ extension was built without CUDA kernels; where nvcc is, build it again with "
            f"SB_BUILD_CUDA=1: {REBUILD}",
        )
    if not torch.cuda.is_available():
        why = "torch sees no CUDA device" if torch.version.cuda else f"torch {torch.__version__} has no CUDA"
        return Backend("cuda", False, f"CUDA kernels are built, but {why}")
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if major < 8:
        return Backend(
            "cuda",
            False,
            f"{name} has compute capability {major}.{minor}; the CUDA kernels need 8.0 or later",
        )
    return Backend(
        "cuda",
        True,
        f"CUDA kernels on {name} (bfloat16 and float16)",
        {"device": name, "capability": f"{major}.{minor}"},
    )


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
    if device not in ("cpu", "cuda") or name not in (None, device):
        raise RuntimeError(
            explain(
                f"q is on device '{device}'" + ("" if name is None else f" and backend is {name!r}"),
                "the kernels run on CPU and CUDA devices, each on tensors of its own",
                "move q, k and v, or pass backend='reference' (plain torch, slow)",
            )
        )
    if not EXTENSION.available:
        raise RuntimeError(
            explain(
                f"backend {device!r} was refused",
                EXTENSION.refusal,
                f"{EXTENSION.remedy}; or pass backend='reference' (plain torch, slow)",
            )
        )
    if device == "cuda" and not torch.compiler.is_compiling():
        cuda = _cuda_backend()
        if not cuda.available:
            raise RuntimeError(
                explain(
                    "backend 'cuda' was refused",
                    cuda.reason,
                    "see `sb doctor`, or pass backend='reference' (plain torch, slow)",
                )
            )
    return device
