"""What a measured step took, and what several of them say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from statistics import median, median_low

__all__ = ["MEDIAN_ERROR", "Passes", "Record", "Sample", "median_of", "relative_spread"]

Passes = tuple[float, float]
"""Forward and backward, in ms."""
# Makes the median absolute deviation of normal noise its standard deviation.
MAD_TO_DEVIATION = 1.4826
# Standard error of a median of normal noise, in standard errors of the mean.
MEDIAN_ERROR = 1.2533
SETTLED_SAMPLES = 5
SETTLED_ERROR = 0.01
BUSY_TOLERANCE = 0.03


@dataclass(frozen=True)
class Sample:
    """Times of one training step of one micro-batch, in ms, cut where its parts begin and end."""

    forward: float
    """From token ids to the loss."""
    backward: float
    """All of the backward pass."""
    layers_forward: float
    """From the input of the first decoder layer to the output of the last."""
    layers_backward: float
    """The same in backward."""
    sparse_forward: float = 0.0
    """Attention of one layer with a budget, the mean over layers; 0 where there is none."""
    sparse_backward: float = 0.0
    """The same in backward."""
    dense_forward: float = 0.0
    """Attention of one layer with full attention, the mean over layers; 0 where there is none."""
    dense_backward: float = 0.0
    """The same in backward."""
    busy: float = 1.0
    """Share of the time in which the process had a core, where other programs may not take it."""

    @property
    def whole(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def sparse(self) -> Passes:
        """Attention of one layer with a budget."""
        return self.sparse_forward, self.sparse_backward

    @property
    def dense(self) -> Passes:
        """Attention of one layer with full attention."""
        return self.dense_forward, self.dense_backward

    @property
    def outside(self) -> Passes:
        """Embedding, head and loss, and what else is not in a decoder layer."""
        return self.forward - self.layers_forward, self.backward - self.layers_backward

    def rest(self, num_sparse: int, num_dense: int) -> Passes:
        """One decoder layer without its attention.

        Args:
            num_sparse: Layers with a budget in the measured model.
            num_dense: Layers with full attention in it.
        """
        count = num_sparse + num_dense
        forward = self.layers_forward - num_sparse * self.sparse_forward - num_dense * self.dense_forward
        backward = self.layers_backward - num_sparse * self.sparse_backward - num_dense * self.dense_backward
        return forward / count, backward / count


class Record:
    """All samples of a point, and what they say together."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.used: list[Sample] = []
        """Those that no other program interrupted, or interrupted least."""
        self.visits = 0
        """Turns of the round-robin that the samples come from."""
        self.whole_ms = 0.0
        """Median of forward and backward."""
        self.spread: float | None = None
        """Relative standard deviation of a sample, by the median absolute deviation; None of a single one."""
        self.error: float | None = None
        """Relative standard error of the median."""

    @property
    def is_settled(self) -> bool:
        """Whether more samples would hardly move the median."""
        return len(self.used) >= SETTLED_SAMPLES and self.error is not None and self.error <= SETTLED_ERROR

    def add(self, samples: Iterable[Sample], visits: int = 1) -> None:
        """Take in the samples of a turn."""
        self.samples += samples
        self.visits += visits
        best = max(sample.busy for sample in self.samples)
        # Where even the best was interrupted, those interrupted a little more say as much.
        least = best - BUSY_TOLERANCE - (1.0 - best) / 2
        self.used = [sample for sample in self.samples if sample.busy >= least]
        whole = [sample.whole for sample in self.used]
        self.whole_ms = median_low(whole)
        # One that is left says nothing about how far it may be off; those that were left out do.
        several = whole if len(whole) > 1 else [sample.whole for sample in self.samples]
        self.spread = relative_spread(several) if len(several) > 1 else None
        self.error = None if self.spread is None else MEDIAN_ERROR * self.spread / math.sqrt(len(whole))

    def to_rows(self) -> list[list[float]]:
        """Return the samples as plain numbers."""
        return [list(astuple(sample)) for sample in self.samples]

    @classmethod
    def from_rows(cls, rows: list[list[float]], visits: int) -> Record:
        """Build from what `to_rows` returned.

        Raises:
            ValueError: A row is not a sample.
        """
        for row in rows:
            if len(row) != len(fields(Sample)) or not all(
                isinstance(ms, int | float) and math.isfinite(ms) for ms in row
            ):
                raise ValueError(f"a sample is {row}")
        record = cls()
        record.add((Sample(*row) for row in rows), visits)
        return record


def relative_spread(values: list[float]) -> float:
    """Return the standard deviation over the median, by the median absolute deviation.

    Example:
        >>> relative_spread([10.0, 10.0, 10.0]), round(relative_spread([9.0, 10.0, 11.0]), 3)
        (0.0, 0.148)
    """
    middle = median(values)
    return MAD_TO_DEVIATION * median(abs(value - middle) for value in values) / middle if middle else 0.0


def median_of(samples: Iterable[Sample], part: Callable[[Sample], Passes]) -> Passes:
    """Return the medians of a part, forward and backward apart; of two values the lower.

    What disturbs a step makes it longer.
    """
    forward, backward = zip(*map(part, samples), strict=True)
    return median_low(forward), median_low(backward)
