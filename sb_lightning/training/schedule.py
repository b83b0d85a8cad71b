"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from sb_lightning.training.settings import OptimizerSettings

__all__ = ["build_optimizer", "learning_rate_share"]


def learning_rate_share(step: int, *, total_steps: float, warmup_share: float, final_share: float) -> float:
    """Return a step's learning rate as a share of the peak: linear warm-up, then cosine decay.

    Args:
        step: Optimizer steps done so far.
        total_steps: Steps of the whole run; infinite keeps the peak after no warm-up.
        warmup_share: Share of the steps spent warming up.
        final_share: Share of the peak at the last step.

    Example:
        >>> share = lambda s: learning_rate_share(s, total_steps=10, warmup_share=0.2, final_share=0.1)
        >>> [round(share(step), 2) for step in (0, 1, 2, 9)]
        [0.5, 1.0, 1.0, 0.13]
    """
    if math.isinf(total_steps):
        return 1.0
    warmup = math.ceil(total_steps * warmup_share)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizer(model: nn.Module, settings: OptimizerSettings, total_steps: float) -> dict[str, Any]:
    """Return what `configure_optimizers` returns: AdamW and a schedule stepped once per optimizer step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
    )
    share = partial(
        learning_rate_share,
        total_steps=total_steps,
        warmup_share=settings.warmup_share,
        final_share=settings.final_share,
    )
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": LambdaLR(optimizer, share), "interval": "step"},
    }
