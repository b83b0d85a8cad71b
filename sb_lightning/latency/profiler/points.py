"""Where to measure: a grid over length and budget, refined level by level, and points to test it on."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from sb_lightning._messages import explain

__all__ = ["Grid", "Point"]

STEPS = ((2.0, 2.0), (1.0, 1.0), (0.5, 1.0))
"""Octaves between neighbouring lengths, and between budgets; each level holds the one before."""
SHORTEST = 64
FEWEST_OCTAVES = 1
HOLD_OUT_SHARE = 0.2
DENSE_SHARE = 0.15


@dataclass(frozen=True, order=True)
class Point:
    """What one measured step runs."""

    length: int
    """Tokens of a sequence."""
    budget: int
    """Blocks that a query attends in the layers with a budget."""
    is_held_out: bool = False
    """Whether the table is tested on it rather than made of it."""
    copies: int = 1
    """Sequences in the micro-batch."""


class Grid:
    """Points of a table up to a length, and 20 % more that it is tested on.

    Lengths are geometric, from one block (at most 64 tokens) to `max_length`; budgets are geometric from 1
    and end with all blocks. Test points lie anywhere between: their lengths fill the octaves evenly, their
    budgets are log-uniform.

    Args:
        block_size: Keys per block.
        max_length: Longest sequence.
        has_budget: Whether the model has a layer with a budget; a dense model is measured by length alone.
        seed: Of the test points.

    Raises:
        ValueError: There is no room between the shortest and the longest length.
    """

    def __init__(self, *, block_size: int, max_length: int, has_budget: bool = True, seed: int = 0) -> None:
        self.block_size = block_size
        self.shortest = min(SHORTEST, block_size)
        self.has_budget = has_budget
        least = self.least_max_length(block_size)
        if max_length < least:
            raise ValueError(
                explain(
                    f"max_length is {max_length}",
                    f"lengths are measured from {self.shortest} tokens on",
                    f"pass max_length >= {least}",
                )
            )
        self.max_length = max_length
        self.levels = [self._level(length_step, budget_step) for length_step, budget_step in STEPS]
        self._add_held_out(random.Random(seed))

    @staticmethod
    def least_max_length(block_size: int) -> int:
        """Return the smallest `max_length` that leaves room for a grid.

        Args:
            block_size: Keys per block.
        """
        return min(SHORTEST, block_size) << FEWEST_OCTAVES

    @property
    def pair(self) -> Point:
        """Two of the shortest sequences in one micro-batch: tells what a micro-batch costs once."""
        return Point(self.shortest, self.blocks(self.shortest), copies=2)

    def blocks(self, length: int) -> int:
        """Return the number of blocks of a sequence: the budget that attends all."""
        return -(-length // self.block_size)

    def level_of(self, point: Point) -> int:
        """Return the first level that has a point."""
        return next(number for number, level in enumerate(self.levels) if point in level)

    def _level(self, length_step: float, budget_step: float) -> list[Point]:
        points = []
        for length in _downwards(self.max_length, self.shortest, length_step):
            budgets = {self.blocks(length)}
            if self.has_budget:
                budgets |= set(_upwards((length - 1) // self.block_size, budget_step))
            points += [Point(length, budget) for budget in budgets]
        return [*sorted(points), self.pair]

    def _add_held_out(self, generator: random.Random) -> None:
        octaves = math.log2(self.max_length / self.shortest)
        drawn: list[Point] = []
        known = {(point.length, point.budget) for point in self.levels[-1]}
        for level in self.levels:
            wanted = round(len(level) * HOLD_OUT_SHARE / (1 - HOLD_OUT_SHARE))
            tries = 0
            while len(drawn) < wanted and tries < 1000:
                tries += 1
                # The golden ratio spreads any number of points evenly.
                place = (len(drawn) + tries) * 0.6180339887498949 % 1.0
                length = round(self.shortest * 2 ** (octaves * place))
                most = self.blocks(length)
                share = generator.random()
                is_dense = generator.random() < DENSE_SHARE or not self.has_budget
                budget = most if is_dense else min(most, round(math.exp(share * math.log(most))))
                if (length, budget) not in known:
                    known.add((length, budget))
                    drawn.append(Point(length, budget, is_held_out=True))
            level += drawn[:wanted]


def _downwards(start: int, end: int, step: float) -> Iterator[int]:
    """Yield whole numbers from `start` down by `step` octaves, and `end` in place of one close to it."""
    yield start
    number = 1
    while (value := start / 2 ** (number * step)) > end * 2 ** (step / 2):
        yield round(value)
        number += 1
    yield end


def _upwards(most: int, step: float) -> Iterator[int]:
    number = 0
    while (value := round(2 ** (number * step))) <= most:
        yield value
        number += 1
