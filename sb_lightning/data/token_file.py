"""Writing a long token array to a safetensors file piece by piece, so that it never has to fit in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

__all__ = ["TokenFileWriter"]

# The header names the number of tokens, which is known at the end: room for it is kept at the start.
# The format allows a header to end in spaces (https://github.com/huggingface/safetensors#format).
_HEADER_BYTES = 256
_DTYPES = {np.dtype(np.uint16): "U16", np.dtype(np.uint32): "U32"}


class TokenFileWriter:
    """Context manager that appends token ids to a file with one tensor, ``tokens``.

    Args:
        path: File to write.
        dtype: uint16 or uint32.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._count = 0

    def __enter__(self) -> TokenFileWriter:
        self._file = self._path.open("wb")
        self._file.write(b" " * (8 + _HEADER_BYTES))
        return self

    def write(self, tokens: Sequence[int]) -> None:
        """Append token ids."""
        self._file.write(
            np.asarray(tokens, dtype=self._dtype).astype(self._dtype.newbyteorder("<")).tobytes()
        )
        self._count += len(tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tensor = {
            "dtype": _DTYPES[self._dtype],
            "shape": [self._count],
            "data_offsets": [0, self._count * self._dtype.itemsize],
        }
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._file.write(_HEADER_BYTES.to_bytes(8, "little"))
                self._file.write(json.dumps({"tokens": tensor}).encode().ljust(_HEADER_BYTES))
