"""Candidate plans, and their expected hypervolume improvement (EHVI) under the posteriors of latency, error, overflow.

Candidates are exact optima of the additive law for draws from its posterior, and neighbours of the best plans. EHVI is
as the noise-aware estimator of Daulton, Balandat and Bakshy (NeurIPS 2021, arXiv 2105.08195, qNEHVI with q = 1): in
each draw from the posterior the front of the built plans is taken anew, and the improvements over these fronts are
averaged. The average is weighed by the probability of feasibility (Gardner et al., ICML 2014; here: of being finite).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.dominance import ERROR_FLOOR, REFERENCE_ERROR, gains, hypervolume_improvement, pareto_staircase
from mptune.tuning.sampler.error_model import ErrorModel
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.overflow_model import OverflowModel
from mptune.tuning.sampler.plans import Bools, CutSolver, Floats, plan_keys
from mptune.tuning.sampler.trials import BuiltPlans, Prior

_JUST_WITHIN, _MEETING = 0.99, 0.5
"""An error that meets the limit by a hundredth, as a share of it, and its worth. Simulated (``benchmarks.search_quality
--hard``) a larger worth gives plans within the limit that are hardly faster, and a worse front below it."""

_DECADES, _BELOW = 2.0, 0.97
"""Decades below the limit that a front should show, and the worth of an error there."""

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


@dataclass(frozen=True)
class ErrorAxis:
    """What the errors of plans are worth, 0 to 1: between the points linear in the logarithm of the error.

    Attributes:
        points: error and its worth, the largest error first, which is worth nothing, as are larger ones.
        limit: that the plan to be used keeps to; None where there is none.
    """

    points: tuple[tuple[float, float], ...]
    limit: float | None = None

    @classmethod
    def to_floor(cls, reference_error: float = REFERENCE_ERROR) -> ErrorAxis:
        """All decades below the reference error are worth the same, as in ``dominance.hypervolume``."""
        return cls(((reference_error, 0.0), (ERROR_FLOOR, 1.0)))

    @classmethod
    def to_limit(cls, limit: float) -> ErrorAxis:
        """Much of the worth is that the limit is met, the rest is that of the two decades below it."""
        limit = max(limit, 10.0 * ERROR_FLOOR)
        below = max(limit / 10.0**_DECADES, 2.0 * ERROR_FLOOR)
        return cls(((limit, 0.0), (_JUST_WITHIN * limit, _MEETING), (below, _BELOW), (ERROR_FLOOR, 1.0)), limit)

    def worth(self, errors: Floats) -> Floats:
        """Of each error, in the shape of ``errors``."""
        points = np.array(self.points)
        worth: Floats = np.interp(-np.log(np.maximum(errors, ERROR_FLOOR)), -np.log(points[:, 0]), points[:, 1])
        return worth


class EhviEstimator:
    """Monte Carlo estimator of EHVI over the mean (draw 0) and draws of the posteriors."""

    def __init__(
        self,
        prior: Prior,
        built: BuiltPlans,
        generator: np.random.Generator,
        axis: ErrorAxis | None = None,
        error_model: ErrorModel | None = None,
        overflow: OverflowModel | None = None,
    ) -> None:
        """Condition the posteriors, draw from them, and take each draw's Pareto staircase.

        ``built.base_ms`` must be known. ``axis`` says what errors are worth; None is the axis of the hypervolume.
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
        self.axis = ErrorAxis.to_floor() if axis is None else axis
        self._built = plan_keys(built.plans)
        emulated, errors = built.emulations
        self._emulated = dict(zip(plan_keys(emulated).tolist(), errors.tolist(), strict=True))
        # Running plans are taken to come out as predicted (constant liar).
        counted = built.finite != 0.0
        plans, measured = built.plans[counted], built.error[counted]
        gain, exact = self._gains(plans), np.empty((_DRAWS + 1, len(plans)))
        is_measured = np.isfinite(measured)
        exact[:, is_measured] = self.axis.worth(measured[is_measured])
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
        return self.axis.worth(errors)

    def screen(self, plans: Bools) -> tuple[Floats, Floats, Floats]:
        """Gain and exactness under the mean, and a rough EHVI from few draws; shape (n_plans,) each."""
        n_draws = _SCREENING_DRAWS + 1
        gain, exact = self._gains(plans, n_draws), self._exactness(plans, n_draws)
        return gain[0], exact[0], self._expected(plans, gain, exact)

    def errors(self, plans: Bools, draw: int) -> Floats:
        """Errors of plans under one draw, shape (n_plans,)."""
        errors: Floats = self._error.predict(plans, self.log_squares[draw : draw + 1])[0]
        return errors

    def expected_gain(self, plans: Bools, emulated_errors: Floats) -> Floats:
        """By how much each plan is expected to raise the largest gain of what is worth anything, shape (n_plans,)."""
        gain, exact = self._gains(plans), self._exactness(plans, emulated_errors=emulated_errors)
        best = np.array([front_gain[-1:].sum() for front_gain, _ in self._staircases])  # ascending; 0 of an empty one
        added = np.where(exact > 0.0, np.maximum(gain - best[:, None], 0.0), 0.0)
        expected: Floats = added.mean(axis=0) * self.overflow.p_sound(plans)
        return expected

    def ehvi(self, plans: Bools, emulated_errors: Floats | None = None) -> Floats:
        """EHVI of each plan times its weight, shape (n_plans,); emulated errors are NaN where there are none."""
        return self._expected(plans, self._gains(plans), self._exactness(plans, emulated_errors=emulated_errors))

    def _expected(self, plans: Bools, gain: Floats, exact: Floats) -> Floats:
        """Mean over the draws of what each plan adds to that draw's staircase, weighed, shape (n_plans,)."""
        draws = zip(gain, exact, self._staircases, strict=False)
        added = np.array([hypervolume_improvement(g, e, *staircase) for g, e, staircase in draws])
        expected: Floats = added.mean(axis=0) * self.overflow.p_sound(plans) ** _FINITE_EXPONENT
        return expected


_SWEPT_DRAWS, _SWEEP_WEIGHTS = 9, 24
"""Draws (the mean among them) whose optima are taken, and trade-off weights for each: 216 minimum cuts."""

_NEAR_WEIGHTS, _NEAR_LIMIT = 12, (0.4, 4.0)
"""Further weights for each draw where there is a limit, and the limit over the errors that they are to give."""

_RISK = 0.5
"""Share of the base latency that an overflow costs in a cut: a plan that fails loses about what FP16 could save."""

_NEIGHBOUR_ROUNDS, _EXPANDED_PLANS = 8, 12
"""Rounds of local search at most, and plans whose neighbours are added in each."""

_FEWEST_ROUNDS, _RISE = 3, 1e-3
"""After this many rounds the search ends where one has raised the largest EHVI by less than this share of it."""

_COMBINED = 10
"""Best neighbours of a plan that are taken together: in pairs, and the best of them all at once. With 120 groups the
largest EHVI is 1.16 times what five rounds of 24 plans without them find, among half as many plans."""

_RANDOM_SHARE = 0.1
"""Random pairs, and random triples, that are tried around a plan, as a share of the groups."""

_CELLS = 4_000_000
"""Neighbours of a round times groups and boundaries, at most: bounds time and memory with hundreds of groups."""


def find_candidates(
    prior: Prior, estimator: EhviEstimator, built: Bools, generator: np.random.Generator
) -> CandidatePool:
    """Plans that may be worth a build: optima of the law, and neighbours of these and of the built plans."""
    n_groups = len(prior.groups)
    pool = CandidatePool(estimator, n_groups)
    optima = exact_optima(prior.solver, estimator, generator)
    pool.add(np.vstack([built, optima, np.eye(n_groups, dtype=bool), np.ones((1, n_groups), dtype=bool)]))
    pool.add_neighbours(prior, generator)
    return pool


def exact_optima(solver: CutSolver, estimator: EhviEstimator, generator: np.random.Generator) -> Bools:
    """Optima of ``-gain + weight * squared error + boundary costs + risk`` for a sweep of weights, by minimum cuts."""
    terms = estimator.latency_terms[:_SWEPT_DRAWS]  # (n_draws, n_groups + n_boundaries + 1)
    squares = np.exp(estimator.log_squares[:_SWEPT_DRAWS])  # (n_draws, n_groups)
    shares = estimator.part_shares
    if shares is not None:
        # The largest over parts is bounded by weighted sums of them (Lagrange multipliers): other weights in each draw.
        mixed = generator.dirichlet(np.full(shares.shape[1], 0.5), len(squares)) @ shares.T
        squares = squares * np.maximum(mixed, 1e-6)
    n_groups = squares.shape[1]
    gains = np.maximum(terms[:, :n_groups], 1e-9 * estimator.base_ms)
    # From a weight that keeps all but the cheapest groups out to one that lets all but the dearest in.
    ratio = gains / squares
    low, high = np.log(np.quantile(ratio, 0.02, axis=1)), np.log(np.quantile(ratio, 0.98, axis=1))
    # Random weights, stratified, so that over several proposals no optimum stays hidden between two of them.
    steps = (np.arange(_SWEEP_WEIGHTS) + generator.random((len(ratio), _SWEEP_WEIGHTS))) / _SWEEP_WEIGHTS
    weights = np.exp(low[:, None] + (high - low)[:, None] * (1.2 * steps - 0.1))  # (n_draws, n_weights)
    sound = np.log1p(-np.minimum(estimator.overflow.probabilities, 1 - 1e-6))
    risk = -_RISK * estimator.base_ms * sound

    def solved(weights: Floats) -> Bools:  # (n_draws, n_weights) -> (n_draws, n_weights, n_groups)
        unary = -terms[:, None, :n_groups] + weights[:, :, None] * squares[:, None, :] + risk
        costs = np.repeat(terms[:, n_groups:-1], weights.shape[1], axis=0)
        return solver.solve(unary.reshape(-1, n_groups), costs).reshape(*weights.shape, n_groups)

    optima = solved(weights)
    if (limit := estimator.axis.limit) is None:
        return optima.reshape(-1, n_groups)
    # Once more with weights whose optima come out about the limit: their errors fall as the weights grow.
    steps = (np.arange(_NEAR_WEIGHTS) + generator.random((len(weights), _NEAR_WEIGHTS))) / _NEAR_WEIGHTS
    exact = np.log(_NEAR_LIMIT[0]) + math.log(_NEAR_LIMIT[1] / _NEAR_LIMIT[0]) * steps - math.log(limit)
    near = np.empty_like(exact)
    for draw, plans in enumerate(optima):
        of_weights = np.maximum.accumulate(-np.log(estimator.errors(plans, draw)))
        near[draw] = np.interp(exact[draw], of_weights, np.log(weights[draw]))
    return np.vstack([optima.reshape(-1, n_groups), solved(np.exp(near)).reshape(-1, n_groups)])


class CandidatePool:
    """Candidates, each once, with their screened coordinates and EHVI."""

    def __init__(self, estimator: EhviEstimator, n_groups: int) -> None:
        self._estimator = estimator
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.plans: Bools = np.zeros((0, n_groups), dtype=bool)  # (n_plans, n_groups)
        self._screened: Floats = np.zeros((3, 0))  # gain, exactness, EHVI (-1 for built plans), each (n_plans,)
        self._is_expanded: Bools = np.zeros(0, dtype=bool)

    def add(self, plans: Bools) -> Floats:
        """Screen plans, shape (n_plans, n_groups), unless they are in the pool; the EHVI of each, shape (n_plans,)."""
        keys = plan_keys(plans)
        unique, first = np.unique(keys, return_index=True)
        is_new = ~np.isin(unique, self._keys, assume_unique=True)
        new = plans[first[is_new]]
        gain, exact, ehvi = self._estimator.screen(new)
        ehvi[~self._estimator.is_new(new)] = -1.0
        self._keys = np.append(self._keys, unique[is_new])
        self._screened = np.hstack([self._screened, [gain, exact, ehvi]])
        self.plans = np.vstack([self.plans, new])
        self._is_expanded = np.append(self._is_expanded, np.zeros(len(new), dtype=bool))
        order = np.argsort(self._keys)
        of_each: Floats = self._screened[2, order[np.searchsorted(self._keys, keys, sorter=order)]]
        return of_each

    def best(self, count: int) -> Bools:
        """At most ``count`` plans that are not built, those of the largest EHVI first."""
        order = _largest(self._screened[2], count)
        chosen: Bools = self.plans[order[self._screened[2, order] >= 0.0]]
        return chosen

    def add_neighbours(self, prior: Prior, generator: np.random.Generator) -> None:
        """Local search: add neighbours of the plans of the largest EHVI and of the predicted front.

        A neighbour differs in one group, in two groups that share a boundary, or in two or three random groups; and in
        what several of the best neighbours of the same plan differ in.
        """
        n_groups = len(prior.groups)
        flips = [np.eye(n_groups, dtype=bool)]
        # The first two groups that share a tensor, so that both take a precision, or leave it.
        pairs = [boundary.members[:2] for boundary in prior.boundaries if len(boundary.members) > 1]
        if pairs:
            flips.append(_masks(np.array(pairs), n_groups))
        n_random = math.ceil(_RANDOM_SHARE * n_groups)
        for round_ in range(_NEIGHBOUR_ROUNDS):
            before = self._screened[2].max()
            best = _largest(np.where(self._is_expanded, -math.inf, self._screened[2]), _EXPANDED_PLANS)
            best, front = (positions[~self._is_expanded[positions]] for positions in (best, self._front()))
            spread = front[np.unique(np.linspace(0, len(front) - 1, min(len(front), _EXPANDED_PLANS // 2)).astype(int))]
            chosen = np.union1d(best[: _EXPANDED_PLANS - len(spread)], spread)
            self._is_expanded[chosen] = True
            centres = self.plans[chosen][:, None, :]  # (n_centres, 1, n_groups)
            positions = generator.random((n_random, n_groups)).argpartition(min(2, n_groups - 1), axis=1)[:, :3]
            masks = np.vstack([*flips, _masks(positions[:, :2], n_groups), _masks(positions, n_groups)])
            most = max(_CELLS // (len(centres) + 1) // (n_groups + len(prior.boundaries)), 1)
            if len(masks) > most:
                masks = masks[generator.choice(len(masks), size=most, replace=False)]
            ehvi = self.add((centres ^ masks).reshape(-1, n_groups)).reshape(len(centres), len(masks))
            if len(masks) > 2:
                # Every pair of each plan's best masks, and the best three, four and so on of them all at once.
                best_masks = masks[np.argsort(-ehvi, axis=1, kind="stable")[:, :_COMBINED]]
                first, second = np.triu_indices(best_masks.shape[1], 1)
                joined = np.logical_xor.accumulate(best_masks, axis=1)[:, 2:]
                combined = np.concatenate([best_masks[:, first] ^ best_masks[:, second], joined], axis=1)
                self.add((centres ^ combined).reshape(-1, n_groups))
            if round_ + 1 >= _FEWEST_ROUNDS and self._screened[2].max() <= before * (1.0 + _RISE):
                break

    def _front(self) -> NDArray[np.int64]:
        """Positions of the plans that no other one dominates under the posterior's mean, those of most gain first."""
        gain, exact, _ = self._screened
        inside = np.flatnonzero((gain > 0) & (exact > 0))
        order = inside[np.argsort(-gain[inside], kind="stable")]
        most_exact = np.maximum.accumulate(np.append(-math.inf, exact[order]))
        front: NDArray[np.int64] = order[exact[order] > most_exact[:-1]]
        return front


def _masks(positions: NDArray[np.int64], n_groups: int) -> Bools:
    """Rows that are True at their positions, shape (n_rows, n_groups), of positions of shape (n_rows, n_positions)."""
    masks = np.zeros((len(positions), n_groups), dtype=bool)
    np.put_along_axis(masks, positions, True, axis=1)
    return masks


def _largest(values: Floats, count: int) -> NDArray[np.int64]:
    """Positions of the ``count`` largest values, the largest first."""
    positions = np.argpartition(-values, count - 1)[:count] if count < len(values) else np.arange(len(values))
    largest: NDArray[np.int64] = positions[np.argsort(-values[positions], kind="stable")]
    return largest
