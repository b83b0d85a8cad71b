"""Coverage curves kept at a few budgets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.tuning.curves import CURVE_BUDGETS, between_points, curve_grid


def test_the_points_ascend_and_reach_every_length():
    assert list(CURVE_BUDGETS) == sorted(set(CURVE_BUDGETS))
    assert CURVE_BUDGETS[:6] == (1, 2, 3, 4, 6, 8)
    assert CURVE_BUDGETS[-1] >= 32767


@settings(deadline=None)
@given(st.integers(2, 200), st.floats(0.2, 1.0))
def test_a_concave_curve_comes_back_from_its_points(blocks, shape):
    exact = (np.arange(blocks) / max(blocks - 1, 1)) ** shape
    points = exact[curve_grid(blocks)]
    curve = between_points(points, blocks, blocks)
    assert curve.shape == (blocks,)
    assert (np.diff(curve) >= 0).all()
    assert curve[-1] == 1.0
    at = [k - 1 for k in CURVE_BUDGETS if k < blocks]
    np.testing.assert_allclose(curve[at], exact[at], rtol=0, atol=1e-12)
    assert (curve <= exact + 1e-12).all(), "straight lines lie below a concave curve"
    assert np.abs(curve - exact).max() < 0.25


def test_beyond_the_blocks_of_a_sequence_all_is_covered():
    points = np.linspace(0, 0.5, len(CURVE_BUDGETS))
    assert between_points(points, 8, 5)[4:].tolist() == [1.0] * 4
    assert between_points(points, 8, 5)[3] < 0.5
