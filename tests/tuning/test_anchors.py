from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.tuning import anchor_latency

TIMES = st.lists(st.integers(0, 10**12), min_size=1, max_size=20)


@settings(deadline=None)
@given(times=TIMES, data=st.data())
def test_anchors_are_ordered_and_do_not_depend_on_the_order(times, data):
    least, mean, most = (anchor_latency(times, anchor) for anchor in ("min", "mean", "max"))
    assert least == min(times)
    assert most == max(times)
    assert least <= mean <= most
    assert -1 < 2 * (mean * len(times) - sum(times)) / len(times) <= 1
    shuffled = data.draw(st.permutations(times))
    assert anchor_latency(shuffled, "mean") == mean


def test_the_mean_is_exact_and_halves_go_upward():
    assert anchor_latency([1, 2]) == 2
    assert anchor_latency([10**18, 10**18 + 1, 10**18 + 1]) == 10**18 + 1
    assert anchor_latency([10**18, 10**18, 10**18 + 1]) == 10**18


@pytest.mark.parametrize(
    ("times", "anchor", "error", "named"),
    [
        ([], "mean", ValueError, "times_us is \\[\\]"),
        ([3, -1], "min", ValueError, "times_us is \\[3, -1\\]"),
        ([1.5], "max", TypeError, "times_us holds other things than integers"),
        ([1], "median", ValueError, "anchor is 'median'"),
    ],
)
def test_bad_values_are_named(times, anchor, error, named):
    with pytest.raises(error, match=named):
        anchor_latency(times, anchor)
