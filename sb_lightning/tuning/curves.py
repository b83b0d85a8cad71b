"""Coverage curves that are learnt: a few budgets of each, and what lies between."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["CURVE_BUDGETS", "between_points", "curve_grid"]

CURVE_BUDGETS: tuple[int, ...] = (1, 2, *(n for e in range(1, 15) for n in (3 << (e - 1), 4 << (e - 1))))
"""Budgets at which a curve is kept: two per doubling, up to 32,768 blocks."""


def curve_grid(max_budget: int) -> NDArray[np.int64]:
    """Return where in a curve of `max_budget` budgets the points lie; those beyond its end, at the end.

    Example:
        >>> curve_grid(5)[:6].tolist()
        [0, 1, 2, 3, 4, 4]
    """
    return np.minimum(np.array(CURVE_BUDGETS, dtype=np.int64), max_budget) - 1


def between_points(points: NDArray[np.float64], max_budget: int, num_blocks: int) -> NDArray[np.float64]:
    """Return a curve at budgets 1 to `max_budget`, straight between its points; never falls.

    Args:
        points: Coverage at `CURVE_BUDGETS` # [points]
        max_budget: Budgets to return.
        num_blocks: Blocks of the sequence: from there on all is covered.

    Returns:
        # [max_budget]

    Example:
        >>> points = np.linspace(0, 1, len(CURVE_BUDGETS))
        >>> curve = between_points(points, 8, num_blocks=7)
        >>> bool(np.isclose(curve[4], (points[3] + points[4]) / 2)), curve[6:].tolist()
        (True, [1.0, 1.0])
    """
    known = np.array(CURVE_BUDGETS, dtype=np.int64)
    budgets = np.arange(1, max_budget + 1)
    above = np.minimum(np.searchsorted(known, budgets), len(known) - 1)
    below = np.maximum(above - 1, 0)
    # Elementwise, one operation at a time: the same bits on every machine.
    width = np.maximum(known[above] - known[below], 1).astype(np.float64)
    share = (budgets - known[below]).astype(np.float64) / width
    curve = points[below] + (points[above] - points[below]) * np.minimum(share, 1.0)
    curve[budgets >= num_blocks] = 1.0
    return np.maximum.accumulate(np.clip(curve, 0.0, 1.0))
