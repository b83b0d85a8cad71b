"""Packing and unpacking."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sb_lightning.data import IGNORED_LABEL, pack_sequences

sequences_of_tokens = st.lists(
    st.lists(st.integers(0, 70_000), min_size=1, max_size=30), min_size=1, max_size=8
)


@given(sequences=sequences_of_tokens, is_padding=st.booleans())
def test_round_trip(sequences, is_padding):
    ids = list(range(100, 100 + len(sequences)))
    batch = pack_sequences([np.array(s) for s in sequences], ids, is_padding=is_padding)
    bounds = batch["cu_seqlens"].tolist()
    pieces = [batch["input_ids"][0, a:b].tolist() for a, b in pairwise(bounds)]
    assert pieces == sequences
    assert batch["sequence_ids"].tolist() == ids
    assert batch["max_seqlen"] == max(map(len, sequences))
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    assert torch.equal(batch["position_ids"], positions[None])
    labels = batch["labels"][0]
    is_target = labels != IGNORED_LABEL
    assert batch["target_tokens"] == int(is_target.sum())
    assert torch.equal(is_target, (positions > 0) & (not is_padding))
    assert torch.equal(labels[is_target], batch["input_ids"][0][is_target])


def test_types():
    batch = pack_sequences([[1, 2, 3], [4]])
    kinds = {name: value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert kinds == {
        "input_ids": torch.int64,
        "position_ids": torch.int64,
        "labels": torch.int64,
        "cu_seqlens": torch.int32,
        "sequence_ids": torch.int64,
    }
    assert {name: batch[name].shape for name in ("input_ids", "position_ids", "labels")} == dict.fromkeys(
        ("input_ids", "position_ids", "labels"), (1, 4)
    )
    assert type(batch["max_seqlen"]) is type(batch["target_tokens"]) is int


@pytest.mark.parametrize("sequences", [[], [[1, 2], []]], ids=["none", "empty"])
def test_nothing_to_pack(sequences):
    with pytest.raises(ValueError, match="at least one sequence"):
        pack_sequences(sequences)
