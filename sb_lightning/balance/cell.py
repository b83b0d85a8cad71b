"""What the batch sampler yields: the indices of one micro-batch, which also know their place in the plan."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Cell"]


class Cell(list[int]):
    """One micro-batch: a list of data-set indices that also knows its place in the plan.

    A data set that is indexed by plain integers needs nothing of this; one whose ``__getitems__`` receives
    the cell can read the rest. Cells travel to worker processes.

    Attributes:
        window: Number of the window in the epoch.
        micro_batch: Number of the micro-batch in the window (the same on all ranks at one time).
        target_tokens: Labels of this cell that count in the loss; 0 for a pad cell.
        window_target_tokens: Labels of all cells of the window that run, over all ranks.
        is_padding: The cell repeats a sequence only so that all ranks run equally many; mask all its labels.
        predicted_ms: Predicted time of forward and backward; None where the plan was not made of times.
        budgets: The budget that each sequence is expected to use; None for full attention.
        plan_gap: How far the window's plan may be from the best one, as a share (0.01 for 1 %).
        max_length: Cut sequences to so many tokens; None: not at all.
    """

    def __init__(
        self,
        indices: Sequence[int] = (),
        *,
        window: int = 0,
        micro_batch: int = 0,
        target_tokens: int = 0,
        window_target_tokens: int = 0,
        is_padding: bool = False,
        predicted_ms: float | None = None,
        budgets: Sequence[int] | None = None,
        plan_gap: float | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(indices)
        self.window = window
        self.micro_batch = micro_batch
        self.target_tokens = target_tokens
        self.window_target_tokens = window_target_tokens
        self.is_padding = is_padding
        self.predicted_ms = predicted_ms
        self.budgets = budgets
        self.plan_gap = plan_gap
        self.max_length = max_length
