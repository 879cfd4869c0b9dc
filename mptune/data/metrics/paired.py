"""How exactly an error is known that is a mean over few samples.

By the jackknife (Miller, Biometrika 61, 1974): leaving out one sample at a time gives as many pseudo-values, whose mean
and standard error are those of the statistic; Student's t says what few of them are worth. Errors spread in proportion
to their size, so the statistics of ``METRICS``, which are never negative, are resampled as logarithms: an interval is a
factor. Metrics of the user's are taken as they are.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.table import METRICS

Floats = NDArray[np.float64]

LEAST_ERROR = 1e-12  # smaller errors count as this one, so that their logarithm exists


def is_compared_by_ratio(metric: str) -> bool:
    """Whether errors of this metric are compared by their ratio, not their difference."""
    return metric in METRICS and METRICS[metric].is_ratio


def pseudo_values(error: OutputError, metric: str) -> Floats | None:
    """The jackknife's pseudo-values, shape (samples,), of the logarithm where the metric is compared by ratio.

    Their mean is the statistic itself: the jackknife's correction of its bias is left out, so that a ratio is the one
    of the two errors that are shown. None where there is a single sample, a value is not finite, or all samples have
    one value of a metric over the whole set.
    """
    is_ratio = is_compared_by_ratio(metric)
    values = np.array([error.value(metric), *error.values_without_one(metric)])
    if len(values) < 2 or not np.isfinite(values).all() or (not is_ratio and (values[1:] == values[1]).all()):
        return None
    if is_ratio:
        values = np.log(np.maximum(values, LEAST_ERROR))
    pseudo: Floats = values[0] + (len(values) - 2) * (values[1:].mean() - values[1:])
    return pseudo


@functools.lru_cache(maxsize=1024)
def t_quantile(level: float, degrees: float) -> float:
    """The value that Student's t stays below with probability ``level``; any degrees of freedom above 0."""
    from scipy.special import stdtrit  # Slow to import.

    return float(stdtrit(degrees, level))


def error_interval(error: OutputError, metric: str) -> tuple[float, float] | None:
    """The 95 % interval of an error; None where it cannot be known."""
    value, pseudo = error.value(metric), pseudo_values(error, metric)
    if pseudo is None:
        return None
    half = t_quantile(0.975, len(pseudo) - 1) * float(np.std(pseudo, ddof=1)) / math.sqrt(len(pseudo))
    is_ratio = is_compared_by_ratio(metric)
    return (value * math.exp(-half), value * math.exp(half)) if is_ratio else (value - half, value + half)
