from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb_lightning.tracking.metrics import (
    idle_ms,
    imbalance,
    imbalance_micro_batch,
    imbalance_slot,
    imbalance_within,
    prediction_error_pct,
)
from sb_lightning.tracking.run_imbalance import MOST_KEPT, RunImbalance
from sb_lightning.tracking.spans import LANES
from sb_lightning.tracking.window_record import (
    MAX_NAMED,
    MeasuredCell,
    decode_window,
    encode_window,
    fit_cells,
    payload_sizes,
    window_metrics,
)

durations = st.floats(0.01, 1e4)


@st.composite
def tables(draw):
    """Times of 1-5 ranks, each with 1-4 micro-batches of its own; and the same padded with NaN."""
    rows = draw(st.lists(st.lists(durations, min_size=1, max_size=4), min_size=1, max_size=5))
    width = max(map(len, rows))
    return rows, np.array([row + [math.nan] * (width - len(row)) for row in rows])


def ratio(values):
    return max(values) / (sum(values) / len(values))


@given(tables())
def test_every_imbalance_by_brute_force(case):
    rows, times = case
    sums = [sum(row) for row in rows]
    slots = [[row[a] for row in rows] for a in range(min(map(len, rows)))]
    assert imbalance(times) == pytest.approx(ratio(sums))
    assert imbalance_slot(times) == pytest.approx(sum(map(ratio, slots)) / len(slots))
    assert imbalance_micro_batch(times) == pytest.approx(ratio([t for row in rows for t in row]))
    assert imbalance_within(times) == pytest.approx(sum(map(ratio, rows)) / len(rows))
    assert idle_ms(times) == pytest.approx(max(sums) - sum(sums) / len(sums), abs=1e-6)
    # What DDP loses: idle is the share of the imbalance above 1.
    assert imbalance(times) - 1 == pytest.approx(idle_ms(times) / (sum(sums) / len(sums)), abs=1e-9)


@given(st.lists(durations, min_size=1, max_size=5))
def test_one_rank_is_balanced(times):
    table = np.array([times])
    assert imbalance(table) == imbalance_slot(table) == 1.0
    assert idle_ms(table) == 0.0


def test_a_window_in_which_nothing_took_time_is_balanced():
    table = np.zeros((2, 3))
    assert [f(table) for f in (imbalance, imbalance_slot, imbalance_micro_batch, imbalance_within)] == [
        1.0
    ] * 4


def test_errors_of_predictions_leave_out_cells_without():
    predicted = np.array([[80.0, math.nan], [150.0, 7.0]])
    measured = np.array([[100.0, 5.0], [100.0, math.nan]])
    assert prediction_error_pct(predicted, measured) == pytest.approx((20 + 50) / 2)
    assert prediction_error_pct(np.array([[math.nan]]), np.array([[1.0]])) is None


def cell(seed, predicted=True, **fields):
    draw = np.random.default_rng(seed)
    lanes = tuple(float(value) for value in draw.uniform(1, 50, len(LANES)))
    lengths = sorted(draw.integers(1, 9000, int(draw.integers(1, 7))).tolist(), reverse=True)
    return MeasuredCell(
        **{
            "lanes_ms": lanes,
            "busy_ms": sum(lanes[:3]),
            "tokens": sum(lengths),
            "longest": lengths[0],
            "num_sequences": len(lengths),
            "predicted_ms": float(draw.uniform(1, 90)) if predicted else math.nan,
            "budget": 8.0,
            "sequences": tuple((seed * 10 + i, length) for i, length in enumerate(lengths[:MAX_NAMED])),
            **fields,
        }
    )


def gathered(rows, capacity, **fields):
    known = {"index": 7, "step": 8, "wall_s": 2.0, "monitor_ms": 1.0, "sync_ms": 0.25, **fields}
    payloads = [encode_window(row, capacity=capacity, **known) for row in rows]
    return np.array([floats for floats, _ in payloads]), np.array([ints for _, ints in payloads])


@pytest.mark.parametrize("counts", [[1], [3, 3], [2, 3, 1]], ids=str)
def test_a_window_arrives_as_it_was_sent(counts):
    rows = [[cell(10 * r + a) for a in range(count)] for r, count in enumerate(counts)]
    floats, ints = gathered(rows, 4)
    assert (floats.shape[1], ints.shape[1]) == payload_sizes(4)
    window = decode_window(floats, ints)
    assert window.cells == rows
    assert (window.index, window.step, window.wall_s) == (7, 8, 2.0)
    assert (window.monitor_ms, window.sync_ms) == (1.0, 0.25)


def test_a_rank_with_nothing_to_tell_makes_no_window():
    assert decode_window(*gathered([[cell(1)], []], 2)) is None


def test_cells_that_are_too_many_are_added_up():
    cells = [cell(i) for i in range(5)]
    kept = fit_cells(cells, 3)
    assert kept[:2] == cells[:2]
    assert kept[2].tokens == sum(c.tokens for c in cells[2:])
    assert kept[2].longest == max(c.longest for c in cells[2:])
    assert kept[2].busy_ms == pytest.approx(sum(c.busy_ms for c in cells[2:]))
    assert [length for _, length in kept[2].sequences] == sorted(
        (length for c in cells[2:] for _, length in c.sequences), reverse=True
    )[:MAX_NAMED]
    window = decode_window(*gathered([cells, cells], 3))
    assert [len(row) for row in window.cells] == [3, 3]


def window_of(rows, capacity=None, **fields):
    return decode_window(*gathered(rows, capacity or max(map(len, rows)) + 1, **fields))


def test_metrics_have_the_names_and_values_of_their_definitions():
    rows = [[cell(1), cell(2)], [cell(3), cell(4, is_padding=True)]]
    found = window_metrics(window_of(rows))
    kinds = ("", "_slot", "_micro_batch", "_within")
    assert set(found) == {
        *(f"balance/imbalance{kind}{twin}" for kind in kinds for twin in ("", "_predicted")),
        "balance/idle_ms",
        "predict/error_pct",
        "throughput/tokens_per_s",
        *(f"time/{lane}_ms" for lane in (*LANES, "monitor", "sync")),
    }
    busy = np.array([[c.busy_ms for c in row] for row in rows])
    predicted = np.array([[c.predicted_ms for c in row] for row in rows])
    assert found["balance/imbalance"] == imbalance(busy)
    assert found["balance/imbalance_within_predicted"] == imbalance_within(predicted)
    # Padding is work, not training data.
    assert found["throughput/tokens_per_s"] == sum(c.tokens for c in (*rows[0], rows[1][0])) / 2.0
    at = LANES.index("wait")
    assert found["time/wait_ms"] == pytest.approx(sum(c.lanes_ms[at] for row in rows for c in row) / 2)
    compute = np.array([[c.lanes_ms[1] + c.lanes_ms[2] for c in row] for row in rows])
    assert found["predict/error_pct"] == pytest.approx(
        float(np.mean(abs(predicted - compute) / compute)) * 100
    )


def test_ranks_that_share_a_batch_count_its_tokens_once():
    rows = [[cell(1)], [cell(1)]]
    one, two = (window_metrics(window_of(rows), replicas)["throughput/tokens_per_s"] for replicas in (1, 2))
    assert two == 2 * one == 2 * cell(1).tokens / 2.0


def test_what_is_unknown_is_absent():
    rows = [[cell(1, tokens=0), cell(2, tokens=0)], [cell(3, tokens=0), cell(4, predicted=False, tokens=0)]]
    found = window_metrics(window_of(rows))
    assert not any(name.endswith("_predicted") for name in found)
    assert "throughput/tokens_per_s" not in found
    assert "predict/error_pct" not in found


def test_the_straggler_is_the_slowest_rank_with_its_slowest_cell():
    rows = [[cell(1, busy_ms=9.0), cell(2, busy_ms=1.0)], [cell(3, busy_ms=5.0), cell(4, busy_ms=6.0)]]
    assert window_of(rows).straggler == (1, 1)


def test_a_cell_that_is_a_sum_counts_only_in_sums_over_ranks():
    rows = [[cell(a, busy_ms=float(a), predicted_ms=2.0 * a) for a in (1, 2, 3, 4)], [cell(5, busy_ms=3.0)]]
    window = window_of(rows, capacity=3)
    assert (window.num_cells, window.is_merged) == ((3, 1), (True, False))
    assert window.is_apart.tolist() == [[True, True, False], [True, False, False]]
    assert window.straggler == (0, 1)
    found = window_metrics(window)
    assert found["balance/imbalance"] == 10 / 6.5
    assert found["balance/idle_ms"] == 3.5
    assert found["balance/imbalance_micro_batch"] == 3 / 2
    assert found["balance/imbalance_within"] == pytest.approx((2 / 1.5 + 1) / 2)
    assert found["balance/imbalance_slot"] == 3 / 2


def test_a_sum_that_is_all_there_is_is_the_straggler():
    window = window_of([[cell(1, busy_ms=1.0), cell(2, busy_ms=2.0)]], capacity=1)
    assert window.straggler == (0, 0)
    assert window_metrics(window)["balance/imbalance_micro_batch"] == 1.0


@pytest.mark.parametrize("count", [MOST_KEPT, 4 * MOST_KEPT + 3])
def test_the_summary_of_a_long_run_keeps_little(count):
    run = RunImbalance()
    window = window_of([[cell(1, busy_ms=3.0)], [cell(2, busy_ms=1.0)]])
    metrics = window_metrics(window)
    for index in range(count + 1):
        run.add(window, {**metrics, "balance/imbalance": 1 + index / count})
    kept = [value for value in vars(run).values() if isinstance(value, (list, dict))]
    assert max(map(len, [*kept, run._sample.values])) <= MOST_KEPT
    summary = run.summary()
    assert summary["imbalance_median"] == pytest.approx(1.5, abs=2e-3)
    assert summary["imbalance_max"] == 2.0
    assert summary["imbalance"] == pytest.approx(1.5, abs=1e-3)


def test_the_summary_of_a_run_leaves_the_first_window_out():
    run = RunImbalance()
    assert run.summary() is None
    slow = [[cell(1, busy_ms=1.0)], [cell(2, busy_ms=99.0)]]
    even = [[cell(1, busy_ms=4.0)], [cell(2, busy_ms=4.0)]]
    worse = [[cell(1, busy_ms=9.0)], [cell(2, busy_ms=3.0)]]
    for index, rows in enumerate((slow, even, worse)):
        window = window_of(rows, index=index, monitor_ms=[0.0, 50.0, 2.0][index])
        run.add(window, window_metrics(window))
        if index == 0:
            assert run.summary()["imbalance"] == 99 / 50
    summary = run.summary()
    assert summary["windows"] == 2
    assert summary["ranks"] == 2
    assert summary["imbalance"] == pytest.approx((1.0 + 9 / 6) / 2)
    assert summary["imbalance_max"] == 1.5
    assert summary["idle_ms"] == pytest.approx((0 + 3) / 2)
    assert summary["idle_share"] == pytest.approx(3 / 4000)
    # The second window carries the cost of the first, which warmed up.
    assert (summary["monitor_ms"], summary["monitor_share"], summary["sync_ms"]) == (2.0, 0.001, 0.25)
    assert summary["straggler_share"] == {"0": 1.0}
    worst = summary["worst_cells"][0]
    assert (worst["window"], worst["rank"], worst["micro_batch"]) == (2, 0, 0)
    assert worst["sequences"] == [list(item) for item in cell(1).sequences]
    assert worst["busy_ms"] == 9.0
