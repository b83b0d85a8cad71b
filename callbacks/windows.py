"""What one rank ran in a window, and how long it took: the measuring part that the callbacks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Stopwatch", "Window", "WindowMeter", "is_padding", "length_source", "loss_of_window"]

Clock = Callable[[], float]
# Batches that may wait for their window's end before their lengths are read, so that they can be freed.
MOST_UNREAD = 256


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


def is_padding(batch: Any) -> bool:
    """Return whether a micro-batch only fills up a short window: its `target_tokens` is the number 0.

    Args:
        batch: The batch as `training_step` gets it. A tensor of that name, as other projects have, is
            something else.
    """
    count = batch.get("target_tokens") if isinstance(batch, Mapping) else None
    return isinstance(count, Integral) and int(count) == 0


def _lengths_from_positions(positions: Tensor) -> list[int]:
    if not positions.numel():
        return []
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


class _MicroBatch:
    """The lengths of a micro-batch, read once; the batch is not held from then on."""

    def __init__(self, batch: Any) -> None:
        self._source = length_source(batch)
        self.is_padding = is_padding(batch)

    @cached_property
    def lengths(self) -> list[int]:
        source, self._source = self._source, None
        return [] if source is None else source()

    @property
    def tokens(self) -> int:
        return 0 if self.is_padding else sum(self.lengths)


class WindowMeter:
    """Collects micro-batches until the optimizer steps; works with automatic and manual optimization.

    One serves one training. The time of validation, and what lies between two epochs, is left out. Nothing
    waits for the device before the window ends, unless it has hundreds of micro-batches.

    Args:
        clock: Returns seconds; replaced in tests.
        global_step: Optimizer steps done when the training starts.
    """

    def __init__(self, clock: Clock = time.perf_counter, global_step: int = 0) -> None:
        self._watch = Stopwatch(clock)
        self._step = global_step
        self._running: _MicroBatch | None = None
        self._pending: list[_MicroBatch] = []

    def resume(self) -> None:
        """Go on counting time; called when a training micro-batch starts."""
        self._watch.resume()

    def start(self, batch: Any) -> None:
        """Go on counting time, and let `tokens` include a micro-batch that starts.

        It counts for the window only once it is added: what another callback skips after its start does not.
        """
        self._watch.resume()
        self._running = _MicroBatch(batch)

    def pause(self) -> None:
        """Stop counting time; called when validation starts and when an epoch ends."""
        self._watch.pause()

    def add(self, batch: Any) -> None:
        """Remember a micro-batch that has run."""
        running, self._running = self._running, None
        self._pending.append(running or _MicroBatch(batch))
        if len(self._pending) % MOST_UNREAD == 0:
            for micro_batch in self._pending[-MOST_UNREAD:]:
                _ = micro_batch.lengths

    @property
    def tokens(self) -> int:
        """Tokens of the window so far, without padding micro-batches; reading it may wait for the device."""
        running = [] if self._running is None else [self._running]
        return sum(micro_batch.tokens for micro_batch in [*self._pending, *running])

    def close(self, trainer: Trainer) -> Window | None:
        """Return the window that has ended, or None if the optimizer has not stepped since the last one."""
        if trainer.global_step == self._step:
            return None
        self._step = trainer.global_step
        window = Window(
            lengths=[length for micro_batch in self._pending for length in micro_batch.lengths],
            tokens=sum(micro_batch.tokens for micro_batch in self._pending),
            seconds=self._watch.lap(),
        )
        self._pending.clear()
        return window
