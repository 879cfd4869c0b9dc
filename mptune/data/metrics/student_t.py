"""Quantiles of Student's t distribution, without SciPy: importing it takes as long as reading a whole run.

The distribution is the regularised incomplete beta function (Abramowitz and Stegun, Handbook of Mathematical Functions,
26.7.1), which is summed as a continued fraction (26.5.8) by Lentz's method.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_TINY = 1e-300
_MOST_TERMS = 10_000
_MOST_STEPS = 200

_LARGE_DEGREES = 1e6
"""From here on the expansion around the normal distribution is exact to 1e-12 (26.7.5), and the fraction is slow."""


@lru_cache(maxsize=1024)
def t_quantile(level: float, degrees: float) -> float:
    """The value that Student's t stays below with a probability; of the normal distribution for infinite degrees.

    Args:
        level: the probability, above 0 and below 1.
        degrees: of freedom, above 0, not necessarily whole.

    Raises:
        ValueError: an argument outside its range.
    """
    if not (0.0 < level < 1.0 and degrees > 0.0):
        raise ValueError(f"no quantile of Student's t: level {level}, degrees of freedom {degrees}")
    if level < 0.5:
        return -t_quantile(1.0 - level, degrees)
    normal = NormalDist().inv_cdf(level)
    if math.isinf(degrees):
        return normal
    if degrees >= _LARGE_DEGREES:
        return normal + (normal**3 + normal) / (4.0 * degrees)
    beyond = 1.0 - level
    low, high = 0.0, 2.0 * normal + 1.0
    while _beyond(high, degrees) > beyond:
        low, high = high, 2.0 * high
    # Newton's method, halved where it leaves the bracket.
    value = 0.5 * (low + high)
    for _ in range(_MOST_STEPS):
        excess = _beyond(value, degrees) - beyond
        low, high = (value, high) if excess > 0.0 else (low, value)
        step = value + excess / _density(value, degrees)
        following = step if low < step < high else 0.5 * (low + high)
        if abs(following - value) <= 1e-14 * max(1.0, following):
            return following
        value = following
    return value


def _beyond(value: float, degrees: float) -> float:
    """The probability above a value of at least 0."""
    square = value * value
    # The smaller argument is exact where the other one would be 1 less next to nothing.
    half, x, rest = 0.5 * degrees, degrees / (degrees + square), square / (degrees + square)
    if x < (half + 1.0) / (half + 2.5):
        return 0.5 * _incomplete_beta(half, 0.5, x, rest)
    return 0.5 * (1.0 - _incomplete_beta(0.5, half, rest, x))


def _density(value: float, degrees: float) -> float:
    constant = math.lgamma(0.5 * (degrees + 1.0)) - math.lgamma(0.5 * degrees) - 0.5 * math.log(degrees * math.pi)
    return math.exp(constant - 0.5 * (degrees + 1.0) * math.log1p(value * value / degrees))


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function; ``rest`` is ``1 - x``, and ``x`` below ``(a + 1) / (a + b + 2)``."""
    if x <= 0.0:
        return 0.0
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    c, d = 1.0, 1.0 / _nonzero(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1.0 / _nonzero(1.0 + term * d)
            c = _nonzero(1.0 + term / c)
            change *= c * d
        fraction *= change
        if abs(change - 1.0) < 1e-15:
            break
    return math.exp(front) * fraction / a


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
