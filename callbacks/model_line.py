"""One line about the model before the training: its size, and the attention that runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["ModelLine"]

HALVES = {"bf16": torch.bfloat16, "16": torch.float16}
"""Dtype of the attention by the first part of the Trainer's precision, where that sets it."""
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "K"))


class ModelLine(Callback):
    """Prints the model's class, its parameters and its attention, in place of Lightning's table.

    Example::

        from lightning.pytorch import Trainer
        from sb_lightning.callbacks import ModelLine
        trainer = Trainer(callbacks=[ModelLine()], enable_model_summary=False)
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line; the model exists by now and is not spread over ranks yet."""
        rank_zero_info(describe_model(trainer, pl_module))


def describe_model(trainer: Trainer, pl_module: LightningModule) -> str:
    """Return the line.

    Args:
        trainer: Tells the device and the precision.
        pl_module: Module whose `model`, if it has one, is the network.
    """
    network = getattr(pl_module, "model", None) or pl_module
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in pl_module.parameters()]
    total = sum(size for size, _ in sizes)
    trainable = sum(size for size, is_trained in sizes if is_trained)
    line = f"model: {type(network).__name__}, {_short(total)} parameters, {_short(trainable)} trainable"
    attention = _attention(trainer.strategy.root_device, str(trainer.precision), pl_module)
    return f"{line}, attention: {attention}" if attention else line


def _attention(device: torch.device, precision: str, pl_module: LightningModule) -> str | None:
    if not hasattr(pl_module, "sparse_settings"):
        return None
    settings: Any = pl_module.sparse_settings
    if settings is None:
        return "dense"
    from sb_lightning.attention import backends
    from sb_lightning.attention.backends import choose_backend

    own = (parameter.dtype for parameter in pl_module.parameters() if parameter.is_floating_point())
    dtype = HALVES.get(precision.split("-")[0]) or next(own, None)
    runs = ""
    # Where none runs, the first step says why.
    with contextlib.suppress(RuntimeError, ValueError):
        name = choose_backend(getattr(settings, "backend", None), device, dtype)
        isa = next((backend.detail.get("isa") for backend in backends() if backend.name == name), None)
        runs = f" {name}/{isa}" if isa else f" {name}"
    return f"moba{runs}, block {settings.block_size}, budget {settings.budget}"


def _short(count: int) -> str:
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
