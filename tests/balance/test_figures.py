"""What policies are predicted to give: figures against the plans they are made of."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.balance import SparsityAwareBatchSampler
from sb_lightning.balance.costs import GENERIC_SHAPE
from sb_lightning.balance.figures import (
    PERFECT,
    compare_policies,
    explain_policies,
    spread_windows,
)
from sb_lightning.balance.figures_table import time_unit
from sb_lightning.balance.policies import POLICIES
from sb_lightning.latency import AnalyticCost
from sb_lightning.tracking import imbalances

COST = AnalyticCost(GENERIC_SHAPE)
SKEWED = [int(x) for x in np.exp(np.random.default_rng(0).normal(6.5, 1.0, 100)).clip(8, 20000)]


def sampler_of(lengths=SKEWED, **options):
    options = {"ranks": 3, "rank": 0, "accumulate": 2, "latency": COST, "budget": 4, **options}
    return SparsityAwareBatchSampler(lengths, **options)


def test_figures_are_those_of_the_plans():
    sampler, windows = sampler_of(), [0, 3, 4, 16]
    found = compare_policies(sampler, ["latency", "length"], windows)
    assert list(found) == ["latency", "length"]
    plans = {
        policy: [sampler.plan(0, window, policy=policy) for window in windows]
        for policy in ("random", "length", "latency")
    }
    totals = {policy: sum(plan.value_ms for plan in of_policy) for policy, of_policy in plans.items()}
    for policy, figures in found.items():
        values = [plan.value_ms for plan in plans[policy]]
        times = [np.array(plan.predicted_ms) for plan in plans[policy]]
        assert (figures.policy, figures.objective, figures.windows) == (policy, "ddp", 4)
        assert figures.window_ms_mean == pytest.approx(np.mean(values))
        assert figures.window_ms_median == pytest.approx(np.median(values))
        assert figures.window_ms_p90 == pytest.approx(np.percentile(values, 90))
        assert figures.window_ms_max == max(values)
        assert figures.speedup == pytest.approx(totals["random"] / totals[policy])
        work = sum(t.sum() for t in times)
        assert figures.waiting_share == pytest.approx(1 - work / (3 * totals[policy]))
        expected = [imbalances(t, "_predicted") for t in times]
        assert set(figures.imbalances) == {
            f"balance/imbalance{kind}_predicted" for kind in ("", "_slot", "_micro_batch", "_within")
        }
        for name, value in figures.imbalances.items():
            assert value == pytest.approx(np.mean([ratios[name] for ratios in expected]))
        to_bound = [plan.gap for plan in plans[policy]]
        to_best = [0.0 if plan.proven_optimal else plan.gap for plan in plans[policy]]
        assert figures.gap_to_bound_mean == pytest.approx(np.mean(to_bound))
        assert figures.gap_to_bound_max == max(to_bound)
        assert figures.gap_to_best_mean == pytest.approx(np.mean(to_best))
        assert figures.gap_to_best_max == max(to_best)
        assert figures.proven_share == np.mean([plan.proven_optimal for plan in plans[policy]])
        assert figures.plan_ms > 0
        lost = [value - t.sum() / 3 for value, t in zip(values, times, strict=True)]
        # Window 16 is the epoch's short last one.
        assert figures.worst_window == windows[int(np.argmax(lost[:3]))]
        assert figures.median_window == windows[int(np.argsort(lost[:3])[1])]


def test_a_short_last_window_is_drawn_only_if_there_is_no_other():
    # Nobody waits in the full windows, and for long in the last.
    last = sampler_of([100] * 10, ranks=2, accumulate=2).members(0, 2)
    lengths = np.full(10, 100)
    lengths[last[0]] = 9000
    sampler = sampler_of(lengths.tolist(), ranks=2, accumulate=2)
    assert [len(sampler.members(0, window)) for window in range(3)] == [4, 4, 2]
    found = compare_policies(sampler, ["random"])["random"]
    assert found.window_ms_max == sampler.plan(0, 2, policy="random").value_ms
    assert found.worst_window != 2
    assert compare_policies(sampler, ["random"], [2])["random"].worst_window == 2


def test_a_plan_that_is_proven_best_has_no_gap_in_the_table():
    # One sequence longer than the mean: the bound is reached by no plan.
    found = sampler_of([1000, 990, 980, 400] * 6, ranks=3, accumulate=1).explain()
    latency = found.figures["latency"]
    assert latency.proven_share == 1
    assert latency.gap_to_best_max == 0
    text = str(found)
    (row,) = [line for line in text.splitlines() if line.startswith("latency ") and "%" in line]
    assert row.split()[-4:-1] == ["0.0%", "0.0%", "100%"]
    assert text.count("above best") == 2
    assert {"gap_to_best_mean", "gap_to_bound_mean"} <= found.to_dict()["figures"]["latency"].keys()


@given(
    lengths=st.lists(st.integers(1, 60000), min_size=12, max_size=40),
    ranks=st.integers(1, 4),
    objective=st.sampled_from(["ddp", "fsdp"]),
)
@settings(max_examples=25, deadline=None)
def test_no_policy_beats_perfect_balance(lengths, ranks, objective):
    sampler = sampler_of(lengths, ranks=ranks, objective=objective)
    found = explain_policies(sampler, list(POLICIES))
    bound = found.perfect
    assert bound.waiting_share == 0
    assert found.figures["random"].speedup == 1
    for policy, figures in found.figures.items():
        assert figures.speedup <= bound.speedup * (1 + 1e-9), policy
        assert 0 <= figures.waiting_share < 1
        assert figures.window_ms_median <= figures.window_ms_p90 <= figures.window_ms_max
        assert all(value >= 1 - 1e-9 for value in figures.imbalances.values())
    assert found.objectives.keys() == {"ddp", "fsdp"}
    assert found.objectives[objective].speedup == found.best.speedup
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_recommendation_is_the_fastest_for_both_objectives():
    found = sampler_of(objective="fsdp").explain()
    assert found.best.policy == "latency"
    assert found.best.speedup > 1.1
    for objective, gain in found.objectives.items():
        assert gain.objective == objective
        assert gain.speedup == pytest.approx(gain.random_ms / gain.window_ms)
    other = sampler_of(objective="ddp").explain()
    # Also from the other side: they are the figures of a sampler with that objective.
    assert found.objectives["ddp"] == other.objectives["ddp"]
    text = str(found)
    assert f"{found.objectives['fsdp'].speedup:.2f}x" in text
    assert "Recommended: policy latency" in text


def test_the_table_is_compact_and_says_where_times_come_from():
    found = sampler_of(tail="drop").explain(num_windows=5)
    text = str(found)
    assert "Predicted for 5 of 16 windows of epoch 0: 3 ranks x 2 micro-batches, objective ddp" in text
    assert "Times: analytic (no profile): only their ratios mean something" in text
    assert max(map(len, text.splitlines())) <= 110
    for policy in ("random", "length", "tokens", "latency", PERFECT):
        assert text.count(f"\n{policy} ") == 2
    assert not found.is_measured


def test_equal_sequences_need_no_balancing():
    found = sampler_of([500] * 24).explain()
    assert "Balancing gains little here" in found.recommendation
    assert "all 4 windows" in str(found)
    assert found.dominated_share == 0


def test_one_long_sequence_is_named_as_what_no_plan_evens_out():
    found = sampler_of([60000, 10, 10, 10, 10, 10] * 4).explain()
    assert found.dominated_share > 0
    assert "No plan evens that out" in found.recommendation


@pytest.mark.parametrize(
    ("longest", "tried", "said"),
    [
        (5000, [4, 8], "So accumulate 8 brings it below 10%."),
        (60_000, [4, 8, 16], "None of these brings it below 10%; shorter sequences would."),
    ],
)
def test_more_micro_batches_are_tried_where_one_takes_longer_than_the_mean(longest, tried, said):
    lengths = [longest, *[500] * 23] * 16
    sampler = sampler_of(lengths, ranks=2, accumulate=2, budget=None)
    found = sampler.explain(num_windows=96)
    assert found.is_dominated
    assert list(found.waiting_by_accumulate) == tried
    for accumulate, share in found.waiting_by_accumulate.items():
        larger = sampler_of(lengths, ranks=2, accumulate=accumulate, budget=None)
        full = len(lengths) // larger.window_size
        windows = spread_windows(full, 16)
        assert (
            share == compare_policies(larger, [found.best.policy], windows)[found.best.policy].waiting_share
        )
        assert f"{share:.1%} with {accumulate}" in found.recommendation
    assert found.recommendation.endswith(said)
    assert max(map(len, str(found).splitlines())) <= 110
    json.dumps(found.to_dict(), allow_nan=False)


def test_sizes_of_which_the_data_fill_no_window_are_not_tried():
    found = sampler_of([60000, 10, 10, 10, 10, 10]).explain()
    assert found.waiting_by_accumulate == {}
    assert "the data do not fill a window of twice as many" in found.recommendation


def test_without_a_table_the_recommendation_names_the_model_and_a_policy_that_needs_none():
    generic = sampler_of(accumulate=4).explain()
    text = generic.recommendation
    assert "Recommended: policy latency" in text
    assert "counted for a generic model, 24 layers of width 896, budget 4 blocks of 128 keys." in text
    assert (
        "Policy latency needs a table that `sb profile` measures, or AnalyticCost(shape) of your model"
        in text
    )
    best = max(("length", "tokens"), key=lambda policy: generic.figures[policy].speedup)
    assert f"choose policy {best}, which needs only lengths: {generic.figures[best].speedup:.2f}x." in text
    assert "\nModel: a generic one, 24 layers of width 896, budget 4" in str(generic)

    own = sampler_of(accumulate=4, latency=AnalyticCost(replace(GENERIC_SHAPE, hidden_size=512)), budget=None)
    text = own.explain().recommendation
    assert "counted for 24 layers of width 512, full attention." in text
    assert "AnalyticCost" not in text
    assert "A table that `sb profile` measures gives policy latency the times of your machine." in text


def test_a_measured_table_needs_no_more(tmp_path):
    found = replace(sampler_of().explain(), is_measured=True)
    assert "`sb profile`" not in str(found)
    assert "only their ratios" not in str(found)


def test_explain_shows_the_samplers_own_policy_and_changes_nothing():
    sampler = sampler_of(policy="flops")
    sampler.set_epoch(2)
    before = [list(cell) for cell in sampler]
    found = sampler.explain(3)
    assert list(found.figures) == ["random", "length", "tokens", "flops", "latency"]
    assert found.epoch == 2
    assert [list(cell) for cell in sampler] == before


def test_progress_counts_every_plan():
    calls = []
    explain_policies(sampler_of(), ["length", "latency"], [1, 2], lambda *call: calls.append(call))
    # Three policies with `random`, then two under the other objective.
    assert calls == [(done, 10) for done in range(1, 11)]


@pytest.mark.parametrize(
    ("policies", "windows", "said"),
    [
        (["lenght"], [0], "a policy is 'lenght'.*To fix it"),
        ([], [0], "policies is empty.*To fix it"),
        (["random"], [], "windows is empty.*To fix it"),
    ],
)
def test_nothing_to_compare_is_an_error(policies, windows, said):
    with pytest.raises(ValueError, match=said):
        compare_policies(sampler_of(), policies, windows)


def test_a_window_outside_the_epoch_is_an_error():
    with pytest.raises(IndexError, match="window 17 of epoch 0 does not run"):
        compare_policies(sampler_of(), ["random"], [17])


@pytest.mark.parametrize(("most", "count"), [(None, 1250), (1000, 1000), (7, 7), (5000, 1250)])
def test_windows_are_spread_over_the_epoch(most, count):
    found = spread_windows(1250, most)
    assert len(set(found)) == len(found) == count
    assert found == sorted(found)
    assert found[0] == 0
    assert 1249 - 1250 // count <= found[-1] <= 1249


def test_long_times_are_shown_in_seconds():
    assert time_unit(99_999) == ("ms", 1.0)
    text = str(sampler_of([200000, 90000, 70000] * 6).explain())
    assert "mean s" in text
    assert "s per step" in text


def test_table_and_recommendation_have_one_unit():
    found = sampler_of([200000, 90000, 70000] * 6).explain()
    # The mean is below the limit, the longest window above it.
    shorter = replace(
        found,
        figures={
            name: replace(figures, window_ms_mean=90_000.0, window_ms_max=110_000.0)
            for name, figures in found.figures.items()
        },
        perfect=replace(found.perfect, window_ms_mean=80_000.0, window_ms_max=90_000.0),
        objectives={
            name: replace(gain, random_ms=95_000.0, window_ms=90_000.0)
            for name, gain in found.objectives.items()
        },
    )
    assert "mean s" in str(shorter)
    assert "(95.0 -> 90.0 s per step)" in str(shorter)


def test_figures_need_neither_lightning_nor_transformers_nor_matplotlib():
    code = (
        "import sys; import sb_lightning.balance.figures, sb_lightning.tracking.plan_picture\n"
        "print(*{'lightning', 'pytorch_lightning', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
