"""What the engines' own profilers say of latency: each group's gain, and the effect of its neighbours' precisions.

A profile has the time of every group in one engine. Over many engines the differences between FP16 and FP32 are the
groups' gains, far better known than from the engines' latencies alone; and how the time of a group in one precision
depends on which of its boundaries are crossed is what the additive law leaves out (tactics, fusion).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.cuts.boundaries import Boundary, Counts, Crossings
from mptune.tuning.sampler.plan_rows import Bools, Floats
from mptune.tuning.sampler.posterior import Prior

_NOISE, _NEIGHBOURS = 0.05, 0.05
"""Prior standard deviations, as shares of a group's time: of a profile's noise, and of its neighbours' effect."""

_PRIOR_WEIGHT = 20.0
"""So many observations weigh as much as these two."""

_ALIKE_DIFFER = 0.05
"""Standard deviation of what BF16 saves beyond FP16 in the same group, as a share of what either saves."""

_LARGEST_DEGREE = 10
"""Boundaries of a group that define its neighbourhoods: with its own precision 2^11 at most."""


class LayerProfiles:
    """Profiles of the engines of some plans, summed up.

    Attributes:
        gains_ms: of each column, shape (n_groups,); NaN where it was not profiled in both precisions. What a group
            gains in one precision tells of those that take as long.
        sd_ms: their standard errors; NaN likewise.
    """

    def __init__(self, prior: Prior, plans: Bools, group_ms: Floats) -> None:
        """Sum up the time of each group, shape (n_plans, n_groups); NaN where that is not known."""
        self._prior, boundaries = prior, prior.boundaries
        group_ms = np.where(self._others(plans.T).T, np.nan, group_ms)
        self._neighbourhoods = Neighbourhoods(boundaries, plans.shape[1])
        is_known = np.isfinite(group_ms)
        (fp32, fp32_count), (fp16, fp16_count) = (_mean(group_ms, is_known & half) for half in (~plans, plans))
        columns = np.ascontiguousarray(plans.T)
        crossed = Crossings(prior.columns, boundaries).of(columns)
        noise, neighbours = self._learn_neighbours(columns, crossed, group_ms, np.where(plans, fp16, fp32))
        with np.errstate(divide="ignore", invalid="ignore"):
            squares = fp32**2 / fp32_count + fp16**2 / fp16_count
        gains_ms: Floats = fp32 - fp16
        sd_ms: Floats = np.sqrt(squares * (noise + neighbours))
        self.gains_ms, self.sd_ms = self._pooled(gains_ms, sd_ms)

    def _pooled(self, gains_ms: Floats, sd_ms: Floats) -> tuple[Floats, Floats]:
        """The gains and their standard errors: of columns that take as long, means weighed by their precision."""
        pooled, pooled_sd = gains_ms.copy(), sd_ms.copy()
        for own, other in (*self._prior.alike, *((b, a) for a, b in self._prior.alike)):
            # By the other column alone, which differs, and then with its own.
            from_other_sd = np.hypot(sd_ms[other], _ALIKE_DIFFER * abs(gains_ms[other]))
            if not np.isfinite(gains_ms[own]):
                pooled[own], pooled_sd[own] = gains_ms[other], from_other_sd
            elif np.isfinite(gains_ms[other]):
                trust = sd_ms[own] ** 2 / max(sd_ms[own] ** 2 + from_other_sd**2, 1e-300)
                pooled[own] += trust * (gains_ms[other] - gains_ms[own])
                pooled_sd[own] = np.sqrt(1.0 - trust) * sd_ms[own]
        return pooled, pooled_sd

    def _learn_neighbours(
        self, columns: Bools, crossed: Counts, group_ms: Floats, mean_ms: Floats
    ) -> tuple[float, float]:
        """Estimate each neighbourhood's effect, shrunk towards 0 by the noise.

        One-way random-effects analysis of variance (Searle, Casella and McCulloch, Variance Components, 1992), pooled
        over the cells (a group in one precision), whose means are taken as known. Groups weigh as long as they take:
        profiles of a few microseconds are mostly noise. Returns the variances of noise and of neighbours' effects, as
        shares of a group's time.
        """
        is_known = np.isfinite(group_ms) & (mean_ms > 0)
        codes, means = self._neighbourhoods.codes(columns, crossed).T[is_known], mean_ms[is_known]
        cells = (2 * np.arange(len(columns)) + columns.T)[is_known]
        size = self._neighbourhoods.size
        mean_of, counts = np.zeros(size), np.bincount(codes, minlength=size)
        mean_of[codes] = means
        deviation = group_ms[is_known] / means - 1.0
        effects = np.bincount(codes, weights=deviation, minlength=size) / np.maximum(counts, 1)
        unit = means.mean() if len(means) else 1.0
        weights, weight_of = means / unit, mean_of / unit
        between = float((weight_of * counts * effects**2).sum())
        within = float((weights * deviation**2).sum()) - between
        neighbourhoods, single = float(weight_of.sum()), float((weights / np.bincount(cells)[cells]).sum())
        noise = (within + _PRIOR_WEIGHT * _NOISE**2) / (float(weights.sum()) - neighbourhoods + _PRIOR_WEIGHT)
        degrees, neighbours = neighbourhoods - single, _NEIGHBOURS**2
        if degrees > 1e-9:
            # Observations per neighbourhood, as the expectation of ``between`` counts them.
            expected = float((weights * (1.0 - counts[codes] / np.bincount(cells)[cells])).sum())
            estimate = max(0.0, between - degrees * noise) / max(expected, 1e-9)
            neighbours = (degrees * estimate + _PRIOR_WEIGHT * neighbours) / (degrees + _PRIOR_WEIGHT)
        shrunk = effects * counts / (counts + noise / neighbours)
        self._excess_ms: NDArray[np.float32] = (shrunk * mean_of).astype(np.float32)
        return noise, neighbours

    def excess_ms(self, columns: Bools, crossed: Counts) -> Floats:
        """Time of each plan above the sum of its groups' mean times, in profiled ms, shape (n_plans,)."""
        excess_ms = self._excess_ms[self._neighbourhoods.codes(columns, crossed)]
        if self._prior.further:
            excess_ms[self._others(columns)] = 0.0
            second = [column for _, column in self._prior.further]
            excess_ms[second] *= columns[second]  # of several that are FP32 the first one counts
        excess: Floats = excess_ms.sum(axis=0, dtype=float)
        return excess

    def _others(self, columns: Bools) -> Bools:
        """Where a column is False and another one of its group True: that is not FP32, shape (n_columns, n_plans)."""
        others = np.zeros(columns.shape, dtype=bool)
        for first, second in self._prior.exclusive:
            others[first] |= columns[second]
            others[second] |= columns[first]
        return others


class Neighbourhoods:
    """Numbers for a group's precision together with which of its boundaries are crossed.

    Attributes:
        size: one more than the largest number.
    """

    def __init__(self, boundaries: tuple[Boundary, ...], n_groups: int) -> None:
        """Number the boundaries of each group, and give each group a range of numbers of its own."""
        self._weights = np.zeros((n_groups, len(boundaries)), dtype=np.float32)
        degrees = np.zeros(n_groups, dtype=int)
        for index, boundary in enumerate(boundaries):
            for member in boundary.members:
                if degrees[member] < _LARGEST_DEGREE:
                    degrees[member] += 1
                    self._weights[member, index] = 2.0 ** degrees[member]
        ends = np.cumsum(2 ** (degrees + 1))
        self.size = int(ends[-1]) if n_groups else 0
        self._starts = (ends - 2 ** (degrees + 1)).astype(np.int32)[:, None]

    def codes(self, columns: Bools, crossed: Counts) -> NDArray[np.int32]:
        """The number of each group's neighbourhood in each plan, shape (n_groups, n_plans); arguments as above."""
        local = self._weights @ (crossed > 0).astype(np.float32)
        local += columns
        codes: NDArray[np.int32] = local.astype(np.int32) + self._starts
        return codes


def _mean(group_ms: Floats, chosen: Bools) -> tuple[Floats, Floats]:
    """Mean of the chosen rows of each column, NaN where there are none, and their count; shape (n_groups,) each."""
    count = chosen.sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(chosen, group_ms, 0.0).sum(axis=0) / np.where(count, count, np.nan)
    return mean, count
