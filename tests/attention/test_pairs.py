from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb_lightning.attention.pairs import attended_pairs, causal_pairs


def walk(length: int, budget: int, block_size: int) -> int:
    return sum(t % block_size + 1 + block_size * min(budget - 1, t // block_size) for t in range(length))


@given(
    sequences=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 12)), max_size=5),
    block_size=st.integers(1, 70),
)
def test_closed_form_equals_the_walk_over_all_queries(sequences, block_size):
    lengths = [length for length, _ in sequences]
    budgets = [budget for _, budget in sequences]
    expected = sum(walk(length, budget, block_size) for length, budget in sequences)
    assert attended_pairs(lengths, budgets, block_size) == expected


@given(length=st.integers(0, 300), block_size=st.integers(1, 64))
def test_a_budget_of_all_blocks_is_dense(length, block_size):
    blocks = max(1, -(-length // block_size))
    assert attended_pairs([length], blocks, block_size) == causal_pairs([length])
    assert attended_pairs([length], blocks + 9, block_size) == causal_pairs([length])
    assert causal_pairs([length]) == sum(range(length + 1))


def test_one_budget_serves_all_sequences():
    assert attended_pairs([63, 1000], 3, 16) == walk(63, 3, 16) + walk(1000, 3, 16)


def test_long_sequences_do_not_overflow_or_walk():
    assert attended_pairs([10**12], 1, 10**6) == 10**6 * (10**6 * (10**6 + 1) // 2)


@pytest.mark.parametrize(
    ("lengths", "budget", "block_size", "named"),
    [
        ([4], 0, 16, "budget is 0"),
        ([4], [2, 0], 16, "2 budgets for 1 lengths"),
        ([4, 4], [2, -1], 16, "budget is -1"),
        ([-1], 2, 16, "length is -1"),
        ([4], 2, 0, "block_size is 0"),
    ],
)
def test_bad_values_are_named(lengths, budget, block_size, named):
    with pytest.raises(ValueError, match=named):
        attended_pairs(lengths, budget, block_size)


def test_causal_pairs_refuses_a_negative_length():
    with pytest.raises(ValueError, match="length is -3"):
        causal_pairs([-3])
