"""What `plan_window` is given, checked and in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sb_lightning._messages import explain

__all__ = ["MOST", "CannotPack", "PlanInputs", "check_choice", "check_count", "read_inputs"]

Integers = npt.NDArray[np.int64]

MOST = 2**62
"""Sums stay below this, so that the C++ planner never overflows."""
WEIGHT_BITS = 40


class CannotPack(ValueError):
    """No cells were found that hold a window's items under `max_tokens`."""


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The items of one window."""

    costs_us: Integers
    """Predicted time of each item."""
    weights: Integers | None
    """What the policy `flops` balances."""
    tokens: Integers
    target_tokens: Integers
    overhead_us: int
    """Time of a cell beside its items."""
    max_tokens: int | None
    """Tokens that a cell may hold, no more than there are in the window."""

    @property
    def num_items(self) -> int:
        """Items of the window."""
        return len(self.costs_us)


def read_inputs(
    costs_ms: Sequence[float] | npt.NDArray[Any],
    tokens: Sequence[int] | npt.NDArray[Any],
    *,
    num_cells: int,
    cell_overhead_ms: float,
    max_tokens: int | None,
    target_tokens: Sequence[int] | npt.NDArray[Any] | None,
    weights: Sequence[float] | npt.NDArray[Any] | None,
) -> PlanInputs:
    """Check the arguments of `plan_window` that describe items.

    Raises:
        TypeError: An argument holds other things than numbers.
        ValueError: A number is out of range, or the arguments are of different lengths.
    """
    ms = _amounts("costs_ms", costs_ms)
    sizes = _counts("tokens", tokens)
    targets = np.maximum(sizes - 1, 0) if target_tokens is None else _counts("target_tokens", target_tokens)
    given = {"tokens": sizes, "target_tokens": targets}
    scaled = None
    if weights is not None:
        amounts = _amounts("weights", weights)
        given["weights"] = amounts
        scaled = _whole(np.ldexp(amounts, WEIGHT_BITS - np.frexp(amounts.max(initial=0.0))[1]))
    for name, values in given.items():
        if len(values) != len(ms):
            raise ValueError(
                explain(
                    f"{len(ms)} costs_ms and {len(values)} {name}",
                    "both describe the items of one window",
                    "pass one entry of each per item",
                )
            )
    overhead = float(_amounts("cell_overhead_ms", [cell_overhead_ms])[0])
    with np.errstate(over="ignore"):
        # Pad cells repeat an item.
        total = ms.sum() + num_cells * (overhead + ms.max(initial=0.0))
        _check_sum("costs_ms", float(total * 1000.0))
    _check_sum("tokens", float(sizes.sum(dtype=np.float64)) + num_cells * float(sizes.max(initial=0)))
    return PlanInputs(
        costs_us=_whole(ms * 1000.0),
        weights=scaled,
        tokens=sizes,
        target_tokens=targets,
        overhead_us=int(_whole(np.array([overhead * 1000.0]))[0]),
        max_tokens=None if max_tokens is None else _cap(max_tokens, sizes, num_cells),
    )


def check_count(name: str, value: Any) -> int:
    """Return an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(explain(f"{name} is {value!r}", "it is a count", "pass an integer >= 1"))
    if value < 1:
        raise ValueError(explain(f"{name} is {value}", "it counts from 1", f"pass {name} >= 1"))
    return int(value)


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse what is not among the allowed names."""
    if value not in allowed:
        raise ValueError(explain(f"{name} is {value!r}", "there is no such choice", f"pass one of {allowed}"))


def _array(name: str, values: Any, kinds: str, wanted: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        found = f"{name} is {array.dtype} of shape {array.shape}"
        raise TypeError(explain(found, f"it holds one of {wanted} per item", f"pass a flat list of {wanted}"))
    return array


def _amounts(name: str, values: Any) -> npt.NDArray[np.float64]:
    array = _array(name, values, "fiu", "numbers").astype(np.float64, copy=False)
    good = np.isfinite(array) & (array >= 0.0)
    if not good.all():
        at = int(np.argmin(good))
        raise ValueError(
            explain(
                f"{name}[{at}] is {array[at]}",
                "a cost is finite and not negative",
                f"pass finite {name} of at least 0",
            )
        )
    return array


def _counts(name: str, values: Any) -> Integers:
    array = _array(name, values, "iu", "integers")
    if array.size and (array.min() < 0 or array.max() > MOST):
        at = int(np.argmax((array < 0) | (array > MOST)))
        raise ValueError(
            explain(f"{name}[{at}] is {array[at]}", "tokens are counted", f"pass {name} from 0 to 2**62")
        )
    return array.astype(np.int64, copy=False)


def _whole(values: npt.NDArray[np.float64]) -> Integers:
    return np.floor(values + 0.5).astype(np.int64)


def _check_sum(name: str, total: float) -> None:
    if total >= MOST:
        unit = " us" if name == "costs_ms" else ""
        raise ValueError(
            explain(
                f"{name} add up to {total:.3g}{unit}",
                "a window's sum stays below 2**62",
                f"pass {name} in the right unit, or plan fewer items at once",
            )
        )


def _cap(max_tokens: Any, tokens: Integers, num_cells: int) -> int:
    cap = check_count("max_tokens", max_tokens)
    if tokens.size and tokens.max() > cap:
        at = int(np.argmax(tokens > cap))
        raise CannotPack(
            explain(
                f"item {at} has {tokens[at]} tokens and max_tokens is {cap}",
                "no cell can hold it",
                "raise max_tokens, or cut the sequence",
            )
        )
    total = int(tokens.sum())
    if total > num_cells * cap:
        raise CannotPack(
            explain(
                f"the window has {total} tokens and {num_cells} cells of max_tokens {cap}",
                f"the cells hold {num_cells * cap} tokens at most",
                "raise max_tokens or accumulate, or put fewer sequences in a window",
            )
        )
    return min(cap, max(total, 1))
