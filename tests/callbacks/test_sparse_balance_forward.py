"""What gives each forward its target: padding, and several forwards in one micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sparse_run import BLOCK, BUDGET, COST, build
from tiny import packed

from sb_lightning.callbacks.sparse_balance_attach import attach
from sb_lightning.callbacks.sparse_balance_forward import ForwardTuner
from sb_lightning.callbacks.sparse_balance_settings import TuningSettings
from sb_lightning.tuning.curves import CURVE_BUDGETS
from sb_lightning.tuning.window_targets import CellGoal, Prices

PRICES = Prices.of(COST)


def tuned_model(**settings):
    model = build().train()
    tuner = ForwardTuner(TuningSettings(**{"tolerance": 0.3, **settings}), PRICES)
    attach(model, model.model, tuner)
    return model, tuner


def run(model, tuner, batch, **goal):
    """Run one forward that is steered to a time; returns its budgets # [layers, N]"""
    tuner.goal = CellGoal(**goal)
    names = ("input_ids", "attention_mask", "position_ids", "cu_seqlens", "max_seqlen")
    model(**{name: batch[name] for name in names if name in batch}, use_cache=False)
    return tuner.forwards[-1].target.record[..., 0]


@pytest.mark.parametrize("share", [0.8, 1.3])
def test_padding_takes_no_time_from_the_sequences_beside_it(share):
    """Sequences of a padded batch are given what they would be without padding."""
    lengths = [256, 64 + BLOCK]
    tau = round(share * PRICES.cell_us(lengths, BUDGET))
    rows = packed(lengths)["input_ids"][0].split(lengths)
    padded = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, rows)), batch_first=True),
    }
    model, tuner = tuned_model()
    want = run(model, tuner, packed(lengths), tau_us=tau)
    got = run(model, tuner, padded, tau_us=tau)
    assert got[:, :2].tolist() == want.tolist() != [[BUDGET] * 2] * 2
    assert got[:, 2:].tolist() == [[1], [1]]
    outcomes = tuner.take()
    assert outcomes[0].chosen_us == outcomes[1].chosen_us
    assert outcomes[0].infeasible == outcomes[1].infeasible


def test_two_forwards_of_a_micro_batch_have_its_fixed_cost_once():
    model, tuner = tuned_model(tolerance=0.0)
    lengths = [90, 200], [150]
    for each in lengths:
        run(model, tuner, packed(each), tau_us=PRICES.cell_us(each, BUDGET))
    assert PRICES.fixed_us > 0
    predicted_ms, budget = tuner.prediction()
    assert 1e3 * predicted_ms == pytest.approx(PRICES.cell_us([90, 200, 150], BUDGET))
    assert budget == BUDGET
    tuner.end_micro_batch()
    assert tuner.prediction() is None


def test_short_sequences_are_cut_where_asked():
    budgets = {}
    for tune_short in (False, True):
        model, tuner = tuned_model(tune_short=tune_short, tolerance=0.5)
        budgets[tune_short] = run(model, tuner, packed([64]), tau_us=0)
    assert (budgets[False] == BUDGET).all()
    assert (budgets[True] < BUDGET).all()


@pytest.mark.parametrize("tune_short", [False, True])
def test_a_step_s_budget_comes_from_what_was_learnt(tune_short):
    """One budget for all layers, by the curve that is expected; nothing is measured."""
    model, tuner = tuned_model(granularity="step", tolerance=0.5, tune_short=tune_short)
    points = np.array([0.0, 0.5, 0.75, 1.0] + [1.0] * (len(CURVE_BUDGETS) - 4))
    tuner.curve = lambda length: points
    tuner.measures = False
    got = run(model, tuner, packed([256, 48]), tau_us=0)
    # From 1.0 at four blocks, half of it may go; three blocks are covered whole by four.
    assert got.tolist() == [[2, 2 if tune_short else BUDGET]] * 2
    assert not tuner.forwards[-1].target.measures
    (outcome,) = tuner.take()
    assert outcome.coverage.tolist() == [0.5, 0.5 if tune_short else 1.0]
    assert outcome.base_coverage.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("told", "ran", "is_refused"),
    [
        ([90, 60], [[90, 60]], False),
        ([90, 60], [[90], [60]], False),
        ([90, 60], [[90, 60], [90, 60]], False),
        ([90], [[90, 60]], True),
        ([90, 61], [[90, 60]], True),
        ([90, 60], [[90]], True),
        ([], [[90]], True),
    ],
    ids=["equal", "two forwards", "twice", "too few", "too many", "one left out", "none"],
)
def test_told_lengths_are_compared_with_those_that_ran(told, ran, is_refused):
    model, tuner = tuned_model()
    tuner.checks_lengths = True
    for lengths in ran:
        run(model, tuner, packed(lengths), tau_us=1000, lengths=tuple(told))
    if not is_refused:
        return tuner.end_micro_batch()
    says = f"lengths of .* returns {sum(told)} tokens for a batch, and {sum(map(sum, ran))} have run.*To fix"
    with pytest.raises(ValueError, match=says):
        tuner.end_micro_batch()
    return None


@pytest.mark.parametrize("ran", [150, 160])
def test_lengths_that_were_believed_are_compared_when_the_window_is_over(ran):
    """As on a device, where reading the bounds before the forward would wait."""
    _, tuner = tuned_model()
    tuner._unread.append((torch.tensor(ran), 150))
    if ran == 150:
        assert tuner.take() == []
        return
    with pytest.raises(ValueError, match="returns 150 tokens for a batch, and 160 have run"):
        tuner.take()
