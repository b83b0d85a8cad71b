"""Where the sequences of a batch start, read from what Hugging Face models are given."""

from __future__ import annotations

import torch
from torch import Tensor

from sb_lightning._messages import explain

__all__ = ["bounds_of_batch", "sequence_bounds"]


def bounds_of_batch(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
) -> tuple[Tensor, int]:
    """Return `cu_seqlens` # [N + 1] int32 and the longest length, from a model's usual inputs.

    Raises:
        ValueError: The mask is not 2-D, or there are no tokens.
    """
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None:
        raise ValueError(
            explain(
                "neither input_ids nor inputs_embeds was given by keyword or position",
                "the bounds of the sequences are found from them",
                "pass one of them, or cu_seqlens and max_seqlen",
            )
        )
    rows, columns = tokens.shape[:2]
    shape = getattr(attention_mask, "shape", None)
    if attention_mask is not None and (shape is None or tuple(shape) != (rows, columns)):
        found = type(attention_mask).__name__ if shape is None else f"shape {tuple(shape)}"
        raise ValueError(
            explain(
                f"attention_mask is a {found}",
                f"MoBA cuts blocks per sequence and takes only a 2-D mask of shape {(rows, columns)}",
                "pass a 2-D attention_mask, or cu_seqlens and max_seqlen for packed sequences",
            )
        )
    return sequence_bounds(rows, columns, attention_mask, position_ids, tokens.device)


def sequence_bounds(
    rows: int,
    columns: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, int]:
    """Find where sequences start in a batch of `rows` x `columns` tokens, flattened row by row.

    A new one starts with each row, where `position_ids` do not go up by one, and where
    `attention_mask` turns from padding to tokens or back; so a run of padding counts as a sequence
    of its own that no token sees.

    Args:
        rows: Batch size.
        columns: Tokens per row.
        attention_mask: 1 for tokens, 0 for padding # [rows, columns], or None.
        position_ids: # [rows or 1, columns], or None.
        device: Where the result is wanted.

    Returns:
        `cu_seqlens` # [N + 1] int32, and the longest length.

    Raises:
        ValueError: Padding inside a sequence.
    """
    starts = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    if position_ids is not None:
        position_ids = position_ids.expand(rows, columns)
        starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if attention_mask is not None:
        real = attention_mask.bool()
        edges = real[:, 1:] != real[:, :-1]
        resumed = edges & real[:, 1:] & (real.cumsum(1)[:, :-1] > 0)
        if position_ids is not None:
            resumed &= position_ids[:, 1:] != 0
        if bool(resumed.any()):
            row, column = (int(i) for i in resumed.nonzero()[0])
            raise ValueError(
                explain(
                    f"attention_mask has padding inside row {row}, before token {column + 1}",
                    "blocks are cut from consecutive tokens of one sequence",
                    "pad only at the ends of a row, or restart position_ids at 0 after the padding",
                )
            )
        starts[:, 1:] = edges | (starts[:, 1:] & real[:, 1:])
    starts[:, :1] = True
    first = starts.flatten().nonzero().flatten().to(torch.int32)
    cu_seqlens = torch.cat([first, torch.tensor([rows * columns], dtype=torch.int32, device=device)])
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if rows * columns else 0
    return cu_seqlens, longest
