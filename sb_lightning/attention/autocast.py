"""Which dtype the attention runs in under autocast."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["autocast_runs", "cast_as_autocast", "dtype_in_kernel"]


def autocast_runs(device: str) -> bool:
    """Return whether autocast is on for a device type; False for those that know no autocast."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def dtype_in_kernel(x: Tensor) -> torch.dtype:
    """Return the dtype the attention runs in: autocast's for what autocast casts, else the tensor's own."""
    device = x.device.type
    if x.is_floating_point() and x.dtype != torch.float64 and autocast_runs(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def cast_as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the dtype of autocast where it is on; like torch's own ops, not float64 and not integers.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     cast_as_autocast(torch.zeros(2))[0].dtype
        torch.bfloat16
    """
    return tuple(x.to(dtype_in_kernel(x)) for x in tensors)
