"""Percentiles of timed values, and how well their median is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BOOTSTRAP_SAMPLES = 1000
"""Resamples of the values for the interval of their median."""

_BOOTSTRAP_CHUNK = 4_000_000


def percentile(sorted_values: Sequence[float] | np.ndarray, p: float) -> float:
    """The p-th percentile (0 to 100) of ascending values: ``sorted[n - 1 - int((1 - p/100) * n)]``, as trtexec."""
    n = len(sorted_values)
    # 1e-9: else (1 - 0.9) * 10 = 0.99999... would be truncated to 0.
    return float(sorted_values[max(0, n - 1 - int((1.0 - p / 100.0) * n + 1e-9))])


def bootstrap_median_interval(
    values: np.ndarray, samples: int = BOOTSTRAP_SAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the median (Efron 1979), deterministic for a seed.

    Args:
        values: one-dimensional, at least one value.
    """
    generator = np.random.default_rng(seed)
    rows = max(1, _BOOTSTRAP_CHUNK // len(values))
    medians = [
        np.median(values[generator.integers(0, len(values), size=(min(rows, samples - start), len(values)))], axis=1)
        for start in range(0, samples, rows)
    ]
    low, high = np.quantile(np.concatenate(medians), [0.025, 0.975])
    return float(low), float(high)
