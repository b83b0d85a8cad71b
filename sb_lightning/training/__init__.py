"""The LightningModule for causal language models, and the loss that a whole window shares."""

from sb_lightning.training.checkpoint_io import AtomicCheckpointIO
from sb_lightning.training.loss import linear_cross_entropy, window_loss_scale
from sb_lightning.training.module import CausalLMModule
from sb_lightning.training.settings import AttentionSettings, OptimizerSettings

__all__ = [
    "AtomicCheckpointIO",
    "AttentionSettings",
    "CausalLMModule",
    "OptimizerSettings",
    "linear_cross_entropy",
    "window_loss_scale",
]
