"""The C++ planner against its twin in Python, result for result, and plans that must not change unnoticed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb_lightning.balance import engine, plan_window, reference
from sb_lightning.balance.planner import NODE_LIMIT
from sb_lightning.latency import ENGINE

needs_engine = pytest.mark.skipif(not ENGINE.available, reason=ENGINE.reason)


@st.composite
def problems(draw, max_items=48):
    """Arguments of `plan_cells`."""
    ranks, accumulate = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cells = ranks * accumulate
    num_items = draw(st.one_of(st.just(cells), st.integers(cells, max(cells, max_items))))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    tokens = draw(
        st.sampled_from(
            [
                generator.integers(1, 60, num_items),
                (2 ** generator.uniform(3, 12, num_items)).astype(np.int64),
            ]
        )
    )
    costs = draw(
        st.sampled_from(
            [
                tokens,
                tokens**2,
                generator.integers(0, 9, num_items),
                np.zeros(num_items, dtype=np.int64),
                generator.integers(0, 2**62 // num_items, num_items),
            ]
        )
    )
    cap = reference.NO_CAP
    if draw(st.booleans()):
        cap = max(int(tokens.max()), int(tokens.sum()) // cells + draw(st.integers(0, 30)))
    limit = draw(st.sampled_from([NODE_LIMIT, 50, 0]))
    return costs, tokens, ranks, accumulate, draw(st.booleans()), cap, draw(st.booleans()), limit


def result(plan):
    items, counts, finished = plan
    return items.tolist(), counts.tolist(), finished


@needs_engine
@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_twin_gives_the_same_plan(problem):
    assert result(engine.plan_cells(*problem)) == result(reference.plan_cells(*problem))
    costs, _, ranks, accumulate, is_fsdp, _, equal_counts, _ = problem
    arguments = costs, ranks, accumulate, is_fsdp, equal_counts
    assert engine.lower_bound_us(*arguments) == reference.lower_bound_us(*arguments)


@needs_engine
@pytest.mark.parametrize("is_fsdp", [False, True])
@pytest.mark.parametrize(("num_items", "ranks", "accumulate"), [(512, 16, 32), (600, 16, 8), (300, 100, 1)])
def test_twin_gives_the_same_plan_of_many_items(num_items, ranks, accumulate, is_fsdp):
    generator = np.random.default_rng(num_items)
    tokens = (2 ** generator.uniform(5, 16, num_items)).astype(np.int64)
    for cap in (reference.NO_CAP, 2**16 + 2**14):
        problem = tokens * 37, tokens, ranks, accumulate, is_fsdp, cap, False, NODE_LIMIT
        assert result(engine.plan_cells(*problem)) == result(reference.plan_cells(*problem))


@needs_engine
def test_twin_searches_to_the_end_alike():
    generator = np.random.default_rng(1)
    for num_items, ranks, accumulate in ((12, 3, 4), (11, 3, 2), (9, 2, 2)):
        costs = generator.integers(1, 10**6, num_items)
        for is_fsdp in (False, True):
            problem = costs, costs, ranks, accumulate, is_fsdp, reference.NO_CAP, False, -1
            assert result(engine.plan_cells(*problem)) == result(reference.plan_cells(*problem))
            assert engine.plan_cells(*problem)[2]


def test_threads_get_the_same_plan():
    tokens = (2 ** np.random.default_rng(2).uniform(5, 16, 256)).astype(np.int64)
    wanted = plan_window(tokens / 8, tokens, ranks=8, accumulate=16)
    found = []

    def plan():
        found.append(plan_window(tokens / 8, tokens, ranks=8, accumulate=16))

    threads = [threading.Thread(target=plan) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 6


@needs_engine
def test_engine_refuses_what_the_planner_would_not_pass():
    one = np.ones(1, dtype=np.int64)
    for ranks, accumulate in ((2, 1), (1, 2), (0, 1), (1, 0), (2**16, 2**16)):
        with pytest.raises(ValueError, match="fewer items than cells"):
            engine.plan_cells(one, one, ranks, accumulate, False, -1, False, 0)


LENGTHS = [
    8201,
    9340,
    10010,
    11876,
    12345,
    13579,
    14000,
    15120,
    17003,
    19999,
    23456,
    28000,
    34567,
    41000,
    52000,
    70000,
]
"""Sixteen lengths as in long-context fine-tuning."""


@pytest.mark.parametrize(
    ("options", "cells", "value_ms"),
    [
        (
            {"ranks": 4, "accumulate": 4},
            (
                ((15,), (2,), (1,), (0,)),
                ((14,), (9,), (8,), (3,)),
                ((13,), (10,), (7,), (4,)),
                ((12,), (11,), (6,), (5,)),
            ),
            149.098,
        ),
        (
            {"ranks": 4, "accumulate": 2},
            (((15,), (1,)), ((14,), (0, 7, 9)), ((3, 13), (4, 5, 10)), ((2, 8, 11), (6, 12))),
            129.346,
        ),
        (
            {"ranks": 4, "accumulate": 4, "objective": "fsdp"},
            (
                ((15,), (8,), (4,), (0,)),
                ((14,), (9,), (5,), (1,)),
                ((13,), (10,), (6,), (2,)),
                ((12,), (11,), (7,), (3,)),
            ),
            185.532,
        ),
        (
            {"ranks": 4, "accumulate": 2, "objective": "fsdp"},
            (((4, 7, 10, 13), (3,)), ((6, 8, 11, 12), (2,)), ((5, 9, 14), (1,)), ((15,), (0,))),
            132.286,
        ),
        (
            {"ranks": 2, "accumulate": 3, "max_tokens": 80000},
            (((15,), (4, 13), (0, 1, 5, 6, 7)), ((3, 14), (8, 10, 11), (2, 9, 12))),
            258.554,
        ),
        (
            {"ranks": 3, "accumulate": 2, "equal_counts": True},
            (((0, 15), (3, 4, 7)), ((2, 14), (6, 8, 12)), ((1, 9, 13), (5, 10, 11))),
            172.435,
        ),
    ],
)
def test_golden_plans(options, cells, value_ms):
    """A change here is a change of the algorithm: every rank of a run needs the same version."""
    costs = [n / 1000 + n * n / 1e8 for n in LENGTHS]
    plan = plan_window(costs, LENGTHS, **options)
    assert plan.value_ms == value_ms
    assert plan.cells == cells
