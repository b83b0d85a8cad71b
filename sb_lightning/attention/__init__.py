"""MoBA block-sparse attention: ops, kernels, their naive twins, and the adapter for Hugging Face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sb_lightning.attention.backends import Backend, backends
from sb_lightning.attention.coverage import moba_budget, moba_coverage
from sb_lightning.attention.functional import moba_attention, moba_select

if TYPE_CHECKING:
    from sb_lightning.attention.huggingface import sparsify

__all__ = ["Backend", "backends", "moba_attention", "moba_budget", "moba_coverage", "moba_select", "sparsify"]


def __getattr__(name: str) -> Any:
    # transformers is imported only by those who adapt a model.
    if name == "sparsify":
        from sb_lightning.attention.huggingface import sparsify

        return sparsify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
