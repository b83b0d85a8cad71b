"""Text to token ids: raw bytes, a byte-level BPE trained on the corpus, or a tokenizer of Hugging Face."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from sb_lightning._messages import explain
from sb_lightning.data.corpus import Corpus
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

        self._tokenizer = Tokenizer.from_file(str(path))
        # A document that spells a special token must not end itself.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.eos_id: int | None = self._tokenizer.token_to_id(END_OF_TEXT)
        self.pad_id: int | None = self._tokenizer.token_to_id(PADDING)

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


class PretrainedTokenizer:
    """A tokenizer that ``transformers.AutoTokenizer`` finds in a local folder or on the hub.

    Args:
        name: Folder or hub name.
    """

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise RuntimeError(
                explain(
                    f"data.tokenizer is {name!r} and transformers cannot be imported",
                    str(error),
                    "run `pip install transformers`, or set data.tokenizer to 'bytes' or 'train:SIZE'",
                )
            ) from error
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(name)
        except Exception as error:
            local = Path(name).exists()
            raise ValueError(
                explain(
                    f"data.tokenizer is {name!r}",
                    f"no tokenizer can be loaded from that {'folder' if local else 'name'} "
                    f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'})",
                    "set data.tokenizer to 'bytes', 'train:SIZE' (such as train:2048), a folder that holds a "
                    "tokenizer, or a hub name that this machine can reach",
                )
            ) from error
        self.vocab_size: int = len(self.inner)
        self.eos_id: int | None = self.inner.eos_token_id
        self.pad_id: int | None = self.inner.pad_token_id

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        encoded = self.inner(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))


def check_spec(spec: str) -> None:
    """Refuse a ``data.tokenizer`` that can name nothing.

    Raises:
        ValueError: SIZE of ``train:SIZE`` is no number, or too small.
    """
    if not spec:
        raise ValueError(
            explain(
                "data.tokenizer is empty",
                "text has to become token ids somehow",
                "pass 'bytes', 'train:SIZE' (such as 'train:2048'), or a folder or hub name",
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
        path = cache_dir / "tokenizers" / f"{digest(stamp)}.json"
        if not _is_tokenizer(path):
            BytePairTokenizer.train(corpus, size, path)
        return BytePairTokenizer(path), stamp
    folder = Path(spec)
    files = sorted(p for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []
    stamp = {
        "kind": "pretrained",
        "name": str(folder.resolve()) if files else spec,
        "files": [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files],
    }
    return PretrainedTokenizer(spec), stamp


def digest(stamp: dict[str, Any]) -> str:
    """Return a short name for a stamp, the same on every machine."""
    return blake2b(json.dumps(stamp, sort_keys=True).encode(), digest_size=12).hexdigest()


def _is_tokenizer(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        BytePairTokenizer(path)
    except Exception:
        return False
    return True


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
