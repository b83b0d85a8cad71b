"""Random micro-batches for the choice of budgets, and the rule for one sequence as it is written down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st


@dataclass(frozen=True)
class MicroBatch:
    """Arguments of `choose_budgets`."""

    coverage: np.ndarray
    cost_us: np.ndarray
    tau_us: int
    options: dict[str, Any]


@st.composite
def micro_batches(draw, max_sequences: int = 4, strictly: bool = False) -> MicroBatch:
    """Draw concave curves in 64ths, where plateaus and ties are common, and costs that never fall."""
    count, width = draw(st.integers(1, max_sequences)), draw(st.integers(1, 8))
    curves, costs = [], []
    for _ in range(count):
        least = 1 if strictly else 0
        gains = st.lists(st.integers(least, 8), min_size=width - 1, max_size=width - 1)
        steps = st.lists(st.integers(0, 5), min_size=width, max_size=width)
        curves.append(np.cumsum([0, *sorted(draw(gains), reverse=True)]) / 64)
        costs.append(np.cumsum(draw(steps)))
    k0 = draw(st.lists(st.integers(1, width + 1), min_size=count, max_size=count))
    options = {
        "tolerance": draw(st.integers(0, 40)) / 64,
        "k0": k0,
        "min_budget": draw(st.integers(1, 4)),
        "rows": draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)),
        "num_blocks": draw(st.lists(st.integers(0, width + 2), min_size=count, max_size=count)),
        "tune_short": draw(st.booleans()),
    }
    tau = draw(st.integers(0, 1 + int(sum(cost[-1] for cost in costs))))
    return MicroBatch(np.array(curves), np.array(costs), tau, options)


def allowed(batch: MicroBatch, n: int) -> list[int]:
    """Return the budgets K of sequence n, ascending, from the definition."""
    curve, options = batch.coverage[n], batch.options
    width, k0, blocks = len(curve), options["k0"][n], options["num_blocks"][n]
    if blocks <= k0 and not options["tune_short"]:
        return [k0]
    k0 = min(k0, width)
    if options["tolerance"] == 0 or curve[0] == curve[-1]:
        return [k0]
    end = max(k0, min(blocks, width))
    return [
        k
        for k in range(min(options["min_budget"], k0), end + 1)
        if abs(curve[k - 1] - curve[k0 - 1]) <= options["tolerance"]
    ]


def cost(batch: MicroBatch, n: int, k: int) -> int:
    return int(batch.cost_us[n, min(k, batch.cost_us.shape[1]) - 1])


def total(batch: MicroBatch, budgets: np.ndarray) -> int:
    return sum(cost(batch, n, int(k)) for n, k in enumerate(budgets))
