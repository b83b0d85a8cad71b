"""From samples to a table."""

from __future__ import annotations

from collections.abc import Callable

from sb_lightning._messages import explain
from sb_lightning.attention.pairs import causal_pairs
from sb_lightning.latency.lattice import Curve, Measurements
from sb_lightning.latency.profiler.points import Grid, Point
from sb_lightning.latency.profiler.samples import Passes, Record, Sample, median_of

__all__ = ["assemble"]

Records = dict[Point, Record]
LEAST_MS = 1e-6
MOST_OVERHEAD = 0.9
"""Share of the shortest time of a part that may be taken for overhead."""


def assemble(
    records: Records, grid: Grid, *, measured: tuple[int, int], layers: tuple[int, int]
) -> Measurements:
    """Put a table's measurements together.

    A micro-batch pays some time once, however many sequences it packs: Python, launches, small tensors. For
    each part that overhead is twice the time of the shortest sequence less the time of two of them packed;
    it is taken off the part's times and adds up to the fixed cost of a micro-batch. So the prediction of one
    sequence plus the fixed cost is what was measured, and several sequences pay for the overhead once.

    Args:
        records: The samples; points that were never measured are missing. Held-out points are not used.
        grid: Where they lie.
        measured: Layers with a budget and with full attention in the model that was measured.
        layers: The same in the model that the table is for.

    Returns:
        The lengths that were measured, with the budgets that were. Where the time did not suffice for full
        attention of a long sequence, its time is that of the longest one measured, scaled by the pairs.

    Raises:
        RuntimeError: Not even the shortest sequence was measured.
    """
    used = {point: record for point, record in records.items() if not point.is_held_out and point.copies == 1}
    parts = _Parts(measured)
    lengths = sorted({point.length for point in used})
    if not lengths or Point(lengths[0], grid.blocks(lengths[0])) not in used:
        raise RuntimeError(
            explain("no sequence was measured", "a table needs one", "give the profile more seconds")
        )
    at = {length: [s for p, r in used.items() if p.length == length for s in r.used] for length in lengths}
    full = {
        length: used[point].used
        for length in lengths
        if (point := Point(length, grid.blocks(length))) in used
    }
    budgets = [
        sorted(p.budget for p in used if p.length == length and p.budget < grid.blocks(length))
        for length in lengths
    ]
    outside = [median_of(at[length], parts.outside) for length in lengths]
    rest = [median_of(at[length], parts.rest) for length in lengths]
    sparse = [
        [median_of(used[Point(length, k)].used, parts.sparse) for k in row]
        for length, row in zip(lengths, budgets, strict=True)
    ]
    if measured[1]:
        dense = [median_of(at[length], parts.dense) for length in lengths]
    else:
        known = {length: median_of(samples, parts.sparse) for length, samples in full.items()}
        dense = [_scaled(length, known, row) for length, row in zip(lengths, sparse, strict=True)]
    pair = records.get(grid.pair)
    one, two = full.get(grid.shortest), pair.used if pair else None

    def overhead(part: Callable[[Sample], Passes], times: list[Passes]) -> Passes:
        if one is None or two is None:
            return 0.0, 0.0
        single, double = median_of(one, part), median_of(two, part)
        most = [MOST_OVERHEAD * min(passes[i] for passes in times) for i in range(2)]
        forward, backward = (max(0.0, min(2 * single[i] - double[i], most[i])) for i in range(2))
        return forward, backward

    once_outside, once_rest = overhead(parts.outside, outside), overhead(parts.rest, rest)
    attention = parts.sparse if measured[0] else parts.dense
    once_attention = overhead(attention, [*dense, *(passes for row in sparse for passes in row)])
    return Measurements(
        block_size=grid.block_size,
        layers=layers[0],
        dense_layers=layers[1],
        fixed_ms=sum(once_outside) + sum(layers) * (sum(once_rest) + sum(once_attention)),
        lengths=lengths,
        budgets=budgets,
        sparse=[_curve(row, once_attention) for row in sparse],
        dense=_curve(dense, once_attention),
        rest=_curve(rest, once_rest),
        outside=_curve(outside, once_outside),
    )


def _scaled(length: int, known: dict[int, Passes], row: list[Passes]) -> Passes:
    """Return the time of full attention: measured, or scaled but not below that of the largest budget."""
    if length in known:
        return known[length]
    near = max(n for n in known if n <= length)
    scale = causal_pairs([length]) / causal_pairs([near])
    forward, backward = (max(scale * known[near][i], *(passes[i] for passes in row)) for i in range(2))
    return forward, backward


class _Parts:
    """The parts of a sample of a model with so many layers."""

    def __init__(self, measured: tuple[int, int]) -> None:
        self.measured = measured

    def outside(self, sample: Sample) -> Passes:
        return sample.outside

    def rest(self, sample: Sample) -> Passes:
        return sample.rest(*self.measured)

    def sparse(self, sample: Sample) -> Passes:
        return sample.sparse

    def dense(self, sample: Sample) -> Passes:
        return sample.dense


def _curve(times: list[Passes], once: Passes) -> Curve:
    return [[max(LEAST_MS, passes[i] - once[i]) for passes in times] for i in range(2)]
