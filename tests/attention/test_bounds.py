"""Where sequences start, from masks and positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.attention.bounds import bounds_of_batch, sequence_bounds

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_restarting_positions_give_the_lengths(lengths, offset):
    positions = torch.cat([torch.arange(offset, offset + n) for n in lengths])[None]
    # Two neighbours whose positions happen to continue are one sequence: impossible from a common offset.
    bounds, longest = sequence_bounds(1, sum(lengths), None, positions, CPU)
    assert bounds.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert bounds.dtype == torch.int32
    assert longest == max(lengths)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=4))
def test_padded_rows_keep_tokens_apart_from_padding(rows):
    columns = max(sum(row) for row in rows)
    mask = torch.zeros(len(rows), columns, dtype=torch.long)
    for index, (left, tokens, _) in enumerate(rows):
        mask[index, left : left + tokens] = 1
    bounds, _ = sequence_bounds(len(rows), columns, mask, None, CPU)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert len(set(mask.flatten()[start:stop].tolist())) == 1
        assert start // columns == (stop - 1) // columns
    for index, (left, tokens, _) in enumerate(rows):
        if tokens:
            assert index * columns + left in bounds.tolist()
            assert index * columns + left + tokens in bounds.tolist()


def test_one_row_of_positions_serves_all_rows():
    bounds, longest = sequence_bounds(3, 4, None, torch.arange(4)[None], CPU)
    assert bounds.tolist() == [0, 4, 8, 12]
    assert longest == 4


def test_embeddings_give_the_shape():
    bounds, _ = bounds_of_batch(None, torch.zeros(2, 3, 8), None, None)
    assert bounds.tolist() == [0, 3, 6]


def test_no_tokens_at_all_is_an_error():
    with pytest.raises(ValueError, match="neither input_ids nor inputs_embeds"):
        bounds_of_batch(None, None, None, None)


def test_a_mask_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="attention_mask is a dict"):
        bounds_of_batch(torch.zeros(1, 3, dtype=torch.long), None, {"full_attention": None}, None)
