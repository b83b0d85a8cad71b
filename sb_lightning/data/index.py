"""The tokenized corpus on disk: tokens, where each sequence begins, and what was left out; built once."""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from sb_lightning._messages import explain
from sb_lightning.data.corpus import Corpus
from sb_lightning.data.digest import digest

__all__ = [
    "Overlong",
    "TokenIndex",
    "check_lengths",
    "describe_report",
    "file_checksum",
    "find_index",
    "index_name",
    "report_checksum",
]

Overlong = Literal["truncate", "split", "drop"]

FORMAT = 2
"""Raised when the files change meaning, so that older caches are built again."""

MIN_TOKENS = 2
"""A sequence of one token predicts nothing."""


class TokenIndex:
    """The sequences of a corpus: their tokens (read on demand), lengths, documents and counts.

    The token file is mapped read-only when it is first read from: forked processes share the mapping, spawned
    ones make their own.

    Args:
        folder: A finished index folder.

    Attributes:
        lengths: Tokens of each sequence, int64.
        target_tokens: Labels of each sequence that count in the loss, int64: all but its first token.
        documents: Number of the document of each sequence, int64; pieces of a split document share it.
        report: Counts of documents, sequences and tokens, and of what was cut or left out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        arrays = load_file(folder / "index.safetensors")
        self._offsets: np.ndarray = arrays["offsets"]
        self.lengths: np.ndarray = np.diff(self._offsets)
        self.target_tokens: np.ndarray = arrays["target_tokens"].astype(np.int64)
        self.documents: np.ndarray = arrays["documents"].astype(np.int64)
        self._names: np.ndarray = arrays["names"]
        self._name_ends: np.ndarray = arrays["name_ends"]
        self._opened: Any = None

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Short name of the content: equal wherever the same sequences have been built."""
        return digest(self.report["files"])

    def tokens(self, sequence: int) -> np.ndarray:
        """Return the token ids of a sequence, int64."""
        start, end = int(self._offsets[sequence]), int(self._offsets[sequence + 1])
        return np.asarray(self._token_slice()[start:end], dtype=np.int64)

    def document_ids(self) -> list[str]:
        """Return the id of each document, in the order that :attr:`documents` counts them."""
        starts = [0, *self._name_ends[:-1].tolist()]
        raw = self._names.tobytes()
        return [raw[a:b].decode("utf-8") for a, b in zip(starts, self._name_ends.tolist(), strict=True)]

    def _token_slice(self) -> Any:
        if self._opened is None:
            self._opened = safe_open(self.folder / "tokens.safetensors", "numpy")
        return self._opened.get_slice("tokens")

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file behind when a worker process is spawned."""
        return {**self.__dict__, "_opened": None}


def check_lengths(max_length: int, overlong: str) -> None:
    """Refuse a ``max_length`` or ``overlong`` that no index can be built with.

    Raises:
        ValueError: Names the setting.
    """
    if max_length < MIN_TOKENS:
        raise ValueError(
            explain(
                f"data.max_length is {max_length}",
                "a sequence needs two tokens for one to predict the other",
                "pass data.max_length >= 2; several attention blocks are sensible",
            )
        )
    if overlong not in get_args(Overlong):
        why = "there is no such choice"
        raise ValueError(explain(f"data.overlong is {overlong!r}", why, f"pass one of {get_args(Overlong)}"))


def index_name(
    corpus: Corpus, tokenizer_stamp: dict[str, Any], *, max_length: int, overlong: Overlong
) -> str:
    """Return the folder name of the index that these inputs give."""
    inputs = {"corpus": corpus.stamp(), "tokenizer": tokenizer_stamp, "max_length": max_length}
    return digest({"format": FORMAT, "overlong": overlong, **inputs})


def describe_report(report: dict[str, Any]) -> str:
    """Return the report in one line.

    Example:
        >>> counts = dict(truncated=1, split=0, dropped=0, too_short=2, skipped={"empty": 3})
        >>> size = dict(source="docs", documents=9, sequences_train=8, sequences_val=1, tokens=1200)
        >>> describe_report({**size, **counts, "length": {"p50": 70, "p99": 400, "max": 512}})
        'docs: 9 documents, 1,200 tokens (median 70, p99 400, longest 512), 8 sequences to train on and 1 to \
validate; 1 truncated, 2 too short, 3 empty'
    """
    lengths = report["length"]
    odd = {key.replace("_", " "): report[key] for key in ("truncated", "split", "dropped", "too_short")}
    notes = [f"{count:,} {what}" for what, count in {**odd, **report["skipped"]}.items() if count]
    return (
        f"{report['source']}: {report['documents']:,} documents, {report['tokens']:,} tokens "
        f"(median {lengths['p50']:,}, p99 {lengths['p99']:,}, longest {lengths['max']:,}), "
        f"{report['sequences_train']:,} sequences to train on and {report['sequences_val']:,} to validate"
        + (f"; {', '.join(notes)}" if notes else "")
    )


def find_index(folder: Path, *, thorough: bool = False, warn: bool = True) -> TokenIndex | None:
    """Return the finished index in a folder, or None if there is none or it is damaged.

    Args:
        folder: ``cache_dir / name``.
        thorough: Compare the checksum of the tokens too, not only their size.
        warn: Warn if it is damaged.
    """
    if not folder.exists():
        return None
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        if report["checksum"] != report_checksum(report):
            raise ValueError("report.json is not as it was written")
        for name, (size, checksum) in report["files"].items():
            path = folder / name
            # All but the tokens is small.
            is_read = thorough or name != "tokens.safetensors"
            if path.stat().st_size != size or (is_read and file_checksum(path) != checksum):
                raise ValueError(f"{name} is not as it was written")
        index = TokenIndex(folder)
        with safe_open(folder / "tokens.safetensors", "numpy") as tokens:
            (stored,) = tokens.get_slice("tokens").get_shape()
        if stored != index.lengths.sum():
            raise ValueError(f"tokens.safetensors holds {stored} tokens, not {index.lengths.sum()}")
        return index
    except Exception as error:  # Of whatever kind: what cannot be read is damaged.
        if warn:
            warnings.warn(
                f"the token index {folder} is damaged ({type(error).__name__}: {error}); it is built again.",
                stacklevel=2,
            )
        return None


def report_checksum(report: dict[str, Any]) -> int:
    """Return the CRC-32 of a report's content, but for the checksum that it holds."""
    content = {key: value for key, value in report.items() if key != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            value = zlib.crc32(chunk, value)
    return value
