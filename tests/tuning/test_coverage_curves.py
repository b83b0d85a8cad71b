from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.tuning import coverage_curve, sampled_rows


@settings(deadline=None)
@given(
    length=st.integers(0, 700),
    block_size=st.sampled_from([1, 3, 16, 48, 64, 128]),
    row_stride=st.sampled_from([1, 2, 3, 7, 64, 100]),
)
def test_sampled_rows_equal_the_walk(length, block_size, row_stride):
    rows = [
        t
        for t in range(block_size, length)
        if t % row_stride == 0 or (t + 1) % block_size == 0 or t == length - 1
    ]
    assert sampled_rows(length, block_size, row_stride) == len(rows)


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_curves_start_at_0_never_fall_and_stay_below_1(heads):
    mass = np.sort(np.asarray([heads]), axis=-1)[..., ::-1]
    curve = coverage_curve(mass)
    assert curve.shape == (1, 5)
    assert curve[0, 0] == 0
    assert (np.diff(curve) >= 0).all()
    assert curve.max() <= 1
    np.testing.assert_allclose(curve[0, 1:], np.minimum(mass[0].mean(0).cumsum(), 1), atol=1e-8)


def test_no_sequences_and_no_ranks():
    assert coverage_curve(np.zeros((0, 2, 3))).shape == (0, 4)
    assert coverage_curve(np.zeros((2, 2, 0))).tolist() == [[0.0], [0.0]]


def test_nan_counts_as_nothing():
    assert coverage_curve([[[np.nan, 0.5]]]).tolist() == [[0.0, 0.0, 0.5]]


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="mass has shape"):
        coverage_curve([0.5, 0.5])
    with pytest.raises(ValueError, match="block_size and row_stride are 10, 0 and 64"):
        sampled_rows(10, 0)
