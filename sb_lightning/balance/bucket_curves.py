"""Coverage curves by length bucket: moving averages of what windows have measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["learn_curves", "nearest_curve"]

Floats = NDArray[np.float64]


def learn_curves(
    before: Floats | None,
    num_buckets: int,
    rate: float,
    buckets: NDArray[np.int64],
    curves: Floats,
    weights: Floats,
) -> Floats | None:
    """Return the curves of all buckets after a window.

    Args:
        before: Those before it; None if there were none # [buckets, points]
        num_buckets: Buckets that there are.
        rate: Weight of the window.
        buckets: Bucket of each sequence # [n]
        curves: Its curve; NaN where it was not measured # [n, points]
        weights: What it counts; 0 where it says nothing # [n]
    """
    after = None if before is None else before.copy()
    is_known = (weights > 0) & ~np.isnan(curves).any(axis=1)
    for bucket in np.unique(buckets[is_known]).tolist():
        total, weight = np.zeros(curves.shape[1]), 0.0
        for n in np.flatnonzero(is_known & (buckets == bucket)).tolist():
            total, weight = total + weights[n] * curves[n], weight + float(weights[n])
        if after is None:
            after = np.full((num_buckets, curves.shape[1]), np.nan)
        mean = total / weight
        old = after[bucket]
        after[bucket] = mean if np.isnan(old[0]) else old + rate * (mean - old)
    return after


def nearest_curve(curves: Floats | None, bucket: int) -> Floats | None:
    """Return the curve of a bucket, or of the nearest one that has any: of two, the shorter lengths'."""
    if curves is None:
        return None
    known = np.flatnonzero(~np.isnan(curves[:, 0]))
    if not len(known):
        return None
    nearest: Floats = curves[known[np.argmin(np.abs(known - bucket))]]
    return nearest
