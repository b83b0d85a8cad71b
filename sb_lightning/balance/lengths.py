"""Lengths of the sequences of a data set, from whatever the user has."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sb_lightning._messages import explain

__all__ = ["LengthSource", "sequence_lengths"]

LengthSource = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64] | Callable[..., Any] | str
"""Where lengths come from, see `sequence_lengths`."""
SHOWN_CHARACTERS = 60


def sequence_lengths(source: LengthSource, dataset: Any | None = None) -> NDArray[np.int64]:
    """Return the tokens of every sequence of a data set.

    Args:
        source: One of

            - the lengths themselves: a list, an array, a tensor, a column of a data set;
            - a list of the sequences, each a list of tokens, which are counted;
            - the name of a column of `dataset`, which holds lengths, or lists of tokens that are counted; of
              a data set that has no columns, but samples that are dictionaries, all samples are read;
            - a function, called with each sample of `dataset`, or, without a data set, called once for all
              lengths.
        dataset: The data set, where it is needed.

    Returns:
        Tokens of each sequence # [N] int64.

    Raises:
        ValueError: Lengths are missing, negative, or not in a flat list.
        TypeError: They are no whole numbers.

    Example:
        >>> sequence_lengths("input_ids", {"input_ids": [[5, 6, 7], [8]]}).tolist()
        [3, 1]
        >>> sequence_lengths(len, ["four", "five!"]).tolist()
        [4, 5]
    """
    if callable(source) and not isinstance(source, np.ndarray):
        found = source() if dataset is None else _measured(source, dataset)
    elif isinstance(source, str):
        found = _column(source, dataset)
    else:
        found = _counted(source, "lengths", "list") if _holds_tokens(source) else source
    return _checked(found)


def _measured(measure: Callable[[Any], Any], dataset: Any) -> list[Any]:
    try:
        count = len(dataset)
    except TypeError:
        raise TypeError(
            explain(
                f"the data set {type(dataset).__name__} has no length",
                "windows are planned from the lengths of all its sequences",
                "use a data set with __len__ and __getitem__",
            )
        ) from None
    return [measure(dataset[i]) for i in range(count)]


def _column(name: str, dataset: Any | None) -> Any:
    if dataset is None:
        raise ValueError(
            explain(
                f"lengths is '{name}'", "no data set was given that has such a column", "pass dataset too"
            )
        )
    known = getattr(dataset, "column_names", None)
    try:
        column = dataset[name]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, NotImplementedError) as error:
        sample = None if known else _first(dataset)
        if isinstance(sample, Mapping) and name in sample:
            _warn(f"lengths='{name}' is a key of the samples: all of them are read for their lengths.")
            return _measured(lambda row: len(row[name]) if np.ndim(row[name]) else row[name], dataset)
        names = list(sample) if isinstance(sample, Mapping) else known
        has = f"it has {', '.join(map(str, names))}" if names else f"{type(error).__name__}: {error}"
        raise ValueError(
            explain(
                f"the data set has no column '{name}' ({has})",
                "lengths are read from it",
                "name a column of lengths or of token lists, or pass the lengths",
            )
        ) from error
    return _counted(column, f"lengths='{name}'", "column") if _holds_tokens(column) else list(column)


def _first(dataset: Any) -> Any:
    """Return the first sample, or None where there is none."""
    try:
        return dataset[0]
    except Exception:
        # Whatever a data set raises for a number: the caller knows a better message.
        return None


def _holds_tokens(rows: Any) -> bool:
    """Whether these are token lists: a whole array or tensor of several dimensions is not."""
    if getattr(rows, "ndim", 1) != 1 or not hasattr(rows, "__len__") or not len(rows):
        return False
    first = next(iter(rows))
    return not isinstance(first, (str, bytes, Mapping)) and hasattr(first, "__len__") and np.ndim(first) == 1


def _counted(rows: Any, what: str, kind: str) -> list[int]:
    _warn(f"{what} is a {kind} of token lists: all of it is read to count them.")
    try:
        return [len(row) for row in rows]
    except TypeError as error:
        raise TypeError(
            explain(
                f"{what} holds token lists and other entries ({error})",
                "either tokens are counted or numbers are read",
                "pass one kind for all sequences",
            )
        ) from error


def _warn(found: str) -> None:
    warnings.warn(
        f"{found} To save the time at every start, keep the lengths in a column, or list, of their own.",
        stacklevel=5,
    )


def _checked(found: Any) -> NDArray[np.int64]:
    if hasattr(found, "detach"):
        found = found.detach().cpu().numpy()
    if isinstance(found, (Mapping, Set, str, bytes, bytearray)) or (
        isinstance(found, (list, tuple)) and any(isinstance(value, bool) for value in found)
    ):
        raise TypeError(
            explain(
                f"lengths is {_short(found)} (a {type(found).__name__})",
                "there is one number of tokens per sequence, in their order",
                "pass a flat list or array of integers, a column's name, or a function",
            )
        )
    try:
        values = np.asarray(found if isinstance(found, np.ndarray) else list(found))
    except (TypeError, ValueError) as error:
        raise TypeError(
            explain(
                f"lengths is a {type(found).__name__} ({error})",
                "there is one number of tokens per sequence",
                "pass a flat list or array of integers, a column's name, or a function",
            )
        ) from error
    if values.ndim != 1:
        raise ValueError(
            explain(
                f"lengths has {values.ndim} dimensions",
                "there is one number of tokens per sequence",
                "pass a flat list or array of integers",
            )
        )
    if values.size == 0:
        return np.zeros(0, dtype=np.int64)
    if values.dtype.kind not in "iu":
        raise TypeError(
            explain(
                f"lengths holds {_short(values.flat[0])} ({values.dtype})",
                "there is one number of tokens per sequence",
                "pass whole numbers or token lists; for dictionaries pass them as dataset and name the key",
            )
        )
    if int(values.min()) < 0 or int(values.max()) > 2**31 - 1:
        worst = int(values.argmin() if values.min() < 0 else values.argmax())
        raise ValueError(
            explain(
                f"sequence {worst} has length {int(values[worst])}",
                "a sequence has from 0 to 2**31 - 1 tokens",
                "pass the number of tokens of each sequence",
            )
        )
    return values.astype(np.int64)


def _short(value: Any) -> str:
    """Return an entry as text, cut where it is long."""
    if isinstance(value, np.generic):
        value = value.item()
    text = reprlib.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
