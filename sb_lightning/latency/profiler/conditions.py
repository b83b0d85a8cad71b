"""What is measured, and as what the result counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sb_lightning.latency.fingerprint import Fingerprint, ModelShape, current_fingerprint
from sb_lightning.latency.profiler.spec import ModelSpec

__all__ = ["Conditions", "architecture_digest", "shape_of"]

BLOCK_OF_DENSE = 64
"""Block size noted for a model without blocks: only its grid depends on it."""
WITHOUT_COST = (
    "_name_or_path", "architectures", "id2label", "label2id", "initializer_range", "max_position_embeddings",
    "dtype", "torch_dtype", "use_cache", "transformers_version",
)  # fmt: skip
"""Fields of a configuration that no time depends on, or that are noted by themselves."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is measured, and as what the result counts."""

    spec: ModelSpec
    """The model of the run."""
    fingerprint: Fingerprint
    """Of the run."""
    max_length: int
    """Longest sequence."""
    devices: tuple[str, ...] = ()
    """Devices of the ranks, as torch names them; empty where they are not known."""
    parameters: tuple[int, int] | None = None
    """All and trainable parameters of a model that is measured as it is."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        max_length: int,
        ranks: int,
        devices: Sequence[str] = (),
        parameters: tuple[int, int] | None = None,
    ) -> Conditions:
        """Describe a run on this machine.

        Args:
            spec: The model and how it is trained.
            max_length: Longest sequence.
            ranks: Ranks that share the machine.
            devices: Devices of the ranks, where they are known.
            parameters: All and trainable parameters of a model that is measured as it is.
        """
        config = spec.configuration()
        is_dense = spec.block_size is None
        shape = ModelShape.from_config(
            config,
            block_size=spec.block_size or BLOCK_OF_DENSE,
            dense_layers=range(spec.layers[1]) if is_dense else spec.dense_layers,
        )
        spec.torch_dtype  # noqa: B018 - refuses what is no element type
        fingerprint = current_fingerprint(
            shape,
            device=spec.device,
            # Weights in fp32 are cast in every step: other times than those of weights in `dtype`.
            dtype=spec.dtype + ("-mixed" if spec.mixed else ""),
            threads=spec.threads,
            ranks=ranks,
            backend="dense" if is_dense else spec.backend,
        )
        return cls(
            spec=spec,
            fingerprint=fingerprint,
            max_length=max_length,
            devices=tuple(devices),
            parameters=parameters,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What the times depend on besides the fingerprint, as plain JSON."""
        config = self.spec.config
        return {
            "max_length": self.max_length,
            "activation_checkpointing": self.spec.activation_checkpointing,
            "loss_chunk_tokens": self.spec.loss_chunk_tokens,
            "hidden_act": str(config.get("hidden_act")),
            "model_type": str(config.get("model_type")),
            "transformers": str(config.get("transformers_version")),
            # Experts, sliding windows and whatever else a family has.
            "architecture": architecture_digest(config),
            "parameters": list(self.parameters) if self.parameters else None,
        }


def architecture_digest(config: Mapping[str, Any]) -> str:
    """Return a short name of all fields of a configuration that times may depend on.

    Args:
        config: Fields of a transformers configuration.
    """
    fields = {
        name: value
        for name, value in config.items()
        if name not in WITHOUT_COST and not name.endswith("_token_id")
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def shape_of(fingerprint: Fingerprint, layers: tuple[int, int]) -> ModelShape:
    """Return the sizes of a model of so many layers with a budget and with full attention."""
    sizes = {name: getattr(fingerprint, name) for name in ModelShape.__dataclass_fields__}
    return ModelShape(**{**sizes, "layers": layers[0], "dense_layers": layers[1]})
