"""Small models and batches that many tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tiny_architecture(**fields: Any) -> dict[str, Any]:
    """Fields of a Qwen2 of two layers, head dimension 32, groups of two query heads."""
    return {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        **fields,
    }


def packed(lengths: list[int], vocabulary: int = 64, seed: int = 0) -> dict[str, Any]:
    """A packed batch of one row with `cu_seqlens`, `max_seqlen`, `position_ids` and `labels`."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(0, vocabulary, (1, total), generator=generator)
    labels = ids.clone()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    labels[0, bounds[:-1][torch.tensor(lengths) > 0]] = -100
    return {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "labels": labels,
        "cu_seqlens": bounds.to(torch.int32),
        "max_seqlen": max(lengths),
    }


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter, cloned."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
