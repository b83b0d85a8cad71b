"""ImbalanceMonitor on two ranks: planted sleeps are found, and both ranks tell the same."""

from __future__ import annotations

import json

import pytest
from imbalance_run import (
    CLOCKS_S,
    SLEEP_S,
    lane,
    lines,
    planted_fit,
)

from sb_lightning.callbacks.imbalance_table import name_sequences

# Micro-batch -> lane and rank of a sleep; windows are pairs of micro-batches.
PLANTS = {3: ("forward", 1), 4: ("data", 0), 7: ("backward", 1), 8: ("forward", 0), 10: ("data", 1)}


@pytest.fixture(scope="module")
def planted(gloo_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    return gloo_pool.run(planted_fit, folder, PLANTS, 12), folder


def test_a_planted_sleep_is_found_on_its_rank_in_its_lane_with_its_size(planted):
    (first, _), _ = planted
    windows = {window.index: window for window in first["windows"]}
    assert sorted(windows) == list(range(6))
    for number, (lane_name, rank) in PLANTS.items():
        window = windows[number // 2]
        here, there = window.cells[rank], window.cells[1 - rank]
        slept = here[number % 2]
        assert window.straggler == (rank, number % 2), number
        # A busy machine may add to any of them, so they are compared, and only the sleep is a bound.
        assert lane(slept, lane_name) >= SLEEP_S, number
        for other in {"data", "forward", "backward"} - {lane_name}:
            assert lane(slept, other) < lane(slept, lane_name), (number, other)
        assert slept.busy_ms / 1e3 >= SLEEP_S
        # Whoever waited, it was not busy: the wait has its own lanes.
        waited = sum(lane(cell, "wait") + lane(cell, "broadcast") for cell in there)
        assert waited > sum(cell.busy_ms for cell in there) / 1e3, number
        assert waited > sum(lane(cell, "wait") for cell in here), number


def test_what_is_logged_of_a_planted_window_is_what_was_measured(planted):
    (first, _), _ = planted
    for window, logged in zip(first["windows"], first["logged"], strict=True):
        sums = [sum(cell.busy_ms for cell in cells) for cells in window.cells]
        mean = sum(sums) / 2
        assert logged["balance/imbalance"] == pytest.approx(max(sums) / mean)
        assert logged["balance/idle_ms"] == pytest.approx(max(sums) - mean, rel=1e-4)


def test_both_ranks_log_the_same_in_one_gather_per_window(planted):
    (first, second), _ = planted
    assert first["logged"] == second["logged"]
    assert first["summary"] == second["summary"]
    # One more when the training ends.
    assert first["gathers"] == second["gathers"] == 6 + 1
    assert first["hooks_left"] == second["hooks_left"] == [False, 0]


def test_the_progress_bar_shares_the_gather(planted):
    (first, second), _ = planted
    text, tokens = first["bar"]
    # Sequences of 4 + n and 2 tokens in micro-batch n, the same on both ranks.
    assert tokens == [2 * sum(6 + n for n in (2 * w, 2 * w + 1)) for w in range(1, 6)]
    assert second["bar"] == ("", tokens)
    assert text.count("  imbalance ") == 5


def test_the_straggler_is_named(planted):
    (first, second), _ = planted
    worst = first["summary"]["worst_cells"]
    assert {(cell["window"], cell["rank"], cell["micro_batch"]) for cell in worst} == {
        (number // 2, rank, number % 2) for number, (_, rank) in PLANTS.items()
    }
    cell = next(cell for cell in worst if cell["window"] == 3)
    assert cell["sequences"] == [[7, 11], [107, 2]]
    named = worst[0]
    text = " ".join(first["text"].split())
    assert f"window {named['window']}, rank {named['rank']}, micro-batch {named['micro_batch']}" in text
    assert f"sequence {name_sequences(named['sequences'], 2)}" in text
    assert second["text"] == ""


def test_only_the_backward_that_meets_the_others_waits(planted):
    _, folder = planted
    for rank in (0, 1):
        for line in lines(folder, rank):
            if line["kind"] == "cell":
                spans = {(name, start, start + length) for name, start, length in line["spans"]}
                (backward,) = [span for span in spans if span[0] == "backward"]
                within = [s for s in spans if s[0] == "wait" and backward[1] <= s[1] and s[2] <= backward[2]]
                assert len(within) == line["micro_batch"]


def test_the_ranks_share_one_timeline(planted):
    from sb_lightning.tracking import read_spans

    _, folder = planted
    run = read_spans(folder)
    assert run.ranks == 2
    for number, (_, rank) in PLANTS.items():
        ends = {
            cell.rank: next(s.end for s in cell.spans if s.lane == "wait" and s.start > cell.start)
            for cell in run.cells_of(number // 2)
            if cell.micro_batch == 1
        }
        # The all-reduce ends on neither rank before the slept one has brought its gradients.
        begins = next(
            s.start
            for cell in run.cells_of(number // 2)
            if cell.rank == rank and cell.micro_batch == 1
            for s in cell.spans
            if s.lane == "wait" and s.start > cell.start
        )
        assert min(ends.values()) > begins - CLOCKS_S, (number, rank)
    assert json.dumps(run.windows[0][2], allow_nan=False)


def test_a_planted_sleep_under_manual_optimization(gloo_pool, tmp_path):
    plants = {1: ("forward", 1), 2: ("backward", 0)}
    first, second = gloo_pool.run(planted_fit, tmp_path, plants, 3, 1, True)
    assert first["logged"] == second["logged"]
    for number, (lane_name, rank) in plants.items():
        window = first["windows"][number]
        assert window.straggler == (rank, 0)
        slept, other = window.cells[rank][0], window.cells[1 - rank][0]
        assert lane(slept, lane_name) >= SLEEP_S
        assert lane(other, "wait") > lane(slept, "wait")
