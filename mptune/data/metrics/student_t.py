"""Quantiles of Student's t distribution."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def t_quantile(level: float, degrees: float) -> float:
    """The value that Student's t stays below with probability ``level``; any degrees of freedom above 0."""
    from scipy.special import stdtrit  # Slow to import.

    return float(stdtrit(degrees, level))
