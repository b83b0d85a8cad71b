"""Settings of the LightningModule; the command line derives its keys and help from them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt

from sb_lightning._messages import explain

__all__ = ["AttentionSettings", "OptimizerSettings", "settings_from"]

SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Block-sparse attention (MoBA) of every layer."""

    block_size: PositiveInt = 64
    """Keys per block, a multiple of 16. Smaller blocks route more exactly, larger ones run faster."""
    budget: PositiveInt = 8
    """Blocks that a query attends, its own included (k0): up to budget x block_size tokens are dense."""
    dense_layers: list[int] = field(default_factory=list)
    """Layers, counted from 0, that keep full attention."""
    backend: str | None = None
    """Attention backend, one of those that `sb doctor` lists; null takes the best available."""

    def __post_init__(self) -> None:
        _check_ranges(self, "model.attention")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW with a linear warm-up and a cosine decay over the whole run."""

    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices; biases, norms and other vectors are not decayed."""
    beta1: ClosedUnitInterval = 0.9
    """Decay of the first moment."""
    beta2: ClosedUnitInterval = 0.95
    """Decay of the second moment."""
    warmup_share: ClosedUnitInterval = 0.1
    """Share of all optimizer steps spent warming up."""
    final_share: ClosedUnitInterval = 0.1
    """Learning rate of the last step as a share of the peak."""

    def __post_init__(self) -> None:
        _check_ranges(self, "model.optimizer")


def settings_from(kind: type[SettingsT], given: SettingsT | dict[str, Any], key: str) -> SettingsT:
    """Return settings given as an object or as a plain dict (as checkpoints keep them).

    Raises:
        ValueError: The dict has a key that the settings do not have.
    """
    if not isinstance(given, dict):
        return given
    known = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(
            explain(f"{key} has no key {unknown}", f"its keys are {known}", f"rename them under {key}")
        )
    return kind(**given)


def _check_ranges(settings: Any, key: str) -> None:
    """Check the numbers against their types; keep plain int and float, which checkpoints can hold."""
    for name, kind in get_type_hints(type(settings)).items():
        base = getattr(kind, "_type", None)
        if base not in (int, float):
            continue
        value = getattr(settings, name)
        try:
            object.__setattr__(settings, name, base(kind(value)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                explain(
                    f"{key}.{name} is {value!r}",
                    f"{kind.__name__} is wanted ({error})",
                    f"change {key}.{name}",
                )
            ) from error
