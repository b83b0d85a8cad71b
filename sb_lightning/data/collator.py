"""Packing: several token sequences become one row, with what keeps them apart in attention and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sb_lightning._messages import explain

__all__ = ["IGNORED_LABEL", "MicroBatch", "pack_sequences"]

MicroBatch = dict[str, Any]
IGNORED_LABEL = -100
"""Label of a token that is no target: the default ``ignore_index`` of cross-entropy."""


def pack_sequences(
    sequences: Sequence[np.ndarray | Sequence[int]],
    sequence_ids: Sequence[int] | None = None,
    *,
    is_padding: bool = False,
) -> MicroBatch:
    """Pack whole sequences, in order, into one micro-batch without padding.

    Args:
        sequences: Token ids of each sequence; at least one, none empty.
        sequence_ids: A stable number for each sequence; None: its position.
        is_padding: Mask every label: the micro-batch only keeps the ranks in step.

    Returns:
        ``input_ids``, ``position_ids`` and ``labels`` int64 ``[1, T]``; ``cu_seqlens`` int32 ``[N + 1]``;
        ``sequence_ids`` int64 ``[N]``; ``max_seqlen`` and ``target_tokens`` Python ints. Positions restart at
        0 with each sequence. ``labels[t]`` is ``input_ids[t]``, not shifted (position t - 1 predicts it), and
        -100 for the first token of each sequence, which nothing may predict.

    Raises:
        ValueError: There is no sequence, or one is empty.

    Example:
        >>> batch = pack_sequences([[5, 6, 7], [8, 9]])
        >>> batch["cu_seqlens"].tolist(), batch["labels"].tolist()
        ([0, 3, 5], [[-100, 6, 7, -100, 9]])
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError(
            explain(
                f"the sequences to pack have lengths {lengths}",
                "a micro-batch holds at least one sequence, and a sequence at least one token",
                "leave empty sequences out",
            )
        )
    ids = sequence_ids if sequence_ids is not None else range(len(lengths))
    input_ids = torch.from_numpy(np.concatenate([np.asarray(s, dtype=np.int64) for s in sequences]))
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.cumsum(torch.tensor(lengths), 0)
    labels = torch.full_like(input_ids, IGNORED_LABEL) if is_padding else input_ids.clone()
    labels[cu_seqlens[:-1].long()] = IGNORED_LABEL
    return {
        "input_ids": input_ids[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "labels": labels[None],
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max(lengths),
        "sequence_ids": torch.tensor(list(ids), dtype=torch.int64),
        "target_tokens": 0 if is_padding else sum(lengths) - len(lengths),
    }
