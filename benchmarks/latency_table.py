"""Speed of the latency table: single look-ups, many at once, and the largest budget within a time.

    python benchmarks/latency_table.py
    python benchmarks/latency_table.py --json benchmarks/results/latency_table.json

Lengths and budgets are drawn at random, so that no look-up repeats the one before. Each figure is the least
of many rounds: what the code takes when nothing else runs. `C++` loops stay in C++; `Python` ones are plain
calls from a Python loop, whose own cost is taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sb_lightning.latency import ENGINE, AnalyticCost, CostModel, ModelShape
from sb_lightning.latency.fingerprint import processor_name

COUNT = 4096
SHAPE = ModelShape(
    layers=24, query_heads=14, kv_heads=2, head_dim=64, hidden_size=896, intermediate_size=4864,
    vocab_size=151936, block_size=64,
)  # fmt: skip
# ns, from the design: in C++ a look-up 50 ns and a budget 1 us; from Python 0.5 us; 4,096 at once 100 us.
TARGETS = {
    "predict, C++": 50.0,
    "budget_within, C++": 1000.0,
    "predict, Python": 500.0,
    "budget_within, Python": None,
    f"predict_many of {COUNT}, whole call": 100e3,
    "cost_us of 128 budgets, whole call": None,
    "recalibrate with 16 cells, whole call": None,
    "build from measurements, whole call": None,
}


def least_ns(call: Callable[[], object], rounds: int) -> float:
    """Return the least time of a call in ns."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter_ns()
        call()
        best = min(best, time.perf_counter_ns() - start)
    return best


def measure(rounds: int) -> dict[str, float]:
    """Return the ns of each figure."""
    table = AnalyticCost(SHAPE)
    generator = np.random.default_rng(0)
    lengths = (2 ** generator.uniform(7, 16, COUNT)).astype(np.int64)
    budgets = 1 + (generator.uniform(0, 1, COUNT) * lengths / SHAPE.block_size).astype(np.int64)
    times = table.predict_many(lengths, budgets).tolist()
    pairs = list(zip(lengths.tolist(), budgets.tolist(), strict=True))
    limits = list(zip(lengths.tolist(), times, strict=True))
    predict, budget_within = table.predict, table.budget_within

    def loop(call: Callable[..., object], arguments: list[tuple[int, float]]) -> Callable[[], None]:
        def run() -> None:
            for a, b in arguments:
                call(a, b)

        return run

    def empty() -> None:
        for _a, _b in pairs:
            pass

    idle = least_ns(empty, rounds)
    model = CostModel(table)
    cells = [[int(n)] for n in lengths[:16]], [[8]] * 16, [model.cell_ms([int(n)], [8]) for n in lengths[:16]]
    figures = [
        min(table._time_calls("predict", lengths, budgets, 1) for _ in range(rounds)),
        min(table._time_calls("budget_within", lengths, budgets, 1) for _ in range(rounds)),
        (least_ns(loop(predict, pairs), rounds) - idle) / COUNT,
        (least_ns(loop(budget_within, limits), rounds) - idle) / COUNT,
        least_ns(lambda: table.predict_many(lengths, budgets), rounds),
        least_ns(lambda: table.cost_us(8192, 128), rounds),
        least_ns(lambda: model.recalibrate(*cells), 10),
        least_ns(lambda: AnalyticCost(SHAPE), 5),
    ]
    return dict(zip(TARGETS, figures, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if not ENGINE.available:
        raise SystemExit(ENGINE.reason)
    head = {
        "machine": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "rounds": arguments.rounds,
    }
    print(json.dumps(head))
    rows = []
    for name, ns in measure(arguments.rounds).items():
        target = TARGETS[name]
        rows.append({"name": name, "ns": round(ns, 1), "target_ns": target})
        print(f"{name:40} {ns:12,.1f} ns" + (f"   target {target:,.0f}" if target else ""))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.json.with_suffix(".tmp")
        part.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(arguments.json)


if __name__ == "__main__":
    main()
