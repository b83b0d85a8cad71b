"""The surface that predictions are read from, in plain Python; the twin of csrc/latency/build.cpp.

Between two measured lengths the times are bilinear in log T over (log L, log u), u = budget * block / L,
where u = 1 is the dense curve. That surface is sampled on a lattice, the samples are made monotone, and
between them it is bilinear in log T over (log L, log budget), which keeps the order of its corners.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sb_lightning.attention.pairs import attended_pairs
from sb_lightning.latency.isotonic import isotonic, isotonic_grid
from sb_lightning.latency.numeric import WEIGHT_ONE, blend, exp2, from_fixed, limit, log2, to_fixed, weight_of

__all__ = ["MAX_LENGTH", "Curve", "Lattice", "Measurements", "Row", "build_lattice", "scale_lattice"]

MAX_LENGTH = 2**31 - 1
NEVER_MEASURED = MAX_LENGTH
ROWS_PER_OCTAVE = 8
EVERY_BUDGET = 64
Curve = Sequence[Sequence[float]]
"""Forward and backward times in ms."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a latency table is made of; all times in milliseconds and positive."""

    block_size: int
    """Keys per block."""
    layers: int
    """Layers with a budget."""
    dense_layers: int
    """Layers with full attention."""
    fixed_ms: float
    """Fixed cost of a micro-batch."""
    lengths: Sequence[int]
    """Measured lengths in tokens, ascending."""
    budgets: Sequence[Sequence[int]]
    """Measured budgets of each length, ascending, below its number of blocks."""
    sparse: Sequence[Curve]
    """Attention of one layer, by length and budget."""
    dense: Curve
    """Attention of one layer over all blocks, by length."""
    rest: Curve
    """One decoder layer without its attention, by length."""
    outside: Curve
    """Embedding, head and loss, by length."""


@dataclass
class Row:
    """One length of the lattice; times are fixed-point logarithms."""

    log2_length: float
    dense: int = 0
    fixed: int = 0
    dense_share: float = 0.0
    fixed_share: float = 0.0
    least_here: int = 0
    least_above: int = 0
    values: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


@dataclass
class Lattice:
    """All rows, and the budgets at which they have values."""

    rows: list[Row]
    knots: list[int]
    block_size: int
    correction: float = 0.0
    mean_correction: float = 0.0

    def __post_init__(self) -> None:
        self.row_axis = [row.log2_length for row in self.rows]
        self.knot_axis = [log2(float(k)) for k in self.knots]

    def row_at(self, length: int) -> tuple[int, int]:
        """Return the row below a length and the weight of the next one."""
        return _place(self.row_axis, log2(float(length)))

    def knot_at(self, budget: int) -> tuple[int, int]:
        """Return the knot below a budget and the weight of the next one."""
        return _place(self.knot_axis, log2(float(budget)))

    def dense_at(self, length: int) -> int:
        """Return the attention's time over all blocks."""
        i, weight = self.row_at(length)
        return blend(self.rows[i].dense, self.rows[i + 1].dense, weight)


def _place(axis: Sequence[float], x: float) -> tuple[int, int]:
    i = min(bisect_right(axis, x) - 1, len(axis) - 2)
    return i, weight_of(x, axis[i], WEIGHT_ONE / (axis[i + 1] - axis[i]))


@dataclass(frozen=True)
class _Spot:
    kind: str
    index: int
    weight: float
    length: int
    log2_length: float


def _spots(lengths: Sequence[int]) -> list[_Spot]:
    spots = []
    x = 1
    while x < lengths[0]:
        spots.append(_Spot("below", 0, 0.0, x, log2(float(x))))
        x += max(1, x // 2)
    for i, length in enumerate(lengths):
        here = log2(float(length))
        spots.append(_Spot("measured", i, 0.0, length, here))
        if i + 1 < len(lengths):
            distance = log2(float(lengths[i + 1])) - here
            parts = math.ceil(distance * ROWS_PER_OCTAVE)
            spots += [
                _Spot("between", i, n / parts, 0, here + distance * (n / parts)) for n in range(1, parts)
            ]
    x = lengths[-1]
    while x < MAX_LENGTH:
        x = min(x + max(1, x // 2), MAX_LENGTH)
        spots.append(_Spot("above", len(lengths) - 1, 0.0, x, log2(float(x))))
    return spots


def _knots(m: Measurements) -> list[int]:
    most = -(-MAX_LENGTH // m.block_size)
    knots = {*range(1, EVERY_BUDGET + 1), most, *(k for row in m.budgets for k in row)}
    k = 1
    while k < most:
        knots.add(k)
        k += 1 if k < EVERY_BUDGET else max(1, k // 23)
    return sorted(knots)


def _mix(a: float, b: float, weight: float) -> float:
    return a + (b - a) * weight


def _logs(curve: Curve) -> tuple[list[float], list[float]]:
    whole = [f + b for f, b in zip(*curve, strict=True)]
    return [log2(t) for t in whole], [f / t for f, t in zip(curve[0], whole, strict=True)]


def _log_pairs(length: int, budget: int, block: int) -> float:
    return log2(float(attended_pairs([length], budget, block)))


def _log_causal(length: int) -> float:
    return log2(float(length * (length + 1) // 2))


def _at_spots(spots: list[_Spot], measured: list[int], work: Callable[[_Spot], float]) -> list[int]:
    result: list[int] = []
    for spot in spots:
        here = value = measured[spot.index]
        if spot.kind == "between":
            above = measured[spot.index + 1]
            value = min(to_fixed(_mix(from_fixed(here), from_fixed(above), spot.weight)), above)
        elif spot.kind != "measured":
            value = to_fixed(from_fixed(here) + work(spot))
        result.append(max(value, result[-1]) if result else value)
    return result


def _share_at(spot: _Spot, shares: list[float]) -> float:
    if spot.kind == "between":
        return _mix(shares[spot.index], shares[spot.index + 1], spot.weight)
    return shares[spot.index]


class _MeasuredRow:
    """The times at one measured length as a piecewise linear function of log2(budget)."""

    def __init__(
        self,
        length: int,
        block: int,
        budgets: Sequence[int],
        times: list[int],
        shares: list[float],
        dense: int,
        dense_share: float,
    ) -> None:
        first = budgets[0] if budgets else -(-length // block)
        time = from_fixed(times[0] if budgets else dense)
        pairs = _log_pairs(length, first, block) if budgets else _log_causal(length)
        self.points: list[tuple[float, float, float]] = []
        k = 1
        while k < first:
            below = time + (_log_pairs(length, k, block) - pairs)
            self.points.append((log2(float(k)), below, shares[0] if budgets else dense_share))
            k *= 2
        for budget, y, share in zip(budgets, times, shares, strict=True):
            self.points.append((log2(float(budget)), from_fixed(y), share))
        self.points.append((log2(float(length)) - log2(float(block)), from_fixed(dense), dense_share))
        self.axis = [point[0] for point in self.points]

    def at(self, x: float) -> tuple[float, float]:
        """Return log2 of the time and the forward pass's share."""
        j = bisect_right(self.axis, x)
        if j == len(self.axis) or j == 0:
            return self.points[max(j - 1, 0)][1:]
        (x0, y0, s0), (x1, y1, s1) = self.points[j - 1], self.points[j]
        weight = (x - x0) / (x1 - x0)
        return _mix(y0, y1, weight), _mix(s0, s1, weight)


def build_lattice(m: Measurements) -> Lattice:
    """Build the surface from measurements."""
    spots, block = _spots(m.lengths), m.block_size
    rows = [Row(spot.log2_length) for spot in spots]
    lattice = Lattice(rows, _knots(m), block)
    moves: list[float] = []

    def moved(before: list[float], after: list[int]) -> list[int]:
        for was, y in zip(map(to_fixed, before), after, strict=True):
            moves.append(0.0 if was == y else abs(exp2(y) / exp2(was) - 1.0))
        return after

    def curve(logs: list[float]) -> list[int]:
        return moved(logs, [to_fixed(y) for y in isotonic(logs)])

    (dense_logs, dense_shares), (rest_logs, rest_shares) = _logs(m.dense), _logs(m.rest)
    outside_logs, outside_shares = _logs(m.outside)
    dense = curve(dense_logs)
    dense_rows = _at_spots(
        spots, dense, lambda spot: _log_causal(spot.length) - _log_causal(m.lengths[spot.index])
    )

    def tokens(spot: _Spot) -> float:
        return spot.log2_length - log2(float(m.lengths[spot.index]))

    rest_rows = _at_spots(spots, curve(rest_logs), tokens)
    outside_rows = _at_spots(spots, curve(outside_logs), tokens)
    for s, (spot, row) in enumerate(zip(spots, rows, strict=True)):
        row.dense, row.dense_share = dense_rows[s], _share_at(spot, dense_shares)
        rest = float(m.layers + m.dense_layers) * exp2(rest_rows[s])
        outside, attention = exp2(outside_rows[s]), float(m.dense_layers) * exp2(row.dense)
        whole = rest + outside + attention
        row.fixed = max(to_fixed(log2(whole)), rows[s - 1].fixed if s else -(2**63))
        row.fixed_share = (
            rest * _share_at(spot, rest_shares)
            + outside * _share_at(spot, outside_shares)
            + attention * row.dense_share
        ) / whole

    sparse = [_logs(row) for row in m.sparse]
    times: list[list[int]] = []
    for i, logs in enumerate(isotonic_grid(m.budgets, [row[0] for row in sparse])):
        least = [lattice.dense_at(k * block) for k in m.budgets[i]]
        bounded = [min(max(to_fixed(y), low), dense[i]) for y, low in zip(logs, least, strict=True)]
        times.append(moved(sparse[i][0], bounded))
    lattice.correction = max(moves)
    total = 0.0
    for move in moves:
        total += move
    lattice.mean_correction = total / len(moves)

    measured = [
        _MeasuredRow(length, block, m.budgets[i], times[i], sparse[i][1], dense[i], dense_shares[i])
        for i, length in enumerate(m.lengths)
    ]
    least_budget = [
        row[0] if row else NEVER_MEASURED if length > block else 0
        for row, length in zip(m.budgets, m.lengths, strict=True)
    ]
    _fill_values(m, lattice, spots, measured, times, least_budget)
    return lattice


def _fill_values(
    m: Measurements,
    lattice: Lattice,
    spots: list[_Spot],
    measured: list[_MeasuredRow],
    times: list[list[int]],
    least: list[int],
) -> None:
    block, count, knots = m.block_size, len(m.lengths), lattice.knots
    reach = [log2(float(k * block)) for k in knots]
    upper = _upper_bounds(m, knots, times)
    before: list[int] = []
    top = -1
    for s, (spot, row) in enumerate(zip(spots, lattice.rows, strict=True)):
        above = min(spot.index + 1, count - 1)
        both = max(least[spot.index], least[above])
        row.least_here = both if spot.kind == "between" else least[spot.index]
        row.least_above = least[0] if spot.kind == "below" else both
        bounds = upper[above if spot.kind == "between" else spot.index]
        run = -(2**63)
        for j, k in enumerate(knots[:-1]):
            if reach[j] >= spot.log2_length:
                break
            x = lattice.knot_axis[j]
            if spot.kind == "between":
                down = min(spot.log2_length - log2(float(m.lengths[spot.index])), x)
                up = down * ((1.0 - spot.weight) / spot.weight)
                (y0, s0), (y1, s1) = measured[spot.index].at(x - down), measured[above].at(x + up)
                y, share = _mix(y0, y1, spot.weight), _mix(s0, s1, spot.weight)
            elif spot.kind == "above":
                highest = lattice.rows[top]
                place = min(j, len(highest.values) - 1)
                more = _log_pairs(spot.length, k, block) - _log_pairs(m.lengths[spot.index], k, block)
                y, share = from_fixed(highest.values[place]) + more, highest.shares[place]
            else:
                y, share = measured[spot.index].at(x)
                if spot.kind == "below":
                    y += _log_pairs(spot.length, k, block) - _log_pairs(m.lengths[spot.index], k, block)
            run = max(run, to_fixed(y), before[min(j, len(before) - 1)] if before else run)
            most = row.dense if spot.kind == "above" else min(bounds[j], row.dense)
            row.values.append(min(run, most))
            row.shares.append(share)
        row.values.append(row.dense)
        row.shares.append(row.dense_share)
        before = row.values
        if spot.kind == "measured":
            top = s


def _upper_bounds(m: Measurements, knots: list[int], times: list[list[int]]) -> list[list[int]]:
    bound = [2**63 - 1] * len(knots)
    bounds: list[list[int]] = [[] for _ in m.lengths]
    for i in reversed(range(len(m.lengths))):
        known = dict(zip(m.budgets[i], times[i], strict=True))
        for j in reversed(range(len(knots))):
            bound[j] = min(bound[j], known.get(knots[j], bound[j]))
            if j + 1 < len(knots):
                bound[j] = min(bound[j], bound[j + 1])
        bounds[i] = list(bound)
    return bounds


def scale_lattice(lattice: Lattice, log2_lengths: Sequence[float], log2_factors: Sequence[float]) -> Lattice:
    """Multiply every time by 2**factor, linear between the given lengths, and make it monotone again."""
    rows: list[Row] = []
    for row in lattice.rows:
        x, n = row.log2_length, bisect_right(log2_lengths, row.log2_length)
        if n == 0 or n == len(log2_lengths):
            factor = log2_factors[max(n - 1, 0)]
        else:
            share = (x - log2_lengths[n - 1]) / (log2_lengths[n] - log2_lengths[n - 1])
            factor = log2_factors[n - 1] + (log2_factors[n] - log2_factors[n - 1]) * share
        shift = to_fixed(factor)
        new = replace(
            row,
            dense=limit(row.dense + shift),
            fixed=limit(row.fixed + shift),
            values=[limit(value + shift) for value in row.values],
        )
        if rows:
            last = rows[-1]
            new.dense, new.fixed = max(new.dense, last.dense), max(new.fixed, last.fixed)
            new.values = [
                max(value, last.values[min(j, len(last.values) - 1)]) for j, value in enumerate(new.values)
            ]
        rows.append(new)
    return replace(lattice, rows=rows)
