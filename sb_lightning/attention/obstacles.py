"""What in a Hugging Face model's attention keeps it from running MoBA."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sb_lightning._messages import explain
from sb_lightning.attention.checks import SUPPORTED_HEAD_DIMS

__all__ = ["refuse_unsupported"]


def refuse_unsupported(base: PreTrainedModel, layer: nn.Module) -> None:
    """Refuse a model whose attention has something that MoBA does not define.

    Args:
        base: The base model.
        layer: One of its attention layers.

    Raises:
        ValueError: It has; names what, and what to change.
    """
    for what, change in _obstacles(base.config.get_text_config(), layer):
        raise ValueError(
            explain(f"{type(base).__name__} has {what}", "MoBA attention does not define it", change)
        )


def _obstacles(config: Any, layer: nn.Module) -> list[tuple[str, str]]:
    """Return what keeps a layer from MoBA, each with what to change."""
    obstacles = []
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(layer, "sliding_window", None)
    if window is None and not types:
        window = getattr(config, "sliding_window", None)
    if window is not None:
        obstacles.append((f"a sliding window (sliding_window={window})", "set sliding_window=None"))
    if patterns := sorted(types - {"full_attention"}):
        obstacles.append((f"layers of type {patterns}", "use a model with full attention in all layers"))
    if dropout := getattr(config, "attention_dropout", 0.0):
        obstacles.append((f"attention_dropout={dropout}", "set attention_dropout=0.0 in its configuration"))
    if getattr(layer, "sinks", None) is not None:
        obstacles.append(("attention sinks", "use a model without them"))
    if cap := getattr(config, "attn_logit_softcapping", None):
        obstacles.append((f"capped scores (attn_logit_softcapping={cap})", "set attn_logit_softcapping=None"))
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        obstacles.append(("an additive attention bias (ALiBi)", "use a model with rotary positions"))
    if getattr(layer, "is_causal", True) is False:
        obstacles.append(("attention that is not causal", "use a decoder-only model"))
    dim = getattr(layer, "head_dim", None)
    if dim is not None and dim not in SUPPORTED_HEAD_DIMS:
        choices = f"choose hidden_size / num_attention_heads from {SUPPORTED_HEAD_DIMS}"
        obstacles.append((f"head_dim={dim}, which no kernel is built for", choices))
    return obstacles
