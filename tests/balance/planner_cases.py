"""Windows for the planner's tests, and what is best for them by trying everything."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st

from sb_lightning.balance import plan_window


@dataclass(frozen=True, kw_only=True)
class Window:
    costs_us: tuple[int, ...]
    tokens: tuple[int, ...]
    ranks: int
    accumulate: int
    max_tokens: int | None
    equal_counts: bool

    @property
    def num_cells(self):
        return self.ranks * self.accumulate

    def plan(self, **options):
        return plan_window(
            [us / 1000 for us in self.costs_us],
            self.tokens,
            ranks=self.ranks,
            accumulate=self.accumulate,
            max_tokens=self.max_tokens,
            equal_counts=self.equal_counts,
            **options,
        )


@st.composite
def windows(draw, max_items=9, max_ranks=3, max_accumulate=3, caps=True):
    """Windows with at least as many items as cells; some with a cap that is hard to meet, or cannot be."""
    ranks, accumulate = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_accumulate))
    cells = ranks * accumulate
    num_items = draw(st.one_of(st.just(cells), st.integers(cells, max(cells, max_items))))
    tokens = draw(st.lists(st.integers(1, 30), min_size=num_items, max_size=num_items))
    kind = draw(st.sampled_from(["linear", "quadratic", "free", "giant"]))
    costs = {
        "linear": tokens,
        "quadratic": [n * n for n in tokens],
        "free": draw(st.lists(st.integers(0, 9), min_size=num_items, max_size=num_items)),
        "giant": [1000, *tokens[1:]],
    }[kind]
    cap = None
    if caps and draw(st.booleans()):
        cap = max(*tokens, 1, -(-sum(tokens) // cells) + draw(st.integers(0, 9)))
    return Window(
        costs_us=tuple(costs),
        tokens=tuple(tokens),
        ranks=ranks,
        accumulate=accumulate,
        max_tokens=cap,
        equal_counts=draw(st.booleans()),
    )


def optimum_us(window, objective):
    """Return the least value of all plans, or None if there is none: every assignment, no bounds."""
    num_items, cells = len(window.tokens), window.num_cells
    least, most = 1, num_items
    if window.equal_counts:
        least, most = num_items // cells, -(-num_items // cells)
    loads, tokens, counts = [0] * cells, [0] * cells, [0] * cells
    found = set()

    def place(item):
        if item == num_items:
            if min(counts) >= least:
                found.add(tuple(sorted(loads)))
            return
        for cell in range(cells):
            over = window.max_tokens is not None and tokens[cell] + window.tokens[item] > window.max_tokens
            if counts[cell] < most and not over:
                counts[cell] += 1
                loads[cell] += window.costs_us[item]
                tokens[cell] += window.tokens[item]
                place(item + 1)
                counts[cell] -= 1
                loads[cell] -= window.costs_us[item]
                tokens[cell] -= window.tokens[item]
            # Empty cells are alike.
            if counts[cell] == 0:
                break

    place(0)
    values = [_value(cell_loads, window.ranks, objective) for cell_loads in found]
    return min(values, default=None)


def _value(loads, ranks, objective):
    """Return the value of cells dealt to ranks and slots in the best way."""
    if objective == "fsdp":
        return sum(sorted(loads, reverse=True)[::ranks])
    accumulate = len(loads) // ranks

    @cache
    def least(rest, ranks_left):
        if ranks_left == 0:
            return 0
        best = None
        for others in itertools.combinations(range(1, len(rest)), accumulate - 1):
            mine = {0, *others}
            left = tuple(load for i, load in enumerate(rest) if i not in mine)
            value = max(sum(rest[i] for i in mine), least(left, ranks_left - 1))
            best = value if best is None else min(best, value)
        return best

    return least(loads, ranks)
