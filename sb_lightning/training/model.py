"""Building the language model, from a configuration or a checkpoint, with the attention asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sb_lightning._messages import explain
from sb_lightning.attention.checks import check_block_size
from sb_lightning.attention.huggingface import sparsify
from sb_lightning.training.settings import AttentionSettings

__all__ = ["backbone_and_head", "build_configuration", "build_language_model"]

# Set by a few model families to change the scores behind the head, where the chunked loss would miss it.
SCORE_SCALES = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


def build_language_model(
    architecture: dict[str, Any] | None,
    pretrained: str | None,
    attention: AttentionSettings | None,
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
) -> PreTrainedModel:
    """Build a causal language model in fp32 and give it its attention.

    Args:
        architecture: Fields of a transformers configuration, `model_type` included; weights are random.
        pretrained: Folder or hub name of a checkpoint; exactly one of the two is given.
        attention: Block-sparse attention, or None for the model's own dense attention.
        vocab_size: Size that the tokenizer needs; used where `architecture` names none.
        max_length: Longest sequence of the data in tokens; used where `architecture` names no
            `max_position_embeddings`.

    Returns:
        The model, in train mode.

    Raises:
        ValueError: A setting does not fit the model or the data.
    """
    check_model(architecture, pretrained, attention)
    dtype = torch.get_default_dtype()
    if pretrained is not None:
        model = _load(pretrained, dtype)
    else:
        assert architecture is not None
        config = _configuration(dict(architecture), vocab_size, max_length)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _check_against_data(model.config, attention, vocab_size, max_length)
    for name, neutral in SCORE_SCALES.items():
        if getattr(model.config, name, neutral) not in (None, neutral):
            raise ValueError(
                explain(
                    f"the model sets {name}={getattr(model.config, name)}",
                    "the loss is computed from the head in chunks and would miss it",
                    "use a model without it, or subclass CausalLMModule and override training_step",
                )
            )
    if attention is not None:
        sparsify(
            model,
            block_size=attention.block_size,
            budget=attention.budget,
            dense_layers=attention.dense_layers,
            backend=attention.backend,
        )
    return model.train()


def check_model(
    architecture: dict[str, Any] | None, pretrained: str | None, attention: AttentionSettings | None
) -> None:
    """Find what is wrong with the settings without building anything, before the data are made ready.

    Raises:
        ValueError: Names the key to change.
    """
    if (architecture is None) == (pretrained is None):
        raise ValueError(
            explain(
                "model.architecture and model.pretrained are "
                + ("both set" if pretrained else "both missing"),
                "a model is either made new from its configuration or loaded",
                "set exactly one of them",
            )
        )
    if attention is not None:
        check_block_size(attention.block_size)
    if architecture is not None:
        _configuration(dict(architecture), None, None)


def build_configuration(
    architecture: dict[str, Any] | None,
    pretrained: str | None,
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
) -> PretrainedConfig:
    """Return the configuration of the model that `build_language_model` would build, without its weights.

    Args:
        architecture: Fields of a transformers configuration, `model_type` included.
        pretrained: Folder or hub name of a checkpoint; exactly one of the two is given.
        vocab_size: Size that the tokenizer needs; used where `architecture` names none.
        max_length: Longest sequence of the data in tokens, likewise for `max_position_embeddings`.

    Raises:
        ValueError: A setting does not fit, or the checkpoint cannot be read.
    """
    check_model(architecture, pretrained, None)
    if pretrained is None:
        assert architecture is not None
        return _configuration(dict(architecture), vocab_size, max_length)
    try:
        return AutoConfig.from_pretrained(pretrained)
    except (OSError, ValueError) as error:
        raise _cannot_load(pretrained, error) from error


def backbone_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the part that makes hidden states and the head that scores them, through PEFT wrappers too."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return inner.get_decoder(), inner.get_output_embeddings()


def _configuration(
    fields: dict[str, Any], vocab_size: int | None, max_length: int | None
) -> PretrainedConfig:
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ValueError(
            explain(
                "model.architecture has no model_type",
                "it says which transformers model to build",
                "add e.g. model.architecture.model_type: qwen2",
            )
        )
    if vocab_size is not None:
        fields.setdefault("vocab_size", vocab_size)
    if max_length is not None:
        fields.setdefault("max_position_embeddings", max_length)
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise ValueError(
            explain(
                f"model.architecture.model_type is '{model_type}'",
                f"transformers cannot build it with these fields ({str(error).splitlines()[0][:200]})",
                "use a model_type that transformers lists, and fields of its configuration",
            )
        ) from error
    # transformers keeps any field it does not know, so a misspelt one would silently do nothing.
    plain = type(config)()
    if unknown := sorted(name for name in fields if not hasattr(plain, name)):
        raise ValueError(
            explain(
                f"model.architecture has {unknown}",
                f"{type(config).__name__} has no such field and would ignore it",
                "correct the spelling or remove it",
            )
        )
    return config


def _load(pretrained: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype)
    except (OSError, ValueError) as error:
        raise _cannot_load(pretrained, error) from error
    return model


def _cannot_load(pretrained: str, error: Exception) -> ValueError:
    kind = "folder" if Path(pretrained).exists() else "name"
    return ValueError(
        explain(
            f"model.pretrained is '{pretrained}'",
            f"transformers cannot load this {kind} ({str(error).splitlines()[0][:200]})",
            "pass a folder with config.json and weights, or a hub name that is reachable or cached",
        )
    )


def _check_against_data(
    config: PretrainedConfig,
    attention: AttentionSettings | None,
    vocab_size: int | None,
    max_length: int | None,
) -> None:
    if vocab_size is not None and config.vocab_size < vocab_size:
        raise ValueError(
            explain(
                f"the model's vocab_size is {config.vocab_size}, the tokenizer's {vocab_size}",
                "token ids would lie outside the embedding",
                "use the tokenizer that belongs to the model (data.tokenizer), or, for a model made from "
                "model.architecture, leave out its vocab_size",
            )
        )
    positions = getattr(config, "max_position_embeddings", None)
    if max_length is not None and positions is not None and positions < max_length:
        rank_zero_warn(
            explain(
                f"data.max_length is {max_length} and the model's max_position_embeddings {positions}",
                "later positions were never trained",
                "lower data.max_length, or set the model's rope scaling",
            )
        )
    if attention is not None and max_length is not None and max_length < attention.block_size:
        raise ValueError(
            explain(
                f"data.max_length is {max_length}, below one block of model.attention.block_size "
                f"{attention.block_size}",
                "every sequence would be a single block with nothing to choose",
                "raise data.max_length or lower model.attention.block_size",
            )
        )
