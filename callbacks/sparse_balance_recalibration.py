"""Measured times of planned micro-batches, for the factors of the sampler's latency table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sb_lightning.balance import BudgetStore
    from sb_lightning.callbacks.imbalance_monitor import ImbalanceMonitor
    from sb_lightning.callbacks.sparse_balance_window import WindowOutcome
    from sb_lightning.latency.table import LatencyModel

__all__ = ["Recalibration"]

# A monitor that stands behind in the list of callbacks is one window late, and one that times a device too.
MOST_LATE = 3


class _Cells(NamedTuple):
    """What the micro-batches of a window held, over all ranks."""

    lengths: list[list[list[int]]]
    budgets: list[list[list[int]]]


class Recalibration:
    """Gives the store of a sampler what an `ImbalanceMonitor` has measured, the same on all ranks.

    Forward and backward of each planned micro-batch, without waits, stand beside the time that the table
    predicts at the budgets used. The first window of a training is left out: there much happens once.

    Args:
        monitor: Measures this training.
    """

    def __init__(self, monitor: ImbalanceMonitor) -> None:
        self._monitor = monitor
        self._cells: dict[int, _Cells | None] = {}
        self._is_first = True

    def note(self, step: int, window: WindowOutcome, lengths: list[list[list[int]]]) -> None:
        """Remember what a window held.

        Args:
            step: Optimizer steps done at its end.
            window: What it came to.
            lengths: Lengths of its sequences as planned, by rank and micro-batch.
        """
        self._cells[step] = None if self._is_first else _cells_of(window, lengths)
        self._is_first = False
        while len(self._cells) > MOST_LATE:
            del self._cells[next(iter(self._cells))]

    def learn(self, store: BudgetStore, table: LatencyModel) -> bool:
        """Take in the window that the monitor has measured last, once; return whether there was one.

        Args:
            store: Its newest version gets the factors.
            table: What the plans are made by.
        """
        measured = self._monitor.window
        cells = None if measured is None else self._cells.pop(measured.step, None)
        if measured is None or cells is None or any(measured.is_merged):
            return False
        if list(measured.num_cells) != [len(row) for row in cells.lengths]:
            return False
        times_ms = [time for row, n in zip(measured.compute_ms.tolist(), measured.num_cells, strict=True)
                    for time in row[:n]]  # fmt: skip
        known = [n for n, time in enumerate(times_ms) if 0 < time < np.inf]
        lengths, budgets = ([cell for row in each for cell in row] for each in cells)
        if not known:
            return False
        store.recalibrate(
            store.version,
            table,
            lengths=[lengths[n] for n in known],
            budgets=[budgets[n] for n in known],
            measured_ms=[times_ms[n] for n in known],
        )
        return True


def _cells_of(window: WindowOutcome, lengths: list[list[list[int]]]) -> _Cells | None:
    """Return the window by rank and micro-batch, or None where something else has run than was planned."""
    budgets: list[list[list[int]]] = []
    start = 0
    for row, count, forwards in zip(lengths, window.named, window.forwards, strict=True):
        flat = [length for cell in row for length in cell]
        end = start + count
        if forwards != len(row) or flat != window.lengths[start:end]:
            return None
        used = iter(window.budgets[start:end])
        budgets.append([[max(1, round(next(used))) for _ in cell] for cell in row])
        start = end
    return _Cells(lengths, budgets)
