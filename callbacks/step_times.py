"""Predicted against measured time of this rank's micro-batches; a part of the run summary."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from sb_lightning.callbacks.windows import length_source

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from sb_lightning.latency import LatencyModel
    from sb_lightning.latency.marks import Marks

__all__ = ["StepTimes", "analytic_cost"]

MOST_MICRO_BATCHES = 4096


class StepTimes:
    """Times forward and backward of micro-batches, and compares them with a latency model's predictions.

    A micro-batch counts from its start to the end of its backward pass. Left out are those in whose backward
    pass gradients are exchanged, because that waits for other ranks, and the first window, which warms up.
    Nothing waits for the device before the end.

    Args:
        marks: The clock.
        exchanges: Whether gradients are exchanged with other ranks.
    """

    def __init__(self, marks: Marks, *, exchanges: bool) -> None:
        self._marks = marks
        self._exchanges = exchanges
        self._start: Any = None
        self._end: Any = None
        self._stepped = False
        self._is_warm = False
        self._open: list[tuple[Any, Any, Callable[[], list[int]]]] = []
        self._kept: deque[tuple[Any, Any, list[int]]] = deque(maxlen=MOST_MICRO_BATCHES)

    def begin(self) -> None:
        """Note that a micro-batch starts."""
        self._start, self._end, self._stepped = self._marks.now(), None, False

    def backward_done(self) -> None:
        """Note that its backward pass is done."""
        self._end = self._marks.now()

    def optimizer_steps(self) -> None:
        """Note that its gradients were exchanged."""
        self._stepped = True

    def finish(self, batch: Any) -> None:
        """Keep the micro-batch that has run, unless its time says nothing."""
        source = length_source(batch)
        counts = self._end is not None and not (self._stepped and self._exchanges)
        if counts and self._is_warm and source is not None:
            self._open.append((self._start, self._end, source))

    def close_window(self) -> None:
        """Read the lengths of the window's sequences; by now the device has run them."""
        self._kept += [(start, end, source()) for start, end, source in self._open]
        self._open.clear()
        self._is_warm = True

    @property
    def has_passed(self) -> bool:
        """Whether the device has passed all micro-batches that are compared; never waits for it."""
        last = self._kept[-1][1] if self._kept else None
        query = getattr(last, "query", None)
        return query is None or bool(query())

    def compare(self, model: LatencyModel, budget: int, *, waits: bool = True) -> dict[str, Any] | None:
        """Return what `summary.json` holds about predicted times; None where nothing was measured.

        Counted operations say nothing about how fast a machine is: they are scaled to the measured times, and
        the label says so.

        Args:
            model: What predicts.
            budget: Blocks that a query attended.
            waits: Wait for the device. After the run has broken off it may be stuck behind an exchange with
                ranks that are gone: then nothing is said of micro-batches that it has not passed.
        """
        from sb_lightning.latency import LatencyTable

        if waits:
            self._marks.settle()
        elif not self.has_passed:
            return None
        measured = [self._marks.between_ms(start, end) for start, end, _ in self._kept]
        predicted = [model.micro_batch_ms(lengths, budget) for _, _, lengths in self._kept]
        pairs = [(p, m) for p, m in zip(predicted, measured, strict=True) if p > 0 and m > 0]
        if not pairs:
            return None
        name, scale = model.label, 1.0
        if not isinstance(model, LatencyTable):
            scale = median(m / p for p, m in pairs)
            name += ", scaled to this run"
        return {
            "latency_model": name,
            "micro_batches": len(pairs),
            "predicted_ms": fmean(scale * p for p, _ in pairs),
            "measured_ms": fmean(m for _, m in pairs),
            "median_error": median(abs(scale * p / m - 1.0) for p, m in pairs),
        }


def analytic_cost(pl_module: LightningModule) -> LatencyModel | None:
    """Return counted operations of a module that says what attention it has; None of any other.

    Args:
        pl_module: A module with `sparse_settings` and a Hugging Face model as `model`.
    """
    from sb_lightning.latency import AnalyticCost

    settings = getattr(pl_module, "sparse_settings", None)
    config = getattr(getattr(pl_module, "model", None), "config", None)
    if settings is None or config is None:
        return None
    try:
        return AnalyticCost.from_config(
            config, block_size=settings.block_size, dense_layers=settings.dense_layers
        )
    except (AttributeError, TypeError, ValueError):
        # Another kind of model: its sizes have other names.
        return None
