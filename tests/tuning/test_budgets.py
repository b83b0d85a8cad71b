"""The choice of budgets: what the rule promises, its twin, and bad values."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from budget_cases import MicroBatch, allowed, cost, micro_batches, total
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.latency.engine import Engine
from sb_lightning.tuning import budgets as budgets_module
from sb_lightning.tuning import choose_budgets


def choose(batch: MicroBatch, **changed: object) -> np.ndarray:
    options = {**batch.options, **changed}
    tau = options.pop("tau_us", batch.tau_us)
    return choose_budgets(batch.coverage, batch.cost_us, tau, **options)


@settings(deadline=None)
@given(batch=micro_batches())
def test_budgets_are_allowed_and_within_tau_when_that_can_be(batch):
    budgets = choose(batch)
    sets = [allowed(batch, n) for n in range(len(budgets))]
    assert all(k in ks for k, ks in zip(budgets, sets, strict=True))
    least = [ks[0] for ks in sets]
    if total(batch, least) <= batch.tau_us:
        assert total(batch, budgets) <= batch.tau_us
        for n, ks in enumerate(sets):  # no sequence could have one block more
            more = budgets.copy()
            more[n] += 1
            assert more[n] not in ks or total(batch, more) > batch.tau_us
    else:
        assert budgets.tolist() == least


@settings(deadline=None)
@given(batch=micro_batches(max_sequences=1))
def test_one_sequence_gets_the_largest_allowed_budget_within_tau(batch):
    ks = allowed(batch, 0)
    fitting = [k for k in ks if cost(batch, 0, k) <= batch.tau_us]
    assert choose(batch).tolist() == [max(fitting, default=ks[0])]


@settings(deadline=None)
@given(batch=micro_batches())
def test_c_and_python_choose_alike(batch):
    assert budgets_module.ENGINE.available, "build the C++ module first"
    fast = choose(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets_module, "ENGINE", Engine("Python", "a test"))
        slow = choose(batch)
    assert fast.dtype == slow.dtype == np.int32
    assert fast.tolist() == slow.tolist()


@settings(deadline=None)
@given(batch=micro_batches(max_sequences=1), more=st.integers(0, 10))
def test_more_time_never_lowers_the_budget(batch, more):
    assert (choose(batch, tau_us=batch.tau_us + more) >= choose(batch)).all()


@settings(deadline=None)
@given(batch=micro_batches(), more=st.integers(0, 10))
def test_more_time_never_lowers_the_cost_of_what_is_unlimited(batch, more):
    # With several sequences a longer time may buy a dear step in place of cheap ones, but all of it buys all.
    everything = choose(batch, tau_us=10**9)
    assert everything.tolist() == [allowed(batch, n)[-1] for n in range(len(everything))]
    assert choose(batch, tau_us=10**9 + more).tolist() == everything.tolist()


@settings(deadline=None)
@given(batch=micro_batches(strictly=True))
def test_tolerance_0_gives_k0(batch):
    width = batch.coverage.shape[1]
    for k, usual, blocks in zip(
        choose(batch, tolerance=0.0), batch.options["k0"], batch.options["num_blocks"], strict=True
    ):
        assert k == (usual if blocks <= usual and not batch.options["tune_short"] else min(usual, width))


@settings(deadline=None)
@given(batch=micro_batches())
def test_constant_coverage_gives_k0(batch):
    flat = replace(batch, coverage=np.full_like(batch.coverage, 0.25))
    usual = np.array(batch.options["k0"])
    chosen = choose(flat)
    assert (np.minimum(chosen, flat.coverage.shape[1]) == np.minimum(usual, flat.coverage.shape[1])).all()


@settings(deadline=None)
@given(batch=micro_batches())
def test_short_sequences_keep_k0_unless_asked(batch):
    usual = np.array(batch.options["k0"])
    short = np.array(batch.options["num_blocks"]) <= usual
    assert (choose(batch, tune_short=False)[short] == usual[short]).all()


def test_a_short_sequence_is_cut_where_asked():
    curve, times = [[0.0, 0.75, 0.9, 1.0]], [[10, 20, 30, 40]]
    given_ = {"tolerance": 0.3, "k0": 6, "num_blocks": 4}
    assert choose_budgets(curve, times, 25, **given_).tolist() == [6]
    assert choose_budgets(curve, times, 25, **given_, tune_short=True).tolist() == [2]
    assert choose_budgets(curve, times, 100, **given_, tune_short=True).tolist() == [4]


@settings(max_examples=60, deadline=None)
@given(batch=micro_batches(max_sequences=3))
def test_several_sequences_follow_the_greedy_rule(batch):
    sets = [allowed(batch, n) for n in range(batch.coverage.shape[0])]
    budgets = [ks[0] for ks in sets]
    spent = total(batch, budgets)
    skipped: set[tuple[int, int]] = set()
    while True:
        steps = []
        for n, k in enumerate(budgets):
            if k + 1 in sets[n] and (n, k) not in skipped:
                gain = batch.options["rows"][n] * (batch.coverage[n, k] - batch.coverage[n, k - 1])
                price = cost(batch, n, k + 1) - cost(batch, n, k)
                # Gains are multiples of 1/64 and prices below 6, so different ratios are far apart.
                steps.append((round(gain / price, 9) if price else float("inf"), -n, price))
        if not steps:
            break
        _, position, price = max(steps)
        n = -position
        if spent + price <= batch.tau_us:
            budgets[n] += 1
            spent += price
        else:
            skipped.add((n, budgets[n]))
    assert choose(batch).tolist() == budgets


@settings(deadline=None)
@given(batch=micro_batches(max_sequences=3))
def test_greedy_is_near_the_best_of_all_choices(batch):
    sets = [allowed(batch, n) for n in range(batch.coverage.shape[0])]
    rows = batch.options["rows"]

    def kept(budgets):
        width = batch.coverage.shape[1]
        return sum(rows[n] * batch.coverage[n, min(int(k), width) - 1] for n, k in enumerate(budgets))

    fitting = [ks for ks in itertools.product(*sets) if total(batch, ks) <= batch.tau_us]
    if fitting:
        # At worst one step is missing, which is the loss of greedy choice for concave curves.
        widest = max(
            (
                rows[n] * (batch.coverage[n, k] - batch.coverage[n, k - 1])
                for n, ks in enumerate(sets)
                for k in ks[:-1]
            ),
            default=0,
        )
        assert kept(choose(batch)) <= max(map(kept, fitting)) + 1e-12
        convex = (np.diff(batch.cost_us, n=2) >= 0).all()
        if convex:
            assert kept(choose(batch)) >= max(map(kept, fitting)) - widest - 1e-12


def test_equal_steps_go_to_the_lower_position_and_a_step_too_long_is_skipped():
    curve = [0.0, 0.25, 0.5]
    options = {"tolerance": 1.0, "k0": 1, "num_blocks": 4}
    assert choose_budgets([curve, curve], [[10, 20, 30]] * 2, 30, **options).tolist() == [2, 1]
    # The first sequence's step would gain more per time, but only the second one's fits.
    better = [0.0, 0.9, 1.0]
    assert choose_budgets([better, curve], [[10, 22, 34], [10, 20, 30]], 30, **options).tolist() == [1, 2]


def test_a_curve_that_falls_by_rounding_is_raised():
    curve = [[0.0, 0.5, 0.5 - 1e-12, 0.75]]
    args = (curve, [[1, 2, 3, 4]], 3)
    assert choose_budgets(*args, tolerance=0.25, k0=2).tolist() == [3]
    assert choose_budgets([[0.0, 0.5, 0.3, 0.6]], [[1, 2, 3, 4]], 3, tolerance=0.05, k0=2).tolist() == [3]


def test_no_sequences():
    empty = np.zeros((0, 3))
    assert choose_budgets(empty, empty.astype(int), 5, tolerance=0.1, k0=2).shape == (0,)


FINE = {"coverage": [[0.0, 0.5]], "cost_us": [[1, 2]], "tau_us": 5, "tolerance": 0.1, "k0": 2}


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"cost_us": [[1, 2, 3]]}, ValueError, "cost_us \\(1, 3\\)"),
        ({"coverage": [0.0, 0.5], "cost_us": [1, 2]}, ValueError, "coverage has shape \\(2,\\)"),
        ({"cost_us": [[2, 1]]}, ValueError, "cost_us falls"),
        ({"cost_us": [[-1, 1]]}, ValueError, "cost_us falls"),
        ({"cost_us": [[1, 2**31]]}, ValueError, "no time of 31 bits"),
        ({"cost_us": [[1.0, 2.0]]}, TypeError, "cost_us holds float64"),
        ({"tau_us": 1.5}, TypeError, "tau_us holds float64"),
        ({"tolerance": -0.1}, ValueError, "tolerance is -0.1"),
        ({"tolerance": float("nan")}, ValueError, "tolerance is nan"),
        ({"k0": 0}, ValueError, "k0 is 0"),
        ({"k0": [1, 2]}, ValueError, "k0 has shape \\(2,\\) for 1 sequences"),
        ({"k0": 1.5}, TypeError, "k0 holds float64"),
        ({"min_budget": 0}, ValueError, "min_budget is 0"),
        ({"rows": -1}, ValueError, "rows is -1"),
        ({"num_blocks": -2}, ValueError, "num_blocks is -2"),
    ],
)
def test_bad_values_are_named(changed, error, named):
    with pytest.raises(error, match=named):
        choose_budgets(**(FINE | changed))
