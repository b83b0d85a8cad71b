"""Logarithm and power of two with the same bits on every machine; the twin of csrc/latency/numeric.h.

A time T in ms is kept as log2(T) in whole units of 2**-36, so that interpolation is exact and therefore
monotone; only +, -, *, / and sqrt are used, which IEEE 754 rounds in one way.
"""

from __future__ import annotations

import math

__all__ = ["WEIGHT_ONE", "blend", "exp2", "from_fixed", "limit", "log2", "to_fixed", "weight_of"]

FRACTION_BITS = 36
WEIGHT_ONE = 1 << 20
POWER_BITS = 10
LOG_BITS = 9
REST_BITS = FRACTION_BITS - POWER_BITS
UNIT = 2.0**-36


def _powers() -> list[float]:
    roots, root = [], 2.0
    for _ in range(POWER_BITS):
        root = math.sqrt(root)
        roots.append(root)
    table = []
    for i in range(1 << POWER_BITS):
        power = 1.0
        for bit, factor in enumerate(roots):
            if i >> (POWER_BITS - 1 - bit) & 1:
                power *= factor
        table.append(power)
    return table


def _logs() -> list[tuple[float, float, float]]:
    table = []
    for i in range(1 << LOG_BITS):
        centre = 1.0 + (i + 0.5) / (1 << LOG_BITS)
        z = (centre - 1.0) / (centre + 1.0)
        total = 0.0
        for n in range(41, 0, -2):
            total = total * (z * z) + 1.0 / n
        table.append((centre, 1.0 / centre, 2.0 * z * total))
    return table


POWER = _powers()
LOG = _logs()


def log2(x: float) -> float:
    """Return log2 of a positive number, with an error below 1e-13.

    Example:
        >>> log2(1024)
        10.0
    """
    half, exponent = math.frexp(x)
    mantissa = 2.0 * half
    centre, inverse, log = LOG[int((mantissa - 1.0) * (1 << LOG_BITS))]
    r = (mantissa - centre) * inverse
    log1p = r * (1.0 + r * (-1.0 / 2.0 + r * (1.0 / 3.0 + r * (-1.0 / 4.0))))
    return float(exponent - 1) + (log + log1p) * 1.4426950408889634


def exp2(y: int) -> float:
    """Return 2**(y / 2**36), strictly increasing in y.

    Example:
        >>> exp2(3 << 36), exp2(-1 << 36)
        (8.0, 0.5)
    """
    fraction = y & ((1 << FRACTION_BITS) - 1)
    r = float(fraction & ((1 << REST_BITS) - 1)) * (0.6931471805599453 * UNIT)
    p = 1.0 + r * (1.0 + r * (1.0 / 2.0 + r * (1.0 / 6.0)))
    return math.ldexp(POWER[fraction >> REST_BITS] * p, y >> FRACTION_BITS)


def to_fixed(logarithm: float) -> int:
    """Return the nearest fixed-point number, kept within +-60."""
    return math.floor(min(max(logarithm, -60.0), 60.0) * 2.0**36 + 0.5)


def limit(y: int) -> int:
    """Return a fixed-point number kept within +-60."""
    return min(max(y, -(60 << FRACTION_BITS)), 60 << FRACTION_BITS)


def from_fixed(y: int) -> float:
    """Return the logarithm that a fixed-point number stands for."""
    return y * UNIT


def blend(a: int, b: int, weight: int) -> int:
    """Return a number between a (weight 0) and b (weight 2**20)."""
    return (a * (WEIGHT_ONE - weight) + b * weight) >> 20


def weight_of(x: float, start: float, scale: float) -> int:
    """Return a position as a weight: 0 at x = start."""
    return min(max(int((x - start) * scale), 0), WEIGHT_ONE)
