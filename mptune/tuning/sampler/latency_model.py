"""Posterior of latency: the additive law's terms, from a roofline and layer profiles, conditioned on timed builds.

Latency is ``base - gains of the FP16 groups + costs of the crossed boundaries``, linear in its terms, with Gaussian
noise. How far the prior and the law can be trusted is not assumed: of a few prior widths and noises the most probable
given the timings are taken (type II maximum likelihood).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.common_terms import expected_gains, mix
from mptune.tuning.sampler.cuts.boundaries import Counts, Crossings
from mptune.tuning.sampler.group_tests.cliff_model import CliffModel
from mptune.tuning.sampler.layer_profiles import LayerProfiles
from mptune.tuning.sampler.plan_rows import Bools, Floats
from mptune.tuning.sampler.posterior import BuiltPlans, LinearGaussian, Prior, log_evidences

_GAIN_WIDTHS = (0.1, 0.3, 0.6, 1.2)
"""Prior standard deviations that are tried, as shares of each term."""

_LIKELY_WIDTH, _WIDTH_SPREAD = 0.35, 0.45
"""Before any timing a width is log-normal about the first, with the second as the standard deviation of its
logarithm."""

_BROKEN_FUSIONS = (0.04, 0.2)
"""Standard deviations that are tried of what every boundary costs beyond what the prior knows of, as shares of a
group's gain: it may break a fusion."""

_ROOFLINE_WIDTH, _PROFILE_WIDTH = 0.6, 0.3
"""Of these widths, the roofline's where it is weighed against profiled gains, and that of the two combined."""

_FP16_SAVES, _BOUNDARY_COST = 0.4, 0.1
"""Without a prior: share of the base latency that all groups save together, and a boundary's cost as a share of a
group's gain."""

_ROUNDS = 4
"""Fits at most, until the set of outliers no longer changes."""

_OUTLIER = 3.0
"""Standard deviations between a latency and what all others predict of it, beyond which it is given a larger noise.
With 5 a few odd engines pass for a law of large noise: on the digits model's plans, timed on an H200, predictions from
50 of them were off by 0.88 %, now by 0.39 % (``benchmarks.latency_prediction`` of commit 672f8217)."""

_BEYOND_LAW = 5.0
"""The same for a plan that is far slower, beyond which the law is not learnt from it."""

_SLOWER = 0.2
"""Plans that are slower than all-FP32 by this share of its latency are held against the law of all others first."""

_LEAST_CLIFF = 0.15
"""Latency above the law, as a share of the base latency, from which on a group of the plan is a cliff.
Boundaries and tactics stay below it."""

_KNOWN = 0.9
"""Probability from which on a group's gain is taken for that of a cliff. Below it a group is a suspect, and a plan
with it may be built, which tells."""

_LAW_NOISES = (3e-4, 2e-3, 6e-3, 1.2e-2)
"""Standard deviations about the additive law that are tried, as shares of the base latency: 2e-3 was measured on an
H200, tactics make it more."""


@dataclass(frozen=True)
class _Terms:
    """Prior of the law's terms: group gains, boundary costs and the fixed gain, ``n_terms`` in all.

    Attributes:
        mean: in ms, shape (n_terms,).
        unit: what widths are shares of, in ms, shape (n_terms,).
        profiles: predict what the law leaves out; None where nothing was profiled or nothing of it is believed.
        scale: milliseconds of latency in one profiled millisecond.
    """

    mean: Floats
    unit: Floats
    profiles: LayerProfiles | None = None
    scale: float = 1.0

    def excess_ms(self, columns: Bools, crossed: Counts) -> Floats:
        """Latency of the plans above the law, in ms, shape (n_plans,)."""
        if self.profiles is None:
            return np.zeros(columns.shape[1])
        return self.scale * self.profiles.excess_ms(columns, crossed)


@dataclass(frozen=True)
class _Fit:
    """The posterior of the terms, ``terms.mean + mixing @ deviations``, under the most probable widths and noise.

    Attributes:
        mixing: shape (n_terms, n_deviations).
        evidence: log marginal likelihood with the log prior of the width, up to a constant.
        noise_ms: standard deviation about the law, in ms.
    """

    terms: _Terms
    mixing: Floats
    deviations: LinearGaussian
    evidence: float
    noise_ms: float

    @property
    def mean(self) -> Floats:
        """Of the terms, shape (n_terms,)."""
        mean: Floats = self.terms.mean + self.mixing @ self.deviations.posterior_mean
        return mean

    def leave_one_out(self, design: Floats, saved: Floats) -> tuple[Floats, Floats]:
        """As ``LinearGaussian.leave_one_out``, for the plans that the fit was conditioned on."""
        return self.deviations.leave_one_out(saved - design @ self.terms.mean)


class LatencyModel:
    """Posterior of ``latency saved against all-FP32 = gains - boundary costs``, in milliseconds.

    Attributes:
        slow: which plans are far slower than the law allows, shape (n_plans,).
        cliffs: posterior of the groups that make them so. The law is learnt from all other plans.
    """

    def __init__(self, prior: Prior, built: BuiltPlans) -> None:
        """Condition the prior on what has been timed, and profiled."""
        self._prior = prior
        self._n_groups = len(prior.groups)
        self._beyond = np.flatnonzero(prior.unpreferred)
        self._crossings = Crossings(prior.columns, prior.boundaries)
        self.base_ms, self._base_sd_ms = built.base_ms, built.base_sd_ms
        timed = np.isfinite(built.latency_ms)
        # The baseline says nothing about what is saved against it.
        is_mixed = built.plans.any(axis=1)
        timed &= is_mixed | (built.latency_ms != built.base_ms) if prior.fixed_gain_ms else is_mixed
        columns, crossed = self._sides(built.plans[timed])
        design = self._design(columns, crossed).T.astype(float)  # (n_timed, n_terms)
        saved, noise_ms = built.base_ms - built.latency_ms[timed], built.latency_sd_ms[timed]
        profiles = None
        if built.group_ms is not None and not prior.exact:
            profiles = LayerProfiles(prior, built.plans, built.group_ms)
        # Plans that are slower than all-FP32 are not believed before the others, of which the law is learnt, are.
        slow: Bools = (saved < -_SLOWER * self.base_ms) & (not prior.exact)
        for _ in range(_ROUNDS):
            self._condition(design, saved, noise_ms, ~slow, (columns, crossed), profiles)
            excess_ms, is_far = self._excess(design, saved, noise_ms, ~slow, (columns, crossed))
            before, slow = slow, is_far
            if (slow == before).all():
                break
        self.slow: Bools = np.zeros(len(timed), dtype=bool)
        self.slow[timed] = slow
        self.cliffs = CliffModel(prior, built.plans[timed], slow)
        self._cliff_ms = self._cliff_costs(design[:, : self._n_groups] > 0, np.where(slow, excess_ms, 0.0))

    def _condition(
        self,
        design: Floats,
        saved: Floats,
        noise_ms: Floats,
        kept: Bools,
        sides: tuple[Bools, Counts],
        profiles: LayerProfiles | None,
    ) -> None:
        """Condition the law on the plans that are kept, each with its row of the design and what it saved in ms."""
        design, saved, noise_ms = design[kept], saved[kept], noise_ms[kept]
        columns, crossed = sides[0][:, kept], sides[1][:, kept]
        gains = expected_gains(self._prior)
        guesses = [gains]
        if columns[self._beyond].any() and not self._prior.exact:
            # A runtime may fuse what overflows in FP32 alone, so that BF16 saves nothing there.
            guesses.append(np.where(self._prior.unpreferred, 0.0, gains))
        alternatives = [self._scaled(guess, design, saved, met_cliffs=not kept.all()) for guess in guesses]
        if profiles is not None:
            alternatives += self._refined(alternatives[0], profiles, design, saved)
        values = [saved + each.excess_ms(columns, crossed) for each in alternatives]
        # Engines are not always what their plans say, and machines not always what they were: outliers count less.
        is_outlier, inflated_ms = np.zeros(len(design), dtype=bool), noise_ms
        for _ in range(_ROUNDS):
            fits = [self._fit(*each, design, inflated_ms) for each in zip(alternatives, values, strict=True)]
            best = max(range(len(fits)), key=lambda number: fits[number].evidence)
            self._best = fits[best]
            if self._prior.exact or not len(design):
                break
            residual_ms, predicted_sd_ms = self._best.leave_one_out(design, values[best])
            law_ms = max(self._best.noise_ms, _LAW_NOISES[1] * self.base_ms)
            sd_ms = np.sqrt(predicted_sd_ms**2 + noise_ms**2 + law_ms**2)
            before, is_outlier = is_outlier, np.abs(residual_ms) > _OUTLIER * sd_ms
            if (is_outlier == before).all():
                break
            inflated_ms = np.where(is_outlier, np.maximum(noise_ms, np.abs(residual_ms)), noise_ms)

    def _excess(
        self, design: Floats, saved: Floats, noise_ms: Floats, kept: Bools, sides: tuple[Bools, Counts]
    ) -> tuple[Floats, Bools]:
        """By how much each plan is slower than what the others say of it, in ms, and whether that is far too much."""
        if self._prior.exact:
            return np.zeros(len(saved)), np.zeros(len(saved), dtype=bool)
        fit = self._best
        values = saved + fit.terms.excess_ms(*sides)
        excess_ms = design @ fit.mean - values
        predicted_sd_ms = np.zeros(len(saved))
        predicted_sd_ms[~kept] = fit.deviations.predicted_sd(design[~kept] @ fit.mixing)
        if kept.any():
            residual_ms, predicted_sd_ms[kept] = fit.leave_one_out(design[kept], values[kept])
            excess_ms[kept] = -residual_ms
        law_ms = max(fit.noise_ms, _LAW_NOISES[1] * self.base_ms)
        sd_ms = np.sqrt(predicted_sd_ms**2 + noise_ms**2 + law_ms**2)
        is_far: Bools = excess_ms > np.maximum(_BEYOND_LAW * sd_ms, _LEAST_CLIFF * self.base_ms)
        if not (saved[kept] > 0).any():  # nothing says yet what FP16 saves
            is_far = saved < -_SLOWER * self.base_ms
        return excess_ms, is_far

    def _cliff_costs(self, plans: Bools, excess_ms: Floats) -> Floats:
        """What each group that is a cliff costs, in ms, and 0.0 for all others; ``excess_ms`` is 0.0 of fast plans."""
        is_known = self.cliffs.group_probabilities > _KNOWN
        shares = excess_ms / np.maximum(plans[:, is_known].sum(axis=1), 1)
        costs = np.where(plans & (shares > 0)[:, None], shares[:, None], math.inf).min(axis=0, initial=math.inf)
        return np.where(is_known & np.isfinite(costs), costs, 0.0)

    def _fit(self, terms: _Terms, saved: Floats, design: Floats, noise_ms: Floats) -> _Fit:
        """Condition these terms on what the plans saved."""
        tried = np.array(list(product(_GAIN_WIDTHS, _BROKEN_FUSIONS, _LAW_NOISES)))
        if self._prior.exact:
            tried = np.array([(1e-4, 0.0, 1e-6)])
        mixing, common_sd = mix(self._prior, terms.mean, profiled=terms.profiles is not None)
        mixed, residuals, n_terms = design @ mixing, saved - design @ terms.mean, len(terms.mean)
        # Variances are sums: of what widths scale, of what broken fusions scale, and of the rest.
        variances = np.zeros((3, mixing.shape[1]))
        variances[0, :n_terms] = terms.unit**2
        variances[1, self._n_groups : n_terms - 1] = _mean(np.abs(terms.mean[: self._n_groups])) ** 2
        # All savings are against one timing of the baseline, and share its error: the fixed gain takes it up.
        variances[2, n_terms - 1], variances[2, n_terms:] = self._base_sd_ms**2, common_sd**2
        scales = np.column_stack([tried[:, :2] ** 2, np.ones(len(tried))])
        evidences = -0.5 * (np.log(tried[:, 0] / _LIKELY_WIDTH) / _WIDTH_SPREAD) ** 2
        noises = np.hypot(noise_ms, tried[:, 2:] * self.base_ms)  # (n_tried, n_timed)
        if len(design):
            evidences += log_evidences(scales, (mixed * variances[:, None]) @ mixed.T, noises, residuals)
        best = int(np.argmax(evidences))
        deviations = LinearGaussian(np.zeros(mixing.shape[1]), np.sqrt(scales[best] @ variances))
        deviations.update(mixed, residuals, noises[best])
        return _Fit(terms, mixing, deviations, float(evidences[best]), float(tried[best, 2] * self.base_ms))

    def _refined(self, terms: _Terms, profiles: LayerProfiles, design: Floats, saved: Floats) -> list[_Terms]:
        """Precision-weighted mean of the prior's gains and profiled ones; none where these contradict the timings."""
        is_known = np.isfinite(profiles.gains_ms)
        gains, sd = (np.where(is_known, figures, 0.0) for figures in (profiles.gains_ms, profiles.sd_ms))
        others = terms.mean.copy()
        others[: self._n_groups][is_known] = 0.0
        expected = design[:, : self._n_groups] @ gains
        largest = int(np.argmax(expected)) if len(expected) else -1
        left = saved[largest] - design[largest] @ others if largest >= 0 else 0.0
        if left <= 0 or expected[largest] <= 0:
            return []
        # Profiling costs time itself: what the plan of the largest gain saved says what a profiled millisecond is.
        scale = float(left / expected[largest])
        own = (_ROOFLINE_WIDTH * terms.unit[: self._n_groups]) ** 2
        trust = np.where(is_known, own / (own + (scale * sd) ** 2), 0.0)
        mean, unit = terms.mean.copy(), terms.unit.copy()
        mean[: self._n_groups] += trust * (scale * gains - mean[: self._n_groups])
        refined = np.sqrt(own * (1.0 - trust)) / _PROFILE_WIDTH
        unit[: self._n_groups] = np.where(is_known, np.maximum(refined, 1e-9 * self.base_ms), unit[: self._n_groups])
        return [_Terms(mean, unit, profiles, scale)]

    def _sides(self, plans: Bools) -> tuple[Bools, Counts]:
        """The plans as columns, shape (n_groups, n_plans), and the boundaries they cross, (n_boundaries, n_plans)."""
        columns = np.ascontiguousarray(plans.T)
        return columns, self._crossings.of(columns)

    def _design(self, columns: Bools, crossed: Counts) -> NDArray[np.float32]:
        """Coefficient of each term in each plan, shape (n_terms, n_plans); exact in float32: 0, 1 and -1."""
        design = np.empty((self._n_groups + len(self._prior.boundaries) + 1, columns.shape[1]), dtype=np.float32)
        design[: self._n_groups] = columns
        np.negative(crossed, out=design[self._n_groups : -1], dtype=np.float32)
        design[-1] = 1.0
        return design

    def _scaled(self, gains: Floats, design: Floats, saved: Floats, *, met_cliffs: bool) -> _Terms:
        """The prior's terms in milliseconds of this machine: scaled by what the plan of the largest gain saved."""
        prior = self._prior
        costs = np.maximum(np.array(prior.boundary_costs_ms, dtype=float), 0.0)
        if prior.gains_ms is None and not prior.exact:
            gains = gains * _FP16_SAVES * self.base_ms / max(1, self._n_groups)
            costs = np.full(len(costs), _BOUNDARY_COST * _mean(gains))
        mean = np.concatenate([gains, costs, [prior.fixed_gain_ms]])
        if not prior.exact:
            expected = design @ mean
            # What BF16 saves beyond FP16's range is in doubt, and says nothing of the scale of the other gains.
            others = ~design[:, self._beyond].any(axis=1) & (expected > 0)
            if len(self._beyond) and others.any():
                expected = np.where(others, expected, 0.0)
            largest = int(np.argmax(np.abs(expected))) if len(expected) else -1
            if largest >= 0 and expected[largest] > 0 and saved[largest] > 0:
                mean *= float(saved[largest] / expected[largest])
            elif met_cliffs or (len(saved) and np.abs(gains).sum() > 0.9 * self.base_ms):
                mean *= _FP16_SAVES * self.base_ms / max(float(np.abs(gains).sum()), 1e-300)
        gains, costs = mean[: self._n_groups], mean[self._n_groups : -1]
        # A group that seems to gain nothing may still gain something, and a boundary may cost more than a Cast.
        typical = np.concatenate([np.full(len(gains), _mean(np.abs(gains))), np.full(len(costs), _mean(costs)), [0.0]])
        unit = np.abs(mean) + 0.25 * typical
        return _Terms(mean, np.maximum(unit, 1e-9 * self.base_ms))

    def mean(self) -> Floats:
        """Gains, costs (>= 0) and the fixed gain in ms, shape (n_terms,)."""
        return self._clipped(self._best.mean)

    def base(self, terms: Floats) -> Floats:
        """Latency of all-FP32 in each draw, in ms: the error of its timing is part of the fixed gain."""
        prior = self._best.terms.mean
        share = (self._base_sd_ms / self._best.deviations.sd[len(prior) - 1]) ** 2
        base: Floats = self.base_ms - share * (terms[:, -1] - prior[-1])
        return base

    def sample(self, generator: np.random.Generator, n_draws: int) -> Floats:
        """Draws of the terms, shape (n_draws, n_terms)."""
        deviations = self._best.deviations.sample(generator, n_draws)
        return self._clipped(self._best.terms.mean + deviations @ self._best.mixing.T)

    def _clipped(self, terms: Floats) -> Floats:
        """A copy of the terms, shape (..., n_terms), with cliffs, and with costs of at least 0."""
        clipped: Floats = terms.copy()
        clipped[..., : self._n_groups] -= self._cliff_ms
        clipped[..., self._n_groups : -1] = np.maximum(clipped[..., self._n_groups : -1], 0.0)
        return clipped

    def predict(self, plans: Bools, terms: Floats) -> Floats:
        """Latency in ms, shape (n_draws, n_plans), by draws of the terms, shape (n_draws, n_terms)."""
        columns, crossed = self._sides(plans)
        saved = terms.astype(np.float32) @ self._design(columns, crossed)
        latency: Floats = self.base_ms + self._best.terms.excess_ms(columns, crossed) - saved.astype(float)
        return latency


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
