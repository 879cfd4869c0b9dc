"""How exactly an error is known that is a mean over few samples, and whether two errors differ beyond that.

Both by the jackknife (Miller, Biometrika 61, 1974): leaving out one sample at a time gives as many pseudo-values, whose
mean and standard error are those of the statistic; Student's t says what few of them are worth. Two plans meet the same
samples, so they are compared by the differences of their pseudo-values, sample by sample: what makes a sample difficult
for both cancels. Errors spread in proportion to their size, so the statistics of ``METRICS``, which are never negative,
are resampled as logarithms: an interval is a factor, a difference a ratio. Metrics of the user's are taken as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.table import METRICS

Floats = NDArray[np.float64]

LEAST_ERROR = 1e-12  # smaller errors count as this one, so that their logarithm exists


@dataclass(frozen=True)
class Difference:
    """How two errors differ: their ratio where ``is_ratio``, else the first one's less the second one's."""

    value: float
    ci95: tuple[float, float]
    is_ratio: bool

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves no doubt which error is the larger one."""
        same = 1.0 if self.is_ratio else 0.0
        return self.ci95[1] < same or self.ci95[0] > same


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
    pseudo = pseudo_values(error, metric)
    return None if pseudo is None else _around(error.value(metric), pseudo, is_ratio=is_compared_by_ratio(metric))


def compare_errors(error: OutputError, other: OutputError, metric: str) -> Difference | None:
    """How two errors on the same samples differ; None where that cannot be known."""
    first, second = pseudo_values(error, metric), pseudo_values(other, metric)
    if first is None or second is None or len(first) != len(second):
        return None
    is_ratio, mine, its = is_compared_by_ratio(metric), error.value(metric), other.value(metric)
    value = max(mine, LEAST_ERROR) / max(its, LEAST_ERROR) if is_ratio else mine - its
    return Difference(value, _around(value, first - second, is_ratio=is_ratio), is_ratio)


def _around(value: float, pseudo: Floats, *, is_ratio: bool) -> tuple[float, float]:
    """The 95 % interval around a value, from at least 2 pseudo-values."""
    half = t_quantile(0.975, len(pseudo) - 1) * float(np.std(pseudo, ddof=1)) / math.sqrt(len(pseudo))
    return (value * math.exp(-half), value * math.exp(half)) if is_ratio else (value - half, value + half)


def is_larger_beyond_noise(error: OutputError, other: OutputError, metric: str) -> bool:
    """Whether an error on some samples is larger than that on others beyond the intervals of both.

    Few samples that carry an error make its interval as wide as the error is large: above the other's interval, twice
    the other is enough.
    """
    value, less = error.value(metric), other.value(metric)
    low, _ = error_interval(error, metric) or (value, value)
    _, high = error_interval(other, metric) or (less, less)
    return value > max(less, high) and (low > less or value > 2 * abs(less))


def significantly_smaller(values: Floats, pseudo: Sequence[Floats | None]) -> NDArray[np.bool_]:
    """Which of many errors are smaller than which others beyond doubt: (plans, plans), the row's than the column's.

    Args:
        pseudo: of each plan, all of the same samples; None where unknown: such errors are compared as they are, and so
            are those that differ in their number of samples.
    """
    smaller = values[:, None] < values[None, :]
    for samples in {len(each) for each in pseudo if each is not None}:
        rows = [row for row, each in enumerate(pseudo) if each is not None and len(each) == samples]
        table = np.array([pseudo[row] for row in rows])
        means = table.mean(axis=1)
        products = (table - means[:, None]) @ (table - means[:, None]).T
        squares = np.add.outer(np.diag(products), np.diag(products))
        variance = np.maximum(squares - 2.0 * products, 0.0) / (samples - 1) / samples
        variance[variance < 1e-24 * (squares + 1.0)] = 0.0  # what rounding leaves of equal series is no doubt
        apart = t_quantile(0.975, samples - 1) * np.sqrt(variance) < np.subtract.outer(means, means).T
        smaller[np.ix_(rows, rows)] &= apart
    return smaller
