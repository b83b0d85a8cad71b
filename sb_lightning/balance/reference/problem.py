"""What is planned, in whole numbers; the twin of csrc/balance/problem.h."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST_SEARCHED", "NO_CAP", "UNLIMITED", "NoPacking", "Parts", "Problem"]

NO_CAP = -1
"""`max_tokens` of a problem whose cells may hold any number of tokens."""

UNLIMITED = -1
"""Node limit of a search that runs to its end."""

MOST_SEARCHED = 24
"""Items of the longest window that a search can be run on."""

Parts = list[list[int]]
"""Items of each rank, or of each cell."""


class NoPacking(Exception):
    """No cells under the cap were found."""

    def __init__(self, certain: bool) -> None:
        super().__init__(certain)
        self.certain = certain


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Items to deal over ranks x accumulate cells; there are at least as many items as cells."""

    costs: list[int]
    """What is balanced, by item; their sum is at most 2**62."""
    tokens: list[int]
    """Tokens of each item."""
    ranks: int
    accumulate: int
    max_tokens: int
    """Tokens that a cell may hold, or `NO_CAP`."""
    equal_counts: bool
    """Whether all cells hold the same number of items (one more where that cannot be)."""

    @property
    def num_cells(self) -> int:
        """Cells of all ranks."""
        return self.ranks * self.accumulate

    @property
    def one_per_cell(self) -> bool:
        """Whether every cell holds exactly one item."""
        return len(self.costs) == self.num_cells

    @property
    def cell_least(self) -> int:
        """Items that a cell holds at least."""
        return len(self.costs) // self.num_cells if self.equal_counts else 1

    @property
    def cell_most(self) -> int:
        """Items that a cell may hold."""
        return -(-len(self.costs) // self.num_cells) if self._even else len(self.costs)

    @property
    def rank_least(self) -> int:
        """Items that a rank holds at least."""
        return self.accumulate * self.cell_least

    @property
    def rank_most(self) -> int:
        """Items that a rank may hold."""
        return self.accumulate * self.cell_most if self._even else len(self.costs)

    @property
    def _even(self) -> bool:
        return self.equal_counts or self.one_per_cell
