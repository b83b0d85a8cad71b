"""Moments of a step on a device, and the time between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from sb_lightning._messages import explain

__all__ = ["TIMED_DEVICES", "CudaMarks", "Marks", "WallMarks", "marks_for"]

TIMED_DEVICES = ("cpu", "cuda")
"""Types of the devices that have a clock here."""


class Marks(Protocol):
    """A clock whose moments are read after the step."""

    def now(self) -> Any:
        """Return this moment, as far as the work handed out so far has come."""

    def settle(self) -> None:
        """Wait until all moments have passed."""

    def between_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two moments that have passed."""


class WallMarks:
    """Moments of this process: on the CPU, work is done when its call returns.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def now(self) -> float:
        """Return seconds."""
        return self._clock()

    def settle(self) -> None:
        """Have nothing to wait for."""

    def between_ms(self, start: float, end: float) -> float:
        """Return the milliseconds between two moments."""
        return (end - start) * 1000.0


class CudaMarks:
    """Moments on a GPU's stream, by events: nothing waits during the step.

    Forward and backward of an operation run on the same stream, so the events lie between the kernels where
    they were recorded. Where the GPU waits for the launches of a short step, that wait is in the times, as it
    is in training.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))  # type: ignore[no-untyped-call]
        return event

    def settle(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)

    def between_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the milliseconds between two events that have passed."""
        return float(start.elapsed_time(end))  # type: ignore[no-untyped-call]


def marks_for(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Marks:
    """Return the clock of a device.

    Args:
        device: Where the steps run.
        clock: Returns seconds, where work is done when its call returns.

    Raises:
        ValueError: No clock is known for it: most devices work on after a call has returned.
    """
    if device.type not in TIMED_DEVICES:
        raise ValueError(
            explain(
                f"the device is {device}",
                f"only steps on {' and '.join(TIMED_DEVICES)} can be timed",
                "measure on one of these",
            )
        )
    return CudaMarks(device) if device.type == "cuda" else WallMarks(clock)
