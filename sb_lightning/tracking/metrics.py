"""Imbalance and its kin as functions of a window's times, the same on every rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "idle_ms",
    "imbalance",
    "imbalance_micro_batch",
    "imbalance_slot",
    "imbalance_within",
    "imbalances",
    "prediction_error_pct",
    "rank_sums",
]

Times = NDArray[np.float64]
"""Milliseconds of each cell [ranks, micro-batches]; NaN where a rank ran no such micro-batch."""


def imbalance(times: Times) -> float:
    """Return max/mean over ranks of the window's time: what data-parallel training waits for.

    Args:
        times: Milliseconds per cell # [R, A], NaN where there is none.

    Example:
        >>> imbalance(np.array([[1.0, 1.0], [4.0, 2.0]]))
        1.5
    """
    return _ratio(rank_sums(times))


def imbalance_slot(times: Times) -> float:
    """Return the mean over slots of max/mean over ranks; slots that a rank did not run are left out.

    Args:
        times: Milliseconds per cell # [R, A], NaN where there is none.

    Example:
        >>> imbalance_slot(np.array([[1.0, 1.0], [3.0, 1.0]]))
        1.25
    """
    whole = times[:, ~np.isnan(times).any(axis=0)]
    return _mean_ratio(whole.max(axis=0), whole.sum(axis=0) / len(whole)) if whole.size else 1.0


def imbalance_micro_batch(times: Times) -> float:
    """Return max/mean over all micro-batches of the window (SparseBalance, arXiv 2604.13847, Fig. 3).

    Args:
        times: Milliseconds per cell # [R, A], NaN where there is none.

    Example:
        >>> imbalance_micro_batch(np.array([[1.0, 2.0], [1.0, 4.0]]))
        2.0
    """
    return _ratio(times[~np.isnan(times)])


def imbalance_within(times: Times) -> float:
    """Return the mean over ranks of max/mean over the rank's own micro-batches.

    Args:
        times: Milliseconds per cell # [R, A], NaN where there is none.

    Example:
        >>> imbalance_within(np.array([[1.0, 1.0], [1.0, 3.0]]))
        1.25
    """
    counts = (~np.isnan(times)).sum(axis=1)
    some = times[counts > 0]
    if not some.size:
        return 1.0
    return _mean_ratio(np.fmax.reduce(some, axis=1), rank_sums(some) / counts[counts > 0])


def idle_ms(times: Times) -> float:
    """Return how long a rank waits for the slowest one, averaged over ranks: max - mean of the ranks' times.

    Args:
        times: Milliseconds per cell # [R, A], NaN where there is none.

    Example:
        >>> idle_ms(np.array([[1.0, 1.0], [4.0, 2.0]]))
        2.0
    """
    sums = rank_sums(times)
    return float(sums.max() - sums.sum() / len(sums)) if sums.size else 0.0


def imbalances(times: Times, suffix: str = "", is_apart: NDArray[np.bool_] | None = None) -> dict[str, float]:
    """Return the four imbalances under the names of their metrics.

    Args:
        times: Milliseconds per cell # [R, A], NaN where there is none.
        suffix: Appended to each name.
        is_apart: Which cells are single micro-batches # [R, A]; the others count for `imbalance` only. None:
            all are.
    """
    apart = times if is_apart is None else np.where(is_apart, times, np.nan)
    return {
        f"balance/imbalance{suffix}": imbalance(times),
        f"balance/imbalance_slot{suffix}": imbalance_slot(apart),
        f"balance/imbalance_micro_batch{suffix}": imbalance_micro_batch(apart),
        f"balance/imbalance_within{suffix}": imbalance_within(apart),
    }


def prediction_error_pct(predicted: Times, measured: Times) -> float | None:
    """Return the mean over cells of |predicted - measured| / measured, in percent; None if there is no cell.

    Args:
        predicted: Milliseconds per cell # [R, A], NaN where there is none.
        measured: Milliseconds per cell # [R, A], NaN where there is none.

    Example:
        >>> prediction_error_pct(np.array([[90.0, 120.0]]), np.array([[100.0, 100.0]]))
        15.0
    """
    known = ~np.isnan(predicted) & (np.nan_to_num(measured) > 0)
    if not known.any():
        return None
    errors = np.abs(predicted[known] - measured[known]) / measured[known]
    return round(100.0 * float(errors.mean()), 9)


def rank_sums(times: Times) -> Times:
    """Return the time of each rank # [R].

    Args:
        times: Milliseconds per cell # [R, A], NaN where there is none.
    """
    # In place of np.nansum and np.mean, which take several times as long on arrays this small.
    return np.where(np.isnan(times), 0.0, times).sum(axis=1)  # type: ignore[no-any-return]


def _ratio(values: Times) -> float:
    """Max/mean; 1 where nothing took any time."""
    total = float(values.sum())
    return float(values.max()) * len(values) / total if total > 0 else 1.0


def _mean_ratio(maxima: Times, means: Times) -> float:
    """Mean of max/mean, which is 1 where nothing took any time."""
    known = means > 0
    ratios = np.where(known, maxima / np.where(known, means, 1.0), 1.0)
    return float(ratios.sum()) / len(ratios)
