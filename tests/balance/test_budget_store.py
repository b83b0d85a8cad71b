"""Budgets expected, in versions."""

import io
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.balance import BudgetStore
from sb_lightning.latency import AnalyticCost, ModelShape

TABLE = AnalyticCost(
    ModelShape(
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_dim=32,
        hidden_size=128,
        intermediate_size=384,
        vocab_size=2048,
        block_size=64,
    )
)
windows = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 70_000), st.floats(1, 99)), max_size=6), max_size=8
)


def updated(windows, **options):
    store = BudgetStore(**options)
    for number, window in enumerate(windows, start=1):
        ids, lengths, budgets = zip(*window, strict=True) if window else ((), (), ())
        store.update(number, ids=ids, lengths=lengths, budgets=budgets)
    return store


def expected(store, version, keys=range(10), length=4096):
    keys = list(keys)
    return store.expected(version, ids=keys, lengths=[length] * len(keys), base=[8] * len(keys)).tolist()


@given(windows=windows, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_order_within_a_window_does_not_matter(windows, data):
    shuffled = [data.draw(st.permutations(window)) for window in windows]
    a, b = updated(windows), updated(shuffled)
    assert expected(a, a.version) == expected(b, b.version)
    assert a.digest() == b.digest()


@given(windows=windows, num_versions=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_version_is_what_the_windows_before_it_have_taught(windows, num_versions):
    store = updated(windows, num_versions=num_versions)
    for version in range(max(len(windows) - num_versions, 0), len(windows) + 1):
        before = updated(windows[:version])
        assert expected(store, version) == expected(before, version)


@given(windows=windows, num_versions=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_state_is_whole_and_safe(windows, num_versions):
    store = updated(windows, num_versions=num_versions)
    buffer = io.BytesIO()
    torch.save(store.state_dict(), buffer)
    buffer.seek(0)
    again = BudgetStore()
    again.load_state_dict(torch.load(buffer, weights_only=True))
    for version in range(max(len(windows) - num_versions, 0), len(windows) + 1):
        assert expected(again, version) == expected(store, version)
    more = [(3, 500, 2.0), (11, 9000, 40.0)]
    for each in (store, again):
        ids, lengths, budgets = zip(*more, strict=True)
        each.update(len(windows) + 1, ids=ids, lengths=lengths, budgets=budgets)
    assert expected(again, again.version) == expected(store, store.version)
    assert again.digest() == store.digest()


def test_id_before_bucket_before_base():
    store = BudgetStore(rate=0.5)
    store.update(1, ids=[1, 2], lengths=[4096, 4200], budgets=[4, 8])
    # Bucket of 4096 to 5792 tokens: the mean of both.
    assert expected(store, 1, [1, 2, 3]) == [4.0, 8.0, 6.0]
    assert expected(store, 1, [3], length=64) == [8.0]
    store.update(2, ids=[1], lengths=[4096], budgets=[8])
    assert expected(store, 2, [1, 2, 3]) == [6.0, 8.0, 7.0]
    assert expected(store, 1, [1, 2, 3]) == [4.0, 8.0, 6.0]


def test_buckets_are_half_octaves():
    lengths = [1, 2, 3, 4, 5, 6, 8, 11, 12, 4095, 4096, 5792, 5793]
    for a, b in itertools.pairwise(lengths):
        store = BudgetStore()
        store.update(1, ids=[1], lengths=[a], budgets=[2])
        shares = expected(store, 1, [2], length=b) == [2.0]
        assert shares == (int(np.floor(2 * np.log2(a))) == int(np.floor(2 * np.log2(b))))


def test_gaps_in_the_numbers():
    store = BudgetStore(num_versions=5)
    store.update(5, ids=[1], lengths=[100], budgets=[3])
    store.update(9, ids=[1], lengths=[100], budgets=[3])
    assert expected(store, 4, [1]) == [8.0]
    assert expected(store, 7, [1]) == [3.0]


def test_recalibration_is_versioned_and_saved():
    store = BudgetStore()
    measured = 2 * TABLE.micro_batch_ms([8192], [8])
    store.recalibrate(1, TABLE, lengths=[[8192]], budgets=[[8]], measured_ms=[measured])
    assert store.costs(0, TABLE) is TABLE
    slower = store.costs(1, TABLE).predict(8192, 8)
    assert slower > TABLE.predict(8192, 8)
    again = BudgetStore()
    again.load_state_dict(store.state_dict())
    assert again.costs(1, TABLE).predict(8192, 8) == slower
    assert again.costs(0, TABLE).predict(8192, 8) == TABLE.predict(8192, 8)


def test_recalibration_and_budgets_of_one_window():
    store = BudgetStore()
    store.update(1, ids=[1], lengths=[8192], budgets=[4])
    store.recalibrate(1, TABLE, lengths=[[8192]], budgets=[[8]], measured_ms=[500.0])
    assert store.version == 1
    assert expected(store, 1, [1]) == [4.0]
    assert store.costs(1, TABLE) is not TABLE


def test_collapse_keeps_what_was_learnt():
    store = BudgetStore()
    store.update(7, ids=[1], lengths=[100], budgets=[3])
    store.collapse()
    assert store.version == 0
    assert expected(store, -1, [1]) == [3.0]
    store.update(1, ids=[2], lengths=[100], budgets=[5])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"number": 0}, "version 0 after version 0"),
        ({"ids": [1, 2]}, "2 ids, 1 lengths"),
        ({"budgets": [0.5]}, "budgets holds"),
        ({"budgets": [float("nan")]}, "budgets holds"),
        ({"budgets": [float("inf")]}, "budgets"),
    ],
)
def test_refused(arguments, match):
    given = {"number": 1, "ids": [1], "lengths": [10], "budgets": [2], **arguments}
    store = BudgetStore()
    with pytest.raises(ValueError, match=match):
        store.update(given.pop("number"), **given)
    assert store.version == 0


def test_bad_rate_and_state():
    with pytest.raises(ValueError, match="rate is 0"):
        BudgetStore(rate=0)
    with pytest.raises(ValueError, match="version 99"):
        BudgetStore().load_state_dict({"version": 99})
