"""The latency table against its twin, its formula, and the order that it promises."""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from latency_cases import (
    BUDGETS,
    LENGTHS,
    attention_ms,
    engine_arguments,
    measurements,
    random_measurements,
    table,
)  # fmt: skip

from sb_lightning.attention.pairs import attended_pairs
from sb_lightning.latency.engine import EngineTable
from sb_lightning.latency.numeric import exp2, log2, to_fixed
from sb_lightning.latency.reference import LatencyTable as Twin

MOST = 2**31 - 1
# The twin is slow, and shrinking calls it a thousand times.
NO_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]


def both(m):
    return EngineTable(*engine_arguments(m)), Twin(*engine_arguments(m))


def probes(m):
    """Lengths and budgets where something changes: grid points, edges of blocks, far outside."""
    block = m.block_size
    lengths = {1, 2, block, block + 1, MOST}
    for length in m.lengths:
        lengths |= {length - 1, length, length + 1, length * 5 // 4, length // block * block, 3 * length}
    budgets = {1, 2, 63, 64, 65, 66, 1000, 2048, 2049, 50000, MOST}
    for row in m.budgets:
        budgets |= {k + d for k in row for d in (-1, 0, 1)}
    return (sorted(n for n in lengths if 1 <= n <= MOST), sorted(k for k in budgets if k >= 1))


@settings(max_examples=15, deadline=None, phases=NO_SHRINKING)
@given(m=random_measurements(), data=st.data())
def test_twin_has_the_same_bits(m, data):
    fast, twin = both(m)
    assert (fast.correction, fast.mean_correction) == (twin.correction, twin.mean_correction)
    lengths, budgets = probes(m)
    for length in lengths:
        for budget in budgets[::2]:
            assert fast.predict(length, budget) == twin.predict(length, budget), (length, budget)
        budget = data.draw(st.integers(1, length // m.block_size + 2))
        for name in ("predict_us", "predict_passes", "attention_ms", "attention_passes"):
            assert getattr(fast, name)(length, budget) == getattr(twin, name)(length, budget), name
        ms = twin.predict(length, budget)
        assert fast.predict(length, budget) == ms
        ms *= data.draw(st.sampled_from([0.5, 1.0, 1.01]))
        assert fast.budget_within(length, ms) == twin.budget_within(length, ms)
    assert fast.extrapolated == twin.extrapolated
    factors = [data.draw(st.floats(-8, 8)) for _ in range(3)]
    fast, twin = (t.scaled([4.0, 9.5, 13.0], factors) for t in (fast, twin))
    for length in lengths:
        for budget in budgets[::3]:
            assert fast.predict(length, budget) == twin.predict(length, budget)


@settings(max_examples=25, deadline=None, phases=NO_SHRINKING)
@given(m=random_measurements(), data=st.data())
def test_never_cheaper_for_more(m, data):
    plain = EngineTable(*engine_arguments(m))
    bent = plain.scaled([3.0, 6.0, 11.0, 15.0], [data.draw(st.floats(-8, 8)) for _ in range(4)])
    lengths, budgets = probes(m)
    start, stop = data.draw(st.integers(1, 40000)), data.draw(st.integers(1, 2000))
    lengths = np.array(sorted({*lengths, *range(start, start + 200)}))
    budgets = np.array(sorted({*budgets, *range(stop, stop + 60)}))
    for t in (plain, bent):
        for budget in budgets.tolist():
            times = t.predict_many(lengths, budget)
            assert (np.diff(times) >= 0).all(), f"budget {budget}"
            assert np.isfinite(times).all()
        for length in lengths[::5].tolist():
            times = t.predict_many([length] * len(budgets), budgets)
            assert (np.diff(times) >= 0).all(), f"length {length}"


@settings(max_examples=50, deadline=None, phases=NO_SHRINKING)
@given(m=random_measurements())
def test_corrected_measurements_are_met_exactly(m):
    """Where the measurements are in order they come back; else they move, and by what is told."""
    t = EngineTable(*engine_arguments(m))
    sizes = [0.0]
    for i, length in enumerate(m.lengths):
        points = [(k, m.sparse[i][0][j] + m.sparse[i][1][j]) for j, k in enumerate(m.budgets[i])]
        for k, ms in [*points, (length, m.dense[0][i] + m.dense[1][i])]:
            sizes.append(abs(t.attention_ms(length, k) / ms - 1))
    assert max(sizes) <= t.correction * (1 + 1e-9) + 1e-10


def test_values_at_and_between_the_measurements():
    t = table()
    assert t.correction == 0
    for length in LENGTHS:
        for budget in [k for k in BUDGETS if k * 64 < length] + [length]:
            want = attention_ms(length, budget)
            assert t.attention_ms(length, budget) == pytest.approx(3 * want, rel=1e-10)
            forward, backward = t.attention_passes(length, budget)
            assert (forward, backward) == pytest.approx((want, 2 * want), rel=1e-9)
            layer = 3 * (0.01 + 1e-4 * length)
            whole = 9 * want + 3 * attention_ms(length, length) + 4 * layer + 3 * (0.02 + 1e-3 * length)
            assert t.predict(length, budget) == pytest.approx(whole, rel=1e-10)
    assert t.extrapolated == 0


def test_surface_is_bilinear_in_the_logarithms():
    """Against the definition: log T over (log L, log u), at the same u in both rows."""
    m = measurements(lengths=(512, 1024, 2048, 4096), budgets=(1, 2, 4, 8, 16, 32))
    t = EngineTable(*engine_arguments(m))

    def row(i, u):
        xs = [math.log(k * 64 / m.lengths[i]) for k in m.budgets[i]] + [0.0]
        ys = [math.log(f + b) for f, b in zip(*m.sparse[i], strict=True)]
        ys.append(math.log(m.dense[0][i] + m.dense[1][i]))
        return np.interp(u, xs, ys)

    for i, (low, high) in enumerate([(512, 1024), (1024, 2048), (2048, 4096)]):
        for length in range(low + 1, high, 37):
            weight = math.log(length / low) / math.log(high / low)
            # With fewer blocks than two the shorter row would be asked for less than one block.
            for budget in range(2, -(-length // 64)):
                u = math.log(budget * 64 / length)
                want = math.exp((1 - weight) * row(i, u) + weight * row(i + 1, u))
                assert t.attention_ms(length, budget) == pytest.approx(want, rel=0.01), (length, budget)


def test_monotone_where_the_bilinear_surface_is_not():
    """At a fixed budget u falls as L grows; a flat shorter row and a steep longer one make a dip."""
    m = measurements(
        lengths=(1024, 2048), budgets=(8,), sparse=[[[1.0], [0.01]], [[1.005], [0.01]]],
        dense=[[3.8, 3.9], [0.1, 0.1]],
    )  # fmt: skip
    t = EngineTable(*engine_arguments(m))
    times = [t.attention_ms(length, 8) for length in range(1024, 2049)]
    assert times == sorted(times)
    assert (times[0], times[-1]) == pytest.approx((1.01, 1.015), rel=1e-10)


def test_outliers_move_only_their_neighbours():
    m = measurements()
    m.dense[0][2] *= 40
    t = EngineTable(*engine_arguments(m))
    assert t.correction > 0.5
    assert t.attention_ms(8192, 8192) == pytest.approx(3 * attention_ms(8192, 8192), rel=1e-10)
    assert t.attention_ms(100, 8192) == pytest.approx(3 * attention_ms(100, 8192), rel=1e-10)


def test_sparse_attention_that_is_slower_than_dense_counts_as_dense():
    m = measurements()
    m.sparse[5][0][-1] *= 2
    t = EngineTable(*engine_arguments(m))
    assert (
        t.attention_ms(8192, 100) == t.attention_ms(8192, 128) == pytest.approx(3 * attention_ms(8192, 128))
    )


def test_far_outside_follows_the_pairs_and_is_counted():
    t = table()
    for length in (9000, 40000, 10**6):
        scale = attended_pairs([length], 8, 64) / attended_pairs([8192], 8, 64)
        assert t.attention_ms(length, 8) == pytest.approx(t.attention_ms(8192, 8) * scale, rel=0.01)
    assert t.attention_ms(30, 8) == pytest.approx(t.attention_ms(100, 8) * 30 * 31 / (100 * 101), rel=0.02)
    assert t.extrapolated == 4
    t.predict_many([90, 100, 8192, 8193], 4)
    assert t.extrapolated == 6
    t.predict(0, 1)
    assert t.extrapolated == 6


def test_budgets_that_were_not_measured_follow_the_pairs():
    t = EngineTable(*engine_arguments(measurements(lengths=(1024, 4096), budgets=(4, 8))))
    scale = attended_pairs([4096], 2, 64) / attended_pairs([4096], 4, 64)
    assert t.attention_ms(4096, 2) == pytest.approx(t.attention_ms(4096, 4) * scale, rel=1e-9)
    assert t.extrapolated == 1


def test_many_at_once_and_whole_microseconds():
    t = table()
    lengths, budgets = [700, 0, 90, 8000], [3, 1, 9, 40]
    one = [t.predict(*pair) for pair in zip(lengths, budgets, strict=True)]
    assert one[1] == 0.0
    for kind in (list, tuple, np.array, lambda x: np.array(x, dtype=np.int16), lambda x: np.array(x)[::1]):
        assert t.predict_many(kind(lengths), kind(budgets)).tolist() == one
    assert t.predict_many(np.repeat(lengths, 2)[::2], 3).tolist() == [t.predict(n, 3) for n in lengths]
    whole = t.predict_many_us(lengths, budgets)
    assert whole.dtype == np.int64
    assert whole.tolist() == [t.predict_us(*pair) for pair in zip(lengths, budgets, strict=True)]
    assert whole.tolist() == [math.floor(ms * 1000 + 0.5) for ms in one]
    assert t.micro_batch_ms(lengths, budgets) == pytest.approx(0.25 + sum(one), rel=1e-14)
    assert t.predict_many([], []).shape == (0,)
    assert t.micro_batch_ms([], 1) == 0.25
    costs = t.cost_us(700, 30)
    assert costs.dtype == np.int32
    assert costs.tolist() == [t.predict_us(700, k) for k in range(1, 31)]
    assert t.cost_us(0, 3).tolist() == [0, 0, 0]
    assert t.cost_us(MOST, 1).tolist() == [2**31 - 1]


def test_budget_within_is_the_largest_that_fits():
    t = table(noise=0.3, seed=3)
    for length in (1, 64, 65, 1000, 5000, 20000):
        blocks = -(-length // 64)
        for budget in (1, 2, 5, blocks // 2 + 1, blocks):
            ms = t.predict(length, budget)
            fitting = t.budget_within(length, ms)
            assert t.predict(length, fitting) <= ms
            assert fitting == blocks or t.predict(length, fitting + 1) > ms
        assert t.budget_within(length, 0.0) == 0
        assert t.budget_within(length, math.inf) == blocks
    assert t.budget_within(0, 0.0) == 1


@pytest.mark.parametrize("kind", ["engine", "twin"])
def test_wrong_arguments_are_named(kind):
    m = measurements()
    t = (EngineTable if kind == "engine" else Twin)(*engine_arguments(m))
    for call, error, text in (
        (lambda: t.predict(-1, 1), ValueError, "length is -1"),
        (lambda: t.predict(2**31, 1), ValueError, "length is 2147483648"),
        (lambda: t.predict(5, 0), ValueError, "budget is 0"),
        (lambda: t.attention_ms(5, -3), ValueError, "budget is -3"),
        (lambda: t.cost_us(5, 0), ValueError, "budget is 0"),
        (lambda: t.budget_within(5, math.nan), ValueError, "ms is nan"),
        (lambda: t.predict_many([5, 6], [1]), ValueError, "1 budgets for 2 lengths"),
        (lambda: t.predict_many([[5, 6]], 1), ValueError, "lengths has 2 dimensions"),
        (lambda: t.predict_many([5.5], 1), TypeError, "lengths holds other things"),
        (lambda: t.micro_batch_ms([5], [1.0]), TypeError, "budgets holds other things"),
        (lambda: t.predict_many([5, -6], 1), ValueError, "length is -6"),
        (lambda: t.scaled([1.0, 1.0], [0.0, 0.0]), ValueError, "the factors"),
        (lambda: t.scaled([1.0], [math.nan]), ValueError, "the factors"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_numbers_only():
    with pytest.raises(TypeError):
        table().predict(5.5, 1)
    with pytest.raises(TypeError):
        table().predict("5", 1)


@settings(max_examples=200, deadline=None)
@given(x=st.floats(1e-9, 1e9), y=st.integers(-(60 << 36), 60 << 36))
def test_numbers_are_exact_enough(x, y):
    assert log2(x) == pytest.approx(math.log2(x), abs=1e-13)
    assert exp2(y) == pytest.approx(2.0 ** (y / 2**36), rel=1e-13)
    assert exp2(y) < exp2(y + 1)
    assert exp2(to_fixed(log2(x))) == pytest.approx(x, rel=1e-11)


def test_threads_read_at_once():
    """Eight threads with a short switch interval; the bulk calls give up the interpreter's lock."""
    t = table()
    lengths = np.arange(1, 9000, 3)
    budgets = 1 + lengths % 50
    want = t.predict_many(lengths, budgets)
    before = t.extrapolated
    wrong = []

    def read():
        for _ in range(10):
            if not (t.predict_many(lengths, budgets) == want).all() or t.predict(1001, 1 + 1001 % 50) <= 0:
                wrong.append(1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert t.extrapolated == before * 81
