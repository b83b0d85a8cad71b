"""A tokenizer of Hugging Face: from a local folder, its cache, or the hub."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sb_lightning._messages import explain
from sb_lightning.data.digest import digest

__all__ = ["PretrainedTokenizer"]

_HUB_TIMEOUT_S = 10.0
_PROBE = "The quick brown fox, 3.14159 \u00e9\u4e2d!\n\tdef f(x):  return x"


class PretrainedTokenizer:
    """A tokenizer that ``transformers.AutoTokenizer`` finds in a local folder or on the hub.

    Args:
        name: Folder or hub name.
    """

    def __init__(self, name: str) -> None:
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise RuntimeError(
                explain(
                    f"data.tokenizer is {name!r} and transformers cannot be imported",
                    str(error),
                    "run `pip install transformers`, or set data.tokenizer to 'bytes' or 'train:SIZE'",
                )
            ) from error
        try:
            self.inner: Any = _load(name)
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

    @cached_property
    def fingerprint(self) -> str:
        """Short name of the vocabulary and of how text is cut."""
        content = {"vocabulary": self.inner.get_vocab(), "probe": self.encode_batch([_PROBE])}
        return digest({**content, "eos": self.eos_id})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        encoded = self.inner(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))


def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    if Path(name).exists():
        return AutoTokenizer.from_pretrained(name)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception:
        # Not in the cache. transformers asks an unreachable hub for a minute: one question comes first.
        _check_hub(name)
    return AutoTokenizer.from_pretrained(name)


def _check_hub(name: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except HfHubHTTPError:
        # It answers; what is wrong with the name is said best by transformers.
        return
