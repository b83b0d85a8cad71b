"""Plans of single windows: what they promise, against trying everything, and what they must not change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from planner_cases import Window, optimum_us, windows

from sb_lightning.balance import plan_window
from sb_lightning.balance.reference.karmarkar_karp import differencing
from sb_lightning.balance.reference.slots import polish

OBJECTIVES = st.sampled_from(["ddp", "fsdp"])
POLICIES = ["random", "length", "tokens", "flops", "latency"]


def cells_of(plan):
    """All cells that are no pad."""
    pairs = zip(plan.cells, plan.is_padding, strict=True)
    return [cell for row, flags in pairs for cell, pad in zip(row, flags, strict=True) if not pad]


def us(ms):
    return round(ms * 1000)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(window=windows(max_items=8), objective=OBJECTIVES, exact=st.booleans())
@example(  # the exact cap: each pair of cells fits in one way
    Window(
        costs_us=(9, 8, 7, 6),
        tokens=(3, 5, 5, 7),
        ranks=2,
        accumulate=1,
        max_tokens=10,
        equal_counts=False,
    ),
    "ddp",
    False,
)
def test_best_of_all_plans(window, objective, exact):
    best = optimum_us(window, objective)
    if best is None:
        with pytest.raises(ValueError, match="max_tokens"):
            window.plan(objective=objective, exact=exact)
        return
    plan = window.plan(objective=objective, exact=exact)
    assert us(plan.lower_bound_ms) <= best <= us(plan.value_ms)
    if plan.proven_optimal or exact:
        assert us(plan.value_ms) == best
        assert plan.proven_optimal


@settings(max_examples=150, deadline=None)
@given(
    window=windows(max_items=40, max_ranks=5, max_accumulate=4),
    objective=OBJECTIVES,
    policy=st.sampled_from(POLICIES),
    drop=st.integers(0, 12),
    overhead_ms=st.sampled_from([0.0, 0.25]),
)
def test_what_every_plan_keeps(window, objective, policy, drop, overhead_ms):
    """Each item once, no empty cell, cap, counts, pads, and figures that are those of the cells."""
    keep = max(len(window.tokens) - drop, 1)
    tokens, costs_us = window.tokens[:keep], window.costs_us[:keep]
    targets = [n // 2 for n in tokens]
    try:
        plan = plan_window(
            np.array(costs_us) / 1000,
            tokens,
            ranks=window.ranks,
            accumulate=window.accumulate,
            policy=policy,
            objective=objective,
            max_tokens=window.max_tokens,
            equal_counts=window.equal_counts,
            cell_overhead_ms=overhead_ms,
            target_tokens=targets,
            weights=[n**3 for n in tokens],
        )
    except ValueError:
        assert window.max_tokens is not None
        return
    cells = cells_of(plan)
    assert sorted(item for cell in cells for item in cell) == list(range(keep))
    assert [len(row) for row in plan.cells] == [window.accumulate] * window.ranks
    assert all(cell for row in plan.cells for cell in row)
    pads = [cell for row in plan.cells for cell in row if cell not in cells]
    shortest = min(range(keep), key=lambda i: (tokens[i], i))
    assert all(cell == (shortest,) for cell in pads)
    assert sum(map(sum, plan.is_padding)) == max(window.num_cells - keep, 0)
    if window.max_tokens is not None:
        assert max(sum(tokens[i] for i in cell) for cell in cells) <= window.max_tokens
    if window.equal_counts or keep <= window.num_cells:
        counts = [len(cell) for cell in cells]
        assert max(counts) - min(counts) <= 1
    for row, flags, times, counts in zip(
        plan.cells, plan.is_padding, plan.predicted_ms, plan.cell_target_tokens, strict=True
    ):
        for cell, pad, ms, count in zip(row, flags, times, counts, strict=True):
            assert us(ms) == sum(costs_us[i] for i in cell) + us(overhead_ms)
            assert count == (0 if pad else sum(targets[i] for i in cell))
    assert plan.target_tokens == sum(targets)
    value = plan.makespan_ms if objective == "ddp" else plan.slot_sum_ms
    assert us(value) == us(plan.value_ms) >= us(plan.lower_bound_ms)
    assert plan.objective == objective
    assert plan.gap == pytest.approx(plan.value_ms / (plan.lower_bound_ms or 1.0) - 1, abs=1e-9) or (
        plan.lower_bound_ms == 0 == plan.gap
    )
    assert plan.gap > 0 or plan.proven_optimal


@settings(max_examples=60, deadline=None)
@given(window=windows(max_items=40, max_ranks=5, max_accumulate=4, caps=False), seed=st.integers(0, 99))
def test_the_order_of_the_items_changes_nothing(window, seed):
    order = np.random.default_rng(seed).permutation(len(window.tokens))
    costs, tokens = np.array(window.costs_us)[order] / 1000, np.array(window.tokens)[order]
    for objective in ("ddp", "fsdp"):
        plan = window.plan(objective=objective)
        mixed = plan_window(
            costs,
            tokens,
            ranks=window.ranks,
            accumulate=window.accumulate,
            equal_counts=window.equal_counts,
            objective=objective,
        )
        assert (mixed.lower_bound_ms, mixed.value_ms) == (plan.lower_bound_ms, plan.value_ms)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(1, 9),
    count=st.integers(1, 12),
    extra=st.integers(0, 8),
    equal_counts=st.booleans(),
)
def test_never_worse_than_differencing_with_equal_sizes(data, ranks, count, extra, equal_counts):
    num_items = ranks * count + extra
    costs = data.draw(st.lists(st.integers(0, 10**6), min_size=num_items, max_size=num_items))
    costs.sort(reverse=True)
    parts = differencing(costs, ranks, ranks)
    plan = plan_window(
        np.array(costs) / 1000,
        [1] * num_items,
        ranks=ranks,
        accumulate=count,
        equal_counts=equal_counts,
    )
    assert us(plan.value_ms) <= max(sum(costs[i] for i in part) for part in parts)


@pytest.mark.parametrize("objective", ["ddp", "fsdp"])
def test_never_worse_than_the_simple_policies(objective):
    generator = np.random.default_rng(3)
    for num_items, ranks, accumulate in ((16, 4, 4), (64, 8, 8), (64, 8, 4), (40, 4, 4)):
        tokens = (2 ** generator.uniform(8, 15, num_items)).astype(int)
        costs = tokens / 100 + tokens.astype(float) ** 2 / 1e6
        plans = {
            policy: plan_window(
                costs,
                tokens,
                ranks=ranks,
                accumulate=accumulate,
                policy=policy,
                objective=objective,
                weights=costs,
            )
            for policy in POLICIES
        }
        values = {policy: plan.value_ms for policy, plan in plans.items()}
        assert values["latency"] <= min(values["length"], values["random"])
        assert values["latency"] < values["tokens"] * 1.01
        # Weights that are the costs give the plan of the costs, in whatever unit they come.
        assert plans["flops"].gap < 0.05


def test_fsdp_with_one_item_per_cell_is_optimal():
    costs = [16.0, 15.0, 9.0, 8.0, 7.0, 7.0, 2.0, 1.0]
    plan = plan_window(costs, [1] * 8, ranks=2, accumulate=4, objective="fsdp")
    assert plan.value_ms == 16 + 9 + 7 + 2 == plan.lower_bound_ms
    assert plan.proven_optimal
    # Within slots the ranks' sums are evened out: 65 / 2 is out of reach.
    assert plan.makespan_ms == 33.0


def test_ddp_slots_line_up_and_are_evened_out():
    costs = [10.0, 9.0, 5.0, 4.0, 3.0, 2.0, 2.0, 1.0]
    plan = plan_window(costs, [1] * 8, ranks=2, accumulate=4)
    assert plan.makespan_ms == 18.0
    assert all(list(row) == sorted(row, reverse=True) for row in plan.predicted_ms)
    # No plan has less: the largest of each pair of neighbours.
    assert plan.slot_sum_ms == 10 + 5 + 3 + 2


def test_polishing_evens_slots_and_keeps_the_makespan():
    loads, rows = [10, 4, 7, 5, 3, 2], [[0, 1], [2, 3], [4, 5]]
    polish(loads, rows)
    sums = [sum(loads[cell] for cell in row) for row in rows]
    assert sum(max(loads[row[slot]] for row in rows) for slot in range(2)) == 10 + 4
    assert max(sums) == 14
    assert sorted(itertools.chain(*rows)) == list(range(6))


def test_random_is_a_distributed_sampler_and_length_deals_slots():
    tokens = [5, 9, 7, 3, 8, 1]
    costs = [float(n) for n in tokens]
    plan = plan_window(costs, tokens, ranks=2, accumulate=3, policy="random")
    assert plan.cells == (((0,), (2,), (4,)), ((1,), (3,), (5,)))
    plan = plan_window(costs, tokens, ranks=2, accumulate=3, policy="length")
    assert plan.cells == (((1,), (0,), (3,)), ((4,), (2,), (5,)))
    plan = plan_window(costs, tokens, ranks=2, accumulate=2, policy="random")
    assert plan.cells == (((0, 2), (4,)), ((1, 3), (5,)))
    # Pads are the shortest item, at the end of a rank's row.
    plan = plan_window(costs[:3], tokens[:3], ranks=2, accumulate=2, policy="random")
    assert plan.cells == (((0,), (2,)), ((1,), (0,)))
    assert plan.is_padding == ((False, False), (False, True))
    assert plan.target_tokens == 4 + 8 + 6


def test_simple_policies_repack_what_breaks_the_cap():
    tokens = [6, 1, 6, 1, 2, 1, 2, 1]
    costs = [float(n) for n in tokens]
    plan = plan_window(costs, tokens, ranks=2, accumulate=2, policy="random", max_tokens=8)
    assert plan.cells == (((0, 4), (2, 6)), ((1, 3), (5, 7)))
    # Rank 0 cannot hold its items at all: the window is planned by tokens.
    plan = plan_window(costs, tokens, ranks=2, accumulate=1, policy="random", max_tokens=10)
    assert sorted(sum(tokens[i] for i in cell) for cell in cells_of(plan)) == [10, 10]


def test_planning_on_tokens_is_judged_by_costs():
    tokens, costs = [4, 4, 2, 2], [1.0, 1.0, 9.0, 9.0]
    plan = plan_window(costs, tokens, ranks=2, accumulate=2, policy="tokens")
    assert plan.makespan_ms == 10.0
    plan = plan_window(costs, [4, 2, 4, 2], ranks=2, accumulate=2, policy="flops", weights=[9, 9, 1, 1])
    assert plan.value_ms == 10.0
    plan = plan_window([1.0, 1.0, 9.0, 9.0], [1, 2, 1, 2], ranks=2, accumulate=2, policy="tokens")
    assert plan.proven_optimal == (plan.gap == 0.0)


def test_weights_have_no_unit():
    weights = np.array([3.7, 1.2, 9.9, 4.4, 2.8, 6.1])
    options = {"ranks": 2, "accumulate": 3, "policy": "flops"}
    plans = [
        plan_window([1.0] * 6, [1] * 6, weights=weights * unit, **options) for unit in (1e-12, 1.0, 1e15)
    ]
    assert plans[0].cells == plans[1].cells == plans[2].cells


def test_no_items():
    plan = plan_window([], [], ranks=3, accumulate=2)
    assert (plan.cells, plan.num_micro_batches, plan.target_tokens) == (((), (), ()), 0, 0)
    assert (plan.value_ms, plan.gap, plan.makespan_ms, plan.slot_sum_ms) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("objective", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("costs", "value"),
    [
        ([0.0] * 8, (0.0, 0.0)),
        ([3.0] * 8, (12.0, 12.0)),
        ([1000.0] + [1.0] * 7, (1003.0, 1003.0)),
        # Half a microsecond is rounded up.
        ([0.0005] * 8, (0.004, 0.004)),
        ([1e15 / 8] * 8, (5e14, 5e14)),
    ],
)
def test_costs_at_the_edge(objective, costs, value):
    plan = plan_window(costs, [1] * 8, ranks=2, accumulate=4, objective=objective)
    assert plan.value_ms == value[objective == "fsdp"]
    assert plan.proven_optimal
    assert plan.gap == 0.0


def test_uneven_counts_beat_equal_ones_where_one_item_is_huge():
    costs, tokens = [10.0, *[1.0] * 11], [1] * 12
    options = {"ranks": 2, "accumulate": 1}
    assert plan_window(costs, tokens, **options).value_ms == 11.0
    even = plan_window(costs, tokens, equal_counts=True, **options)
    assert even.value_ms == 15.0
    assert even.proven_optimal


def test_exact_lifts_the_limit():
    generator = np.random.default_rng(5)
    costs = generator.integers(10**6, 2 * 10**6, 18) / 1000
    options = {"ranks": 3, "accumulate": 6}
    quick, exact = (plan_window(costs, [1] * 18, exact=e, **options) for e in (False, True))
    assert not quick.proven_optimal
    assert exact.proven_optimal
    assert exact.lower_bound_ms <= exact.value_ms <= quick.value_ms


def test_imbalances_have_the_names_of_the_metrics():
    plan = plan_window([4.0, 2.0, 1.0, 1.0], [1] * 4, ranks=2, accumulate=2)
    assert plan.imbalances() == {
        "balance/imbalance_predicted": 1.25,
        "balance/imbalance_slot_predicted": pytest.approx((4 / 3 + 1.0) / 2),
        "balance/imbalance_micro_batch_predicted": 2.0,
        "balance/imbalance_within_predicted": pytest.approx((4 / 2.5 + 2 / 1.5) / 2),
    }
