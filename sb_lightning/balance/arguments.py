"""Checks of the sampler's arguments."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sb_lightning._messages import explain

__all__ = ["check_overflow", "choice", "count", "digest", "process_group"]


def process_group(ranks: int | None, rank: int | None) -> tuple[int, int]:
    """Return ranks and rank, those of `torch.distributed` where they are None."""
    import torch.distributed as dist

    ready = dist.is_available() and dist.is_initialized()
    if ranks is None:
        ranks = dist.get_world_size() if ready else 1
    if rank is None:
        rank = dist.get_rank() if ready else 0
    return ranks, rank


def count(name: str, value: Any, *, least: int = 1, most: int = 2**62) -> int:
    """Return a count, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(explain(f"{name} is {value!r}", "it is a count", f"pass an integer >= {least}"))
    if value < least:
        raise ValueError(explain(f"{name} is {value}", f"it counts from {least}", f"pass {name} >= {least}"))
    if value > most:
        raise ValueError(explain(f"{name} is {value}", "it is too large", f"pass {name} <= {most}"))
    return int(value)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    """Return a choice, or name those that there are."""
    if value not in allowed:
        raise ValueError(explain(f"{name} is {value!r}", "there is no such choice", f"pass one of {allowed}"))
    return value


def digest(values: NDArray[Any]) -> str:
    """Return a short name of an array's content."""
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8).hexdigest()


def check_overflow(
    lengths: NDArray[np.int64], target_tokens: NDArray[np.int64], max_tokens: int, *, truncate: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return lengths and target tokens of sequences of which none is longer than a cell may be.

    Args:
        lengths: Tokens of each sequence # [N].
        target_tokens: Labels of each that count # [N].
        max_tokens: Most tokens of a cell.
        truncate: Cut sequences that are longer; False refuses them.

    Raises:
        ValueError: A sequence is longer, and is not to be cut, or it is unknown how many of its targets are
            left.
    """
    long = np.flatnonzero(lengths > max_tokens)
    if not len(long):
        return lengths, target_tokens
    first = int(long[0])
    if not truncate:
        raise ValueError(
            explain(
                f"{len(long)} sequences are longer than max_tokens={max_tokens}; the first is sequence "
                f"{first}, of {int(lengths[first])} tokens",
                "no micro-batch may hold more, and sequences are not split",
                f"raise max_tokens to {int(lengths.max())}, cut the sequences, or set overflow to 'truncate'",
            )
        )
    if (target_tokens[long] != lengths[long] - 1).any():
        raise ValueError(
            explain(
                f"overflow is 'truncate', and of sequences longer than max_tokens={max_tokens} target_tokens "
                "is not all tokens but the first",
                "how many targets are left after the cut is not known, and the loss divides by them",
                "cut the sequences in the data set, and pass their lengths and target_tokens",
            )
        )
    cut = np.minimum(lengths, max_tokens)
    return cut, np.where(lengths > max_tokens, max_tokens - 1, target_tokens)
