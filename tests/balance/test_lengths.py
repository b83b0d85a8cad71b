"""Lengths of a data set, from whatever the user has."""

import numpy as np
import pytest
import torch

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
        ([[1, 2], [3, 4]], None, ValueError, "2 dimensions"),
        ([3, -1], None, ValueError, "sequence 1 has length -1"),
        ([3, 2**50], None, ValueError, "sequence 1 has length"),
        ([True, False], None, TypeError, "whole numbers"),
        (7, None, TypeError, "flat list"),
        (len, iter([1]), TypeError, "has no length"),
    ],
)
def test_refused(source, dataset, error, match):
    with pytest.raises(error, match=match):
        sequence_lengths(source, dataset)


def test_empty():
    assert sequence_lengths([]).tolist() == []
