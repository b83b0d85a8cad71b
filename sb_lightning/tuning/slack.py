"""The anchor 'slack': coverage is bought with the time that ranks would otherwise wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sb_lightning.tuning.budgets import choose_budgets
from sb_lightning.tuning.reference import BudgetSequence, allowed_budgets, fixed_point

__all__ = ["ExpectedSequence", "slack_budgets"]

Cells = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True, kw_only=True)
class ExpectedSequence:
    """What is expected of a sequence of the window before its attention has run."""

    coverage: NDArray[np.float64]
    """C(k) at k = 1, 2, ..., max_budget; never falls."""
    cost_us: NDArray[np.int64]
    """Time at the same budgets."""
    k0: int
    """Budget when nothing is tuned."""
    rows: int
    """Weight of its coverage."""
    num_blocks: int

    def allowed(self, tolerance: float, min_budget: int, tune_short: bool) -> tuple[int, int]:
        """Return the least and the largest budget that keep its coverage within the tolerance."""
        sequence = BudgetSequence(
            coverage=[fixed_point(share) for share in self.coverage.tolist()],
            cost_us=self.cost_us.tolist(),
            k0=self.k0,
            rows=self.rows,
            blocks=self.num_blocks,
        )
        return allowed_budgets(
            sequence, tolerance=fixed_point(tolerance), min_budget=min_budget, tune_short=tune_short
        )

    def time_us(self, budget: int) -> int:
        """Return its time at a budget."""
        return int(self.cost_us[min(budget, len(self.cost_us)) - 1])


def slack_budgets(
    cells: Cells,
    sequences: Sequence[ExpectedSequence],
    *,
    anchor_us: int,
    fixed_us: int,
    tolerance: float,
    min_budget: int = 1,
    tune_short: bool = False,
    speed: float = 0.0,
    objective: str = "ddp",
) -> list[int]:
    """Choose the budgets of a whole window: most row-weighted coverage in the time that `mean` would take.

    The micro-batches are first steered to the anchor, each for itself. The time of the slowest rank is then
    what the window takes, and every other rank has the rest of it to give away: block by block, where rows x
    coverage per time is highest. Per rank the better is kept of what grows from the anchor's budgets and what
    grows from the least allowed ones, so the window is never predicted to be slower than with the anchor, nor
    to cover less.

    Args:
        cells: `cells[rank][micro_batch]` holds positions in `sequences`.
        sequences: What is expected of each.
        anchor_us: The anchor, fixed cost included.
        fixed_us: Fixed cost of a micro-batch.
        tolerance: Largest change of coverage.
        min_budget: No budget is lowered below it.
        tune_short: Also cut sequences that `k0` covers whole.
        speed: Move the window's time so far towards the least reachable one, in [0, 1]; coverage may then be
            less than with the anchor.
        objective: "ddp": ranks meet once per window; "fsdp": in every micro-batch.

    Returns:
        # [sequences]
    """
    limits = [s.allowed(tolerance, min_budget, tune_short) for s in sequences]
    least = [low for low, _ in limits]
    most = [high for _, high in limits]
    anchored = list(least)
    for row in cells:
        for cell in row:
            for n, budget in zip(
                cell, _grow(sequences, cell, least, most, anchor_us - fixed_us), strict=True
            ):
                anchored[n] = budget
    budgets = list(anchored)
    for groups in _meetings(cells, objective):
        # All of them may take as long as the slowest one does.
        slowest = max(_time(sequences, group, anchored) for group in groups)
        reachable = max(_time(sequences, group, least) for group in groups)
        cap = slowest - int(speed * max(slowest - reachable, 0))
        for group in groups:
            grown = [_grow(sequences, group, least, most, cap)]
            if _time(sequences, group, anchored) <= cap:
                grown.append(_grow(sequences, group, anchored, most, cap))
            best = max(grown, key=lambda found: _coverage(sequences, group, found))
            for n, budget in zip(group, best, strict=True):
                budgets[n] = budget
    return budgets


def _meetings(cells: Cells, objective: str) -> list[list[list[int]]]:
    """Return, for each meeting of the ranks, what each of them runs before it."""
    if objective == "fsdp":
        return [[list(cell) for cell in slot] for slot in zip(*cells, strict=True)]
    return [[[n for cell in row for n in cell] for row in cells]]


def _grow(
    sequences: Sequence[ExpectedSequence],
    group: Sequence[int],
    start: Sequence[int],
    most: Sequence[int],
    cap_us: int,
) -> list[int]:
    """Return budgets that grow from `start`, the best step first, while all take at most `cap_us`."""
    if not group:
        return []
    width = max(most[n] - start[n] for n in group) + 1
    coverage, costs = np.zeros((len(group), width)), np.zeros((len(group), width), dtype=np.int64)
    for i, n in enumerate(group):
        s = sequences[n]
        at = np.minimum(np.arange(start[n], start[n] + width), most[n])
        at = np.minimum(at, len(s.cost_us)) - 1
        coverage[i], costs[i] = s.coverage[at], s.cost_us[at]
    steps = choose_budgets(
        coverage,
        costs,
        cap_us,
        tolerance=1.0,
        k0=1,
        rows=[sequences[n].rows for n in group],
        tune_short=True,
    )
    return [min(start[n] + int(step) - 1, most[n]) for n, step in zip(group, steps, strict=True)]


def _time(sequences: Sequence[ExpectedSequence], group: Sequence[int], budgets: Sequence[int]) -> int:
    return sum(sequences[n].time_us(budgets[n]) for n in group)


def _coverage(sequences: Sequence[ExpectedSequence], group: Sequence[int], budgets: Sequence[int]) -> int:
    """Return the row-weighted coverage of a group, in whole units so that all ranks compare alike."""
    total = 0
    for n, budget in zip(group, budgets, strict=True):
        s = sequences[n]
        total += s.rows * fixed_point(float(s.coverage[min(budget, len(s.coverage)) - 1]))
    return total
