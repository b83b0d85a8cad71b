"""Lengths of a data set, from whatever the user has."""

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from sb_lightning.balance import sequence_lengths


class Table:
    """A data set with columns, as those of the datasets library."""

    column_names = ("input_ids", "length", "text")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key):
        if isinstance(key, str):
            return [row[key] for row in self.rows]
        return self.rows[key]


ROWS = Table([{"input_ids": list(range(n)), "length": n, "text": "x" * n} for n in (3, 1, 4)])


@pytest.mark.parametrize(
    "source",
    [[3, 1, 4], (3, 1, 4), np.array([3, 1, 4], dtype=np.int32), torch.tensor([3, 1, 4]), lambda: [3, 1, 4]],
    ids=["list", "tuple", "array", "tensor", "function"],
)
def test_lengths_themselves(source):
    found = sequence_lengths(source)
    assert found.tolist() == [3, 1, 4]
    assert found.dtype == np.int64


def test_of_a_data_set():
    assert sequence_lengths("length", ROWS).tolist() == [3, 1, 4]
    assert sequence_lengths(lambda row: len(row["text"]), ROWS).tolist() == [3, 1, 4]
    with pytest.warns(UserWarning, match="all of it is read"):
        assert sequence_lengths("input_ids", ROWS).tolist() == [3, 1, 4]


class Column:
    """A lazy column, as the datasets library returns it: a sequence that is no list."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return self.values[i]

    def __iter__(self):
        return iter(self.values)


def test_lazy_column():
    assert sequence_lengths(Column([3, 1, 4])).tolist() == [3, 1, 4]
    assert sequence_lengths("n", {"n": Column([3, 1, 4])}).tolist() == [3, 1, 4]
    with pytest.warns(UserWarning, match="all of it is read"):
        assert sequence_lengths("ids", {"ids": Column([[1, 2], [3]])}).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("source", "dataset", "error", "match"),
    [
        ("size", ROWS, ValueError, "no column 'size'.*input_ids, length, text"),
        ("length", None, ValueError, "pass dataset"),
        ([1.5, 2.0], None, TypeError, "whole numbers"),
        (np.array([[1, 2], [3, 4]]), None, ValueError, "2 dimensions"),
        (torch.ones(2, 2), None, ValueError, "2 dimensions"),
        (["ab", "c"], None, TypeError, "holds 'ab'.*whole numbers or token lists"),
        ("x", [{"input_ids": [1], "n": 1}], ValueError, "no column 'x' .it has input_ids, n"),
        ("x", [(1, 2), (3, 4)], ValueError, "no column 'x'"),
        ([3, -1], None, ValueError, "sequence 1 has length -1"),
        ([3, 2**50], None, ValueError, "sequence 1 has length"),
        ([True, False], None, TypeError, "one number of tokens per sequence"),
        ([True, 5], None, TypeError, "one number of tokens per sequence"),
        ({5: 1, 7: 2}, None, TypeError, "a dict"),
        (b"abc", None, TypeError, "a bytes"),
        ({3, 4}, None, TypeError, "a set"),
        (7, None, TypeError, "flat list"),
        (len, iter([1]), TypeError, "has no length"),
    ],
)
def test_refused(source, dataset, error, match):
    with pytest.raises(error, match=match):
        sequence_lengths(source, dataset)


@pytest.mark.parametrize(
    "tokens",
    [[[1, 2], [3]], [[1, 2], [3, 4]], ((1, 2), ()), [torch.arange(2), np.arange(3)], [[], [1]]],
    ids=["ragged", "alike", "tuples", "arrays", "empty"],
)
def test_token_lists_are_counted(tokens):
    with pytest.warns(UserWarning, match="lengths is a list of token lists: all of it is read"):
        assert sequence_lengths(tokens).tolist() == [len(row) for row in tokens]


SAMPLES = [{"input_ids": list(range(n)), "labels": torch.arange(n), "n": n} for n in (3, 1, 4)]


@pytest.mark.parametrize("key", ["input_ids", "labels", "n"])
def test_a_key_of_samples_that_are_dictionaries(key):
    with pytest.warns(UserWarning, match=f"lengths='{key}' is a key of the samples: all of them are read"):
        assert sequence_lengths(key, SAMPLES).tolist() == [3, 1, 4]
    with pytest.warns(UserWarning, match="is a key of the samples"):
        assert sequence_lengths(key, Subset(SAMPLES, [2, 0])).tolist() == [4, 3]


def test_token_lists_beside_numbers():
    with (
        pytest.warns(UserWarning, match="token lists"),
        pytest.raises(TypeError, match=r"token lists and other entries.*one kind"),
    ):
        sequence_lengths([[1, 2], 3])


def test_a_whole_sample_is_not_printed():
    with pytest.raises(TypeError, match=r"pass them as dataset and name the key") as error:
        sequence_lengths([{"text": "word " * 1000, **{f"key {i}": list(range(900)) for i in range(9)}}] * 2)
    found = str(error.value).removeprefix("lengths holds ").partition(" (object)")[0]
    assert found.startswith("{'")
    assert len(found) <= 60


def test_empty():
    assert sequence_lengths([]).tolist() == []
