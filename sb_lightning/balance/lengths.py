"""Lengths of the sequences of a data set, from whatever the user has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sb_lightning._messages import explain

__all__ = ["LengthSource", "sequence_lengths"]

LengthSource = Sequence[int] | NDArray[np.int64] | Callable[..., Any] | str
"""Where lengths come from, see `sequence_lengths`."""
WHAT = "lengths"


def sequence_lengths(source: LengthSource, dataset: Any | None = None) -> NDArray[np.int64]:
    """Return the tokens of every sequence of a data set.

    Args:
        source: One of

            - the lengths themselves: a list, an array, a tensor, a column of a data set;
            - the name of a column of `dataset`, which holds lengths, or lists of tokens that are counted;
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
        found = source
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
    except (KeyError, TypeError, IndexError, ValueError) as error:
        has = f"its columns are {', '.join(map(str, known))}" if known else f"{type(error).__name__}: {error}"
        raise ValueError(
            explain(
                f"the data set has no column '{name}' ({has})",
                "lengths are read from it",
                "name a column of lengths or of token lists, or pass the lengths",
            )
        ) from error
    if len(column) and np.ndim(column[0]) == 1:
        warnings.warn(
            f"lengths='{name}' is a column of token lists: all of it is read to count them. To save the time "
            "at every start, keep the lengths in a column of their own.",
            stacklevel=4,
        )
        return [len(row) for row in column]
    return list(column)


def _checked(found: Any) -> NDArray[np.int64]:
    if hasattr(found, "detach"):
        found = found.detach().cpu().numpy()
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
                f"lengths holds {values.tolist()[0]!r} ({values.dtype})",
                "tokens are counted",
                "pass whole numbers",
            )
        )
    if int(values.min()) < 0 or int(values.max()) > 2**40:
        worst = int(values.argmin() if values.min() < 0 else values.argmax())
        raise ValueError(
            explain(
                f"sequence {worst} has length {int(values[worst])}",
                "a sequence has from 0 to 2**40 tokens",
                "pass the number of tokens of each sequence",
            )
        )
    return values.astype(np.int64)
