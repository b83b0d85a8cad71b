"""Tables for the tests: by a formula, and random ones."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from sb_lightning.attention.pairs import attended_pairs, causal_pairs
from sb_lightning.latency import Fingerprint, LatencyTable, Measurements

FINGERPRINT = {
    "layers": 3, "dense_layers": 1, "query_heads": 4, "kv_heads": 2, "head_dim": 32, "hidden_size": 128,
    "intermediate_size": 384, "vocab_size": 2048, "block_size": 64, "device": "cpu",
    "processor": "A processor",
    "threads": 1, "ranks": 2, "dtype": "float32", "backend": "cpu", "torch": "2.13.0",
    "build": "0.1.0+avx512",
}  # fmt: skip
LENGTHS = (100, 256, 512, 1024, 3000, 8192)
BUDGETS = (1, 2, 4, 8, 16, 32, 64, 100)


def attention_ms(length: int, budget: int, block: int = 64) -> float:
    """Forward of one layer, as the formula has it; backward takes twice that."""
    pairs = attended_pairs([length], budget, block) if budget * block < length else causal_pairs([length])
    return 0.02 + 1e-7 * pairs + 1e-5 * length


def measurements(
    lengths=LENGTHS, budgets=BUDGETS, noise: float = 0.0, seed: int = 0, **changes: Any
) -> Measurements:
    """Times by the formula, each multiplied by up to (1 +- noise)."""
    generator = random.Random(seed)

    def curve(times):
        return [[scale * ms * (1 + noise * generator.uniform(-1, 1)) for ms in times] for scale in (1, 2)]

    rows = [[k for k in budgets if k * 64 < length] for length in lengths]
    given = {
        "block_size": 64,
        "layers": 3,
        "dense_layers": 1,
        "fixed_ms": 0.25,
        "lengths": list(lengths),
        "budgets": rows,
        "sparse": [curve([attention_ms(n, k) for k in row]) for n, row in zip(lengths, rows, strict=True)],
        "dense": curve([attention_ms(n, n) for n in lengths]),
        "rest": curve([0.01 + 1e-4 * n for n in lengths]),
        "outside": curve([0.02 + 1e-3 * n for n in lengths]),
    }
    return Measurements(**{**given, **changes})


def engine_arguments(m: Measurements) -> tuple[Any, ...]:
    """The arguments of a bare engine, C++ or Python."""
    return (
        m.block_size, m.layers, m.dense_layers, m.fixed_ms, m.lengths, m.budgets, m.sparse, m.dense, m.rest,
        m.outside,
    )  # fmt: skip


def table(**kwargs: Any) -> LatencyTable:
    """A measured table by the formula."""
    profile = kwargs.pop("profile", None)
    return LatencyTable(measurements(**kwargs), Fingerprint(**FINGERPRINT), profile)


@st.composite
def random_measurements(draw: Any) -> Measurements:
    """Anything that a file may hold: rows with their own budgets, times in no order at all."""
    block = draw(st.sampled_from([1, 7, 16, 64, 100, 4096]))
    lengths = sorted(
        draw(st.sets(st.one_of(st.integers(1, 300), st.integers(1, 40000)), min_size=1, max_size=6))
    )
    spread = draw(st.sampled_from([1e-13, 0.01, 1.0, 8.0]))
    times = st.floats(-spread, spread).map(lambda x: 2.0**x)
    small = st.floats(-3 * spread, 3 * spread).map(lambda x: 2.0**x)

    def curve(count, values=times):
        return [draw(st.lists(values, min_size=count, max_size=count)) for _ in range(2)]

    rows = []
    for length in lengths:
        most = (length - 1) // block
        rows.append(sorted(draw(st.sets(st.integers(1, most), max_size=5))) if most else [])
    return Measurements(
        block_size=block,
        layers=draw(st.integers(0, 3)),
        dense_layers=draw(st.integers(1, 2)),
        fixed_ms=draw(st.floats(0, 10)),
        lengths=lengths,
        budgets=rows,
        sparse=[curve(len(row)) for row in rows],
        dense=curve(len(lengths)),
        rest=curve(len(lengths), small),
        outside=curve(len(lengths), small),
    )
