"""What the layers of a forward have written, as figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sb_lightning.callbacks.sparse_balance_outcome import RanForward
from sb_lightning.tuning import SparseTarget
from sb_lightning.tuning.coverage import sampled_rows

BLOCK = 16
# Budget, coverage, coverage at k0 # [layers, sequences, 3]; the first layer is dense, the last has not run.
RECORD = [
    [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    [[2, 0.5, 0.25], [1, 0.0, 0.0], [1, 0.0, 0.5]],
    [[3, 0.75, 0.25], [1, 0.0, 0.0], [1, 0.5, 0.5]],
    [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
]


def ran(**changed):
    """A sequence of 200 tokens, padding, and a sequence of 40, at 10 and 5 us per block."""
    cost = np.array([[10, 20, 30, 40], [1000] * 4, [5, 10, 15, 20]])
    target = SparseTarget(
        cost_us=torch.from_numpy(cost), tau_us=torch.tensor(25), tolerance=torch.tensor(1.0),
        k0=torch.tensor([2, 1, 9]), given=torch.zeros(3), record=torch.tensor(RECORD),
    )  # fmt: skip
    forward = RanForward(
        target=target, layers=[1, 2, 3], lengths=[200, 30, 40], ids=[7, -1, 8],
        is_real=np.array([True, False, True]), cost_us=cost, k0=np.array([2, 1, 9]), tau_us=25, fixed_us=100,
        block_size=BLOCK,
    )  # fmt: skip
    return replace(forward, **changed)


def test_layers_that_ran_are_counted_and_padding_is_not():
    found = ran().outcome()
    assert (found.lengths, found.ids) == ([200, 40], [7, 8])
    assert found.budgets.tolist() == [2.5, 1.0]
    assert (found.least_budget, found.most_budget) == (1, 3)
    assert found.coverage.tolist() == [0.625, 0.25]
    assert found.base_coverage.tolist() == [0.25, 0.5]
    assert found.rows.tolist() == [sampled_rows(200, BLOCK), sampled_rows(40, BLOCK)]
    # Budgets beyond the table's width cost what the last of it does.
    assert found.base_us == 100 + 20 + 20
    assert found.chosen_us == 100 + (25 + 35) / 2


def test_a_layer_that_takes_just_the_time_it_may_is_feasible():
    assert (ran().outcome().decisions, ran().outcome().infeasible) == (2, 1)
    assert ran(tau_us=35).outcome().infeasible == 0
    assert ran(tau_us=24).outcome().infeasible == 2
    untuned = ran(tau_us=None).outcome()
    assert (untuned.decisions, untuned.infeasible) == (0, 0)


def test_coverage_that_was_not_measured_is_what_was_expected():
    expected = np.array([[0.0, 0.3, 0.6, 0.9], [0.0, 0.1, 0.2, 1.0]])
    found = ran(layers=[1], expected=expected).outcome()
    assert found.coverage.tolist() == [0.3, 0.0]
    assert found.base_coverage.tolist() == [0.3, 1.0]


@pytest.mark.parametrize("changed", [{"is_real": np.zeros(3, dtype=bool)}, {"layers": [3]}], ids=str)
def test_nothing_that_ran_is_no_outcome(changed):
    assert ran(**changed).outcome() is None
