"""What a batch says about itself, noted without waiting for the device and read when its window is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

from torch import Tensor

from sb_lightning.callbacks.windows import is_padding, length_source
from sb_lightning.tracking.window_record import MAX_NAMED, MeasuredCell

__all__ = ["BatchFacts", "Lengths"]

Lengths = Callable[[Any], Tensor | Sequence[int]]


class BatchFacts:
    """Where the facts of one micro-batch are.

    Args:
        batch: As `training_step` gets it.
        lengths: Returns the tokens of each sequence; None: look for them.
        budget: Attention budget where neither the batch nor anybody else knows better; NaN if unknown.
    """

    def __init__(self, batch: Any, lengths: Lengths | None = None, budget: float = math.nan) -> None:
        fields: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else {}
        self._lengths: Callable[[], Tensor | Sequence[int]] | None
        if lengths is None:
            self._lengths = length_source(batch)
        else:
            found = lengths(batch)
            self._lengths = lambda: found
        self._ids = fields.get("sequence_ids")
        self._is_padding = is_padding(batch)
        self._numbers: dict[str, Any] = {
            "predicted_ms": fields.get("predicted_ms", math.nan),
            "budget": fields.get("budget", budget),
        }

    def update(self, numbers: Mapping[str, float]) -> None:
        """Take over what somebody else knows of the micro-batch."""
        self._numbers.update(numbers)

    def forget_device(self) -> None:
        """Give up what lies on a device, because reading it could wait for ever."""
        self._lengths = None
        if _is_on_device(self._ids):
            self._ids = None
        self._numbers = {
            name: math.nan if _is_on_device(value) else value for name, value in self._numbers.items()
        }

    def measured(self, lanes_ms: Sequence[float], busy_ms: float) -> MeasuredCell:
        """Return the micro-batch with its times; this may wait for the device.

        Args:
            lanes_ms: Time in each of `LANES`.
            busy_ms: Busy time.
        """
        lengths = [] if self._lengths is None else _integers(self._lengths())
        ids = [] if self._ids is None else _integers(self._ids)
        if len(ids) != len(lengths):
            ids = [-1] * len(lengths)
        named = sorted(zip(ids, lengths, strict=True), key=lambda item: -item[1])[:MAX_NAMED]
        return MeasuredCell(
            lanes_ms=tuple(lanes_ms),
            busy_ms=busy_ms,
            tokens=sum(lengths),
            longest=max(lengths, default=0),
            num_sequences=len(lengths),
            is_padding=self._is_padding,
            predicted_ms=_number(self._numbers["predicted_ms"]),
            budget=_number(self._numbers["budget"]),
            sequences=tuple(named),
        )


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _integers(values: Any) -> list[int]:
    if hasattr(values, "tolist"):
        # Of tensors and arrays; those of no dimension give a number.
        values = values.tolist()
    flat: Iterable[Any] = values if isinstance(values, Iterable) else [values]
    # Ids of other data sets may be names, or hashes of more than 63 bits.
    return [_integer(value) for value in _flatten(flat)]


def _integer(value: Any) -> int:
    if isinstance(value, Integral) or (isinstance(value, Real) and math.isfinite(value)):
        number = int(cast("float", value))
        return number if -(2**63) <= number < 2**63 else -1
    return -1


def _flatten(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        elif isinstance(value, Tensor):
            yield value.item() if value.numel() == 1 else None
        else:
            yield value


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        return float(value.double().mean())
    return float(value) if isinstance(value, Real) else math.nan
