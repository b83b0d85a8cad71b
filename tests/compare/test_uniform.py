"""The one budget that changes coverage as much as tuning does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb_lightning.compare.uniform import CoverageCurve, matching_budget

K0 = 8


def curve(budget, rows=20.0, width=32):
    shares = 1 - 0.8 ** np.arange(width)
    shares[-1] = 1.0
    return CoverageCurve(rows=rows, sums=tuple((rows * shares).tolist()), budget=budget, usual=K0)


def test_the_first_round_has_the_usual_budget():
    assert matching_budget([], K0, -0.1) == K0


def test_no_change_keeps_it_and_more_coverage_takes_more():
    assert matching_budget([curve(K0)], K0, 0.0) == K0
    assert matching_budget([curve(K0)], K0, 0.1) > K0 > matching_budget([curve(K0)], K0, -0.1)


@given(st.floats(-0.7, 0.15), st.lists(st.floats(5.0, 50.0), min_size=12, max_size=30))
def test_over_rounds_the_change_is_the_one_wanted(change, weights):
    rounds = [curve(K0)]
    for rows in weights:
        rounds.append(curve(matching_budget(rounds, K0, change), rows))
    counted = rounds[1:]
    found = sum(c.change(c.budget) for c in counted) / sum(c.rows for c in counted)
    # Weights differ from round to round, and a budget is a whole number: one step of the largest round.
    assert found == pytest.approx(change, abs=3 * 0.2 * 50 / sum(weights))


def test_what_one_round_changed_too_much_the_next_makes_up_for():
    too_low = [curve(K0), curve(2)]
    assert matching_budget(too_low, K0, -0.05) > matching_budget([curve(K0)], K0, -0.05)
