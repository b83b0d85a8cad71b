"""Building a token index: reads, tokenizes, cuts, and publishes the folder in one step."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import warnings
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sb_lightning._messages import explain
from sb_lightning.data.corpus import Corpus, Document
from sb_lightning.data.index import (
    FORMAT,
    MIN_TOKENS,
    Overlong,
    TokenIndex,
    file_checksum,
    find_index,
    report_checksum,
)
from sb_lightning.data.progress import BuildProgress
from sb_lightning.data.token_file import TokenFileWriter
from sb_lightning.data.tokenizer import TextTokenizer

__all__ = ["build_index"]

_BATCH_DOCUMENTS = 256
_BATCH_BYTES = 4 * 2**20


def build_index(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    folder: Path,
    *,
    max_length: int,
    overlong: Overlong,
) -> TokenIndex:
    """Tokenize the corpus into ``folder``.

    Everything is written to a folder beside it that is renamed when it is complete, so that an interrupted
    build leaves nothing behind that looks finished, and of two processes that build at once one wins.

    Raises:
        ValueError: The corpus holds no usable document, or (by ``on_error``) a broken one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    building = folder.parent / f".building-{folder.name}-{socket.gethostname()}-{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        _write_index(corpus, tokenizer, building, max_length, overlong)
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return TokenIndex(folder)


@dataclass
class _Cut:
    """Cuts documents to ``max_length`` and counts what it did."""

    max_length: int
    overlong: Overlong
    counts: Counter[str]

    def pieces(self, tokens: list[int]) -> list[list[int]]:
        if len(tokens) < MIN_TOKENS:
            self.counts["too_short"] += 1
            return []
        if len(tokens) <= self.max_length:
            return [tokens]
        if self.overlong == "drop":
            self.counts["dropped"] += 1
            return []
        if self.overlong == "truncate":
            self.counts["truncated"] += 1
            self.counts["tokens_cut"] += len(tokens) - self.max_length
            return [tokens[: self.max_length]]
        self.counts["split"] += 1
        pieces = [tokens[i : i + self.max_length] for i in range(0, len(tokens), self.max_length)]
        if len(pieces[-1]) < MIN_TOKENS:
            self.counts["tokens_cut"] += len(pieces.pop())
        return pieces


def _write_index(
    corpus: Corpus, tokenizer: TextTokenizer, folder: Path, max_length: int, overlong: Overlong
) -> None:
    is_folder = corpus.root.is_dir()
    if is_folder and any(name.endswith((".jsonl", ".parquet")) for name, _, _ in corpus.listing):
        warnings.warn(
            f"data.source {corpus.source!r} is a folder with .jsonl or .parquet files in it: each is read as "
            "one document of text. Name one such file as data.source, or set data.file_pattern.",
            stacklevel=2,
        )
    cut = _Cut(max_length, overlong, Counter())
    ending = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    lengths, documents, name_ends = array("q"), array("q"), array("q")
    names = bytearray()
    read = 0
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    skipped: Counter[str] = Counter()
    with (
        TokenFileWriter(folder / "tokens.safetensors", dtype) as tokens,
        BuildProgress(f"tokenizing {corpus.source}", corpus.num_bytes) as progress,
    ):
        for batch in _batches(corpus, skipped):
            for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
                read += 1
                pieces = cut.pieces([*ids, *ending])
                for piece in pieces:
                    tokens.write(piece)
                    lengths.append(len(piece))
                    documents.append(len(name_ends))
                if pieces:
                    names += document.id.encode("utf-8")
                    name_ends.append(len(names))
            progress.advance(sum(document.num_bytes for document in batch))
    if not lengths:
        raise ValueError(
            explain(
                f"data.source {corpus.source!r} holds no usable document ({read} read, "
                f"{sum(skipped.values())} broken or empty, {cut.counts['too_short']} of fewer than "
                f"{MIN_TOKENS} tokens, {cut.counts['dropped']} longer than max_length)",
                "there is nothing to train on",
                "set data.source to a folder, file or 'stdlib' with text in it (and check data.file_pattern, "
                "data.text_field and data.overlong)",
            )
        )
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
    arrays = {
        "offsets": offsets,
        "target_tokens": (np.diff(offsets) - 1).astype(np.int32),
        "documents": np.asarray(documents, dtype=np.int32),
        "names": np.frombuffer(bytes(names), dtype=np.uint8),
        "name_ends": np.asarray(name_ends, dtype=np.int64),
    }
    save_file(arrays, folder / "index.safetensors")
    report = _report(corpus, skipped, read, cut.counts, np.diff(offsets), len(name_ends))
    report["files"] = {
        p.name: [p.stat().st_size, file_checksum(p)] for p in sorted(folder.glob("*.safetensors"))
    }
    report["checksum"] = report_checksum(report)
    (folder / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


def _batches(corpus: Corpus, skipped: Counter[str]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in corpus.documents(skipped):
        batch.append(document)
        size += document.num_bytes
        if len(batch) >= _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _report(
    corpus: Corpus,
    skipped: Counter[str],
    read: int,
    counts: Counter[str],
    lengths: np.ndarray,
    documents: int,
) -> dict[str, Any]:
    points = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {
        "format": FORMAT,
        "source": corpus.source,
        "documents_read": read,
        "documents": documents,
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "truncated": counts["truncated"],
        "split": counts["split"],
        "dropped": counts["dropped"],
        "too_short": counts["too_short"],
        "tokens_cut": counts["tokens_cut"],
        "skipped": dict(sorted(skipped.items())),
        "length": {
            name: int(np.percentile(lengths, point, method="lower")) for name, point in points.items()
        },
    }


def _publish(building: Path, folder: Path) -> None:
    for _ in range(3):
        with _alone(folder.parent):
            try:
                building.rename(folder)
                return
            except OSError:
                if find_index(folder, thorough=True, warn=False) is not None:
                    # Another process was faster.
                    return
                # A damaged index is in the way: move it aside in one step, so that nobody reads half of it.
                aside = building.with_name(f"{building.name}-damaged")
                if folder.exists():
                    folder.rename(aside)
                    if aside.is_dir():
                        shutil.rmtree(aside, ignore_errors=True)
                    else:
                        aside.unlink()
    raise RuntimeError(
        explain(
            f"{folder} cannot be written",
            "another process keeps replacing it",
            "set data.cache_dir to another folder",
        )
    )


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Keep other processes of this machine from replacing what this one has just published."""
    handle = os.open(cache, os.O_RDONLY)
    try:
        # Some network file systems cannot lock; the renames are atomic all the same.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(cache: Path) -> None:
    """Remove what killed builds of this machine have left."""
    for path in cache.glob(f".building-*-{socket.gethostname()}-*"):
        process = path.name.removesuffix("-damaged").rpartition("-")[2]
        if process.isdigit() and not _is_running(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
