"""Which attention backends run here, and why the others do not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from sb_lightning._messages import explain
from sb_lightning.attention.dense import dense_paths
from sb_lightning.attention.extension import EXTENSION, REBUILD

__all__ = ["Backend", "backends", "best_backend", "choose_backend"]

BACKENDS = ("cpu", "cuda", "reference")
CUDA_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of the CUDA kernels."""
LEAST_CAPABILITY = (8, 0)
"""Compute capability that the CUDA kernels need: asynchronous copies and bf16 tensor cores."""


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
        Backend(
            "reference",
            True,
            "plain torch on any device, quadratic in memory: for tests, slow; on a GPU it runs what the CUDA "
            "kernels refuse, with a warning",
        ),
    ]


def _cuda_backend() -> Backend:
    why, change = _build_refusal()
    if why:
        return Backend("cuda", False, f"{why}; {change}")
    if not torch.cuda.is_available():
        return Backend("cuda", False, _no_gpu())
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    others = {i: _device_refusal(i)[0] for i in range(torch.cuda.device_count())}
    refused = "; ".join(f"cuda:{i}: {text}" for i, text in others.items() if text)
    why, _ = _device_refusal(None)
    if why:
        return Backend("cuda", False, why)
    detail = {
        "device": name,
        "capability": f"{major}.{minor}",
        "float32": "runs on 'reference', with a warning",
        "dense": dense_paths(),
    }
    return Backend(
        "cuda",
        True,
        f"CUDA kernels on {name} (bfloat16 and float16)",
        detail | ({"refused": refused} if refused else {}),
    )


def _build_refusal() -> tuple[str, str]:
    """Return why the build has no CUDA kernels, and what to change; empty where it has."""
    if not EXTENSION.available:
        return EXTENSION.refusal, EXTENSION.remedy
    if not torch._C._dispatch_has_kernel_for_dispatch_key("sb::moba_attention", "CUDA"):
        return (
            "the C++ extension was built without CUDA kernels",
            f"where nvcc is, build it again with SB_BUILD_CUDA=1: {REBUILD}",
        )
    return "", ""


def _no_gpu() -> str:
    why = "torch sees no CUDA device" if torch.version.cuda else f"torch {torch.__version__} has no CUDA"
    return f"CUDA kernels are built, but {why}"


def _device_refusal(index: int | None) -> tuple[str, str]:
    """Return why a GPU does not run the CUDA kernels, and what to change; empty where it does."""
    try:
        major, minor = torch.cuda.get_device_capability(index)
    except (AssertionError, RuntimeError):
        # Torch was built without CUDA, or there is no such GPU.
        return _no_gpu(), "use a torch built for CUDA, on a machine with a GPU"
    if (major, minor) >= LEAST_CAPABILITY:
        return "", ""
    name = torch.cuda.get_device_name(index)
    least = ".".join(map(str, LEAST_CAPABILITY))
    return (
        f"{name} has compute capability {major}.{minor}; the CUDA kernels need {least} or later",
        "use a GPU of that kind",
    )


def _dtype_refusal(dtype: torch.dtype | None) -> tuple[str, str]:
    """Return why the CUDA kernels do not run a dtype, and what to change; empty where they do."""
    if dtype is None or dtype in CUDA_DTYPES:
        return "", ""
    return (
        f"q is {dtype} and the CUDA kernels run bfloat16 and float16, on tensor cores",
        "convert q, k and v or run under torch.autocast (`trainer.precision: bf16-true` or `bf16-mixed`)",
    )


def best_backend(device: torch.device, dtype: torch.dtype | None = None) -> tuple[str, str, str]:
    """Find what runs on a device where nobody asks for a backend by name.

    Args:
        device: That of the tensors.
        dtype: What the attention runs in (autocast's, where it is on); None leaves it out of account.

    Returns:
        The backend; and where it is "reference", why the faster one was refused and what to change.
    """
    if device.type == "cuda":
        why, change = _build_refusal()
        if not why:
            why, change = _device_refusal(device.index)
        if not why:
            why, change = _dtype_refusal(dtype)
        return "reference" if why else "cuda", why, change
    if device.type != "cpu":
        return "reference", f"no kernels run on device '{device.type}'", "move q, k and v to a CPU or a GPU"
    if not EXTENSION.available:
        return "reference", EXTENSION.refusal, EXTENSION.remedy
    return "cpu", "", ""


def choose_backend(name: str | None, device: str | torch.device, dtype: torch.dtype | None = None) -> str:
    """Return the backend to run for tensors of a device.

    On a GPU that is the reference where the CUDA kernels were refused and no name was given: it says so,
    once for each reason. Elsewhere nothing slower is taken by itself: the caller is told why.

    Args:
        name: What the caller asks for; None for the best.
        device: The tensors' device, or its type.
        dtype: What the attention runs in; None leaves it out of account.

    Raises:
        ValueError: No backend has that name, or the kernels do not run that dtype.
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
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or name not in (None, device.type):
        raise RuntimeError(
            explain(
                f"q is on device '{device.type}'" + ("" if name is None else f" and backend is {name!r}"),
                "the kernels run on CPU and CUDA devices, each on tensors of its own",
                "move q, k and v, or pass backend='reference' (plain torch, slow)",
            )
        )
    return _choose(name, device.type, device.index, dtype)


def _choose(name: str | None, kind: str, index: int | None, dtype: torch.dtype | None) -> str:
    device = torch.device(kind if index is None else f"{kind}:{index}")
    best, why, change = best_backend(device, dtype)
    if best != "reference":
        return best
    if kind == "cuda" and name is None:
        _warn_once(why, change)
        return best
    error = ValueError if kind == "cuda" and why == _dtype_refusal(dtype)[0] else RuntimeError
    raise error(
        explain(
            f"backend {kind!r} was refused",
            why,
            f"{change}; or pass backend='reference' (plain torch, slow)",
        )
    )


# To the compiler the choice is a constant: what torch.compiler.assume_constant_result would say, whose import
# takes seconds.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]

_TOLD: set[str] = set()


def _warn_once(why: str, change: str) -> None:
    """Say on rank zero what runs instead of the CUDA kernels; each reason once."""
    if why in _TOLD:
        return
    _TOLD.add(why)
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    found = "attention runs on backend 'reference' (plain torch, slow, memory quadratic in the length)"
    accept = "pass backend='reference' to run it without this warning"
    warnings.warn(
        explain(found, f"backend 'cuda' was refused: {why}", f"{change}; or {accept}"), stacklevel=2
    )
