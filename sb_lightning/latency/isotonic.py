"""Measured times made monotone: a longer sequence or a larger budget never costs less."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["isotonic", "isotonic_grid"]

ROUNDS = 64


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the least-squares non-decreasing fit (pool adjacent violators).

    Example:
        >>> isotonic([1.0, 3.0, 2.0, 5.0])
        [1.0, 2.5, 2.5, 5.0]
    """
    pools: list[tuple[float, float]] = []
    for value in values:
        pools.append((value, 1.0))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = (pools[-1][0] + total, pools[-1][1] + count)
    return [total / count for total, count in pools for _ in range(int(count))]


def isotonic_grid(columns: Sequence[Sequence[int]], rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Make rows monotone along themselves and from row to row.

    Rows and columns are fitted in turn; what then remains, between rows without common columns, is met
    half-way between the largest value before and the smallest value after each point.

    Args:
        columns: The columns (budgets, ascending) of each row.
        rows: The values.

    Returns:
        Values with value(i, a) <= value(j, b) wherever i <= j and a <= b.
    """
    result = [list(row) for row in rows]
    places: dict[int, list[tuple[int, int]]] = {}
    for i, row_columns in enumerate(columns):
        for j, column in enumerate(row_columns):
            places.setdefault(column, []).append((i, j))
    for _ in range(ROUNDS):
        result = [isotonic(row) for row in result]
        changed = False
        for column in sorted(places):
            before = [result[i][j] for i, j in places[column]]
            after = isotonic(before)
            changed = changed or after != before
            for (i, j), value in zip(places[column], after, strict=True):
                result[i][j] = value
        if not changed:
            break
    lower, upper = _envelope(columns, result, 1), _envelope(columns, result, -1)
    return [[(a + -b) / 2.0 for a, b in zip(*pair, strict=True)] for pair in zip(lower, upper, strict=True)]


def _envelope(
    columns: Sequence[Sequence[int]], rows: Sequence[Sequence[float]], sign: int
) -> list[list[float]]:
    """Return the largest value at or before each point (sign 1), or minus the smallest at or after it."""
    best = dict.fromkeys(
        sorted({column for row in columns for column in row}, key=lambda c: sign * c), -math.inf
    )
    result: list[list[float]] = [[] for _ in rows]
    for i in range(len(rows))[::sign]:
        for column, value in zip(columns[i], rows[i], strict=True):
            best[column] = max(best[column], sign * value)
        run = -math.inf
        for column in best:
            best[column] = run = max(run, best[column])
        result[i] = [best[column] for column in columns[i]]
    return result
