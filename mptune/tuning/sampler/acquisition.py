"""Expected hypervolume improvement (EHVI) of plans, under the posteriors of latency, error and overflow.

As the noise-aware estimator of Daulton, Balandat and Bakshy (NeurIPS 2021, arXiv 2105.08195, qNEHVI with q = 1): in
each draw from the posterior the front of the built plans is taken anew, and the improvements over these fronts are
averaged. The average is weighed by the probability of feasibility (Gardner et al., ICML 2014; here: of being finite).
"""

from __future__ import annotations

import math

import numpy as np

from mptune.tuning.dominance import (
    ERROR_FLOOR,
    REFERENCE_ERROR,
    exactness,
    gains,
    hypervolume_improvement,
    pareto_staircase,
)
from mptune.tuning.sampler.error_model import ErrorModel
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.overflow_model import OverflowModel
from mptune.tuning.sampler.plans import Bools, Floats, plan_keys
from mptune.tuning.sampler.posterior import BuiltPlans, Prior

_FINITE_EXPONENT = 0.7
"""Weight = P(finite)^0.7; an exponent below 1 explores: a failure tells which group overflows. With 1 the search stays
with plans that are safe, and is worse where emulation misses overflows."""

_LEARNT_FROM, _PER_TERM = 400, 3
"""Plans that teach the posteriors of latency and error all there is to learn, at least, and for each term: the law is
not exact, and more of them only say again what its noise hides. All plans count for the front."""

_DRAWS = 32
"""Draws of the estimator, beside the mean. With fewer the choice falls on plans that the draws happen to favour."""

_SCREENING_DRAWS = 3
"""Draws, beside the mean, by which thousands of candidates are screened."""


def taught_by(prior: Prior, built: BuiltPlans) -> BuiltPlans:
    """The plans that the posteriors of latency and error learn from."""
    return built.thinned(max(_LEARNT_FROM, _PER_TERM * (len(prior.groups) + len(prior.boundaries))))


class EhviEstimator:
    """Monte Carlo estimator of EHVI over the mean (draw 0) and draws of the posteriors."""

    def __init__(
        self,
        prior: Prior,
        built: BuiltPlans,
        generator: np.random.Generator,
        reference_error: float = REFERENCE_ERROR,
        error_model: ErrorModel | None = None,
        overflow: OverflowModel | None = None,
        error_floor: float = ERROR_FLOOR,
    ) -> None:
        """Condition the posteriors, draw from them, and take each draw's Pareto staircase.

        ``built.base_ms`` must be known. A plan is worth nothing past ``reference_error``, and below ``error_floor`` all
        are equally exact.
        """
        taught = taught_by(prior, built)
        self._latency = LatencyModel(prior, taught)
        self._error = ErrorModel(prior, taught) if error_model is None else error_model
        self.base_ms = built.base_ms
        self.overflow = OverflowModel(prior, built) if overflow is None else overflow
        # Gains, boundary costs and the fixed gain in ms, (n_draws, n_groups + n_boundaries + 1).
        self.latency_terms = np.vstack([self._latency.mean(), self._latency.sample(generator, _DRAWS)])
        self.log_squares = np.vstack([self._error.mode, self._error.sample(generator, _DRAWS)])  # (n_draws, n_groups)
        self.part_shares = None if prior.part_shares is None else np.array(prior.part_shares)
        self._band = reference_error, error_floor
        self._built = plan_keys(built.plans)
        emulated, errors = built.emulations
        self._emulated = dict(zip(plan_keys(emulated).tolist(), errors.tolist(), strict=True))
        # Running plans are taken to come out as predicted (constant liar).
        counted = built.finite != 0.0
        plans, measured = built.plans[counted], built.error[counted]
        gain, exact = self._gains(plans), np.empty((_DRAWS + 1, len(plans)))
        is_measured = np.isfinite(measured)
        exact[:, is_measured] = exactness(measured[is_measured], *self._band)
        others = plans[~is_measured]
        exact[:, ~is_measured] = self._exactness(others, emulated_errors=self.emulated_errors(others))
        self._staircases = [pareto_staircase(g, e) for g, e in zip(gain, exact, strict=True)]

    def is_new(self, plans: Bools) -> Bools:
        """Which of the plans are neither built nor being built, shape (n_plans,)."""
        new: Bools = ~np.isin(plan_keys(plans), self._built)
        return new

    def emulated_errors(self, plans: Bools) -> Floats:
        """Errors of the plans as emulated, shape (n_plans,); NaN where a plan was not emulated."""
        return np.array([self._emulated.get(key, math.nan) for key in plan_keys(plans).tolist()], dtype=float)

    def _gains(self, plans: Bools, n_draws: int = _DRAWS + 1) -> Floats:
        terms = self.latency_terms[:n_draws]
        return gains(self._latency.predict(plans, terms), self._latency.base(terms)[:, None])

    def _exactness(self, plans: Bools, n_draws: int = _DRAWS + 1, emulated_errors: Floats | None = None) -> Floats:
        errors = self._error.predict(plans, self.log_squares[:n_draws])
        if emulated_errors is not None:
            errors = self._error.combine(errors, emulated_errors)
        return exactness(errors, *self._band)

    def screen(self, plans: Bools) -> tuple[Floats, Floats, Floats]:
        """Gain and exactness under the mean, and a rough EHVI from few draws; shape (n_plans,) each."""
        n_draws = _SCREENING_DRAWS + 1
        gain, exact = self._gains(plans, n_draws), self._exactness(plans, n_draws)
        return gain[0], exact[0], self._expected(plans, gain, exact)

    def ehvi(self, plans: Bools, emulated_errors: Floats | None = None) -> Floats:
        """EHVI of each plan times its weight, shape (n_plans,); emulated errors are NaN where there are none."""
        return self._expected(plans, self._gains(plans), self._exactness(plans, emulated_errors=emulated_errors))

    def _expected(self, plans: Bools, gain: Floats, exact: Floats) -> Floats:
        """Mean over the draws of what each plan adds to that draw's staircase, weighed, shape (n_plans,)."""
        draws = zip(gain, exact, self._staircases, strict=False)
        added = np.array([hypervolume_improvement(g, e, *staircase) for g, e, staircase in draws])
        expected: Floats = added.mean(axis=0) * self.overflow.p_sound(plans) ** _FINITE_EXPONENT
        return expected
