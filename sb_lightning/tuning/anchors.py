"""The time that the micro-batches of a window are steered to."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal

from sb_lightning._messages import explain

__all__ = ["Anchor", "anchor_latency"]

Anchor = Literal["min", "mean", "max"]


def anchor_latency(times_us: Sequence[int], anchor: Anchor = "mean") -> int:
    """Return the anchor of a window in microseconds (SparseBalance, arXiv 2604.13847: Min, Mean, Max).

    Args:
        times_us: Predicted time of each micro-batch at the usual budget, in whole microseconds. Whole
            numbers, so that every rank and every order of the list gives the same.
        anchor: "min" slows no micro-batch's neighbours down and cuts most; "max" cuts nothing; the mean,
            halves upward, lies between.

    Raises:
        TypeError: A time is no integer.
        ValueError: There is no time, one is negative, or no anchor has that name.

    Example:
        >>> anchor_latency([100, 400, 201], "mean")
        234
    """
    try:
        times = [operator.index(time) for time in times_us]
    except TypeError:
        raise TypeError(
            explain(
                "times_us holds other things than integers",
                "all ranks must find the same anchor, so times count whole microseconds",
                "pass what CostModel.cell_us returns",
            )
        ) from None
    if not times or min(times) < 0:
        raise ValueError(
            explain(
                f"times_us is {times if len(times) < 10 else f'{len(times)} times, the least {min(times)}'}",
                "a window has a micro-batch, and no time is negative",
                "pass one predicted time per micro-batch of the window",
            )
        )
    if anchor == "min":
        return min(times)
    if anchor == "max":
        return max(times)
    if anchor == "mean":
        return (2 * sum(times) + len(times)) // (2 * len(times))
    raise ValueError(
        explain(f"anchor is {anchor!r}", "no anchor has that name", "pass 'min', 'mean' or 'max'")
    )
