"""The times that micro-batches are steered to, and what they are taken from."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sparse_run import BLOCK, BUDGET, COST, LENGTHS
from tiny import packed

from sb_lightning.balance import SparsityAwareBatchSampler, WindowSync
from sb_lightning.callbacks import sparse_balance_goals
from sb_lightning.callbacks.sparse_balance_goals import EMA_RATE, EmaGoals, PlanGoals, SlotGoals
from sb_lightning.callbacks.sparse_balance_settings import TuningSettings
from sb_lightning.tuning import anchor_latency
from sb_lightning.tuning.curves import CURVE_BUDGETS
from sb_lightning.tuning.window_targets import Prices

PRICES = Prices.of(COST)


def plan_goals(num_windows=0, sampler=None, **settings):
    made = SparsityAwareBatchSampler(
        LENGTHS,
        ranks=2,
        rank=1,
        accumulate=2,
        policy="random",
        latency=COST,
        budget=BUDGET,
        **(sampler or {}),
    )
    points = np.linspace(0, 1, len(CURVE_BUDGETS))[None].repeat(len(LENGTHS), 0)
    budgets, ids = [BUDGET] * len(LENGTHS), range(len(LENGTHS))
    made.store.update(1, ids=list(ids), lengths=LENGTHS, budgets=budgets, curves=points, weights=np.ones(12))
    asked = []

    def prices(version):
        asked.append(version)
        return PRICES

    goals = PlanGoals(made, TuningSettings(**settings), BUDGET, prices, BLOCK, lambda: num_windows)
    return goals, made, asked


@pytest.mark.parametrize("anchor", ["min", "mean", "max"])
def test_a_plan_is_steered_to_the_anchor_of_all_its_micro_batches(anchor):
    goals, sampler, asked = plan_goals(anchor=anchor)
    for window in range(3):
        cells = [[sampler.cell(window, m, rank) for m in range(2)] for rank in range(2)]
        lengths = [[[LENGTHS[i] for i in cell] for cell in row] for row in cells]
        times = [PRICES.cell_us(cell, BUDGET) for row in lengths for cell in row]
        for m in range(2):
            goal = goals.goal(None, 2 * window + m)
            assert goal.tau_us == anchor_latency(times, anchor)
            assert list(goal.lengths) == lengths[1][m]
            assert list(goal.ids) == list(cells[1][m])
    assert asked == [0 - sampler.lag, 1 - sampler.lag, 2 - sampler.lag]


def test_a_plan_waits_for_the_end_of_the_warm_up():
    taus = [plan_goals(windows, warmup_windows=2)[0].goal(None, 0).tau_us for windows in (0, 1, 2, 3)]
    assert [tau is None for tau in taus] == [True, True, False, False]


def test_a_plan_counts_sequences_as_long_as_they_are_cut():
    """Eight sequences of 40 tokens do not fit into four micro-batches of 40: the window cuts them to 20."""
    crowded = {"max_tokens": 40, "overflow": "truncate", "sequences_per_micro_batch": 2}
    goals, *_ = plan_goals(sampler=crowded)
    with pytest.warns(UserWarning, match="overflow='truncate'"):
        goal = goals.goal(None, 0)
    cells = [n for row in goals.cells for cell in row for n in cell]
    assert sorted(set(cells)) == [16, 20]
    assert set(goal.lengths) <= {16, 20}


@pytest.mark.parametrize("is_known", [True, False])
def test_slack_is_asked_for_what_the_settings_say(monkeypatch, is_known):
    given = {}

    def slack_budgets(cells, sequences, **options):
        given.update(options, sequences=sequences)
        return [BUDGET + 1] * len(sequences)

    monkeypatch.setattr(sparse_balance_goals, "slack_budgets", slack_budgets)
    settings = {"tolerance": 0.4, "min_budget": 2, "max_budget": 5, "tune_short": True, "slack_speed": 0.5}
    goals, sampler, _ = plan_goals(anchor="slack", sampler={"objective": "fsdp"}, **settings)
    if not is_known:
        sampler.store._ring[-1].curves = None
    goal = goals.goal(None, 0)
    assert bool(given) == is_known
    if not is_known:
        assert goal.budgets == ()
        return
    assert goal.tau_us == PRICES.cell_us(list(goal.lengths), BUDGET + 1)
    assert goal.budgets == (BUDGET + 1,) * len(goal.lengths)
    for name in ("tolerance", "min_budget", "tune_short"):
        assert given[name] == settings[name]
    assert (given["speed"], given["objective"], given["fixed_us"]) == (0.5, "fsdp", PRICES.fixed_us)
    assert (
        max(len(s.coverage) for s in given["sequences"])
        == max(len(s.cost_us) for s in given["sequences"])
        == 5
    )


def outcome(*times):
    """A window of micro-batches that take so long at k0."""
    return SimpleNamespace(
        base_least_us=min(times), base_total_us=sum(times), base_most_us=max(times), cells=len(times)
    )


@pytest.mark.parametrize(
    ("anchor", "first", "second"), [("min", 100, 40), ("mean", 250, 70), ("max", 500, 100)]
)
def test_the_average_is_that_of_the_anchor(anchor, first, second):
    goals = EmaGoals(TuningSettings(anchor=anchor), None, None, 0)
    assert goals.goal({}, 0).tau_us is None
    goals.learn(outcome(100, 150, 500))
    assert goals.goal({}, 0).tau_us == goals.ema_us == first
    goals.learn(outcome(40, 100))
    assert goals.ema_us == first + EMA_RATE * (second - first)
    assert goals.inputs() == {"ema_us": goals.ema_us}


def test_an_average_that_is_known_waits_for_the_end_of_the_warm_up():
    goals = EmaGoals(TuningSettings(anchor="mean", warmup_windows=2), None, 300.0, 0)
    taus = []
    for _ in range(3):
        taus.append(goals.goal({}, 0).tau_us)
        goals.learn(outcome(300))
    assert taus == [None, None, 300]
    assert EmaGoals(TuningSettings(warmup_windows=2), None, 300.0, 2).goal({}, 0).tau_us == 300


class TwoRanks(WindowSync):
    """This rank, and another one that begins a micro-batch which takes so long."""

    def __init__(self, other_us, batch_idx=0, window=0):
        super().__init__(is_alone=True)
        self.other = [other_us, batch_idx, window, 0]

    def gather_words(self, words):
        return np.array([words, self.other])


def slots(sync, num_windows=0, **settings):
    return SlotGoals(TuningSettings(sync="slot", **settings), sync, PRICES, BUDGET, None, num_windows)


@pytest.mark.parametrize("anchor", ["min", "mean", "max"])
def test_a_slot_is_steered_to_the_anchor_of_all_ranks(anchor):
    mine = PRICES.cell_us([200, 40], BUDGET)
    goal = slots(TwoRanks(3 * mine), anchor=anchor).goal(packed([200, 40]), 0)
    assert goal.tau_us == {"min": mine, "mean": 2 * mine, "max": 3 * mine}[anchor]


def test_slots_meet_in_the_warm_up_too_and_tune_nothing():
    goals = slots(TwoRanks(100), warmup_windows=1)
    assert goals.goal(packed([200]), 0).tau_us is None
    goals.learn(outcome(1))
    goals._sync.other[2] = 1
    assert goals.goal(packed([200]), 0).tau_us is not None


@pytest.mark.parametrize(("batch_idx", "window"), [(1, 0), (0, 1)])
def test_ranks_at_different_micro_batches_are_named(batch_idx, window):
    goals = slots(TwoRanks(100, batch_idx, window))
    with pytest.raises(RuntimeError, match=rf"micro-batches \[0, {batch_idx}\] of windows \[0, {window}\]"):
        goals.goal(packed([200]), 0)


class Unlisted:
    def __repr__(self):
        return "Unlisted"


WRONG_LENGTHS = {
    "none": (None, TypeError, "returns None"),
    "number": (5, TypeError, "returns a int"),
    "text": ("12", TypeError, "returns a str"),
    "dict": ({5: 1}, TypeError, "returns a dict"),
    "set": ({5, 6}, TypeError, "returns a set"),
    "rows": (torch.tensor([[5]]), TypeError, "a Tensor of 2 dimensions"),
    "scalar": (np.int64(5), TypeError, "a int64 of 0 dimensions"),
    "meta": (torch.zeros(2, dtype=torch.int64, device="meta"), TypeError, "without data"),
    "nested": ([[5], [6]], TypeError, r"returns \[5\] for a sequence"),
    "text items": (["5"], TypeError, "returns '5' for a sequence"),
    "other items": ([Unlisted()], TypeError, "returns Unlisted for a sequence"),
    "bools": (torch.tensor([True]), TypeError, "returns True for a sequence"),
    "array bools": ([np.bool_(1)], TypeError, "returns True for a sequence"),
    "nan": ([float("nan")], ValueError, "nan tokens"),
    "inf": (np.array([np.inf]), ValueError, "inf tokens"),
    "fraction": ([5.7], ValueError, "5.7 tokens"),
    "negative": ([-5], ValueError, "-5 tokens"),
    "too many": ([2**31], ValueError, "2147483648 tokens"),
}


@pytest.mark.parametrize("kind", ["slot", "ema"])
@pytest.mark.parametrize("case", WRONG_LENGTHS)
def test_what_a_function_of_lengths_may_not_return(case, kind):
    found, error, named = WRONG_LENGTHS[case]
    with pytest.raises(error, match=f"^lengths of SparseBalanceCallback .*{named}.*To fix it"):
        given(kind, found).goal({}, 0)


def given(kind, found):
    """Goals of whoever passes a function of the batch that returns this."""
    if kind == "slot":
        return SlotGoals(TuningSettings(sync="slot"), TwoRanks(100), PRICES, BUDGET, lambda batch: found, 0)
    return EmaGoals(TuningSettings(sync="ema"), lambda batch: found, 300.0, 0)


@pytest.mark.parametrize(
    "found",
    [
        [5, 6],
        (5, 6),
        np.array([5, 6]),
        torch.tensor([5.0, 6.0]),
        [np.int32(5), torch.tensor(6)],
        iter([5, 6]),
    ],
    ids=["list", "tuple", "array", "whole floats", "scalars", "iterator"],
)
def test_what_a_function_of_lengths_may_return(found):
    assert given("ema", found).goal({}, 0).lengths == (5, 6)


def test_a_slot_may_have_no_tokens():
    """Of a packed batch without a sequence: its fixed cost is left."""
    nothing = {name: torch.zeros(1, 0, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    assert slots(TwoRanks(0), anchor="max").goal(nothing, 0).tau_us == PRICES.fixed_us
