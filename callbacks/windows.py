"""What one rank ran in a window, and how long it took: the measuring part that the callbacks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Stopwatch", "Window", "WindowMeter", "length_source", "loss_of_window"]

Clock = Callable[[], float]


def length_source(batch: Any) -> Callable[[], list[int]] | None:
    """Find where a batch says how long its sequences are, without waiting for the device.

    Looks at `cu_seqlens`, then `attention_mask` (padded), then `position_ids` (packed: each sequence starts
    at 0), then the shape of `input_ids`.

    Args:
        batch: The batch as `training_step` gets it.

    Returns:
        A function that reads the lengths (it may wait for the device), or None if the batch says nothing.
    """
    if not isinstance(batch, Mapping):
        return None
    cu_seqlens, mask = batch.get("cu_seqlens"), batch.get("attention_mask")
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1:
        return lambda: cu_seqlens.diff().tolist()
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return lambda: mask.ne(0).sum(-1).tolist()
    positions, tokens = batch.get("position_ids"), batch.get("input_ids")
    if isinstance(positions, Tensor) and positions.ndim == 2:
        return lambda: _lengths_from_positions(positions)
    if isinstance(tokens, Tensor) and tokens.ndim == 2:
        num_sequences, length = tokens.shape
        return lambda: [length] * num_sequences
    return None


def _lengths_from_positions(positions: Tensor) -> list[int]:
    starts = positions.eq(0)
    # A row starts a sequence even where a foreign collator counts from another number.
    starts[:, 0] = True
    bounds = [*starts.flatten().nonzero().flatten().tolist(), positions.numel()]
    return [end - start for start, end in pairwise(bounds)]


def loss_of_window(trainer: Trainer, outputs: Any, name: str) -> float | None:
    """Return the loss of the window that just ended.

    Args:
        trainer: The Trainer, whose `callback_metrics` are asked first.
        outputs: What the last `training_step` returned; its loss (of one micro-batch) is used if nothing is
            logged.
        name: Name of the logged loss.
    """
    logged = trainer.callback_metrics.get(name)
    if logged is not None:
        return float(logged)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    # Lightning has divided it by the number of accumulated micro-batches.
    return float(loss) * trainer.accumulate_grad_batches if isinstance(loss, Tensor) else None


class Stopwatch:
    """Adds up the time between `resume` and `pause`.

    Args:
        clock: Returns seconds; replaced in tests.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._seconds = 0.0

    def resume(self) -> None:
        """Start counting, unless it is counting already."""
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        """Stop counting, unless it has stopped already."""
        if self._since is not None:
            self._seconds += self._clock() - self._since
            self._since = None

    def lap(self) -> float:
        """Return the seconds counted since the last lap and go on counting from zero."""
        now = self._clock()
        seconds = self._seconds + (0.0 if self._since is None else now - self._since)
        self._seconds = 0.0
        self._since = None if self._since is None else now
        return seconds


@dataclass(kw_only=True)
class Window:
    """What this rank ran between two optimizer steps."""

    lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence, padding micro-batches included: it is work that was done."""
    tokens: int = 0
    """Tokens, without the micro-batches that only fill up a short window."""
    seconds: float = 0.0
    """From the end of the previous window, or from the first micro-batch after a pause, to the end of this
    one."""


class WindowMeter:
    """Collects micro-batches until the optimizer steps; works with automatic and manual optimization.

    One serves one training. The time of validation, and what lies between two epochs, is left out. Nothing
    waits for the device before the window ends.

    Args:
        clock: Returns seconds; replaced in tests.
        global_step: Optimizer steps done when the training starts.
    """

    def __init__(self, clock: Clock = time.perf_counter, global_step: int = 0) -> None:
        self._watch = Stopwatch(clock)
        self._step = global_step
        self._pending: list[tuple[Callable[[], list[int]], bool]] = []

    def resume(self) -> None:
        """Go on counting time; called when a training micro-batch starts."""
        self._watch.resume()

    def pause(self) -> None:
        """Stop counting time; called when validation starts and when an epoch ends."""
        self._watch.pause()

    def add(self, batch: Any) -> None:
        """Remember a micro-batch that has run."""
        source = length_source(batch)
        if source is not None:
            is_padding = isinstance(batch, Mapping) and batch.get("target_tokens") == 0
            self._pending.append((source, is_padding))

    def close(self, trainer: Trainer) -> Window | None:
        """Return the window that has ended, or None if the optimizer has not stepped since the last one."""
        if trainer.global_step == self._step:
            return None
        self._step = trainer.global_step
        window = Window()
        for source, is_padding in self._pending:
            lengths = source()
            window.lengths.extend(lengths)
            window.tokens += 0 if is_padding else sum(lengths)
        self._pending.clear()
        window.seconds = self._watch.lap()
        return window
