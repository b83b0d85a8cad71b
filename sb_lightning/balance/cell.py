"""What the batch sampler yields: the indices of one micro-batch, which also know their place in the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from sb_lightning._messages import explain

__all__ = ["Cell"]


class Cell(list[int]):
    """One micro-batch: a list of data-set indices that also knows its place in the plan.

    A data set that is indexed by plain integers needs nothing of this; one whose ``__getitems__`` receives
    the cell can read the rest. Cells travel to worker processes. Copy what the training step needs into the
    batch, as plain numbers: Lightning rebuilds every list in a batch from its elements, and what a cell knows
    besides is lost.

    Attributes:
        window: Number of the window in the epoch.
        micro_batch: Number of the micro-batch in the window (the same on all ranks at one time).
        target_tokens: Labels of this cell that count in the loss; 0 for a pad cell.
        window_target_tokens: Labels of all cells of the window that run, over all ranks.
        is_padding: The cell repeats a sequence only so that all ranks run equally many; mask all its labels.
        predicted_ms: Predicted time of forward and backward.
        budgets: The budget that each sequence is expected to use; None for full attention.
        plan_gap: How far the window's plan may be from the best one, as a share (0.01 for 1 %).
        max_length: Cut sequences to so many tokens; None: not at all.

    Raises:
        AttributeError: Something is asked that this cell was not told.
    """

    window: int
    micro_batch: int
    target_tokens: int
    window_target_tokens: int
    is_padding: bool
    predicted_ms: float
    budgets: list[int] | None
    plan_gap: float
    max_length: int | None

    def __init__(self, indices: Sequence[int] = (), **place: Any) -> None:
        super().__init__(indices)
        for name, value in place.items():
            if name not in Cell.__annotations__:
                raise TypeError(
                    explain(
                        f"a cell was told its {name}",
                        "it has no such attribute",
                        f"choose from {', '.join(Cell.__annotations__)}",
                    )
                )
            setattr(self, name, value)

    def __getattr__(self, name: str) -> NoReturn:
        if name in Cell.__annotations__:
            raise AttributeError(
                explain(
                    f"this cell does not know its {name}",
                    "it was made without, or from its indices alone, as Lightning does with lists in a batch",
                    f"copy what is needed into the batch where it is made: batch['{name}'] = cell.{name}",
                )
            )
        raise AttributeError(f"'Cell' object has no attribute '{name}'")
