"""The JSON form of a latency table: written with a digest, read back with every field checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

from sb_lightning._messages import explain
from sb_lightning.latency.fingerprint import Fingerprint
from sb_lightning.latency.lattice import MAX_LENGTH, Curve, Measurements

__all__ = ["TableParts", "check_measurements", "decode", "encode", "parse", "unparse"]

FORMAT = "sb_lightning.latency_table"
VERSION = 1
LEAST_MS, MOST_MS = 1e-9, 1e12
MAX_LENGTHS, MAX_BUDGETS = 512, 512
MAX_BYTES = 1 << 26
KEYS = {
    "format", "version", "digest", "fingerprint", "micro_batch_ms", "lengths", "attention", "dense", "rest",
    "outside", "profile",
}  # fmt: skip
OPTIONAL = {"digest", "profile"}
POSITIVE = {"query_heads", "kv_heads", "head_dim", "hidden_size", "block_size", "threads", "ranks"}


@dataclass(frozen=True)
class TableParts:
    """What a file holds."""

    measurements: Measurements
    fingerprint: Fingerprint
    profile: dict[str, Any]


def refuse(field: str, found: str) -> NoReturn:
    """Raise the error of a field."""
    raise ValueError(
        explain(
            f"{field} {found}",
            "the latency table is damaged or was written by another program",
            "measure again with `sb profile`",
        )
    )


def encode(document: dict[str, Any]) -> str:
    """Write a document with its digest."""
    body = {key: value for key, value in document.items() if key != "digest"}
    head = {key: body.pop(key) for key in ("format", "version")}
    return json.dumps({**head, "digest": _digest({**head, **body}), **body}, indent=1, allow_nan=False) + "\n"


def decode(content: bytes) -> dict[str, Any]:
    """Read a document; nothing in it is checked but that it is JSON of the digest that it names.

    Raises:
        ValueError: It is not, a key occurs twice, or a number is not finite.
    """
    if len(content) > MAX_BYTES:
        refuse("the file", f"has {len(content)} bytes")
    try:
        document = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_parse_int,
            parse_constant=lambda name: refuse("the file", f"holds the number {name}"),
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        refuse("the file", f"is not JSON ({error})")
    if not isinstance(document, dict):
        refuse("the file", f"holds a {type(document).__name__}, not an object")
    return document


def parse(document: dict[str, Any]) -> TableParts:
    """Check every field of a document and return what it holds.

    Raises:
        ValueError: A field is missing, unknown, of the wrong kind or out of range; the message names it.
    """
    if not isinstance(document, dict):
        refuse("the table", f"is a {type(document).__name__}, not a dict")
    # The version goes first: another version may have other keys.
    if document.get("format") != FORMAT:
        refuse("format", f"is {_short(document.get('format'))}, not '{FORMAT}'")
    if type(document.get("version")) is not int or document["version"] != VERSION:
        refuse("version", f"is {_short(document.get('version'))}, and this program reads {VERSION}")
    _keys("the table", document, KEYS, OPTIONAL)
    if "digest" in document:
        try:
            digest = _digest({key: value for key, value in document.items() if key != "digest"})
        except (TypeError, ValueError, RecursionError) as error:
            refuse("the table", f"is not plain JSON ({error})")
        if document["digest"] != digest:
            refuse("digest", "does not belong to the rest, which was changed after it was written")
    fingerprint = _fingerprint(document["fingerprint"])
    lengths = _integers("lengths", document["lengths"])
    if len(lengths) > MAX_LENGTHS:
        refuse("lengths", f"has {len(lengths)} values, more than {MAX_LENGTHS}")
    rows = document["attention"]
    if not isinstance(rows, list):
        refuse("attention", f"is {_short(rows)}, not a list")
    budgets, sparse = [], []
    for i, row in enumerate(rows):
        name = f"attention[{i}]"
        _keys(name, row, {"budgets", "forward_ms", "backward_ms"})
        budgets.append(_integers(f"{name}.budgets", row["budgets"]))
        sparse.append(_curve(name, {key: value for key, value in row.items() if key != "budgets"}))
    measurements = Measurements(
        block_size=fingerprint.block_size,
        layers=fingerprint.layers,
        dense_layers=fingerprint.dense_layers,
        fixed_ms=_number("micro_batch_ms", document["micro_batch_ms"]),
        lengths=lengths,
        budgets=budgets,
        sparse=sparse,
        dense=_curve("dense", document["dense"]),
        rest=_curve("rest", document["rest"]),
        outside=_curve("outside", document["outside"]),
    )
    check_measurements(measurements)
    profile = document.get("profile", {})
    if not isinstance(profile, dict):
        refuse("profile", f"is {_short(profile)}, not an object")
    return TableParts(measurements, fingerprint, profile)


def unparse(parts: TableParts) -> dict[str, Any]:
    """Return the document that `parse` reads."""
    m = parts.measurements

    def curve(passes: Curve) -> dict[str, list[float]]:
        return {"forward_ms": list(passes[0]), "backward_ms": list(passes[1])}

    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": asdict(parts.fingerprint),
        "micro_batch_ms": m.fixed_ms,
        "lengths": list(m.lengths),
        "attention": [{"budgets": list(k), **curve(row)} for k, row in zip(m.budgets, m.sparse, strict=True)],
        "dense": curve(m.dense),
        "rest": curve(m.rest),
        "outside": curve(m.outside),
        "profile": parts.profile,
    }


def check_measurements(m: Measurements) -> None:
    """Check lengths, budgets and times against each other and their ranges.

    Raises:
        ValueError: One does not fit; the message names it.
    """
    if not 0 <= m.fixed_ms <= MOST_MS:
        refuse("micro_batch_ms", f"is {m.fixed_ms}")
    if not m.lengths:
        refuse("lengths", "is empty")
    _axis("lengths", m.lengths, MAX_LENGTH)
    count = len(m.lengths)
    if len(m.budgets) != count or len(m.sparse) != count:
        refuse("attention", f"has {len(m.sparse)} rows for {count} lengths")
    for i, (length, budgets) in enumerate(zip(m.lengths, m.budgets, strict=True)):
        name = f"attention[{i}]"
        if len(budgets) > MAX_BUDGETS:
            refuse(f"{name}.budgets", f"has {len(budgets)} values, more than {MAX_BUDGETS}")
        _axis(f"{name}.budgets", budgets, (length - 1) // m.block_size)
        _times(name, m.sparse[i], len(budgets))
    for name, curve in (("dense", m.dense), ("rest", m.rest), ("outside", m.outside)):
        _times(name, curve, count)


def _axis(name: str, values: Sequence[int], most: int) -> None:
    last = 0
    for i, value in enumerate(values):
        if not last < value <= most:
            refuse(f"{name}[{i}]", f"is {value} after {last} (values ascend from 1 to at most {most})")
        last = value


def _times(name: str, curve: Curve, count: int) -> None:
    for key, times in zip(("forward_ms", "backward_ms"), curve, strict=True):
        if len(times) != count:
            refuse(f"{name}.{key}", f"has {len(times)} values where {count} are needed")
        for i, ms in enumerate(times):
            if not LEAST_MS <= ms <= MOST_MS:
                refuse(f"{name}.{key}[{i}]", f"is {ms}, which is not within {LEAST_MS:g} and {MOST_MS:g} ms")


def _fingerprint(given: object) -> Fingerprint:
    kinds = {entry.name: entry.type for entry in fields(Fingerprint)}
    checked: dict[str, Any] = _keys("fingerprint", given, set(kinds))
    for name, kind in kinds.items():
        field, value = f"fingerprint.{name}", checked[name]
        if kind == "str":
            if not isinstance(value, str):
                refuse(field, f"is {_short(value)}, not a text")
        else:
            least = 1 if name in POSITIVE else 0
            most = 2**20 if name == "block_size" else 2**31 - 1
            if not least <= _integer(field, value) <= most:
                refuse(field, f"is {value}, which is not within {least} and {most}")
    if not 0 < checked["layers"] + checked["dense_layers"] <= 1_000_000:
        refuse("fingerprint.layers", f"is {checked['layers']} beside {checked['dense_layers']} dense layers")
    return Fingerprint(**checked)


def _curve(name: str, given: object) -> Curve:
    keys = ("forward_ms", "backward_ms")
    curve = _keys(name, given, set(keys))
    for key in keys:
        if not isinstance(curve[key], list):
            refuse(f"{name}.{key}", f"is {_short(curve[key])}, not a list")
    return [[_number(f"{name}.{key}[{i}]", ms) for i, ms in enumerate(curve[key])] for key in keys]


def _keys(
    name: str, given: object, keys: set[str], optional: set[str] | frozenset[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(given, dict):
        refuse(name, f"is {_short(given)}, not an object")
    if missing := sorted(keys - optional - set(given)):
        refuse(name, f"has no {', '.join(missing)}")
    if unknown := sorted(map(str, set(given) - keys)):
        refuse(name, f"has an unknown key {_short(unknown[0])}")
    return given


def _integers(name: str, given: object) -> list[int]:
    if not isinstance(given, list):
        refuse(name, f"is {_short(given)}, not a list")
    return [_integer(f"{name}[{i}]", value) for i, value in enumerate(given)]


def _integer(name: str, value: object) -> int:
    if type(value) is not int:
        refuse(name, f"is {_short(value)}, not an integer")
    return value


def _number(name: str, value: object) -> float:
    if type(value) not in (int, float):
        refuse(name, f"is {_short(value)}, not a number")
    assert isinstance(value, int | float)
    if not -MOST_MS <= value <= MOST_MS:
        refuse(name, f"is {_short(value)}, which is not a finite number of milliseconds")
    return float(value)


def _parse_int(digits: str) -> int:
    return int(digits) if len(digits) <= 40 else refuse("the file", f"holds a number of {len(digits)} digits")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [key for key, _ in pairs]
        refuse(next(key for key in names if names.count(key) > 1), "occurs twice")
    for key, value in pairs:
        if isinstance(value, float) and not math.isfinite(value):
            refuse(key, "is not finite")
    return document


def _digest(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Numbers of thousands of digits and very deep lists have no text.
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= 60 else text[:57] + "..."
