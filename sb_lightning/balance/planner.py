"""Plan one window: which item runs in which cell, what that is predicted to take, and how good it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from sb_lightning._messages import explain
from sb_lightning.balance.engine import lower_bound_us, plan_cells
from sb_lightning.balance.plan_inputs import CannotPack, PlanInputs, check_choice, check_count, read_inputs
from sb_lightning.balance.policies import (
    OBJECTIVES,
    POLICIES,
    Objective,
    Policy,
    deal_random,
    deal_sorted,
    even_cells,
)
from sb_lightning.balance.reference import NO_CAP, pack
from sb_lightning.balance.window import WindowPlan

__all__ = ["EXACT_ITEMS", "NODE_LIMIT", "CannotPack", "plan_window"]

Integers = npt.NDArray[np.int64]

NODE_LIMIT = 4000
"""Steps of the branch and bound unless `exact`: with a limit in time the ranks' plans could differ."""
EXACT_ITEMS = 24
"""Items of a window that can be planned with `exact`."""


def plan_window(
    costs_ms: Sequence[float] | npt.NDArray[Any],
    tokens: Sequence[int] | npt.NDArray[Any],
    *,
    ranks: int,
    accumulate: int,
    policy: Policy = "latency",
    objective: Objective = "ddp",
    max_tokens: int | None = None,
    equal_counts: bool = False,
    cell_overhead_ms: float = 0.0,
    target_tokens: Sequence[int] | npt.NDArray[Any] | None = None,
    weights: Sequence[float] | npt.NDArray[Any] | None = None,
    exact: bool = False,
) -> WindowPlan:
    """Deal the items of one window over ``ranks`` x ``accumulate`` cells.

    The same arguments give the same plan, to the last bit, on every machine: ranks plan apart and agree.
    Times are rounded to whole microseconds before anything is decided. No cell is empty: if there are fewer
    items than cells, the remaining ones are pad cells, which repeat the window's shortest item.

    Policies:

    - ``random``: item i goes to rank ``i % ranks``; a rank's items are cut in order into cells.
    - ``length``: items by descending tokens, ``ranks`` at a time, in alternating direction; then as above.
    - ``tokens``, ``flops``, ``latency``: the planner, on tokens, ``weights`` or ``costs_ms``: largest item
      first and Karmarkar-Karp differencing, improved by exchanges; for up to 16 items then branch and bound.

    Whatever a policy balances, the times, the value, its bound and the gap are those of ``costs_ms``.

    Args:
        costs_ms: Predicted time of each item.
        tokens: Tokens of each item.
        ranks: Data-parallel ranks.
        accumulate: Cells per rank that run.
        policy: How items are dealt.
        objective: What the ranks wait for. ``ddp``: they meet once per window, the largest sum of a rank
            counts; among such plans slots are kept even. ``fsdp``: they meet in each slot, the sum over slots
            of the largest cell counts; among such plans the ranks' sums are kept even.
        max_tokens: Tokens that a cell may hold, strictly. ``random`` and ``length`` re-pack a rank's items
            where their cells hold more, and where that is impossible plan the window by tokens.
        equal_counts: Whether all cells hold the same number of items (one more where that cannot be).
        cell_overhead_ms: Time of a cell beside its items.
        target_tokens: Labels of each item that count in the loss; None: all tokens but each item's first.
        weights: What ``flops`` balances, in any unit; the other policies ignore it.
        exact: Run the branch and bound to its end, however long that takes; for up to 24 items.

    Raises:
        CannotPack: No cells under ``max_tokens`` were found: a ValueError.
        ValueError: An argument is out of range.
        TypeError: An argument is of the wrong kind.

    Example:
        >>> plan = plan_window([4.0, 3.0, 3.0, 2.0], [40, 30, 30, 20], ranks=2, accumulate=2)
        >>> plan.cells, plan.value_ms, plan.proven_optimal
        ((((0,), (3,)), ((1,), (2,))), 6.0, True)
    """
    ranks, accumulate = check_count("ranks", ranks), check_count("accumulate", accumulate)
    check_choice("policy", policy, POLICIES)
    check_choice("objective", objective, OBJECTIVES)
    window = read_inputs(
        costs_ms,
        tokens,
        num_cells=ranks * accumulate,
        cell_overhead_ms=cell_overhead_ms,
        max_tokens=max_tokens,
        target_tokens=target_tokens,
        weights=weights,
    )
    if window.num_items == 0:
        nothing: tuple[tuple[()], ...] = ((),) * ranks
        return WindowPlan(
            cells=nothing,
            is_padding=nothing,
            cell_target_tokens=nothing,
            target_tokens=0,
            predicted_ms=nothing,
            objective=objective,
            value_ms=0.0,
            lower_bound_ms=0.0,
            gap=0.0,
            proven_optimal=True,
        )
    if policy == "flops" and window.weights is None:
        raise ValueError(
            explain("weights is None", "policy 'flops' balances them", "pass the FLOPs of each item")
        )
    if exact and max(window.num_items, ranks * accumulate) > EXACT_ITEMS:
        raise ValueError(
            explain(
                f"exact is True for {window.num_items} items in {ranks * accumulate} cells",
                f"a search to its end is affordable for {EXACT_ITEMS} of each",
                "pass exact=False, or plan smaller windows",
            )
        )
    deal = _Deal(window, ranks, accumulate, objective, equal_counts, -1 if exact else NODE_LIMIT)
    items, counts, finished = deal.by_rule(policy) if policy in ("random", "length") else deal.planned(policy)
    return deal.assemble(items, counts, finished and policy == "latency")


class _Deal:
    """One window, with pads where there are fewer items than cells."""

    def __init__(
        self,
        window: PlanInputs,
        ranks: int,
        accumulate: int,
        objective: Objective,
        equal_counts: bool,
        node_limit: int,
    ) -> None:
        self.window, self.ranks, self.accumulate = window, ranks, accumulate
        self.objective, self.equal_counts, self.node_limit = objective, bool(equal_counts), node_limit
        self.shortest = int(np.argmin(window.tokens))
        pads = max(ranks * accumulate - window.num_items, 0)
        # Which item of the window each item of the deal is.
        self.source = np.concatenate([np.arange(window.num_items), np.full(pads, self.shortest)])
        self.tokens = window.tokens[self.source]
        self.costs_us = window.costs_us[self.source]

    def planned(self, policy: Policy) -> tuple[Integers, Integers, bool]:
        """Return the items, cell after cell; the cells' counts; and whether the search was finished."""
        window = self.window
        if policy == "flops" and window.weights is not None:
            balanced = window.weights[self.source]
        else:
            balanced = self.costs_us if policy == "latency" else self.tokens
        items, counts, finished = plan_cells(
            balanced,
            self.tokens,
            self.ranks,
            self.accumulate,
            self.objective == "fsdp",
            NO_CAP if window.max_tokens is None else window.max_tokens,
            self.equal_counts,
            self.node_limit,
        )
        if len(items) == 0 and policy != "tokens":
            # So that whether a window can be packed does not depend on what its items cost.
            items, counts, _ = self.planned("tokens")
            return items, counts, False
        if len(items) == 0:
            raise CannotPack(
                explain(
                    f"{window.num_items} items of {int(window.tokens.sum())} tokens and max_tokens "
                    f"{window.max_tokens}",
                    f"{'there are' if finished else 'the planner found'} no {self.ranks * self.accumulate} "
                    "cells that hold them all" + (" with equal_counts" if self.equal_counts else ""),
                    "raise max_tokens or accumulate, or put fewer sequences in a window",
                )
            )
        return items, counts, finished

    def by_rule(self, policy: Policy) -> tuple[Integers, Integers, bool]:
        """The same for a policy that looks at no cost."""
        window = self.window
        if policy == "random":
            rows = deal_random(window.num_items, self.ranks)
        else:
            rows = deal_sorted(window.tokens.tolist(), self.ranks)
        pads = iter(range(window.num_items, len(self.source)))
        cells = []
        for row in rows:
            mine = even_cells(row, self.accumulate)
            if window.max_tokens is not None and max(map(self._tokens_of, mine)) > window.max_tokens:
                packed = self._repacked(row, window.max_tokens)
                if packed is None:
                    return self.planned("tokens")
                mine = packed
            cells += [cell or [next(pads)] for cell in mine]
        items = np.array(list(chain.from_iterable(cells)), dtype=np.int64)
        return items, np.array([len(cell) for cell in cells], dtype=np.int64), False

    def assemble(self, items: Integers, counts: Integers, finished: bool) -> WindowPlan:
        """Return the plan with its predictions."""
        shape = self.ranks, self.accumulate
        overhead = self.window.overhead_us
        starts = np.cumsum(counts) - counts
        cell_us = np.add.reduceat(self.costs_us[items], starts).reshape(shape) + overhead
        targets = self.window.target_tokens[self.source]
        targets[self.window.num_items :] = 0
        cell_targets = np.add.reduceat(targets[items], starts).reshape(shape)
        pads = items[starts].reshape(shape) >= self.window.num_items
        is_fsdp = self.objective == "fsdp"
        value = int(cell_us.max(axis=0).sum() if is_fsdp else cell_us.sum(axis=1).max())
        bound = lower_bound_us(self.costs_us, *shape, is_fsdp, self.equal_counts) + overhead * self.accumulate
        members = self.source[items].tolist()
        stops = (starts + counts).tolist()
        cells = [tuple(members[a:b]) for a, b in zip(starts.tolist(), stops, strict=True)]
        return WindowPlan(
            cells=tuple(tuple(cells[r : r + shape[1]]) for r in range(0, len(cells), shape[1])),
            is_padding=tuple(map(tuple, pads.tolist())),
            cell_target_tokens=tuple(map(tuple, cell_targets.tolist())),
            target_tokens=int(cell_targets.sum()),
            predicted_ms=tuple(map(tuple, (cell_us / 1000.0).tolist())),
            objective=self.objective,
            value_ms=value / 1000.0,
            lower_bound_ms=bound / 1000.0,
            gap=value / bound - 1.0 if bound else 0.0,
            proven_optimal=finished or value == bound,
        )

    def _tokens_of(self, cell: Sequence[int]) -> int:
        return int(sum(self.tokens[i] for i in cell))

    def _repacked(self, row: list[int], cap: int) -> list[list[int]] | None:
        if len(row) < self.accumulate:
            return None
        share, extra = divmod(len(row), self.accumulate)
        least, most = (share, share + (extra > 0)) if self.equal_counts else (1, len(row))
        return pack(self.tokens.tolist(), sorted(row), self.accumulate, least, most, cap)[0]
