"""Text to token ids: raw bytes, a byte-level BPE trained on the corpus, or a tokenizer of Hugging Face."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from sb_lightning._messages import explain
from sb_lightning.data.corpus import Corpus
from sb_lightning.data.digest import digest
from sb_lightning.data.pretrained import PretrainedTokenizer
from sb_lightning.data.progress import BuildProgress

__all__ = ["BytePairTokenizer", "ByteTokenizer", "PretrainedTokenizer", "TextTokenizer", "load_tokenizer"]

TRAINING_BYTES = 8 * 2**20
"""A tokenizer is trained on about this much text at most, so that it takes seconds on any corpus."""

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
SMALLEST_VOCABULARY = 256 + 2


class TextTokenizer(Protocol):
    """What the data module needs of a tokenizer.

    Attributes:
        vocab_size: Token ids run from 0 to ``vocab_size - 1``, special ones included.
        eos_id: Id appended to each document, or None.
        pad_id: Id of padding, or None; packing needs none.
    """

    vocab_size: int
    eos_id: int | None
    pad_id: int | None

    @property
    def fingerprint(self) -> str:
        """Short name of the content: equal for tokenizers that give the same token ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""


class ByteTokenizer:
    """Each UTF-8 byte is a token; ids 256 and 257 are end of text and padding.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode_batch(["ab"]), tokenizer.decode([97, 98, 256])
        ([[97, 98]], 'ab')
    """

    vocab_size = 258
    eos_id: int | None = 256
    pad_id: int | None = 257
    fingerprint = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes; broken characters become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class BytePairTokenizer:
    """Byte-level BPE without normalisation: every text comes back exactly.

    Args:
        path: A ``tokenizer.json`` that :meth:`train` wrote.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        text = path.read_text(encoding="utf-8")
        self._tokenizer = Tokenizer.from_str(text)
        # A document that spells a special token must not end itself.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.eos_id: int | None = self._tokenizer.token_to_id(END_OF_TEXT)
        self.pad_id: int | None = self._tokenizer.token_to_id(PADDING)

    @cached_property
    def fingerprint(self) -> str:
        """Short name of the vocabulary; its order is that of the merges."""
        return digest({"vocabulary": self._tokenizer.get_vocab()})

    @staticmethod
    def train(corpus: Corpus, size: int, path: Path) -> None:
        """Train on the corpus, at most some 8 MiB of it, and write ``tokenizer.json`` atomically.

        From a larger corpus, documents are drawn by a hash of their id, so that the same corpus always gives
        the same tokenizer. Only the words (pre-tokens) of the text are learned from; ``size`` counts the 256
        bytes and two special tokens, and may not be reached on a small corpus.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT, PADDING],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_training_texts(corpus, size), trainer=trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            tokenizer.save(str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def check_spec(spec: str) -> None:
    """Refuse a ``data.tokenizer`` that can name nothing.

    Raises:
        ValueError: SIZE of ``train:SIZE`` is no number, or too small; a path that is not there.
    """
    if not spec:
        raise ValueError(
            explain(
                "data.tokenizer is empty",
                "text has to become token ids somehow",
                "pass 'bytes', 'train:SIZE' (such as 'train:2048'), or a folder or hub name",
            )
        )
    plain = spec.strip().lower()
    if plain != spec and (plain == "bytes" or plain.startswith("train:")):
        raise ValueError(
            explain(f"data.tokenizer is {spec!r}", f"there is {plain!r}, spelt so", f"pass {plain!r}")
        )
    looks_like_path = spec.startswith(("/", ".", "~")) or "\\" in spec or spec.count("/") > 1
    if looks_like_path and not Path(spec).expanduser().exists():
        raise ValueError(
            explain(
                f"data.tokenizer is {spec!r}",
                "there is no such folder",
                "pass a folder that holds a tokenizer, a hub name, 'bytes' or 'train:SIZE' (such as "
                "'train:2048')",
            )
        )
    kind, _, size = spec.partition(":")
    if kind == "train" and not (size.isascii() and size.isdigit() and int(size) >= SMALLEST_VOCABULARY):
        raise ValueError(
            explain(
                f"data.tokenizer is {spec!r}",
                "SIZE of 'train:SIZE' counts tokens, 256 bytes and 2 special ones among them",
                f"pass an integer >= {SMALLEST_VOCABULARY}, such as 'train:2048'",
            )
        )


def load_tokenizer(spec: str, corpus: Corpus, cache_dir: Path) -> tuple[TextTokenizer, dict[str, Any]]:
    """Return the tokenizer that ``data.tokenizer`` names, and a stamp that tells it from others.

    Args:
        spec: ``bytes``, ``train:SIZE``, or a folder or hub name.
        corpus: What ``train:SIZE`` trains on; trained once and cached.
        cache_dir: Where trained tokenizers are kept.

    Raises:
        ValueError: The spec names no tokenizer.
    """
    if spec == "bytes":
        return ByteTokenizer(), {"kind": "bytes"}
    check_spec(spec)
    if spec.startswith("train:"):
        size = int(spec.removeprefix("train:"))
        stamp = {"kind": "train", "size": size, "corpus": corpus.stamp(), "training_bytes": TRAINING_BYTES}
        tokenizer = _trained_tokenizer(corpus, size, cache_dir / "tokenizers", digest(stamp))
        return tokenizer, {**stamp, "content": tokenizer.fingerprint}
    spec = os.path.expanduser(spec)
    folder = Path(spec)
    files = sorted(p for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []
    stamp = {
        "kind": "pretrained",
        "name": str(folder.resolve()) if files else spec,
        "files": [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files],
    }
    return PretrainedTokenizer(spec), stamp


def _trained_tokenizer(corpus: Corpus, size: int, folder: Path, name: str) -> BytePairTokenizer:
    """Return the cached tokenizer, or train it; the checksum of the content is part of the file's name."""
    for path in sorted(folder.glob(f"{name}-*.json")):
        try:
            if path.name == f"{name}-{_checksum(path)}.json":
                return BytePairTokenizer(path)
        except Exception:
            # Of whatever kind: what cannot be read is damaged.
            pass
        path.unlink(missing_ok=True)
    fresh = folder / f".{name}.{os.getpid()}.json"
    try:
        BytePairTokenizer.train(corpus, size, fresh)
        tokenizer = BytePairTokenizer(fresh)
        fresh.replace(folder / f"{name}-{_checksum(fresh)}.json")
    finally:
        fresh.unlink(missing_ok=True)
    return tokenizer


def _checksum(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _training_texts(corpus: Corpus, size: int) -> Iterator[str]:
    left = TRAINING_BYTES
    total = corpus.num_bytes
    with BuildProgress(f"training a tokenizer of {size} tokens on {corpus.source}", total) as progress:
        for document in corpus.documents(Counter()):
            drawn = int.from_bytes(blake2b(document.id.encode(), digest_size=8).digest(), "big") / 2**64
            progress.advance(document.num_bytes)
            if drawn * total < TRAINING_BYTES and left > 0:
                left -= document.num_bytes
                yield document.text
