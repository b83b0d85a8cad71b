"""Coverage curves in the store: by bucket, by version, and through a checkpoint."""

from __future__ import annotations

import io

import numpy as np
import torch

from sb_lightning.balance import BudgetStore

NAN = float("nan")


def learn(store, number, curves, lengths=(1000, 1000, 60), weights=(3.0, 1.0, 2.0)):
    store.update(
        number, ids=[1, 2, 3], lengths=lengths, budgets=[4, 4, 4], curves=np.array(curves),
        weights=np.array(weights),
    )  # fmt: skip


def test_sequences_of_a_bucket_count_by_their_weight():
    store = BudgetStore(rate=0.5)
    learn(store, 1, [[0.0, 0.4], [0.0, 0.8], [0.1, 0.9]])
    assert store.curve(1, 1000).tolist() == [0.0, (3 * 0.4 + 0.8) / 4]
    assert store.curve(1, 60).tolist() == [0.1, 0.9]
    learn(store, 2, [[0.2, 0.6], [NAN, NAN], [NAN, NAN]], weights=(1.0, 1.0, 1.0))
    np.testing.assert_allclose(store.curve(2, 1000), [0.1, 0.55], rtol=1e-15)
    assert store.curve(2, 60).tolist() == [0.1, 0.9]
    assert store.curve(1, 1000).tolist() == [0.0, 0.5], "an older version has changed"


def test_other_lengths_get_the_nearest_curve_and_nothing_is_known_before():
    store = BudgetStore()
    assert store.curve(0, 1000) is None
    learn(store, 1, [[0.0, 0.5], [0.0, 0.5], [0.1, 0.9]])
    assert store.curve(1, 10**6).tolist() == [0.0, 0.5]
    assert store.curve(1, 1).tolist() == [0.1, 0.9]
    assert store.curve(0, 1000) is None


def test_a_sequence_without_rows_says_nothing():
    store = BudgetStore()
    learn(store, 1, [[0.0, 0.5], [0.0, 0.9], [0.0, 0.0]], weights=(1.0, 0.0, 0.0))
    assert store.curve(1, 60).tolist() == [0.0, 0.5]


def test_curves_survive_a_checkpoint_and_count_in_the_digest():
    store, other = BudgetStore(), BudgetStore()
    learn(store, 1, [[0.0, 0.5], [0.0, 0.5], [0.1, 0.9]])
    learn(other, 1, [[0.0, 0.5], [0.0, 0.5], [0.1, 0.8]])
    assert store.digest() != other.digest()
    file = io.BytesIO()
    torch.save(store.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.curve(1, 1000).tolist() == store.curve(1, 1000).tolist()
    assert other.curve(0, 1000) is None
    store.collapse()
    assert store.curve(0, 60).tolist() == [0.1, 0.9]


def test_a_state_from_before_curves_is_read():
    store = BudgetStore()
    store.update(1, ids=[1], lengths=[100], budgets=[4])
    state = store.state_dict()
    for entry in state["ring"]:
        del entry["curves"]
    other = BudgetStore()
    other.load_state_dict(state)
    assert other.curve(1, 100) is None
    assert other.expected(1, ids=[1], lengths=[100], base=[9]).tolist() == [4.0]


def test_a_sequence_without_a_number_counts_for_its_bucket_only():
    store = BudgetStore()
    store.update(1, ids=[-1, 5], lengths=[100, 5000], budgets=[3, 7])
    assert store.expected(1, ids=[-1, 9, 5], lengths=[100, 100, 1], base=[1, 1, 1]).tolist() == [3, 3, 7]
    assert len(store.state_dict()["ring"][-1]["ids"]) == 1
