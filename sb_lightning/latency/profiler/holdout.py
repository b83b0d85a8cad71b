"""How well a table predicts points that it was not made of, beside two simple predictors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from sb_lightning.latency.fingerprint import ModelShape
from sb_lightning.latency.flops import step_flops
from sb_lightning.latency.profiler.points import Point
from sb_lightning.latency.profiler.samples import Record

__all__ = ["PREDICTORS", "evaluate"]

PREDICTORS = {
    "table": "table",
    "length": "length only (a + bL + cL²)",
    "flops": "FLOPs only (a + b·FLOPs)",
}
"""What each is called in reports."""
Features = Callable[[Point], Sequence[float]]


def evaluate(
    records: dict[Point, Record], shape: ModelShape, predict: Callable[[Point], float]
) -> dict[str, Any]:
    """Compare measured times of the held-out points with three predictions.

    The simple predictors are fitted to the points that the table is made of, by least squares of the
    relative error. This is the analogue of Fig. 6 of the paper (arXiv 2604.13847).

    Args:
        records: All samples.
        shape: The model that was measured.
        predict: The table's time of a step at a point, the fixed cost included, in ms.

    Returns:
        Plain JSON: `points` (length, budget, samples, measured and predicted ms, spread, whether held out),
        `errors` (for each predictor the median and the worst relative error over the held-out points, None
        where there are none) and `noise` (medians of the relative spread of a step and of the standard
        error of the held-out medians, and the share of steps that were left out).
    """
    single = {point: record for point, record in records.items() if point.copies == 1}
    train = [point for point in single if not point.is_held_out]
    held_out = [point for point in single if point.is_held_out]
    features: dict[str, Features] = {
        "length": lambda p: (1.0, p.length, float(p.length) ** 2),
        "flops": lambda p: (1.0, step_flops(shape, p.length, p.budget)),
    }
    times = [single[point].whole_ms for point in train]
    predictors = {"table": predict}
    for name, of in features.items():
        predictors[name] = _fit(of, train, times)
    points = []
    for point in sorted(single):
        record = single[point]
        points.append(
            {
                "length": point.length,
                "budget": point.budget,
                "held_out": point.is_held_out,
                "samples": len(record.used),
                "measured_ms": record.whole_ms,
                "spread": record.spread,
                "predicted_ms": {name: float(time(point)) for name, time in predictors.items()},
            }
        )
    steps = sum(len(record.samples) for record in records.values())
    errors: dict[str, Any] = {}
    for name, time in predictors.items():
        found = [abs(float(time(point)) / single[point].whole_ms - 1.0) for point in held_out]
        errors[name] = {
            "median": median(found) if found else None,
            "worst": max(found) if found else None,
        }
    return {
        "points": points,
        "errors": errors,
        "noise": {
            "spread": _median_known(record.spread for record in single.values()),
            "held_out_error": _median_known(single[point].error for point in held_out),
            "interrupted": 1.0 - sum(len(r.used) for r in records.values()) / steps,
        },
    }


def _median_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _fit(features: Features, points: Sequence[Point], times: Sequence[float]) -> Callable[[Point], float]:
    rows = np.array([features(point) for point in points], dtype=np.float64)
    # Columns of like size keep the solution exact.
    scale = np.abs(rows).max(axis=0)
    weighted = rows / scale / np.array(times)[:, None]
    solution, *_ = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)
    return lambda point: float(np.array(features(point)) / scale @ solution)
