"""Lengths of sequences as published for known data sets: synthetic, for planning without the data.

Each preset draws from a distribution that was fitted to published statistics of a data set; none is the data
set. `LENGTH_PRESETS` says what each was matched to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sb_lightning._messages import explain

__all__ = ["LENGTH_PRESETS", "LengthPreset", "sample_lengths"]

Lengths = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class LengthPreset:
    """A distribution of lengths."""

    description: str
    """What it was matched to."""
    least: int
    """Tokens of the shortest sequence."""
    most: int
    """Tokens of the longest sequence."""
    draw: Draw
    """Draws lengths before they are cut to the range."""


# Upper ends in tokens and shares in percent of the histogram.
_MAGI_ENDS = [10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 196608]
_MAGI_SHARES = [0.22, 2.91, 5.2, 10.23, 28.19, 24.64, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14]


def _log_normal(median: float, sigma: float) -> Draw:
    return lambda generator, count: median * np.exp(sigma * generator.standard_normal(count))


def _uniform(least: int, most: int) -> Draw:
    return lambda generator, count: generator.uniform(least, most, count)


def _normal(mean: float, deviation: float) -> Draw:
    return lambda generator, count: mean + deviation * generator.standard_normal(count)


def _mixture(share: float, first: Draw, second: Draw) -> Draw:
    """Draw from the first with probability `share`, else from the second."""

    def draw(generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        is_first = generator.uniform(size=count) < share
        return np.where(is_first, first(generator, count), second(generator, count))

    return draw


def _cut(draw: Draw, least: int, most: int) -> Draw:
    return lambda generator, count: np.clip(draw(generator, count), least, most)


def _histogram(ends: list[int], shares: list[float]) -> Draw:
    """Draw a bin by its share, then a length within it, all logarithms alike."""

    def draw(generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        chosen = np.searchsorted(np.cumsum(shares) / sum(shares), generator.uniform(size=count))
        starts = np.log([1, *ends[:-1]])[chosen]
        return np.exp(starts + (np.log(ends)[chosen] - starts) * generator.uniform(size=count))

    return draw


LENGTH_PRESETS: dict[str, LengthPreset] = {
    "longalign": LengthPreset(
        description="synthetic, matched to LongAlign-10k read as log-normal: median 14K, 8K to 72K",
        least=8192,
        most=73728,
        draw=_log_normal(14000, 0.65),
    ),
    "longalign_uniform": LengthPreset(
        description="synthetic, matched to LongAlign-10k read as evenly distributed: 8K to 64K",
        least=8192,
        most=65536,
        draw=_uniform(8192, 65536),
    ),
    "chatqa2": LengthPreset(
        description="synthetic, matched to ChatQA2-Long-SFT: half below 4K, half 16K to 32K (share unknown)",
        least=32,
        most=32768,
        draw=_mixture(0.5, _cut(_log_normal(900, 0.8), 32, 4096), _uniform(16384, 32768)),
    ),
    "longalpaca": LengthPreset(
        description="synthetic, matched to LongAlpaca-12k: 9,942 +- 3,417 tokens, 4,695 to 25,826",
        least=4695,
        most=25826,
        draw=_normal(9941.8, 3417.1),
    ),
    "magi": LengthPreset(
        description="synthetic, matched to the length histogram of MagiAttention's benchmark: 1 to 192K",
        least=1,
        most=196608,
        draw=_histogram(_MAGI_ENDS, _MAGI_SHARES),
    ),
    "llama3": LengthPreset(
        description="synthetic, matched to Llama-3 SFT: 99.89 % short (mean 1K), 0.11 % long (mean 37K)",
        least=16,
        most=131072,
        draw=_mixture(0.0011, _normal(37000, 12000), _log_normal(726, 0.8)),
    ),
}
"""The presets by name."""


def sample_lengths(preset: str, count: int, seed: int = 0) -> Lengths:
    """Draw the lengths of `count` sequences from a preset.

    Args:
        preset: A key of `LENGTH_PRESETS`.
        count: Number of sequences.
        seed: Seed of the draw; the same seed gives the same lengths.

    Raises:
        ValueError: There is no such preset, or the count is negative.

    Example:
        >>> bool(sample_lengths("longalpaca", 3).min() >= 4695)
        True
    """
    if preset not in LENGTH_PRESETS:
        raise ValueError(
            explain(
                f"preset is {preset!r}", "there is none of that name", f"pass one of {list(LENGTH_PRESETS)}"
            )
        )
    if count < 0:
        raise ValueError(explain(f"count is {count}", "sequences are counted", "pass a count >= 0"))
    chosen = LENGTH_PRESETS[preset]
    drawn = chosen.draw(np.random.default_rng(seed), count)
    return np.clip(np.floor(drawn + 0.5), chosen.least, chosen.most).astype(np.int64)
