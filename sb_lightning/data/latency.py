"""What the planner of a run predicts times with: the same on every rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from sb_lightning.balance import WindowSync
from sb_lightning.balance.costs import GENERIC_SHAPE
from sb_lightning.latency import AnalyticCost, LatencyTable

if TYPE_CHECKING:
    from sb_lightning.latency import LatencyModel

__all__ = ["analytic_cost", "model_budget", "sync_latency"]


def model_budget(module: Any) -> int | None:
    """Return the budget k0 of a `CausalLMModule`; None for full attention, and where it is not known."""
    attention = getattr(module, "attention", None)
    budget = getattr(attention, "budget", None)
    return budget if isinstance(budget, int) else None


def analytic_cost(module: Any, *, vocab_size: int, max_length: int) -> AnalyticCost:
    """Return times from counted operations of a `CausalLMModule`'s model, of a generic one for others.

    Args:
        module: The LightningModule.
        vocab_size: Size that the tokenizer needs, where the model leaves its own open.
        max_length: Longest sequence of the data in tokens.
    """
    from sb_lightning.training import CausalLMModule
    from sb_lightning.training.model import build_configuration

    if not isinstance(module, CausalLMModule):
        return AnalyticCost(GENERIC_SHAPE)
    config = build_configuration(
        module.architecture, module.pretrained, vocab_size=vocab_size, max_length=max_length
    )
    attention = module.attention
    return AnalyticCost.from_config(
        config,
        block_size=attention.block_size if attention else GENERIC_SHAPE.block_size,
        dense_layers=attention.dense_layers if attention else (),
    )


def sync_latency(trainer: Trainer, latency: LatencyModel | None) -> LatencyModel | None:
    """Return rank zero's table on every rank; None where rank zero has none.

    Args:
        trainer: The Trainer whose ranks meet, once.
        latency: What this rank has. Only a measured table travels; counted operations are the same anywhere.
    """
    sync = WindowSync.of(trainer)
    if sync.ranks == 1:
        return latency
    table = latency if isinstance(latency, LatencyTable) else None
    mine = json.dumps(table.to_dict()) if sync.rank == 0 and table is not None else ""
    first = sync.gather_texts(mine)[0]
    if sync.rank == 0:
        return latency
    if not first:
        return None if table is not None else latency
    return LatencyTable.from_dict(json.loads(first))
