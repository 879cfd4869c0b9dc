"""What a plan promises: by how much it is expected to raise the hypervolume, under the posterior of all evaluations."""

from __future__ import annotations

import math

import numpy as np

from mptune.tuning.sampler.error_model import ERROR_FLOOR, ErrorModel, Observations, Prior, keys
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.min_cut import Bools, Floats
from mptune.tuning.sampler.overflow_model import Overflow

_CAUTION = 0.7
"""At 1 the search stays with plans that are safe, and learns no more; simulated, where emulation misses overflows."""

_DRAWS, _ROUGH = 32, 3
"""Fewer let the choice fall on plans that the draws happen to flatter."""


class Box:
    """The hypervolume's box with what is in it, under the mean (draw 0) and draws of both posteriors.

    Its sides are the share of the base latency that a plan saves (gain) and how exact it is on a log axis from the
    reference error to the floor (height), both 0 to 1.
    """

    def __init__(self, prior: Prior, seen: Observations, reference: float, generator: np.random.Generator) -> None:
        """Take the posteriors and lay out the stairs that the evaluated plans make.

        Args:
            prior: what is known beforehand.
            seen: what has been or is being evaluated; its ``base_ms`` must be known.
            reference: error past which a plan is worth nothing.
            generator: of the draws.
        """
        self._latency, self._error = LatencyModel(prior, seen), ErrorModel(prior, seen)
        self.base_ms = seen.base_ms
        self.overflow = Overflow(prior, seen)
        self.terms = np.vstack([self._latency.mean(), self._latency.samples(generator, _DRAWS)])
        self.u = np.vstack([self._error.typical, self._error.samples(generator, _DRAWS)])
        self._top, self._span = math.log(reference), math.log(reference / ERROR_FLOOR)
        self._seen = keys(seen.plans)
        told = (seen.plans[:0], np.zeros(0)) if seen.emulated is None else seen.emulated
        self._emulated = dict(zip(keys(told[0]).tolist(), told[1], strict=True))
        inside = seen.finite != 0.0  # plans in work are taken to come out as predicted
        plans, measured = seen.plans[inside], seen.error[inside]
        gains, heights = self.place(plans, emulated=self.emulated(plans))
        known = np.isfinite(measured)
        heights[:, known] = self._height(measured[known])
        self._stairs = [stairs(g, h) for g, h in zip(gains, heights, strict=True)]

    def is_new(self, plans: Bools) -> Bools:
        """Which of the plans nobody has evaluated or evaluates."""
        new: Bools = ~np.isin(keys(plans), self._seen)
        return new

    def emulated(self, plans: Bools) -> Floats:
        """Errors that emulation has told; NaN where it was not asked."""
        return np.array([self._emulated.get(key, math.nan) for key in keys(plans).tolist()], dtype=float)

    def place(self, plans: Bools, draws: int = _DRAWS + 1, emulated: Floats | None = None) -> tuple[Floats, Floats]:
        """Gains and heights, draws x plans each; ``emulated`` are errors of the plans, NaN where nothing is known."""
        gains = 1.0 - self._latency.predict(plans, self.terms[:draws]) / self._latency.base(self.terms[:draws])[:, None]
        errors = self._error.predict(plans, self.u[:draws])
        return gains, self._height(errors if emulated is None else self._error.weigh(errors, emulated))

    def _height(self, errors: Floats) -> Floats:
        height: Floats = (self._top - np.log(np.maximum(errors, ERROR_FLOOR))) / self._span
        return height

    def judge(self, plans: Bools) -> tuple[Floats, Floats, Floats]:
        """Gain and height under the mean, and what is promised under it and a few draws: quick, for many plans."""
        gains, heights = self.place(plans, _ROUGH + 1)
        raised = self._added(gains, heights)
        return gains[0], heights[0], raised.mean(axis=0) * self._worth(plans)

    def expected(self, plans: Bools, emulated: Floats | None = None) -> Floats:
        """By how much each plan is expected to raise the hypervolume, times its chance to be finite.

        Args:
            plans: any.
            emulated: as ``place`` takes them; ``inf`` promises nothing.
        """
        gains, heights = self.place(plans, emulated=emulated)
        raised = self._added(gains, heights)
        expected: Floats = raised.mean(axis=0) * self._worth(plans)
        return expected

    def _worth(self, plans: Bools) -> Floats:
        """What a promise counts: by its chance to be finite, and a little more, since a failure tells who overflows."""
        worth: Floats = self.overflow.finite(plans) ** _CAUTION
        return worth

    def _added(self, gains: Floats, heights: Floats) -> Floats:
        """The area that each plan adds to the stairs of each draw, of as many draws as there are rows."""
        return np.array([added(g, h, *stair) for g, h, stair in zip(gains, heights, self._stairs, strict=False)])


def stairs(gains: Floats, heights: Floats) -> tuple[Floats, Floats]:
    """The front as stairs: ascending gains, and how high everything up to each is dominated."""
    inside = (gains > 0) & (heights > 0)
    order = np.argsort(gains[inside])
    steps, tops = gains[inside][order], heights[inside][order]
    tops = np.maximum.accumulate(tops[::-1])[::-1]
    kept = np.append(tops[:-1] > tops[1:], True)[: len(tops)]
    return steps[kept], tops[kept]


def added(gains: Floats, heights: Floats, steps: Floats, tops: Floats) -> Floats:
    """The area that each point adds to the stairs."""
    ends = np.append(0.0, steps)
    under = np.append(0.0, np.cumsum(np.diff(ends) * tops))
    # Above the stairs a point only has what lies right of the last step that is as high as it is.
    first = np.searchsorted(-tops, -heights, side="right")
    area = heights * (gains - ends[first]) - (np.interp(gains, ends, under) - under[first])
    above: Floats = np.where((gains > ends[first]) & (heights > 0.0), area, 0.0)
    return above
