"""What a rank runs, as plain data: every process of a profile builds the same model from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sb_lightning._messages import explain

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["ModelSpec"]

MOST_SPARSE_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model with random weights and the way it is trained."""

    config: dict[str, Any]
    """Fields of its transformers configuration."""
    block_size: int | None
    """Keys per block; None for a model with its own dense attention."""
    dense_layers: tuple[int, ...] = ()
    """Layers with full attention."""
    backend: str | None = None
    """Attention backend; None takes the best available."""
    dtype: str = "float32"
    """Element type of the activations."""
    mixed: bool = False
    """Whether the weights stay in fp32 and `dtype` is that of autocast."""
    device: str = "cpu"
    """Where it runs, as torch names it."""
    threads: int = 1
    """CPU threads."""
    activation_checkpointing: bool = False
    """Whether layers are recomputed in the backward pass."""
    loss_chunk_tokens: int = 1024
    """Tokens whose logits exist at a time."""

    def __post_init__(self) -> None:
        if "num_hidden_layers" not in self.config or "intermediate_size" not in self.config:
            raise ValueError(
                explain(
                    f"the model's type is '{self.config.get('model_type')}'",
                    "its configuration does not name num_hidden_layers and intermediate_size",
                    "use a decoder-only model such as Qwen2 or Llama",
                )
            )

    @property
    def layers(self) -> tuple[int, int]:
        """Layers with a budget, layers with full attention."""
        count = int(self.config["num_hidden_layers"])
        num_dense = count if self.block_size is None else len(self.dense_layers)
        return count - num_dense, num_dense

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> ModelSpec:
        """Read what `to_json` returned."""
        fields = json.loads(line)
        return cls(**{**fields, "dense_layers": tuple(fields["dense_layers"])})

    def with_few_layers(self) -> ModelSpec:
        """Return a model of at most three layers with a budget and one without: layers are all alike."""
        num_sparse, num_dense = self.layers
        if self.block_size is None:
            num_sparse, num_dense = 0, min(num_dense, MOST_SPARSE_LAYERS)
        else:
            num_sparse, num_dense = min(num_sparse, MOST_SPARSE_LAYERS), min(num_dense, 1)
        count = num_sparse + num_dense
        config = {**self.config, "num_hidden_layers": count}
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:count]
        dense = tuple(range(num_sparse, count)) if self.block_size is not None else ()
        return replace(self, config=config, dense_layers=dense)

    def configuration(self) -> PretrainedConfig:
        """Return the transformers configuration.

        Raises:
            ValueError: transformers does not know the model.
        """
        from transformers import AutoConfig

        fields = dict(self.config)
        name = fields.pop("model_type", None)
        try:
            return AutoConfig.for_model(name, **fields)
        except ValueError as error:
            raise ValueError(
                explain(
                    f"the model's model_type is '{name}'",
                    "transformers cannot build it from its configuration, as the profile's other ranks must "
                    f"({str(error).splitlines()[0][:120]})",
                    "profile with ranks=1, or register the model with transformers' AutoConfig",
                )
            ) from error

    def build(self) -> PreTrainedModel:
        """Build the model on its device, in train mode; the global random state stays as it was."""
        import torch
        from transformers import AutoModelForCausalLM

        from sb_lightning.attention.huggingface import sparsify

        weights = torch.float32 if self.mixed else self.torch_dtype
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which seeds every GPU too; weights are drawn on the CPU.
            torch.default_generator.manual_seed(0)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.configuration(), dtype=weights)
        if self.block_size is not None:
            sparsify(
                model,
                block_size=self.block_size,
                budget=1,
                dense_layers=self.dense_layers,
                backend=self.backend,
            )
        if self.activation_checkpointing:
            newer = getattr(model, "activation_checkpointing_enable", None)
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model.to(self.device).train()  # type: ignore[arg-type]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the activations."""
        import torch

        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(
                explain(
                    f"dtype is '{self.dtype}'", "models are trained in floating point", "pass e.g. bfloat16"
                )
            )
        return found
