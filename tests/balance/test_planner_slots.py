"""Objective `fsdp` with several items per cell: giants, the starts that fill slots, and the bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import optimum_us, windows

from sb_lightning.balance import plan_window
from sb_lightning.balance.reference import NO_CAP, lower_bound_us
from sb_lightning.balance.reference.problem import Problem
from sb_lightning.balance.reference.slot_fill import fill_slots, one_full_slot


def problem_of(costs, ranks, accumulate, max_tokens=NO_CAP, tokens=None):
    return Problem(
        costs=costs,
        tokens=costs if tokens is None else tokens,
        ranks=ranks,
        accumulate=accumulate,
        max_tokens=max_tokens,
        equal_counts=False,
    )


def costs_of(problem, cells):
    return [[problem.costs[item] for item in cell] for cell in cells]


def test_what_fits_beside_a_giant_is_spread_over_its_slot():
    problem = problem_of([100, 9, 8, 7, 6, 5, 4, 3, 2, 1], 2, 3)
    cells = fill_slots(problem)
    assert costs_of(problem, cells) == [[100], [9, 8, 7, 6, 5], [4], [3], [2], [1]]


def test_a_slot_is_filled_as_far_as_its_giant_reaches():
    # 60 + 40 and 55 + 45 reach 100; the rest is spread over the other slot, its giant being no more than
    # the mean.
    problem = problem_of([100, 60, 55, 45, 40, 34, 33, 33, 2], 3, 2)
    cells = costs_of(problem, fill_slots(problem))
    assert cells[:3] == [[100], [60, 40], [55, 45]]
    assert sorted(map(sum, cells[3:])) == [33, 34, 35]


def test_a_slot_leaves_an_item_for_each_cell_to_come():
    problem = problem_of([50, 10, 10, 10, 1], 2, 2)
    assert costs_of(problem, fill_slots(problem)) == [[50], [10, 10], [10], [1]]
    # Few items: each of the slot's cells takes one even though more would fit in one.
    problem = problem_of([50, 2, 1, 1], 2, 2)
    assert costs_of(problem, fill_slots(problem)) == [[50], [2], [1], [1]]


def test_filled_slots_stay_under_the_cap():
    costs, tokens = [100, 50, 50, 10, 10, 9], [1, 40, 40, 30, 20, 20]
    problem = problem_of(costs, 2, 2, tokens=tokens)
    assert costs_of(problem, fill_slots(problem))[:2] == [[100], [50, 50]]
    # Now 50 may not go beside 50.
    problem = problem_of(costs, 2, 2, max_tokens=60, tokens=tokens)
    assert costs_of(problem, fill_slots(problem))[:2] == [[100], [50, 10]]
    plan = plan_window(costs, tokens, ranks=2, accumulate=2, max_tokens=60, objective="fsdp")
    assert max(sum(tokens[i] for i in cell) for row in plan.cells for cell in row) <= 60


def test_filled_slots_leave_no_cell_empty_under_the_cap():
    # 7 would fit beside 9 and 8, but only one item may share a cell.
    problem = problem_of(
        [100, 9, 8, 7, 6, 1, 1, 1, 1], 4, 2, max_tokens=6, tokens=[1, 1, 1, 3, 4, 1, 1, 1, 1]
    )
    cells = costs_of(problem, fill_slots(problem))
    assert cells == [[100], [9, 8], [7], [6], [1], [1], [1], [1]]


def test_one_full_slot():
    problem = problem_of([9, 8, 7, 6, 5, 4, 3, 2, 1], 2, 3)
    assert costs_of(problem, one_full_slot(problem)) == [[9, 6, 5], [8, 7], [4], [3], [2], [1]]


@pytest.mark.parametrize(
    ("costs", "ranks", "accumulate", "bound"),
    [
        # The mean is 27: the giant, and what two more slots of two cells each hold at least.
        ([40, 3, 3, 3, 2, 2, 1], 2, 3, 40 + 2 + 3),
        # Three of 10 in two ranks: two of them meet in time; and the largest of the last two.
        ([10, 10, 10, 2, 1, 1], 2, 3, 10 + 10 + 1),
        # Five of 7 in two ranks.
        ([7, 7, 7, 7, 7], 2, 2, 21),
    ],
)
def test_bound(costs, ranks, accumulate, bound):
    assert lower_bound_us(np.array(costs), ranks, accumulate, True, False) == bound
    plan = plan_window(costs, costs, ranks=ranks, accumulate=accumulate, objective="fsdp")
    assert (plan.value_ms, plan.proven_optimal) == (bound, True)


def test_bound_with_equal_counts():
    # Each cell holds two: the giant and 1, then 3 and 1.
    costs = [40, 4, 4, 3, 3, 2, 1, 1]
    assert lower_bound_us(np.array(costs), 2, 2, True, True) == 40 + 3 + 1 + 1


@settings(max_examples=150, deadline=None)
@given(window=windows(max_items=8, caps=False))
def test_no_plan_is_below_the_bound(window):
    costs = np.array(window.costs_us)
    bound = lower_bound_us(costs, window.ranks, window.accumulate, True, window.equal_counts)
    assert bound <= optimum_us(window, "fsdp")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), giants=st.integers(1, 40), ranks=st.sampled_from([8, 16]))
def test_heavy_tails_end_close_to_the_bound(seed, giants, ranks):
    """Giants among short items: slots as large as a giant take the short ones too."""
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.normal(6.5, 0.8, ranks * 16))
    lengths[:giants] *= 2 ** generator.uniform(3, 8, giants)
    plan = plan_window(lengths, lengths.astype(int), ranks=ranks, accumulate=4, objective="fsdp")
    assert plan.gap < 0.03
