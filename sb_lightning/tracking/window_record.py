"""A measured window: how it travels between ranks, and the metrics made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sb_lightning.tracking.metrics import idle_ms, imbalances, prediction_error_pct, rank_sums
from sb_lightning.tracking.spans import LANES

__all__ = [
    "MAX_NAMED",
    "MeasuredCell",
    "MeasuredWindow",
    "decode_window",
    "encode_window",
    "fit_cells",
    "payload_sizes",
    "window_metrics",
]

MAX_NAMED = 4
"""Sequences of a cell that are named: its longest ones."""
# Per cell: the lanes, then busy time, prediction, budget.
CELL_FLOATS = len(LANES) + 3
BUSY, PREDICTED = len(LANES), len(LANES) + 1
# Per cell: tokens, longest, sequences, is_padding, named sequences, then their ids and lengths.
CELL_INTS = 5 + 2 * MAX_NAMED
TOKENS, IS_PADDING = 0, 3
# Per window: wall time, the monitor's own time, the ranks' meeting.
WINDOW_FLOATS = 3
# Per window: micro-batches (also those that share a cell), number, optimizer steps.
WINDOW_INTS = 3


@dataclass(frozen=True, kw_only=True)
class MeasuredCell:
    """One micro-batch of one rank."""

    lanes_ms: tuple[float, ...]
    """Time in each of `LANES`; each moment counts once."""
    busy_ms: float
    """Data, forward and backward, without waits."""
    tokens: int = 0
    """Tokens; 0 if unknown."""
    longest: int = 0
    """Tokens of the longest sequence; 0 if unknown."""
    num_sequences: int = 0
    """Sequences; 0 if unknown."""
    is_padding: bool = False
    """It only fills up a short window."""
    predicted_ms: float = math.nan
    """Forward and backward as predicted; NaN if nobody has."""
    budget: float = math.nan
    """Attention budget, averaged where there are several; NaN if unknown."""
    sequences: tuple[tuple[int, int], ...] = ()
    """Id (-1 if unknown) and length of the longest sequences, longest first."""

    @property
    def compute_ms(self) -> float:
        """Forward and backward: what a prediction is about."""
        return self.lanes_ms[LANES.index("forward")] + self.lanes_ms[LANES.index("backward")]


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredWindow:
    """What all ranks measured of one window; equal on every rank."""

    index: int
    """Number of the window in the run."""
    step: int
    """Optimizer steps done at its end."""
    wall_s: float
    """Its length by the clock, of the rank where it took longest; validation is not in it."""
    monitor_ms: float
    """Work of the monitor since the window before was measured, averaged over ranks."""
    sync_ms: float
    """The ranks' meeting after the window before: from coming to it until all were there, averaged."""
    num_cells: tuple[int, ...]
    """Cells of each rank."""
    is_merged: tuple[bool, ...]
    """Whether a rank's last cell is the sum of the micro-batches there was no room for."""
    times: NDArray[np.float64]
    """Per cell the time in each of `LANES`, busy time, predicted time, budget # [R, A, lanes + 3]; NaN where
    a rank ran no such micro-batch."""
    counts: NDArray[np.int64]
    """Per cell the integers of a `MeasuredCell` # [R, A, 13]; 0 where a rank ran no such micro-batch."""

    @property
    def busy_ms(self) -> NDArray[np.float64]:
        """Busy time of each cell # [R, A]."""
        return self.times[..., BUSY]

    @property
    def is_apart(self) -> NDArray[np.bool_]:
        """Whether a cell is one micro-batch, rather than none or the sum of several # [R, A]."""
        number = np.arange(self.times.shape[1])
        last = np.array(self.num_cells)[:, None] - np.array(self.is_merged)[:, None]
        return np.asarray(number < last)

    @property
    def predicted_ms(self) -> NDArray[np.float64]:
        """Predicted time of each cell # [R, A]; NaN also where there is no prediction."""
        return self.times[..., PREDICTED]

    @property
    def compute_ms(self) -> NDArray[np.float64]:
        """Forward and backward of each cell, which a prediction is about # [R, A]."""
        return self.times[..., LANES.index("forward")] + self.times[..., LANES.index("backward")]

    @property
    def straggler(self) -> tuple[int, int]:
        """The rank that was busy longest, and its micro-batch that took longest."""
        rank = int(rank_sums(self.busy_ms).argmax())
        # A sum of micro-batches is the longest only where there is nothing else.
        count = max(self.num_cells[rank] - self.is_merged[rank], 1)
        return rank, int(self.busy_ms[rank, :count].argmax())

    def cell(self, rank: int, micro_batch: int) -> MeasuredCell:
        """Return one micro-batch."""
        *lanes_ms, busy_ms, predicted_ms, budget = self.times[rank, micro_batch].tolist()
        tokens, longest, num_sequences, is_padding, num_named, *named = self.counts[
            rank, micro_batch
        ].tolist()
        return MeasuredCell(
            lanes_ms=tuple(lanes_ms),
            busy_ms=busy_ms,
            tokens=tokens,
            longest=longest,
            num_sequences=num_sequences,
            is_padding=bool(is_padding),
            predicted_ms=predicted_ms,
            budget=budget,
            sequences=tuple((named[2 * i], named[2 * i + 1]) for i in range(num_named)),
        )

    @property
    def cells(self) -> list[list[MeasuredCell]]:
        """`cells[rank][micro_batch]`; made anew at each call."""
        return [[self.cell(rank, a) for a in range(count)] for rank, count in enumerate(self.num_cells)]


def payload_sizes(capacity: int) -> tuple[int, int]:
    """Return how many floats and ints a window of so many micro-batches per rank needs."""
    return WINDOW_FLOATS + capacity * CELL_FLOATS, WINDOW_INTS + capacity * CELL_INTS


def fit_cells(cells: Sequence[MeasuredCell], capacity: int) -> list[MeasuredCell]:
    """Return at most `capacity` cells: the last one takes in those that are too many."""
    if len(cells) <= capacity:
        return list(cells)
    kept, rest = list(cells[: capacity - 1]), cells[capacity - 1 :]
    named = sorted((item for cell in rest for item in cell.sequences), key=lambda item: -item[1])
    merged = replace(
        rest[0],
        lanes_ms=tuple(map(sum, zip(*(cell.lanes_ms for cell in rest), strict=True))),
        busy_ms=sum(cell.busy_ms for cell in rest),
        tokens=sum(cell.tokens for cell in rest),
        longest=max(cell.longest for cell in rest),
        num_sequences=sum(cell.num_sequences for cell in rest),
        is_padding=all(cell.is_padding for cell in rest),
        predicted_ms=sum(cell.predicted_ms for cell in rest),
        budget=sum(cell.budget for cell in rest) / len(rest),
        sequences=tuple(named[:MAX_NAMED]),
    )
    return [*kept, merged]


def encode_window(
    cells: Sequence[MeasuredCell],
    *,
    capacity: int,
    index: int,
    step: int,
    wall_s: float,
    monitor_ms: float,
    sync_ms: float,
) -> tuple[list[float], list[int]]:
    """Write this rank's part of a window as numbers of a fixed count, see `payload_sizes` and `fit_cells`.

    Args:
        cells: The rank's micro-batches; none for "nothing to tell".
        capacity: Micro-batches that there is room for.
        index: Number of the window.
        step: Optimizer steps done.
        wall_s: Length of the window by the clock.
        monitor_ms: What measuring took.
        sync_ms: What the ranks' meeting took.
    """
    num_floats, num_ints = payload_sizes(capacity)
    floats, ints = [wall_s, monitor_ms, sync_ms], [len(cells), index, step]
    for cell in fit_cells(cells, capacity):
        floats += [*cell.lanes_ms, cell.busy_ms, cell.predicted_ms, cell.budget]
        named = cell.sequences[:MAX_NAMED]
        ints += [cell.tokens, cell.longest, cell.num_sequences, int(cell.is_padding), len(named)]
        for item in range(MAX_NAMED):
            ints += named[item] if item < len(named) else (0, 0)
    floats += [0.0] * (num_floats - len(floats))
    ints += [0] * (num_ints - len(ints))
    return floats, ints


def decode_window(floats: NDArray[np.float64], ints: NDArray[np.int64]) -> MeasuredWindow | None:
    """Read what all ranks have written; None if a rank had nothing to tell.

    Args:
        floats: As gathered # [R, floats].
        ints: As gathered # [R, ints].
    """
    if not len(ints) or int(ints[:, 0].min()) == 0:
        return None
    ranks, capacity = len(ints), (ints.shape[1] - WINDOW_INTS) // CELL_INTS
    num_cells = np.minimum(ints[:, 0], capacity)
    monitor_ms, sync_ms = (floats[:, 1:WINDOW_FLOATS].sum(axis=0) / ranks).tolist()
    width = int(num_cells.max())
    times = floats[:, WINDOW_FLOATS:].reshape(ranks, -1, CELL_FLOATS)[:, :width].copy()
    times[np.arange(width) >= num_cells[:, None]] = np.nan
    return MeasuredWindow(
        index=int(ints[0, 1]),
        step=int(ints[0, 2]),
        wall_s=float(floats[:, 0].max()),
        monitor_ms=monitor_ms,
        sync_ms=sync_ms,
        num_cells=tuple(num_cells.tolist()),
        is_merged=tuple((ints[:, 0] > capacity).tolist()),
        times=times,
        counts=ints[:, WINDOW_INTS:].reshape(ranks, -1, CELL_INTS)[:, :width],
    )


def window_metrics(window: MeasuredWindow, replicas: int | None = None) -> dict[str, float]:
    """Return a window's metrics by name; those that cannot be known are left out.

    Args:
        window: What all ranks measured.
        replicas: Ranks with batches of their own; None: all. Ranks that share a batch (tensor parallel) have
            counted its tokens several times.

    Returns:
        `balance/imbalance` and its kin, `balance/idle_ms`, and `time/*_ms`: the time of a rank in each lane,
        averaged over ranks; with `_predicted` twins and `predict/error_pct` where every cell has a
        prediction, and `throughput/tokens_per_s` where token counts are known. Where a window has more
        micro-batches than there was room for, those that are not apart count for sums over ranks only.
    """
    busy, predicted, ranks = window.busy_ms, window.predicted_ms, len(window.num_cells)
    is_apart = window.is_apart
    found = imbalances(busy, is_apart=is_apart)
    # NaN also stands where a rank ran no cell: only a cell without a prediction makes the twins unknown.
    if not np.isnan(predicted[~np.isnan(busy)]).any():
        found |= imbalances(predicted, "_predicted", is_apart=is_apart)
        error = prediction_error_pct(np.where(is_apart, predicted, np.nan), window.compute_ms)
        if error is not None:
            found["predict/error_pct"] = error
    found["balance/idle_ms"] = idle_ms(busy)
    tokens = int(window.counts[..., TOKENS][window.counts[..., IS_PADDING] == 0].sum())
    if tokens and window.wall_s > 0:
        found["throughput/tokens_per_s"] = tokens * (replicas or ranks) / ranks / window.wall_s
    lanes_ms = window.times[..., : len(LANES)][~np.isnan(busy)].sum(axis=0) / ranks
    found |= {f"time/{lane}_ms": time_ms for lane, time_ms in zip(LANES, lanes_ms.tolist(), strict=True)}
    found["time/monitor_ms"] = window.monitor_ms
    found["time/sync_ms"] = window.sync_ms
    return found
