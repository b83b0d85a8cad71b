"""What `plan_window` refuses, and that it says which argument and what to do."""

from __future__ import annotations

import numpy as np
import pytest

from sb_lightning.balance import plan_window
from sb_lightning.data.length_presets import LENGTH_PRESETS, sample_lengths

GOOD = {"costs_ms": [1.0, 2.0, 3.0, 4.0], "tokens": [1, 2, 3, 4], "ranks": 2, "accumulate": 2}


@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        ({"costs_ms": [1.0, float("nan"), 3.0, 4.0]}, ValueError, r"costs_ms\[1\] is nan"),
        ({"costs_ms": [1.0, 2.0, float("inf"), 4.0]}, ValueError, r"costs_ms\[2\] is inf"),
        ({"costs_ms": [-1.0, 2.0, 3.0, 4.0]}, ValueError, r"costs_ms\[0\] is -1.0"),
        ({"costs_ms": [1.0, 2.0, 3.0]}, ValueError, "3 costs_ms and 4 tokens"),
        ({"costs_ms": [[1.0, 2.0], [3.0, 4.0]]}, TypeError, "costs_ms is float64 of shape"),
        ({"costs_ms": ["1", "2", "3", "4"]}, TypeError, "costs_ms is"),
        ({"costs_ms": [True] * 4}, TypeError, "costs_ms is bool"),
        ({"costs_ms": None}, TypeError, "costs_ms is object"),
        ({"costs_ms": [2.0**60] * 4}, ValueError, "costs_ms add up to"),
        ({"costs_ms": [1e308] * 4}, ValueError, "costs_ms add up to inf"),
        ({"tokens": [1.0, 2.0, 3.0, 4.0]}, TypeError, "tokens is float64"),
        ({"tokens": [True, False, True, True]}, TypeError, "tokens is bool"),
        ({"tokens": [1, 2, 3]}, ValueError, "4 costs_ms and 3 tokens"),
        ({"tokens": [1, -2, 3, 4]}, ValueError, r"tokens\[1\] is -2"),
        ({"tokens": [2**62] * 4}, ValueError, "tokens add up to"),
        (
            {"tokens": np.array([2**63 + 1, 1, 1, 1], dtype=np.uint64)},
            ValueError,
            r"tokens\[0\] is 9223372036854775809",
        ),
        ({"tokens": [2**70, 1, 1, 1]}, TypeError, "tokens is object"),
        ({"tokens": [[1], [2, 3]]}, TypeError, "tokens is object"),
        ({"target_tokens": [1, 2]}, ValueError, "4 costs_ms and 2 target_tokens"),
        ({"target_tokens": [0.5] * 4}, TypeError, "target_tokens is float64"),
        ({"ranks": 0}, ValueError, "ranks is 0"),
        ({"ranks": True}, TypeError, "ranks is True"),
        ({"ranks": 2.0}, TypeError, "ranks is 2.0"),
        ({"accumulate": -1}, ValueError, "accumulate is -1"),
        ({"policy": "best"}, ValueError, "policy is 'best'"),
        ({"objective": "pp"}, ValueError, "objective is 'pp'"),
        ({"policy": "flops"}, ValueError, "weights is None"),
        ({"policy": "flops", "weights": [1.0] * 3}, ValueError, "4 costs_ms and 3 weights"),
        ({"policy": "flops", "weights": [1.0, 1.0, 1.0, float("nan")]}, ValueError, r"weights\[3\] is nan"),
        ({"cell_overhead_ms": -0.5}, ValueError, r"cell_overhead_ms\[0\] is -0.5"),
        ({"cell_overhead_ms": 1e300}, ValueError, "costs_ms add up to"),
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"max_tokens": 3}, ValueError, "item 3 has 4 tokens and max_tokens is 3"),
        ({"max_tokens": 4, "accumulate": 1}, ValueError, "10 tokens and 2 cells of max_tokens 4"),
    ],
)
def test_refused(change, error, found):
    with pytest.raises(error, match=found) as raised:
        plan_window(**{**GOOD, **change})
    assert "To fix it, " in str(raised.value)


def test_no_packing_is_told_for_certain_or_not():
    # Three of 5 do not fit two by two under 9, though there is room for all their tokens.
    with pytest.raises(ValueError, match=r"there are no 2 cells that hold them all.*max_tokens"):
        plan_window([1.0] * 3, [5] * 3, ranks=2, accumulate=1, max_tokens=9)
    with pytest.raises(ValueError, match=r"the planner found no 20 cells.*max_tokens"):
        plan_window([1.0] * 30, [5] * 30, ranks=20, accumulate=1, max_tokens=9)


def test_exact_is_for_few_items():
    with pytest.raises(ValueError, match="exact is True for 25 items"):
        plan_window([1.0] * 25, [1] * 25, ranks=5, accumulate=5, exact=True)
    with pytest.raises(ValueError, match="in 30 cells"):
        plan_window([1.0] * 2, [1] * 2, ranks=5, accumulate=6, exact=True)


def test_a_packing_that_is_hard_to_find_is_found():
    # Each cell takes 7 + 3 or 6 + 4 or 5 + 5; spreading by tokens breaks the cap.
    tokens = [7, 3, 6, 4, 5, 5, 7, 3]
    for objective in ("ddp", "fsdp"):
        plan = plan_window([1.0] * 8, tokens, ranks=2, accumulate=2, max_tokens=10, objective=objective)
        assert {sum(tokens[i] for i in cell) for row in plan.cells for cell in row} == {10}
    # Neither spreading nor best fit finds it; the only way is 7 + 3 + 3 and 5 + 4 + 4.
    costs = [1.0, 1.0, 1.0, 5.0, 1.0, 1.0]
    plan = plan_window(costs, [7, 5, 4, 4, 3, 3], ranks=2, accumulate=1, max_tokens=13)
    assert {cell for row in plan.cells for cell in row} == {(0, 4, 5), (1, 2, 3)}


def test_the_cap_is_strict_where_costs_ask_for_more():
    """Balancing costs alone would put two items of 7 into one cell (volcengine/verl, issue 6735)."""
    plan = plan_window([1.0] * 8, [7] * 8, ranks=2, accumulate=4, max_tokens=8)
    assert [len(cell) for row in plan.cells for cell in row] == [1] * 8


def test_an_item_over_the_cap_empties_no_cell():
    with pytest.raises(ValueError, match="item 0 has 9 tokens"):
        plan_window([1.0] * 4, [9, 1, 1, 1], ranks=2, accumulate=1, max_tokens=8)
    plan = plan_window([9.0, 1.0, 1.0, 1.0], [9, 1, 1, 1], ranks=2, accumulate=1)
    assert plan.cells == (((0,),), ((1, 2, 3),))


@pytest.mark.parametrize("policy", ["random", "length", "tokens", "latency"])
@pytest.mark.parametrize("objective", ["ddp", "fsdp"])
def test_nine_items_for_four_ranks(policy, objective):
    """A ceiling would give counts of 3, 3, 3, 0 (volcengine/verl, issue 6869)."""
    tokens = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    plan = plan_window(
        [float(n) for n in tokens], tokens, ranks=4, accumulate=1, policy=policy, objective=objective,
        equal_counts=True,
    )  # fmt: skip
    assert sorted(len(row[0]) for row in plan.cells) == [2, 2, 2, 3]


def test_arguments_are_left_as_they_were():
    costs, tokens, targets = np.array([3.0, 1.0, 2.0]), np.array([3, 1, 2]), np.array([2, 0, 1])
    plan_window(costs, tokens, ranks=2, accumulate=2, target_tokens=targets)
    assert (costs.tolist(), tokens.tolist(), targets.tolist()) == ([3.0, 1.0, 2.0], [3, 1, 2], [2, 0, 1])


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32, np.uint64, np.float32])
def test_small_numbers_do_not_wrap(dtype):
    costs = np.array([200, 100, 100, 200], dtype=dtype)
    tokens = np.array([200, 100, 100, 200], dtype=np.uint8)
    plan = plan_window(costs, tokens, ranks=2, accumulate=2, max_tokens=200)
    assert plan.value_ms == 300.0
    assert plan.target_tokens == 596


@pytest.mark.parametrize("preset", LENGTH_PRESETS)
def test_presets_have_the_published_figures(preset):
    lengths = sample_lengths(preset, 50_000, seed=1)
    chosen = LENGTH_PRESETS[preset]
    assert lengths.min() >= chosen.least
    assert lengths.max() <= chosen.most
    assert np.array_equal(lengths[:10], sample_lengths(preset, 50_000, seed=1)[:10])
    figures = {
        "longalign": (np.median(lengths), 14000, 0.03),
        "longalign_uniform": (lengths.mean(), 36864, 0.02),
        "chatqa2": ((lengths < 8192).mean(), 0.5, 0.02),
        "longalpaca": (lengths.mean(), 9942, 0.03),
        "magi": ((lengths <= 1024).mean(), 0.7139, 0.02),
        "llama3": (lengths[lengths < 16384].mean(), 1000, 0.03),
    }
    found, published, tolerance = figures[preset]
    assert found == pytest.approx(published, rel=tolerance)
    assert chosen.description.startswith("synthetic, matched to")


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"preset is 'alpaca'.*longalign"):
        sample_lengths("alpaca", 3)
    with pytest.raises(ValueError, match="count is -1"):
        sample_lengths("magi", -1)
