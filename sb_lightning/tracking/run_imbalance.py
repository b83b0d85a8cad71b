"""What the windows of a run have in common: the figures of its summary."""

from __future__ import annotations

import heapq
import statistics
from typing import Any

from sb_lightning.tracking.spans import LANES
from sb_lightning.tracking.window_record import MeasuredWindow

__all__ = ["RunImbalance"]

MEASURES = ("imbalance", "imbalance_slot", "imbalance_micro_batch", "imbalance_within")
NUM_WORST = 5
MOST_KEPT = 4096


class _Sample:
    """At most `MOST_KEPT` of a series of numbers, evenly over it; the same wherever the series is."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every, self._count = 1, 0

    def add(self, value: float) -> None:
        if self._count % self._every == 0:
            if len(self.values) == MOST_KEPT:
                self.values, self._every = self.values[::2], 2 * self._every
            if self._count % self._every == 0:
                self.values.append(value)
        self._count += 1


class RunImbalance:
    """Adds up windows; the first of a session, which warms up, counts only where it stays the only one.

    It keeps equally much however long the run is: the median is that of some thousand windows, evenly taken.
    """

    def __init__(self) -> None:
        self._windows = self._ranks = 0
        self._warm_up: tuple[MeasuredWindow, dict[str, float]] | None = None
        self._totals = dict.fromkeys(MEASURES, 0.0)
        self._sample, self._largest = _Sample(), 0.0
        self._sums = {f"time/{lane}_ms": 0.0 for lane in LANES}
        # A window carries the costs of the one before it: the first of them are those of the warm-up.
        self._warm_costs: tuple[float, float] | None = None
        self._monitor_ms = self._sync_ms = 0.0
        self._idle_ms = self._wall_ms = 0.0
        self._stragglers: dict[int, int] = {}
        self._worst: list[tuple[float, int, dict[str, Any]]] = []

    def add(self, window: MeasuredWindow, metrics: dict[str, float]) -> None:
        """Add a window with its metrics."""
        if self._windows == 0 and self._warm_up is None:
            self._warm_up = (window, metrics)
            return
        self._add(window, metrics)

    def _add(self, window: MeasuredWindow, metrics: dict[str, float]) -> None:
        self._windows += 1
        self._ranks = len(window.num_cells)
        for name in MEASURES:
            self._totals[name] += metrics[f"balance/{name}"]
        self._sample.add(metrics["balance/imbalance"])
        self._largest = max(self._largest, metrics["balance/imbalance"])
        for name in self._sums:
            self._sums[name] += metrics[name]
        if self._warm_costs is None:
            self._warm_costs = (window.monitor_ms, window.sync_ms)
        else:
            self._monitor_ms += window.monitor_ms
            self._sync_ms += window.sync_ms
        self._idle_ms += metrics["balance/idle_ms"]
        self._wall_ms += 1e3 * window.wall_s
        rank, micro_batch = window.straggler
        self._stragglers[rank] = self._stragglers.get(rank, 0) + 1
        cell = window.cell(rank, micro_batch)
        worst = {
            "window": window.index,
            "rank": rank,
            "micro_batch": micro_batch,
            "busy_ms": cell.busy_ms,
            "idle_ms": metrics["balance/idle_ms"],
            "tokens": cell.tokens,
            "num_sequences": cell.num_sequences,
            "sequences": [list(item) for item in cell.sequences],
        }
        # A window's number tells apart entries of equal idle time.
        heapq.heappush(self._worst, (metrics["balance/idle_ms"], window.index, worst))
        if len(self._worst) > NUM_WORST:
            heapq.heappop(self._worst)

    def summary(self) -> dict[str, Any] | None:
        """Return the figures as JSON can write them; None before the first window."""
        if self._windows == 0:
            if self._warm_up is None:
                return None
            only = RunImbalance()
            only._add(*self._warm_up)
            return only.summary()
        total = sum(self._stragglers.values())
        assert self._warm_costs is not None
        monitor_ms, sync_ms = self._warm_costs
        if self._windows > 1:
            monitor_ms, sync_ms = (cost / (self._windows - 1) for cost in (self._monitor_ms, self._sync_ms))
        window_ms = self._wall_ms / self._windows
        return {
            "windows": self._windows,
            "ranks": self._ranks,
            **{name: total / self._windows for name, total in self._totals.items()},
            "imbalance_median": statistics.median(self._sample.values),
            "imbalance_max": self._largest,
            "idle_ms": self._idle_ms / self._windows,
            "idle_share": self._idle_ms / self._wall_ms if self._wall_ms else 0.0,
            "window_ms": window_ms,
            "time_ms": {
                name.removeprefix("time/").removesuffix("_ms"): value / self._windows
                for name, value in self._sums.items()
            },
            "monitor_ms": monitor_ms,
            "monitor_share": monitor_ms / window_ms if window_ms else 0.0,
            "sync_ms": sync_ms,
            "straggler_share": {str(rank): count / total for rank, count in sorted(self._stragglers.items())},
            "worst_cells": [worst for _, _, worst in sorted(self._worst, key=lambda item: item[:2])[::-1]],
        }
