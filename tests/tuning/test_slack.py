"""The anchor 'slack': never predicted slower than the mean, nor to cover less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.tuning import anchor_latency, choose_budgets
from sb_lightning.tuning.slack import ExpectedSequence, slack_budgets

K0 = 4
FIXED = 7


def sequence(blocks, price, shape, rows=10):
    budgets = np.arange(1, blocks + 1)
    coverage = ((budgets - 1) / max(blocks - 1, 1)) ** shape
    return ExpectedSequence(
        coverage=coverage, cost_us=(price * budgets).astype(np.int64), k0=K0, rows=rows, num_blocks=blocks
    )


@st.composite
def windows(draw):
    ranks, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sequences, cells = [], []
    for _ in range(ranks):
        row = []
        for _ in range(micro_batches):
            cell = []
            for _ in range(draw(st.integers(1, 2))):
                cell.append(len(sequences))
                sequences.append(
                    sequence(
                        draw(st.integers(1, 24)), draw(st.integers(1, 50)), draw(st.floats(0.2, 1.0)),
                        draw(st.integers(0, 30)),
                    )
                )  # fmt: skip
            row.append(cell)
        cells.append(row)
    return cells, sequences


def anchor_of(cells, sequences):
    times = [FIXED + sum(sequences[n].time_us(K0) for n in cell) for row in cells for cell in row]
    return anchor_latency(times)


def mean_budgets(cells, sequences, anchor, tolerance):
    budgets = {}
    for cell in (cell for row in cells for cell in row):
        width = max(len(sequences[n].coverage) for n in cell)
        pad = [(0, width - len(sequences[n].coverage)) for n in cell]
        found = choose_budgets(
            np.stack([np.pad(sequences[n].coverage, p, mode="edge") for n, p in zip(cell, pad, strict=True)]),
            np.stack([np.pad(sequences[n].cost_us, p, mode="edge") for n, p in zip(cell, pad, strict=True)]),
            anchor - FIXED,
            tolerance=tolerance,
            k0=K0,
            rows=[sequences[n].rows for n in cell],
            num_blocks=[sequences[n].num_blocks for n in cell],
        )
        budgets |= dict(zip(cell, found.tolist(), strict=True))
    return budgets


def makespan(cells, sequences, budgets, objective="ddp"):
    times = [[sum(sequences[n].time_us(budgets[n]) for n in cell) for cell in row] for row in cells]
    if objective == "fsdp":
        return sum(map(max, zip(*times, strict=True)))
    return max(map(sum, times))


def covered(sequences, budgets):
    return sum(
        s.rows * s.coverage[min(b, len(s.coverage)) - 1] for s, b in zip(sequences, budgets, strict=True)
    )


@settings(max_examples=80, deadline=None)
@given(windows(), st.sampled_from([0.05, 0.2, 1.0]), st.sampled_from(["ddp", "fsdp"]))
def test_it_is_predicted_no_slower_than_the_mean_and_to_cover_no_less(window, tolerance, objective):
    cells, sequences = window
    anchor = anchor_of(cells, sequences)
    mean = mean_budgets(cells, sequences, anchor, tolerance)
    found = slack_budgets(
        cells, sequences, anchor_us=anchor, fixed_us=FIXED, tolerance=tolerance, objective=objective
    )
    assert makespan(cells, sequences, found, objective) <= makespan(cells, sequences, mean, objective)
    assert covered(sequences, found) >= covered(sequences, [mean[n] for n in range(len(found))]) - 1e-6
    for s, budget in zip(sequences, found, strict=True):
        low, high = s.allowed(tolerance, 1, False)
        assert low <= budget <= high


@settings(max_examples=40, deadline=None)
@given(windows())
def test_speed_lowers_the_time_to_the_least_reachable(window):
    cells, sequences = window
    anchor = anchor_of(cells, sequences)
    spans = [
        makespan(
            cells, sequences,
            slack_budgets(cells, sequences, anchor_us=anchor, fixed_us=FIXED, tolerance=0.3, speed=speed),
        )
        for speed in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    least = [s.allowed(0.3, 1, False)[0] for s in sequences]
    assert spans[0] >= spans[1] >= spans[2]
    assert spans[2] == makespan(cells, sequences, least)


def test_time_that_a_rank_would_wait_buys_coverage():
    # Rank 0 has a sequence that cannot be cut; rank 1 has two that are worth reading more of.
    sequences = [sequence(5, 50, 1.0), sequence(40, 10, 0.5), sequence(40, 10, 0.5)]
    cells = [[[0]], [[1, 2]]]
    anchor = anchor_of(cells, sequences)
    mean = mean_budgets(cells, sequences, anchor, 0.2)
    found = slack_budgets(cells, sequences, anchor_us=anchor, fixed_us=FIXED, tolerance=0.2)
    assert [mean[n] for n in range(3)] == [4, 7, 7]
    assert found == [4, 9, 9]


def test_a_rank_whose_cells_differ_moves_time_between_them():
    # The mean caps the cell of the sequence that has most to gain, and the rank has time left in the other.
    sequences = [sequence(20, 30, 0.4), sequence(5, 10, 1.0), sequence(20, 40, 0.9), sequence(20, 40, 0.9)]
    cells = [[[0], [1]], [[2], [3]]]
    anchor = anchor_of(cells, sequences)
    mean = mean_budgets(cells, sequences, anchor, 0.3)
    found = slack_budgets(cells, sequences, anchor_us=anchor, fixed_us=FIXED, tolerance=0.3)
    assert found[0] > mean[0]
    assert makespan(cells, sequences, found) == pytest.approx(makespan(cells, sequences, mean), rel=0.15)
