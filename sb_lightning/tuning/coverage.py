"""Coverage curves: the share of routing score that a budget keeps, from mass by rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sb_lightning._messages import explain
from sb_lightning.tuning.reference import FIXED_ONE

__all__ = ["ROW_STRIDE", "coverage_curve", "sampled_rows"]

ROW_STRIDE = 64
"""Every so many-th row of a sequence is sampled, and each block's last; csrc/tuning/sampling.h agrees."""


def coverage_curve(mass: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return C(k) at k = 1, 2, ...: the mass of the first k - 1 ranks, mean over heads.

    Masses are rounded to 2^-30 first, as the choice of budgets has it, so a curve never falls and never
    exceeds 1.

    Args:
        mass: Share of routing score by rank # [N, Hq, max_rank], from `moba_coverage`

    Returns:
        # [N, max_rank + 1]

    Raises:
        ValueError: `mass` has another shape.

    Example:
        >>> coverage_curve([[[0.5, 0.25, 0.125]]])
        array([[0.   , 0.5  , 0.75 , 0.875]])
    """
    shares = np.asarray(mass, dtype=np.float64)
    if shares.ndim != 3 or shares.shape[1] < 1:
        raise ValueError(
            explain(
                f"mass has shape {shares.shape}",
                "each sequence and head has one row of ranks",
                "pass [sequences, heads, ranks], as moba_coverage returns it",
            )
        )
    units: npt.NDArray[Any] = np.floor(np.clip(np.nan_to_num(shares), 0.0, 1.0) * FIXED_ONE + 0.5)
    sums = units.astype(np.int64).sum(1).cumsum(1)
    curve = np.zeros((sums.shape[0], sums.shape[1] + 1))
    curve[:, 1:] = np.minimum(sums / (FIXED_ONE * shares.shape[1]), 1.0)
    return curve


def sampled_rows(length: int, block_size: int, row_stride: int = ROW_STRIDE) -> int:
    """Count the rows that the coverage of a sequence is taken from: its weight in averages.

    They are every `row_stride`-th row and each block's last, of those that have an earlier block.

    Args:
        length: Tokens of the sequence.
        block_size: Keys per block.
        row_stride: Distance of the rows.

    Raises:
        ValueError: `length` is negative, or one of the others below 1.

    Example:
        >>> sampled_rows(256, 128)  # 128, 192, 255
        3
    """
    if length < 0 or block_size < 1 or row_stride < 1:
        raise ValueError(
            explain(
                f"length, block_size and row_stride are {length}, {block_size} and {row_stride}",
                "a length is not negative, and blocks and strides hold at least one row",
                "pass those of the attention",
            )
        )
    ends = np.minimum(np.arange(block_size, max(length, block_size), block_size) + block_size, length)
    on_grid = max(0, length - 1) // row_stride - (block_size - 1) // row_stride if len(ends) else 0
    return int(on_grid + np.count_nonzero((ends - 1) % row_stride))
