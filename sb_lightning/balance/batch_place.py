"""What a cell knows of its window, brought into batches of any data set and collate function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from sb_lightning._messages import explain
from sb_lightning.balance.cell import Cell

__all__ = ["CellDataset", "place_of", "with_place"]


class CellDataset(Dataset[Any]):
    """A data set whose items, asked for by the cell, come together with it.

    Args:
        dataset: Any data set with ``__getitem__`` or ``__getitems__``, and a length.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Items of the data set."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one item."""
        return self.dataset[index]

    def __getitems__(self, cell: Cell) -> tuple[Cell, Any]:
        """Return the cell and its items."""
        many = getattr(self.dataset, "__getitems__", None)
        return cell, [self.dataset[i] for i in cell] if many is None else many(cell)


def place_of(cell: Cell) -> dict[str, Any]:
    """Return what a training step and `ImbalanceMonitor` need of a cell, as plain numbers.

    Example:
        >>> place = {"window": 0, "micro_batch": 1, "target_tokens": 7, "window_target_tokens": 30}
        >>> cell = Cell([4], **place, is_padding=False, predicted_ms=2.5, budgets=None, plan_gap=0.0)
        >>> place_of(cell)["window_target_tokens"], "budget" in place_of(cell)
        (30, False)
    """
    names = (
        "window",
        "micro_batch",
        "target_tokens",
        "window_target_tokens",
        "is_padding",
        "predicted_ms",
        "plan_gap",
    )
    place: dict[str, Any] = {name: getattr(cell, name) for name in names}
    if cell.budgets is not None:
        place["budget"] = sum(cell.budgets) / len(cell.budgets)
    return place


def with_place(collate: Callable[[Any], Any]) -> Callable[[tuple[Cell, Any]], dict[str, Any]]:
    """Return a collate function for the items of a `CellDataset`, which adds `place_of` to the batch."""
    return partial(_collate, collate)


def _collate(collate: Callable[[Any], Any], found: tuple[Cell, Any]) -> dict[str, Any]:
    cell, items = found
    batch = collate(items)
    if not isinstance(batch, dict):
        raise TypeError(
            explain(
                f"add_plan is True and collate_fn returns a {type(batch).__name__}",
                "the plan's numbers are added to a dictionary",
                "return a dict from collate_fn, or leave add_plan out",
            )
        )
    return {**batch, **place_of(cell)}
