"""The planner: how long a plan takes, how far from its bound it ends, what it wins over simpler dealing.

    python benchmarks/planner.py --quick
    python benchmarks/planner.py --json benchmarks/results/planner.json

Lengths come from the presets of `sb_lightning.data.length_presets` (synthetic, matched to published figures),
costs from the analytic model of a small Qwen-like decoder, dense and at a budget of 8 blocks. Times are
processor times of the thread, so that other programs count little: `call` from the Python call to the
WindowPlan, `C++` the planner alone, each the median of its repeats; over windows, median and 90th percentile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sb_lightning.balance import plan_window
from sb_lightning.balance.engine import plan_cells
from sb_lightning.balance.planner import NODE_LIMIT
from sb_lightning.balance.reference import NO_CAP
from sb_lightning.balance.reference.karmarkar_karp import differencing
from sb_lightning.data.length_presets import LENGTH_PRESETS, sample_lengths
from sb_lightning.latency import ENGINE, AnalyticCost, ModelShape
from sb_lightning.latency.fingerprint import processor_name

SHAPE = ModelShape(
    layers=24, query_heads=14, kv_heads=2, head_dim=64, hidden_size=896, intermediate_size=4864,
    vocab_size=151936, block_size=64,
)  # fmt: skip
BUDGET = 8
# Ranks, micro-batches per rank, sequences per micro-batch, objective, windows.
SIZES = [
    (4, 4, 1, "ddp", 100), (4, 2, 2, "ddp", 100), (2, 8, 1, "ddp", 100), (8, 8, 1, "ddp", 50),
    (16, 16, 1, "ddp", 20), (64, 64, 1, "ddp", 5), (64, 16, 4, "ddp", 5),
    (4, 4, 1, "fsdp", 100), (4, 2, 2, "fsdp", 100), (8, 4, 4, "fsdp", 20), (64, 64, 1, "fsdp", 5),
    (64, 16, 4, "fsdp", 5),
]  # fmt: skip
QUICK = 4
TARGETS_MS = {16: 0.2, 4096: 10.0}
TARGET_GAP = 0.01


def spent_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the median processor time of a call."""
    times = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return float(np.median(times)) / 1e6


def measure(
    preset: str, budget: int | None, size: tuple[int, int, int, str, int], repeats: int
) -> dict[str, Any]:
    """Return the figures of one preset and size."""
    ranks, accumulate, sequences, objective, windows = size
    num_items = ranks * accumulate * sequences
    lengths = sample_lengths(preset, num_items * windows, seed=1)
    table = AnalyticCost(SHAPE)
    budgets = np.full_like(lengths, BUDGET) if budget else -(-lengths // SHAPE.block_size)
    costs = table.predict_many(lengths, budgets)
    rows = []
    for window in range(windows):
        part = slice(window * num_items, (window + 1) * num_items)
        ms, tokens = costs[part], lengths[part]
        options = {"ranks": ranks, "accumulate": accumulate, "objective": objective}
        plan = plan_window(ms, tokens, **options)
        random = plan_window(ms, tokens, policy="random", **options)
        us = np.floor(ms * 1000 + 0.5).astype(np.int64)
        arguments = us, tokens, ranks, accumulate, objective == "fsdp", NO_CAP, False, NODE_LIMIT
        ordered = sorted(us.tolist(), reverse=True)
        equal = max(sum(ordered[i] for i in p) for p in differencing(ordered, ranks, ranks)) / 1000
        rows.append(
            {
                "call": spent_ms(lambda o=options, a=(ms, tokens): plan_window(*a, **o), repeats),
                "cpp": spent_ms(lambda a=arguments: plan_cells(*a), repeats),
                "gap": plan.gap,
                "proven": plan.proven_optimal,
                "random": random.value_ms / plan.value_ms,
                "equal": equal / plan.value_ms if objective == "ddp" else float("nan"),
            }
        )
    columns = {key: np.array([row[key] for row in rows], dtype=np.float64) for key in rows[0]}
    result: dict[str, Any] = {
        "preset": preset,
        "budget": budget,
        "objective": objective,
        "items": num_items,
        "ranks": ranks,
        "accumulate": accumulate,
        "windows": windows,
        "call_ms_median": round(float(np.median(columns["call"])), 4),
        "call_ms_p90": round(float(np.quantile(columns["call"], 0.9)), 4),
        "cpp_ms_median": round(float(np.median(columns["cpp"])), 4),
        "cpp_ms_p90": round(float(np.quantile(columns["cpp"], 0.9)), 4),
        "gap_mean": float(f"{columns['gap'].mean():.3g}"),
        "gap_max": float(f"{columns['gap'].max():.3g}"),
        "proven_optimal": round(float(columns["proven"].mean()), 3),
        "speedup_over_random": round(float(columns["random"].mean()), 4),
    }
    if objective == "ddp":
        result["speedup_over_equal_size_kk"] = round(float(columns["equal"].mean()), 5)
        result["least_speedup_over_equal_size_kk"] = round(float(columns["equal"].min()), 5)
    return {**result, "misses": misses(result)}


def misses(row: dict[str, Any]) -> list[str]:
    """Return which targets a row misses."""
    found = []
    limit = TARGETS_MS.get(row["items"])
    if limit is not None and row["call_ms_median"] > limit:
        found.append(f"median call over {limit} ms")
    if row["items"] / row["ranks"] >= 8 and row["gap_mean"] > TARGET_GAP:
        found.append("mean gap over 1 %")
    if row.get("least_speedup_over_equal_size_kk", 1.0) < 1.0:
        found.append("worse than equal-size Karmarkar-Karp")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the windows, one repeat")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if not ENGINE.available:
        raise SystemExit(ENGINE.reason)
    head = {
        "machine": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "node_limit": NODE_LIMIT,
        "lengths": {name: preset.description for name, preset in LENGTH_PRESETS.items()},
        "targets": {"call_ms_median by items": TARGETS_MS, "gap_mean where items / ranks >= 8": TARGET_GAP},
    }
    print(json.dumps({key: head[key] for key in ("machine", "cores", "python", "date")}))
    print(
        f"{'preset':18} {'budget':>6} {'items':>5} {'R':>3} {'A':>3} {'':4} {'call ms':>8} {'p90':>7} "
        f"{'C++ ms':>8} {'p90':>7} {'gap %':>7} {'max':>7} {'proven':>6} {'random':>7} {'KK equal':>8}"
    )
    rows = []
    for size in SIZES:
        if arguments.quick:
            size = (*size[:4], max(size[4] // 5, 1))
        for preset in LENGTH_PRESETS:
            for budget in (BUDGET, None):
                row = measure(preset, budget, size, 1 if arguments.quick else 5)
                rows.append(row)
                print(
                    f"{preset:18} {budget or 'dense':>6} {row['items']:5} {row['ranks']:3} "
                    f"{row['accumulate']:3} {row['objective']:4} "
                    f"{row['call_ms_median']:8.3f} {row['call_ms_p90']:7.3f} "
                    f"{row['cpp_ms_median']:8.3f} {row['cpp_ms_p90']:7.3f} {100 * row['gap_mean']:7.3f} "
                    f"{100 * row['gap_max']:7.3f} {row['proven_optimal']:6.2f} "
                    f"{row['speedup_over_random']:7.3f} "
                    f"{row.get('speedup_over_equal_size_kk', float('nan')):8.4f}  {'; '.join(row['misses'])}",
                    flush=True,
                )
    missed = sum(bool(row["misses"]) for row in rows)
    print(f"{missed} of {len(rows)} rows miss a target")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.json.with_suffix(".tmp")
        part.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(arguments.json)


if __name__ == "__main__":
    main()
