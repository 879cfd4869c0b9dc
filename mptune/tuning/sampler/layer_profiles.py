"""What the engines' own profilers teach of latency: what each group gains, and what its neighbours' precisions change.

A profiler tells what every group took in one engine. Over many engines the differences between FP16 and FP32 are the
groups' gains, far better known than from the engines' latencies alone; and what one group took in one precision beside
such and such neighbours is what the additive law leaves out (tactics, fusion).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.boundaries import Boundary, Crossings
from mptune.tuning.sampler.plan_rows import Bools, Floats

_NOISE, _NEIGHBOURS = 0.05, 0.05
"""Of what a group takes, as shares of it: by how much a profile misses it, and by how much neighbours change it. These
are believed as much as so many observations say otherwise:"""
_BELIEF = 20.0

_LARGEST_DEGREE = 10
"""Boundaries of a group that have terms of their own."""


class Profiles:
    """Profiles of the engines of some plans, summed up.

    Attributes:
        gains_ms: of each group; NaN where it was not profiled in both precisions.
        sd_ms: by how much these may miss; NaN likewise.
    """

    def __init__(self, boundaries: tuple[Boundary, ...], plans: Bools, group_ms: Floats) -> None:
        """Sum up.

        Args:
            boundaries: the boundaries: they say who the neighbours are.
            plans: plans x groups, True is FP16.
            group_ms: what each group took, in rows as ``plans``; NaN where that is not known.
        """
        self._settings = Settings(boundaries, plans.shape[1])
        seen = np.isfinite(group_ms)
        (fp32, fp32_count), (fp16, fp16_count) = (_mean(group_ms, seen & half) for half in (~plans, plans))
        halves = np.ascontiguousarray(plans.T)
        crossed = Crossings(boundaries).of(halves)
        noise, neighbours = self._learn_neighbours(halves, crossed, group_ms, np.where(plans, fp16, fp32))
        with np.errstate(divide="ignore", invalid="ignore"):
            squares = fp32**2 / fp32_count + fp16**2 / fp16_count
        self.gains_ms: Floats = fp32 - fp16
        self.sd_ms: Floats = np.sqrt(squares * (noise + neighbours))

    def _learn_neighbours(
        self, halves: Bools, crossed: Bools, group_ms: Floats, mean_ms: Floats
    ) -> tuple[float, float]:
        """Keep what settings change, shrunk by what is noise; returns the variances of noise and settings, in shares.

        One-way analysis of variance, pooled over the cells (a group in one precision), whose means are taken as known.
        Groups weigh as long as they take: of those of a few microseconds a profiler tells little.
        """
        known = np.isfinite(group_ms) & (mean_ms > 0)
        codes, means = self._settings.codes(halves, crossed).T[known], mean_ms[known]
        cells = (2 * np.arange(len(halves)) + halves.T)[known]
        size = self._settings.size
        mean_of, counts = np.zeros(size), np.bincount(codes, minlength=size)
        mean_of[codes] = means
        miss = group_ms[known] / means - 1.0
        shares = np.bincount(codes, weights=miss, minlength=size) / np.maximum(counts, 1)
        unit = means.mean() if len(means) else 1.0
        weights, weight_of = means / unit, mean_of / unit
        between = float((weight_of * counts * shares**2).sum())
        within = float((weights * miss**2).sum()) - between
        settings, alone = float(weight_of.sum()), float((weights / np.bincount(cells)[cells]).sum())
        noise = (within + _BELIEF * _NOISE**2) / (float(weights.sum()) - settings + _BELIEF)
        degrees, neighbours = settings - alone, _NEIGHBOURS**2
        if degrees > 1e-9:
            # How many observations there are of one setting, as the expectation of ``between`` counts them.
            expected = float((weights * (1.0 - counts[codes] / np.bincount(cells)[cells])).sum())
            found = max(0.0, between - degrees * noise) / max(expected, 1e-9)
            neighbours = (degrees * found + _BELIEF * neighbours) / (degrees + _BELIEF)
        kept = shares * counts / (counts + noise / neighbours)
        self._excess_ms: NDArray[np.float32] = (kept * mean_of).astype(np.float32)
        return noise, neighbours

    def neighbours_ms(self, halves: Bools, crossed: Bools) -> Floats:
        """By how much each plan takes longer than by its groups' mean times, as far as such settings were seen.

        Args:
            halves: groups x plans, True is FP16.
            crossed: boundaries x plans.
        """
        excess: Floats = self._excess_ms[self._settings.codes(halves, crossed)].sum(axis=0, dtype=float)
        return excess


class Settings:
    """Tells by a number how a group and those that it shares a boundary with are set.

    Attributes:
        size: one more than the largest number.
    """

    def __init__(self, boundaries: tuple[Boundary, ...], groups: int) -> None:
        """Number the boundaries of each group, and give each group a range of numbers of its own."""
        self._weights = np.zeros((groups, len(boundaries)), dtype=np.float32)
        degrees = np.zeros(groups, dtype=int)
        for index, boundary in enumerate(boundaries):
            for member in boundary.members:
                if degrees[member] < _LARGEST_DEGREE:
                    degrees[member] += 1
                    self._weights[member, index] = 2.0 ** degrees[member]
        ends = np.cumsum(2 ** (degrees + 1))
        self.size = int(ends[-1]) if groups else 0
        self._starts = (ends - 2 ** (degrees + 1)).astype(np.int32)[:, None]

    def codes(self, halves: Bools, crossed: Bools) -> NDArray[np.int32]:
        """Groups x plans: the group's own precision and which of its boundaries are crossed, one number for each."""
        local = self._weights @ crossed.astype(np.float32)
        local += halves
        codes: NDArray[np.int32] = local.astype(np.int32) + self._starts
        return codes


def _mean(group_ms: Floats, chosen: Bools) -> tuple[Floats, Floats]:
    """Mean of the chosen rows of each column, NaN where there are none, and how many they are."""
    count = chosen.sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(chosen, group_ms, 0.0).sum(axis=0) / np.where(count, count, np.nan)
    return mean, count
