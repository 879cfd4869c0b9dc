"""The linear-Gaussian posterior, and that of latency: the additive law's terms, from a roofline and layer profiles.

Latency is ``base - gains of the FP16 groups + costs of the crossed boundaries``, linear in its terms, with Gaussian
noise about it, whose size is estimated from the builds.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.plans import Bools, Crossings, Floats
from mptune.tuning.sampler.trials import BuiltPlans, Prior

_WIDTH = 0.4
"""Prior standard deviation of a term, as a share of its unit."""

_BROKEN_FUSION = 0.04
"""Standard deviation of what every boundary costs beyond what the prior knows of, as a share of a group's gain: it may
break a fusion."""

_ROOFLINE_WIDTH = 0.6
"""Standard deviation of a roofline's gain where it is weighed against a profiled one, as a share of its unit."""

_PROFILE_NOISE = 0.07
"""Standard deviation of a group's time in a profile, as a share of it: noise, and what its neighbours do."""

_FEWEST_TIMINGS = 4
"""Timings that can contradict a profile."""

_FP16_SAVES, _BOUNDARY_COST = 0.4, 0.1
"""Without a prior: share of the base latency that all groups save together, and a boundary's cost as a share of a
group's gain."""

_LEAST_NOISE, _FIRST_NOISE, _LARGEST_NOISE = 3e-4, 4e-3, 1.2e-2
"""Standard deviation about the additive law, as a share of the base latency: 2e-3 was measured on an H200, tactics make
it more."""

_ROUNDS, _OUTLIER = 4, 3.0
"""Fits at most; standard deviations between a latency and what all others predict of it, beyond which it is given a
larger noise: engines are not always what their plans say, and machines not always what they were."""


class LinearGaussian:
    """Independent Gaussian parameters conditioned on linear observations with Gaussian noise.

    Bayesian linear regression (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, Section 2.1,
    Eq. 2.8), with a diagonal prior.
    """

    def __init__(self, mean: Floats, sd: Floats) -> None:
        """Take the prior's mean and standard deviation, each of shape (n_parameters,)."""
        self.mean = mean
        self.sd = sd
        self._jacobian: Floats = np.zeros((0, len(mean)))
        self._noise: Floats = np.zeros(0)
        self._known_gain: Floats | None = np.zeros((len(mean), 0))
        self._factor: Floats  # Cholesky factor of the matrix that the gain is solved with
        self.posterior_mean = mean

    @property
    def _gain(self) -> Floats:
        """Kalman gain, shape (n_parameters, n_observations)."""
        if self._known_gain is None:
            if len(self._factor) == len(self._noise):
                self._known_gain = _solved(self._factor, self._jacobian * self.sd**2).T
            else:
                self._known_gain = _solved(self._factor, (self._jacobian / self._noise[:, None] ** 2).T)
        return self._known_gain

    def update(self, jacobian: Floats, values: Floats, noise: Floats) -> float:
        """Condition on ``values = jacobian @ parameters + noise``, the noise given by its standard deviations.

        Returns the log marginal likelihood (the same book, Eq. 2.30) without its constant term.
        """
        variance = self.sd**2
        residual = values - jacobian @ self.mean
        if len(jacobian) <= len(variance):  # solve in whichever space is smaller (matrix inversion lemma)
            factor = _cholesky((jacobian * variance) @ jacobian.T + np.diag(noise**2))
            correction = variance * (jacobian.T @ _solved(factor, residual))
            log_determinant = np.log(np.diag(factor)).sum()
        else:
            weighted = jacobian / noise[:, None]
            factor = _cholesky(weighted.T @ weighted + np.diag(1.0 / variance))
            correction = _solved(factor, jacobian.T @ (residual / noise**2))
            log_determinant = np.log(np.diag(factor)).sum() + np.log(noise).sum() + np.log(self.sd).sum()
        self._jacobian, self._noise, self._factor, self._known_gain = jacobian, noise, factor, None
        self.posterior_mean = self.mean + correction
        solved = (residual - jacobian @ (self.posterior_mean - self.mean)) / noise**2
        return float(-0.5 * residual @ solved - log_determinant)

    def leave_one_out(self, values: Floats) -> tuple[Floats, Floats]:
        """Residual of each observation against the posterior of all others (the same book, Section 5.4.2).

        And the standard deviation of what all others predict, without the observation's own noise.
        """
        leverage = np.clip(np.einsum("ij,ji->i", self._jacobian, self._gain), 0.0, 1.0 - 1e-9)
        residuals = (values - self._jacobian @ self.posterior_mean) / (1.0 - leverage)
        return residuals, self._noise * np.sqrt(leverage / (1.0 - leverage))

    def covariance(self) -> Floats:
        """Of the parameters under the posterior, shape (n_parameters, n_parameters)."""
        covariance: Floats = np.diag(self.sd**2) - self._gain @ (self._jacobian * self.sd**2)
        return covariance

    def sample(self, generator: np.random.Generator, n_draws: int) -> Floats:
        """Draws (n_draws, n_parameters), by Matheron's rule (Wilson et al., ICML 2020, arXiv 2002.09309, Theorem 1)."""
        offsets = generator.normal(size=(n_draws, len(self.mean))) * self.sd
        noise = generator.normal(size=(n_draws, len(self._noise))) * self._noise
        observed = offsets @ self._jacobian.T + noise
        drawn: Floats = self.posterior_mean + offsets - observed @ self._gain.T
        return drawn


def robust_sd(deviations: Floats) -> float:
    """Standard deviation of normal deviations from their middle, by their median: a few outliers do not count."""
    return 1.4826 * float(np.median(np.abs(deviations)))


def _solved(factor: Floats, values: Floats) -> Floats:
    """``values`` times the inverse of the matrix that has the lower Cholesky factor."""
    from scipy.linalg.lapack import dpotrs  # Slow to import, and a run that is only read needs none.

    if not values.size:
        return np.zeros_like(values)
    solved, _ = dpotrs(factor, values, lower=1)  # what cho_solve calls, which takes several times as long around it
    return np.asarray(solved, dtype=np.float64).reshape(values.shape)


def _cholesky(matrix: Floats) -> Floats:
    try:
        factor = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        shift = 1e-9 * float(np.trace(matrix)) + 1e-300
        factor = np.linalg.cholesky(matrix + shift * np.eye(len(matrix)))
    return np.asarray(factor, dtype=np.float64)


class LatencyModel:
    """Posterior of ``latency saved against all-FP32 = gains - boundary costs``, in milliseconds."""

    def __init__(self, prior: Prior, built: BuiltPlans) -> None:
        """Condition the prior on what has been timed, and profiled."""
        self._prior, self._n_groups = prior, len(prior.groups)
        self._crossings = Crossings(prior.columns, prior.boundaries)
        self.base_ms, self._base_sd_ms = built.base_ms, built.base_sd_ms
        timed = np.isfinite(built.latency_ms)
        # The baseline says nothing about what is saved against it.
        is_mixed = built.plans.any(axis=1)
        timed &= is_mixed | (built.latency_ms != built.base_ms) if prior.fixed_gain_ms else is_mixed
        design = self._design(built.plans[timed]).T.astype(float)  # (n_timed, n_terms)
        saved, measured_ms = built.base_ms - built.latency_ms[timed], built.latency_sd_ms[timed]
        self._model = LinearGaussian(*self._prior_terms(design, saved, built))
        is_outlier = np.zeros(len(saved), dtype=bool)
        law_ms = (1e-6 if prior.exact else _FIRST_NOISE) * self.base_ms
        noise_ms = np.hypot(measured_ms, law_ms)
        for _ in range(_ROUNDS if len(saved) else 0):
            self._model.update(design, saved, noise_ms)
            if prior.exact:
                break
            residual_ms, predicted_sd_ms = self._model.leave_one_out(saved)
            # What is left of the residuals' spread, taken by medians, beyond what the terms' doubts explain.
            left = robust_sd(residual_ms) ** 2 - float(np.median(predicted_sd_ms**2 + measured_ms**2))
            weight = len(saved) / (len(saved) + self._n_groups / 4)
            estimate = (1 - weight) * (_FIRST_NOISE * self.base_ms) ** 2 + weight * max(left, 0.0)
            law_ms = float(np.clip(math.sqrt(estimate), _LEAST_NOISE * self.base_ms, _LARGEST_NOISE * self.base_ms))
            sd_ms = np.sqrt(predicted_sd_ms**2 + measured_ms**2 + law_ms**2)
            before, is_outlier = is_outlier, np.abs(residual_ms) > _OUTLIER * sd_ms
            last_ms, noise_ms = noise_ms, np.hypot(measured_ms, law_ms)
            noise_ms = np.where(is_outlier, np.maximum(noise_ms, np.abs(residual_ms)), noise_ms)
            if (is_outlier == before).all() and np.allclose(noise_ms, last_ms, rtol=0.05):
                break

    def _prior_terms(self, design: Floats, saved: Floats, built: BuiltPlans) -> tuple[Floats, Floats]:
        """Mean and standard deviation of gains, costs and the fixed gain, in milliseconds of this machine."""
        prior, n_groups = self._prior, self._n_groups
        gains = np.ones(n_groups) if prior.gains_ms is None else np.array(prior.gains_ms, dtype=float)
        costs = np.maximum(np.array(prior.boundary_costs_ms, dtype=float), 0.0)
        if prior.exact:
            mean = np.concatenate([gains, costs, [prior.fixed_gain_ms]])
            return mean, np.maximum(1e-4 * np.abs(mean), 1e-9 * self.base_ms)
        if prior.gains_ms is None:
            gains = gains * _FP16_SAVES * self.base_ms / max(1, n_groups)
            costs = np.full(len(costs), _BOUNDARY_COST * _mean(gains))
        mean = np.concatenate([gains, costs, [prior.fixed_gain_ms]])
        # The prior is right up to a factor: the plan of the largest gain says which.
        expected = design @ mean
        largest = int(np.argmax(np.abs(expected))) if len(expected) else -1
        if largest >= 0 and expected[largest] > 0 and saved[largest] > 0:
            mean *= float(saved[largest] / expected[largest])
        elif len(saved) and np.abs(gains).sum() > 0.9 * self.base_ms:
            mean *= _FP16_SAVES * self.base_ms / max(float(np.abs(gains).sum()), 1e-300)
        gains, costs = mean[:n_groups], mean[n_groups:-1]
        # A group that seems to gain nothing may still gain something, and a boundary may cost more than a Cast.
        typical = np.concatenate([np.full(len(gains), _mean(np.abs(gains))), np.full(len(costs), _mean(costs)), [0.0]])
        unit = np.abs(mean) + 0.25 * typical
        sd = _WIDTH * unit
        sd[n_groups:-1] = np.hypot(sd[n_groups:-1], _BROKEN_FUSION * _mean(np.abs(gains)))
        if built.group_ms is not None:
            self._weigh_profiles(mean, sd, unit, design, saved, built)
        # All savings are against one timing of the baseline, and share its error: the fixed gain takes it up.
        sd[-1] = math.hypot(sd[-1], self._base_sd_ms)
        return mean, np.maximum(sd, 1e-9 * self.base_ms)

    def _weigh_profiles(
        self, mean: Floats, sd: Floats, unit: Floats, design: Floats, saved: Floats, built: BuiltPlans
    ) -> None:
        """Weigh profiled gains against the roofline's by their precision, in place."""
        assert built.group_ms is not None
        gains, gains_sd = profiled_gains(built.plans, built.group_ms)
        profiled = np.flatnonzero(np.isfinite(gains))
        others = mean.copy()
        others[profiled] = 0.0
        expected = design[:, profiled] @ gains[profiled]
        largest = int(np.argmax(expected)) if len(expected) else -1
        left = saved[largest] - design[largest] @ others if largest >= 0 else 0.0
        if left <= 0 or expected[largest] <= 0:
            return
        # Profiling costs time itself: what the plan of the largest gain saved says what a profiled millisecond is.
        scale, own = left / expected[largest], (_ROOFLINE_WIDTH * unit[profiled]) ** 2
        trust = own / (own + (scale * gains_sd[profiled]) ** 2)
        weighed = mean.copy()
        weighed[profiled] += trust * (scale * gains[profiled] - mean[profiled])
        # A profile of fused layers may blame the wrong group: then the timings speak for the roofline.
        miss, before = (float(np.median(np.abs(saved - design @ terms))) for terms in (weighed, mean))
        if len(saved) < _FEWEST_TIMINGS or miss <= before + _FIRST_NOISE * self.base_ms:
            mean[:] = weighed
            sd[profiled] = np.sqrt(own * (1.0 - trust))

    def _design(self, plans: Bools) -> NDArray[np.float32]:
        """Coefficient of each term in each plan, shape (n_terms, n_plans); exact in float32: 0, 1 and -1."""
        columns = np.ascontiguousarray(plans.T)
        design = np.empty((self._n_groups + len(self._prior.boundaries) + 1, len(plans)), dtype=np.float32)
        design[: self._n_groups] = columns
        np.negative(self._crossings.count(columns), out=design[self._n_groups : -1], dtype=np.float32)
        design[-1] = 1.0
        return design

    def mean(self) -> Floats:
        """Gains, costs (>= 0) and the fixed gain in ms, shape (n_terms,)."""
        return self._with_costs(self._model.posterior_mean.copy())

    def sample(self, generator: np.random.Generator, n_draws: int) -> Floats:
        """Draws of the terms, shape (n_draws, n_terms)."""
        return self._with_costs(self._model.sample(generator, n_draws))

    def base(self, terms: Floats) -> Floats:
        """Latency of all-FP32 in each draw, in ms: the error of its timing is part of the fixed gain."""
        share = (self._base_sd_ms / self._model.sd[-1]) ** 2
        base: Floats = self.base_ms - share * (terms[:, -1] - self._model.mean[-1])
        return base

    def _with_costs(self, terms: Floats) -> Floats:
        costs = terms[..., self._n_groups : -1]
        np.maximum(costs, 0.0, out=costs)
        return terms

    def predict(self, plans: Bools, terms: Floats) -> Floats:
        """Latency in ms, shape (n_draws, n_plans), by draws of the terms, shape (n_draws, n_terms)."""
        saved = terms.astype(np.float32) @ self._design(plans)
        latency: Floats = self.base_ms - saved.astype(float)
        return latency


def profiled_gains(plans: Bools, group_ms: Floats) -> tuple[Floats, Floats]:
    """What each group gains by the engines' own profilers, and its standard error, shape (n_groups,) each.

    NaN where a group was not profiled in both precisions. ``group_ms`` has the time of each group in each plan.
    """
    is_known = np.isfinite(group_ms)
    with np.errstate(divide="ignore", invalid="ignore"):
        counts = [(is_known & chosen).sum(axis=0) for chosen in (~plans, plans)]
        fp32, fp16 = (
            np.where(is_known & chosen, group_ms, 0.0).sum(axis=0) / count
            for chosen, count in zip((~plans, plans), counts, strict=True)
        )
        return fp32 - fp16, _PROFILE_NOISE * np.sqrt(fp32**2 / counts[0] + fp16**2 / counts[1])


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
