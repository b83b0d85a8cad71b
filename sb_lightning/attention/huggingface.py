"""MoBA attention for Hugging Face causal language models, through transformers' attention interface.

`sparsify` makes a model run `moba_attention` in every layer. A forward pre-hook on the innermost
base model works out once per forward where each sequence starts and hands that to every layer as
keyword arguments, so it reaches them through PEFT wrappers, activation checkpointing and other
people's LightningModules.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sb_lightning._messages import explain
from sb_lightning.attention.bounds import bounds_of_batch
from sb_lightning.attention.checks import check_block_size, check_budget
from sb_lightning.attention.functional import moba_attention
from sb_lightning.attention.obstacles import refuse_unsupported
from sb_lightning.attention.tuned import tuned_budget
from sb_lightning.tuning.target import SparseTarget

__all__ = [
    "IMPLEMENTATION",
    "TUNER",
    "SequenceBoundsHook",
    "SparseSettings",
    "sparse_bases",
    "sparse_settings",
    "sparsify",
]

IMPLEMENTATION = "sb_moba"
TUNER = "sb_tuner"
"""Attribute of a base model with what gives each of its training forwards a `SparseTarget`."""
# Tested; others whose layers are built alike work too.
WORKING = (
    "Llama, Qwen2, Qwen3, Mistral and Mixtral without a sliding window, Phi-3, Granite, OLMo 2 or SmolLM3"
)
# Arguments of other models' attention functions that change the scores in ways MoBA does not define.
SCORE_MODIFIERS = ("softcap", "s_aux", "position_bias", "sliding_window")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class SparseSettings:
    """What `sparsify` was told."""

    block_size: int
    """Keys per block, B."""
    budget: int
    """Blocks a query attends when nothing tunes it, its own block included: k0."""
    dense_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that attend every block."""
    backend: str | None = None
    """Attention backend; None takes the best available."""

    def budget_of(self, layer: int, max_seqlen: int) -> int:
        """Return the budget of one layer; a dense layer's covers `max_seqlen` tokens."""
        if layer in self.dense_layers:
            return max(1, -(-max_seqlen // self.block_size))
        return self.budget


def sparsify(
    model: ModuleT,
    *,
    block_size: int,
    budget: int,
    dense_layers: Sequence[int] = (),
    backend: str | None = None,
) -> ModuleT:
    """Make a Hugging Face causal language model attend with MoBA. A second call changes the settings.

    Packed batches are told apart by `cu_seqlens` and `max_seqlen` given to the model's forward, by
    the names that transformers' own collator uses (`cu_seq_lens_q`, `max_length_q`), or else by
    `position_ids` that restart and by a 2-D `attention_mask`. `generate()` works with a KV cache:
    the prompt runs MoBA, later tokens attend the whole cache.

    Args:
        model: A `PreTrainedModel`, or any module that contains one (a PEFT model, a LightningModule).
        block_size: Keys per block B, a multiple of 16.
        budget: Blocks k0 that a query attends, its own block included; at least 1.
        dense_layers: Layers, counted from 0, that keep full attention. MoBA's authors keep the last
            ones dense.
        backend: Name of one of `sb_lightning.attention.backends()`; None takes the best available.

    Returns:
        The same model.

    Raises:
        ValueError: The model's attention has something MoBA does not define (sliding window, score
            bias, dropout, sinks, an unsupported head dimension), or an argument is out of range.
        TypeError: `model` contains no transformers model, or one whose attention cannot be replaced, or
            `dense_layers` is no list of integers.
    """
    check_block_size(block_size)
    check_budget(budget)
    if isinstance(dense_layers, int) or not all(isinstance(layer, int) for layer in dense_layers):
        raise TypeError(
            explain(
                f"dense_layers is {dense_layers!r}", "it lists layer numbers", "pass e.g. dense_layers=[3]"
            )
        )
    base, layers = _base_model(model)
    settings = SparseSettings(
        block_size=block_size,
        budget=budget,
        dense_layers=tuple(sorted(set(dense_layers))),
        backend=backend,
    )
    known = {int(layer.layer_idx) for layer in layers}  # type: ignore[arg-type]
    if unknown := [layer for layer in settings.dense_layers if layer not in known]:
        raise ValueError(
            explain(
                f"dense_layers contains {unknown}",
                f"the model's layers are 0 to {max(known)}",
                "name only those",
            )
        )
    for layer in layers:
        refuse_unsupported(base, layer)

    AttentionInterface.register(IMPLEMENTATION, _attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _attention_mask)
    base.set_attn_implementation(IMPLEMENTATION)
    for layer in layers:
        layer.sb_settings = settings  # type: ignore[assignment]
    if not hasattr(base, "sb_settings"):
        names = tuple(inspect.signature(base.forward).parameters)
        base.register_forward_pre_hook(SequenceBoundsHook(names), with_kwargs=True)
    base.sb_settings = settings
    return model


def sparse_settings(model: nn.Module) -> SparseSettings | None:
    """Return what `sparsify` was told about this model, or None where it was not called."""
    for module in model.modules():
        settings = getattr(module, "sb_settings", None)
        if isinstance(settings, SparseSettings):
            return settings
    return None


def sparse_bases(model: nn.Module) -> list[PreTrainedModel]:
    """Return the base models in a module that `sparsify` has made sparse."""
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, "sb_settings")]


class SequenceBoundsHook:
    """Adds `cu_seqlens`, `max_seqlen` and what tunes budgets to the arguments of the base model's forward.

    Args:
        names: The positional arguments of that forward.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a forward with what its layers need to know."""
        if module.config._attn_implementation != IMPLEMENTATION:  # type: ignore[union-attr]
            # Switched back to another one since.
            return args, kwargs
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if module.training and given.get("use_cache") is None:
            kwargs["use_cache"] = False
        cache = given.get("cache", given.get("past_key_values"))
        if cache is not None and _continues(cache, given.get("attention_mask")):
            return args, kwargs
        cu_seqlens = given.get("cu_seqlens", given.get("cu_seq_lens_q"))
        max_seqlen = given.get("max_seqlen", given.get("max_length_q"))
        if cu_seqlens is None:
            cu_seqlens, max_seqlen = bounds_of_batch(
                given.get("input_ids"),
                given.get("inputs_embeds"),
                given.get("attention_mask"),
                given.get("position_ids"),
            )
        elif max_seqlen is None and not torch.compiler.is_compiling():
            max_seqlen = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if len(cu_seqlens) > 1 else 0
        if cu_seqlens.is_floating_point():
            raise TypeError(
                explain(f"cu_seqlens is {cu_seqlens.dtype}", "it counts tokens", "pass an int32 tensor")
            )
        kwargs["cu_seqlens"] = cu_seqlens.to(torch.int32)
        kwargs["max_seqlen"] = int(max_seqlen) if isinstance(max_seqlen, Tensor) else max_seqlen
        # A compiled base model is given its target from outside: making one is no part of a graph.
        tuner = None if torch.compiler.is_compiling() else getattr(module, TUNER, None)
        if tuner is not None and cache is None and "sb_target" not in kwargs:
            target = tuner.target(module, kwargs["cu_seqlens"], given.get("attention_mask"))
            if target is not None:
                kwargs["sb_target"] = target
        return args, kwargs


def _continues(cache: Any, attention_mask: Any) -> bool:
    """Return whether the queries attend a cache: one with tokens in it, or one of fixed size.

    `generate()` prepares the masks of a cache of fixed size itself, as a dict.
    """
    is_prepared = isinstance(attention_mask, dict)
    return torch.compiler.is_compiling() or is_prepared or int(cache.get_seq_length()) > 0


def _attention_mask(
    *args: Any, q_length: int, kv_length: int, q_offset: int | Tensor = 0, **kwargs: Any
) -> Tensor | None:
    """Mask function: none for whole sequences, whose bounds the hook found; SDPA's over a cache."""
    if q_length == kv_length:
        return None
    mask: Tensor | None = sdpa_mask(
        *args, q_length=q_length, kv_length=kv_length, q_offset=q_offset, **kwargs
    )
    return mask


def _attention_forward(
    module: nn.Module,
    query: Tensor,  # [rows, Hq, columns, D]
    key: Tensor,  # [rows, Hkv, keys, D]
    value: Tensor,  # [rows, Hkv, keys, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    sb_target: SparseTarget | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    settings = getattr(module, "sb_settings", None)
    if not isinstance(settings, SparseSettings):
        raise RuntimeError(
            explain(
                f"{type(module).__name__} runs '{IMPLEMENTATION}' without settings",
                "block size and budget are set by sparsify()",
                "call sb_lightning.attention.sparsify(model, block_size=..., budget=...)",
            )
        )
    if dropout > 0:
        raise ValueError(
            explain(f"attention dropout is {dropout}", "MoBA has none", "set attention_dropout: 0")
        )
    for name in SCORE_MODIFIERS:
        if kwargs.get(name) is not None:
            raise ValueError(
                explain(f"the layer passes {name}", "MoBA does not define it", "use a model without it")
            )
    if query.shape[2] != key.shape[2]:
        over_cache: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, **kwargs
        )
        return over_cache
    if cu_seqlens is None or max_seqlen is None:
        raise RuntimeError(
            explain(
                "the layer was given no cu_seqlens and max_seqlen",
                "the bounds of the sequences come from a hook on the base model",
                "call the model rather than a layer of it; under torch.compile pass both to its forward; an "
                "architecture whose layers hand no keyword arguments on (Nemotron) cannot be made sparse",
            )
        )
    rows, heads, columns, dim = query.shape
    q = query.transpose(1, 2).reshape(rows * columns, heads, dim)
    k = key.transpose(1, 2).reshape(rows * columns, key.shape[1], key.shape[3])
    layer: int = module.layer_idx  # type: ignore[assignment]
    budget: int | Tensor = settings.budget_of(layer, max_seqlen)
    max_budget: int | None = budget  # type: ignore[assignment]
    if sb_target is not None and layer not in settings.dense_layers:
        budget = tuned_budget(
            sb_target,
            layer,
            q,
            k,
            cu_seqlens,
            block_size=settings.block_size,
            max_seqlen=max_seqlen,
            backend=settings.backend,
        )
        # Read from the budgets where that waits for nothing new: it sizes the selection.
        max_budget = sb_target.cost_us.shape[1] if torch.compiler.is_compiling() else None
    packed = moba_attention(
        q,
        k,
        value.transpose(1, 2).reshape(rows * columns, value.shape[1], value.shape[3]),
        cu_seqlens,
        budget,
        block_size=settings.block_size,
        max_seqlen=max_seqlen,
        max_budget=max_budget,
        scale=scaling,
        backend=settings.backend,
    )
    assert isinstance(packed, Tensor)
    return packed.view(rows, columns, heads, dim), None


def _base_model(model: nn.Module) -> tuple[PreTrainedModel, list[nn.Module]]:
    """Return the innermost transformers model that holds all attention layers, and those layers."""
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "num_key_value_groups")]
    wanted = {id(layer) for layer in layers}
    holding = [
        m
        for m in model.modules()
        if layers and isinstance(m, PreTrainedModel) and wanted <= {id(part) for part in m.modules()}
    ]
    if holding and getattr(holding[-1], "_supports_attention_backend", False):
        return holding[-1], layers
    foreign = next((type(m).__name__ for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    raise TypeError(
        explain(
            f"{type(model).__name__} holds no transformers model"
            if foreign is None
            else f"the attention of {foreign} cannot be replaced",
            "sparsify() plugs into transformers' AttentionInterface, for attention layers built like Llama's",
            f"pass a model of an architecture that works, such as {WORKING}",
        )
    )
