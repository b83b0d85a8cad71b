"""A round as its file holds it, read with care: files get cut off, mixed up and edited."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sb_lightning.compare.results import ArmWindow, Cells, Round
from sb_lightning.compare.uniform import CoverageCurve

__all__ = ["decode_round"]

# Of `ArmWindow`; all others are numbers.
SPECIAL = ("number", "members", "busy_ms", "predicted_ms", "loss")


def decode_round(content: object) -> Round:
    """Return the round that `Round.to_dict` has written.

    Args:
        content: What the JSON holds.

    Raises:
        ValueError: A field is missing or holds something else; the message says which, in a few words.
    """
    found = _object(content, "the round", Round)
    order = tuple(_text(name, "order") for name in _list(found["order"], "order"))
    windows = {
        str(name): tuple(_window(each) for each in _list(given, f"windows.{name}"))
        for name, given in _mapping(found["windows"], "windows").items()
    }
    if sorted(order) != sorted(windows):
        raise ValueError("order and windows name different arms")
    numbers = [[window.number for window in each] for each in windows.values()]
    if not numbers or not numbers[0] or any(each != numbers[0] for each in numbers):
        raise ValueError("its arms have not trained the same windows")
    return Round(
        number=_whole(found["number"], "number"),
        order=order,
        windows=windows,
        curves={
            str(name): _curve(each, f"curves.{name}")
            for name, each in _mapping(found["curves"], "curves").items()
        },
        seconds=_number(found["seconds"], "seconds"),
    )


def _window(content: object) -> ArmWindow:
    found = _object(content, "a window", ArmWindow)
    busy = _cells(found["busy_ms"], "busy_ms")
    predicted = _cells(found["predicted_ms"], "predicted_ms")
    if (len(busy), len(busy[0])) != (len(predicted), len(predicted[0])):
        raise ValueError("busy_ms and predicted_ms have different shapes")
    if all(cell is None for row in busy for cell in row):
        raise ValueError("busy_ms has no number")
    numbers = {name: _number(value, name) for name, value in found.items() if name not in SPECIAL}
    if numbers["wall_ms"] <= 0:
        raise ValueError("wall_ms is not above 0")
    return ArmWindow(
        number=_whole(found["number"], "a window's number"),
        members=_text(found["members"], "members"),
        busy_ms=busy,
        predicted_ms=predicted,
        loss=None if found["loss"] is None else _number(found["loss"], "loss"),
        **numbers,
    )


def _curve(content: object, name: str) -> CoverageCurve:
    found = _object(content, name, CoverageCurve)
    sums = tuple(_number(value, f"{name}.sums") for value in _list(found["sums"], f"{name}.sums"))
    budget, usual = (_whole(found[key], f"{name}.{key}") for key in ("budget", "usual"))
    if not sums or budget < 1 or usual < 1:
        raise ValueError(f"{name} has no sums or a budget below 1")
    return CoverageCurve(rows=_number(found["rows"], f"{name}.rows"), sums=sums, budget=budget, usual=usual)


def _cells(content: object, name: str) -> Cells:
    rows = [_list(row, name) for row in _list(content, name)]
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{name} is no table of ranks and micro-batches")
    return tuple(tuple(None if cell is None else _number(cell, name) for cell in row) for row in rows)


def _object(content: object, name: str, kind: type[Any]) -> Mapping[str, Any]:
    found = _mapping(content, name)
    wanted = {field.name for field in fields(kind)}
    if odd := sorted(wanted ^ set(found)):
        raise ValueError(f"{name} lacks, or has too many of, the fields {', '.join(map(str, odd))[:200]}")
    return found


def _mapping(content: object, name: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} is no object")
    return content


def _list(content: object, name: str) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"{name} is no list")
    return content


def _text(content: object, name: str) -> str:
    if not isinstance(content, str):
        raise ValueError(f"{name} is no text")
    return content


def _number(content: object, name: str) -> float:
    if isinstance(content, bool) or not isinstance(content, (int, float)) or not math.isfinite(content):
        raise ValueError(f"{name} is no number")
    return float(content)


def _whole(content: object, name: str) -> int:
    if isinstance(content, bool) or not isinstance(content, int) or content < 0:
        raise ValueError(f"{name} is no whole number")
    return content
