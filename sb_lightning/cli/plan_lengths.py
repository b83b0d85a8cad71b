"""Lengths of sequences from a file of the user's, in the formats that people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sb_lightning._messages import explain

__all__ = ["read_lengths"]

Lengths = NDArray[np.int64]
FORMATS = "one whole number per line, a JSON list, a .npy array, or --column of a .jsonl or .parquet file"
MOST_TOKENS = 2**31 - 1


def read_lengths(path: Path, column: str = "length") -> Lengths:
    """Return the tokens of every sequence # [N].

    Args:
        path: ``.npy`` (an array), ``.jsonl`` or ``.parquet`` (a column of numbers, or of token lists, which
            are counted), ``.json`` (a list); anything else holds one number per line.
        column: Of a ``.jsonl`` or ``.parquet`` file.

    Raises:
        ValueError: There is no such file, it is empty or damaged, or something in it is no length.
        RuntimeError: pyarrow is needed and not installed.
    """
    readers = {".npy": _npy, ".json": _json, ".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no file"
        raise ValueError(explain(f"--lengths is '{path}'", f"it is {what}", f"name a file: {FORMATS}"))
    try:
        values = readers.get(path.suffix.lower(), _lines)(path, column)
    except (UnicodeDecodeError, EOFError) as error:
        raise ValueError(explain(f"'{path}' cannot be read", str(error), f"pass {FORMATS}")) from error
    if len(values) == 0:
        raise ValueError(explain(f"'{path}' is empty", "there is nothing to plan", f"pass {FORMATS}"))
    wrong = np.flatnonzero((values < 1) | (values > MOST_TOKENS))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            explain(
                f"'{path}': length number {first + 1} is {int(values[first])}",
                "a sequence has from 1 to 2**31 - 1 tokens",
                "correct it, or leave it out",
            )
        )
    return values


def _lines(path: Path, column: str) -> Lengths:
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return _json(path, column)
    try:
        # All at once is fast, and does not know which line is wrong.
        return np.array(text.split(), dtype=np.int64)
    except (ValueError, OverflowError):
        pass
    values = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            values += [np.int64(int(word)) for word in line.split()]
        except (ValueError, OverflowError):
            what = f"'{path}', line {number}: '{line.strip()[:60]}'"
            raise ValueError(explain(what, "it is no whole number", f"pass {FORMATS}")) from None
    return np.array(values, dtype=np.int64)


def _json(path: Path, column: str) -> Lengths:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(explain(f"'{path}' is no JSON", str(error), f"pass {FORMATS}")) from error
    if not isinstance(content, list):
        raise ValueError(
            explain(f"'{path}' holds a {type(content).__name__}", "a list is wanted", f"pass {FORMATS}")
        )
    return _whole_numbers(path, content)


def _npy(path: Path, column: str) -> Lengths:
    try:
        content = np.load(path, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ValueError(explain(f"'{path}' is no .npy array", str(error), f"pass {FORMATS}")) from error
    if content.ndim != 1 or content.dtype.kind not in "iu":
        raise ValueError(
            explain(
                f"'{path}' is an array of {content.dtype} with {content.ndim} dimensions",
                "there is one whole number per sequence",
                "save a flat array of integers",
            )
        )
    return np.asarray(content, dtype=np.int64)


def _jsonl(path: Path, column: str) -> Lengths:
    values: list[Any] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    explain(f"'{path}', line {number} is no JSON", str(error), "correct it, or leave it out")
                ) from error
            if not isinstance(record, dict) or column not in record:
                has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise ValueError(_no_column(path, column, f"line {number} has {has}"))
            values.append(record[column])
    return _whole_numbers(path, values)


def _parquet(path: Path, column: str) -> Lengths:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise RuntimeError(
            explain(f"'{path}' needs pyarrow", "it is not installed", "pip install pyarrow")
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        content = file.read([column]).column(0) if column in names else None
    except pyarrow.ArrowException as error:
        raise ValueError(explain(f"'{path}' is no parquet file", str(error), f"pass {FORMATS}")) from error
    if content is None:
        raise ValueError(_no_column(path, column, f"it has {', '.join(names)}"))
    kind = content.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        content = pyarrow.compute.list_value_length(content)
    if content.null_count or not pyarrow.types.is_integer(content.type):
        raise ValueError(
            explain(
                f"column '{column}' of '{path}' holds {kind}{' with nulls' if content.null_count else ''}",
                "lengths are whole numbers, or lists of tokens to be counted",
                "name another --column",
            )
        )
    return np.asarray(content.to_numpy(), dtype=np.int64)


def _whole_numbers(path: Path, values: list[Any]) -> Lengths:
    counted = [len(value) if isinstance(value, list) else value for value in values]
    for number, value in enumerate(counted, 1):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**62:
            raise ValueError(
                explain(
                    f"'{path}': length number {number} is {str(value)[:60]!r}",
                    "lengths are whole numbers, or lists of tokens to be counted",
                    f"pass {FORMATS}",
                )
            )
    return np.array(counted, dtype=np.int64)


def _no_column(path: Path, column: str, has: str) -> str:
    return explain(
        f"'{path}' has no column '{column}' ({has})", "lengths are read from it", "name one with --column"
    )
