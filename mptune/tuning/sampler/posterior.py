"""What is known before any build (``Prior``), what builds gave (``BuiltPlans``), and the linear-Gaussian update."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from mptune.tuning.sampler.plans import Bools, Boundary, Columns, Floats


@dataclass(frozen=True)
class Prior:
    """What is known of a search space before any build, as plain data; all sequences are parallel to ``groups``.

    What is said of FP16 holds for the reduced precision of each group; None is for what is not known of any.

    Attributes:
        groups: ids of the free groups: the names of the parameters.
        log_square_errors: log of each group's squared error when it alone is FP16; ``inf`` where that overflows, NaN
            where it is not known.
        gains_ms: what FP16 saves in each group, up to a factor that the builds of all-FP32 and all-FP16 fix.
        boundaries: between the groups, by their positions.
        boundary_costs_ms: what crossing each costs, in the same unit as the gains.
        fixed_gain_ms: what groups that are FP16 under every plan save against all-FP32, and TF32 in FP32 groups.
        exact: latencies are predicted by these very terms, so that there is nothing to learn of them.
        log_square_sds: standard deviation of each of ``log_square_errors`` on top of how far emulation can be trusted:
            where it was taken on few samples, or from other groups. None is 0 everywhere.
        part_shares: squared error of each group in each part of the outputs, over that in its worst part: the law of
            squares holds for a part, and the error of a plan is the largest over them. None where one part decides.
        precisions: of each, where it is not FP32; empty where all are FP16.
    """

    groups: tuple[str, ...]
    log_square_errors: tuple[float, ...] | None = None
    gains_ms: tuple[float, ...] | None = None
    boundaries: tuple[Boundary, ...] = ()
    boundary_costs_ms: tuple[float, ...] = ()
    fixed_gain_ms: float = 0.0
    exact: bool = False
    log_square_sds: tuple[float, ...] | None = None
    part_shares: tuple[tuple[float, ...], ...] | None = None
    precisions: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> Columns:
        """What the columns of a plan stand for."""
        return Columns(self.groups, self.precisions) if self.precisions else Columns.fp16(self.groups)


@dataclass(frozen=True)
class BuiltPlans:
    """Plans that were built or are being built, and what came of them."""

    plans: Bools  # (n_plans, n_groups), True is FP16
    latency_ms: Floats  # (n_plans,) medians; NaN where none was taken
    latency_sd_ms: Floats  # (n_plans,) their standard errors as measured; 0 where unknown or predicted
    error: Floats  # (n_plans,) what the search minimises; NaN where there is none
    finite: Floats  # (n_plans,) 1.0 where it built and its outputs are finite, 0.0 where not, NaN while it runs
    base_ms: float  # latency of all-FP32; NaN before it is known
    base_sd_ms: float = 0.0
    # Plans that were emulated, not measured, (n_emulated, n_groups); their errors, (n_emulated,), inf where not finite.
    emulated: tuple[Bools, Floats] | None = None
    # Emulated error over measured error, of each plan that has both.
    emulation_ratios: Floats = field(default_factory=lambda: np.ones(0))
    group_ms: Floats | None = None  # (n_plans, n_groups) by the engine's own profiler; NaN where that is not known
    failed: Bools | None = None  # (n_plans,) it gave no outputs at all

    @property
    def gave_nothing(self) -> Bools:
        """Which plans gave no outputs, shape (n_plans,)."""
        return np.zeros(len(self.plans), dtype=bool) if self.failed is None else self.failed

    @property
    def emulations(self) -> tuple[Bools, Floats]:
        """``emulated``, of no rows where there are none."""
        return (self.plans[:0], np.zeros(0)) if self.emulated is None else self.emulated

    def with_emulated(self, plans: Bools, errors: Floats) -> BuiltPlans:
        """With more plans that were emulated; NaN where that failed."""
        is_valid, before = ~np.isnan(errors), self.emulations
        return replace(self, emulated=(np.vstack([before[0], plans[is_valid]]), np.append(before[1], errors[is_valid])))

    def thinned(self, most: int) -> BuiltPlans:
        """At most ``most`` of the plans, and of the emulated ones, evenly spread over the search."""
        counts = len(self.plans), len(self.emulations[1])
        rows, emulated = (np.linspace(0, count - 1, min(count, most)).astype(int) for count in counts)
        names = ("plans", "latency_ms", "latency_sd_ms", "error", "finite", "group_ms", "failed")
        chosen = {name: value[rows] for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **chosen, emulated=(self.emulations[0][emulated], self.emulations[1][emulated]))


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
