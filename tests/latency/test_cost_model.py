"""Cells, plans and recalibration; costs without a profile; fingerprints."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latency_cases import FINGERPRINT, random_measurements, table
from transformers import Qwen2Config

from sb_lightning.attention.pairs import attended_pairs, causal_pairs
from sb_lightning.latency import (
    AnalyticCost,
    CostModel,
    Fingerprint,
    LatencyModel,
    ModelShape,
    current_fingerprint,
)
from sb_lightning.latency import engine as engine_module

SHAPE = ModelShape(
    layers=2, query_heads=4, kv_heads=2, head_dim=32, hidden_size=128, intermediate_size=384, vocab_size=2048,
    block_size=64,
)  # fmt: skip


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_copies_of_copies():
    model = CostModel(AnalyticCost(SHAPE), rate=1.0)
    model.recalibrate([[4096]], [[8]], [2 * model.cell_ms([4096], [8])])
    again = copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(model))))
    assert again.version == 1
    assert again.label == model.label
    assert again.cell_us([300, 4096], [2, 8]) == model.cell_us([300, 4096], [2, 8])


def test_cells_and_plans():
    t = table()
    model = CostModel(t)
    assert model.cell_ms([700, 90], [3, 1]) == pytest.approx(0.25 + t.predict(700, 3) + t.predict(90, 1))
    assert model.cell_us([700, 90], [3, 1]) == 250 + t.predict_us(700, 3) + t.predict_us(90, 1)
    assert model.cell_us([700, 90], 3) == model.cell_us([700, 90], [3, 3])
    lengths, budgets = [[[700], [90, 5000]], [[64, 65], [1]]], [[[3], [1, 8]], [[1, 2], [1]]]
    assert model.plan_ms(lengths, budgets) == [
        [model.cell_ms(*cell) for cell in zip(*rank, strict=True)]
        for rank in zip(lengths, budgets, strict=True)
    ]
    assert model.plan_us(lengths, budgets)[0][1] == model.cell_us([90, 5000], [1, 8])
    assert isinstance(model.cell_us([1], [1]), int)


def test_recalibration_learns_a_machine_that_slows_down_with_the_length():
    t = table()
    model = CostModel(t, rate=0.3)
    generator = random.Random(0)

    def truth(lengths, budgets):
        return 0.25 + sum(
            t.predict(n, k) * (1.0 + 0.5 * math.log2(n) / 13) for n, k in zip(lengths, budgets, strict=True)
        )

    def error():
        cells = [([n], [k]) for n in (150, 600, 3000, 8000) for k in (1, 8, 200)]
        return max(abs(model.cell_ms(*cell) / truth(*cell) - 1) for cell in cells)

    before = error()
    for _ in range(60):
        lengths = [
            [round(2 ** generator.uniform(6.5, 13)) for _ in range(generator.randint(1, 3))] for _ in range(8)
        ]
        budgets = [[generator.randint(1, 20) for _ in cell] for cell in lengths]
        measured = [
            truth(*cell) * generator.uniform(0.95, 1.05) for cell in zip(lengths, budgets, strict=True)
        ]
        model.recalibrate(lengths, budgets, measured)
    assert before > 0.25
    assert error() < 0.05
    assert model.version == 60
    assert model.label == "measured (A processor, 1 thread x 2, float32), recalibrated over 60 windows"
    # What was never measured follows its nearest neighbour.
    assert model.factor(10**6) == model.factor(10**7) > 1


@settings(max_examples=25, deadline=None)
@given(m=random_measurements(), data=st.data())
def test_recalibrated_times_stay_in_order(m, data):
    model = CostModel(LatencyModel(m, "random"), rate=1.0)
    seen = sorted(data.draw(st.sets(st.integers(1, 40000), min_size=1, max_size=6)))
    for _ in range(2):
        ms = [model.cell_ms([n], [1]) * 2.0 ** data.draw(st.floats(-6, 6)) + 1e-9 for n in seen]
        model.recalibrate([[n] for n in seen], [[1] for _ in seen], ms)
    start = data.draw(st.integers(1, 40000))
    lengths = np.array(sorted({*seen, *range(start, start + 300), *range(1, 60000, 997)}))
    for budget in (1, 2, 7, 100):
        assert (np.diff(model.current.predict_many(lengths, budget)) >= 0).all()
    for length in (start, seen[-1], 50000):
        assert (np.diff(model.current.cost_us(length, 200)) >= 0).all()
    assert all(1 / 8 - 1e-9 <= model.factor(n) <= 8 + 1e-9 for n in lengths.tolist())


def test_recalibration_depends_on_the_measurements_and_not_on_their_order():
    generator = random.Random(3)
    cells = [([700 + i, 90], [3, 1], generator.uniform(3.0, 20.0)) for i in range(40)]
    states = []
    for order in (cells, cells[::-1], *(generator.sample(cells, 40) for _ in range(6))):
        model = CostModel(table())
        for _ in range(3):
            model.recalibrate(*(list(column) for column in zip(*order, strict=True)))
        states.append(model.state_dict())
    assert all(state == states[0] for state in states)


def test_one_bad_window_is_bounded():
    model = CostModel(table(), rate=1.0)
    model.recalibrate([[700]], [[3]], [1e12])
    assert 6 < model.factor(700) <= 8
    model.recalibrate([[700]] * 2, [[3]] * 2, [1e-9, 1e-9])
    assert 1 / 8 - 1e-9 <= model.factor(700) < 2
    calm = CostModel(table(), rate=0.1)
    calm.recalibrate([[700]], [[3]], [1e12])
    assert calm.factor(700) < 1.25


def test_state_survives_a_checkpoint():
    model = CostModel(table())
    model.recalibrate([[700, 90], [5000]], [[3, 1], [8]], [9.0, 70.0])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = CostModel(table())
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.state_dict() == model.state_dict()
    for n in (1, 90, 701, 6000):
        assert again.predict(n, 3) == model.predict(n, 3)
    for one in (model, again):
        one.recalibrate([[800]], [[3]], [5.0])
    assert again.state_dict() == model.state_dict()


def test_state_of_another_table_is_dropped_with_a_warning():
    model = CostModel(table())
    model.recalibrate([[700]], [[3]], [9.0])
    other = CostModel(table(noise=0.1))
    with pytest.warns(UserWarning, match="belongs to another latency table"):
        other.load_state_dict(model.state_dict())
    assert other.version == 0
    assert other.current is other.table


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"windows": -1},
        {"windows": "1"},
        {"log2_factors": [0.0]},
        {"log2_factors": [math.nan] * 63},
        {"log2_factors": [3.5] * 63},
        {"seen": [2] * 63},
        {"seen": None},
    ],
)
def test_impossible_states_are_refused(change):
    model = CostModel(table())
    with pytest.raises(ValueError, match=r"state .* cannot be read.*To fix it"):
        model.load_state_dict({**model.state_dict(), **change})
    assert model.version == 0


@pytest.mark.parametrize(
    ("window", "text"),
    [
        (([[5]], [[1]], [math.nan]), r"measured_ms\[0\] is nan"),
        (([[5]], [[1]], [-1.0]), r"measured_ms\[0\] is -1.0"),
        (([[5]], [[1]], [0.0]), r"measured_ms\[0\] is 0.0"),
        (([[5]], [[1]], [math.inf]), r"measured_ms\[0\] is inf"),
        (([[5], []], [[1], []], [1.0, 1.0]), r"lengths\[1\] is empty"),
        (([], [], []), "0 cells of lengths"),
        (([[5]], [[1]], [1.0, 2.0]), "1 cells of lengths, 1 of budgets, 2 times"),
        (([[5, 6]], [[1]], [1.0]), "1 budgets for 2 lengths"),
        (([[-5]], [[1]], [1.0]), "length is -5"),
    ],
)
def test_impossible_windows_are_refused_and_change_nothing(window, text):
    model = CostModel(table())
    before = model.state_dict()
    with pytest.raises(ValueError, match=text):
        model.recalibrate(*window)
    assert model.state_dict() == before


def test_rates_are_checked():
    for rate in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="rate is"):
            CostModel(table(), rate=rate)


def test_analytic_cost_counts_operations():
    cost = AnalyticCost(SHAPE, overhead_ms=1e-9, attention_gflops=50.0, matmul_gflops=100.0)
    assert isinstance(cost, LatencyModel)
    assert cost.label == CostModel(cost).label == "analytic (no profile)"
    assert cost.correction < 0.2
    for length in (1024, 4096):
        # Seven products of D for all pairs of all heads.
        dense = 14 * causal_pairs([length]) * 4 * 32 / 50e6
        assert cost.attention_ms(length, length) == pytest.approx(dense, rel=1e-3)
        sparse = 14 * attended_pairs([length], 8, 64) * 4 * 32 / 50e6
        gate = 2 * sum(t // 64 for t in range(length)) * 4 * 32 / 100e6
        assert cost.attention_ms(length, 8) == pytest.approx(sparse + gate, rel=1e-3)
        weights = 128 * (2 * 4 + 2 * 2) * 32 + 3 * 128 * 384
        fixed = 6 * length * (2 * weights + 128 * 2048) / 100e6
        assert cost.predict(length, length) == pytest.approx(2 * dense + fixed, rel=1e-3)
    assert cost.predict(5000, 9) < cost.predict(5001, 9)
    assert cost.extrapolated == 0
    far = 14 * attended_pairs([10**6], 8, 64) * 4 * 32 / 50e6
    assert cost.attention_ms(10**6, 8) == pytest.approx(far, rel=0.3)


def test_analytic_cost_from_a_configuration():
    config = Qwen2Config(
        hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=2048,
    )  # fmt: skip
    cost = AnalyticCost.from_config(config, block_size=64, dense_layers=[0], matmul_gflops=100.0)
    assert cost.shape == replace(SHAPE, dense_layers=1)
    assert (cost.layers, cost.dense_layers, cost.block_size) == (2, 1, 64)
    assert cost.predict(4096, 4) > AnalyticCost(SHAPE, matmul_gflops=100.0).predict(4096, 4)
    with pytest.raises(ValueError, match="matmul_gflops is 0"):
        AnalyticCost(SHAPE, matmul_gflops=0.0)


def test_what_differs_is_named():
    t = table()
    assert t.mismatch(Fingerprint(**FINGERPRINT)) == []
    found = t.mismatch(Fingerprint(**{**FINGERPRINT, "threads": 2, "dtype": "bfloat16"}))
    assert [entry.field for entry in found] == ["threads", "dtype"]
    assert str(found[0]) == "threads (1 in the table, 2 here)"


def test_fingerprint_of_this_machine():
    here = current_fingerprint(SHAPE, threads=1, ranks=2, dtype=torch.bfloat16)
    assert (here.dtype, here.threads, here.ranks, here.layers) == ("bfloat16", 1, 2, 2)
    assert here.processor
    assert here.torch.startswith(torch.__version__.split("+")[0])
    assert current_fingerprint(SHAPE, threads=1, ranks=2, dtype=torch.bfloat16) == here
    assert current_fingerprint(SHAPE, backend="reference").backend == "reference"


def test_the_twin_serves_where_the_module_is_not_built():
    code = """
import sys
sys.modules["sb_lightning._core"] = None
from sb_lightning.latency import ENGINE, AnalyticCost, CostModel, ModelShape
assert not ENGINE.available
assert "plain Python" in ENGINE.reason and "build_ext --inplace" in ENGINE.reason, ENGINE.reason
shape = ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=32, hidden_size=128, intermediate_size=384,
                   vocab_size=2048, block_size=64)
model = CostModel(AnalyticCost(shape))
model.recalibrate([[700], [5000]], [[3], [8]], [9.0, 70.0])
print(repr(model.predict(5000, 8)), model.cell_us([700, 90], [3, 1]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    model = CostModel(AnalyticCost(SHAPE))
    model.recalibrate([[700], [5000]], [[3], [8]], [9.0, 70.0])
    assert run.stdout.split() == [repr(model.predict(5000, 8)), str(model.cell_us([700, 90], [3, 1]))]


def test_a_module_from_other_sources_is_refused(monkeypatch):
    here = engine_module.SCHEMA_VERSION
    monkeypatch.setattr(engine_module, "SCHEMA_VERSION", 999)
    refused = engine_module._load()
    if engine_module.ENGINE.available:
        assert f"built from other sources (interface {here}, not 999)" in refused.reason
    assert not refused.available


def test_import_brings_no_framework():
    code = "import sys, sb_lightning.latency; print({'lightning', 'transformers'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.strip() == "set()", run.stderr
