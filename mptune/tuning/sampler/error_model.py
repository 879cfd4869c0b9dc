"""Posterior of the one-group errors, by measured and emulated errors of plans; which plans to emulate to learn more.

The squared error of a plan is ``exp(u_i)`` summed over its FP16 groups i, with Gaussian ``u``; the posterior is
taken by iterated extended Kalman steps, which are Gauss-Newton steps (Bell and Cathey, IEEE TAC 38(2), 1993). How far
the prior can be trusted is not assumed: of a few prior widths the most probable given the errors is taken (type II
maximum likelihood).
"""

from __future__ import annotations

import functools
import math

import numpy as np

from mptune.tuning.dominance import ERROR_FLOOR
from mptune.tuning.sampler.latency_model import LinearGaussian, robust_sd
from mptune.tuning.sampler.plans import Bools, Floats, plan_keys
from mptune.tuning.sampler.trials import BuiltPlans, Prior

_PRIOR_WIDTHS = (0.15, 0.6, 2.0, 4.5)
"""Standard deviations of ``u`` that are tried: from an emulation that is right to 8 % to one that knows nothing (4.5 is
a factor of 10 in the error)."""

_WIDTH_PENALTY = 0.1
"""Of the log evidence, per log of the width: of widths that explain the errors as well the narrower one is taken."""

_LAW_NOISE = 0.1
"""Standard deviation of the log of a squared error about the sum of squares: 5 % of the error."""

_EMULATION_NOISE = 0.06
"""The same for emulation of whole plans, 3 % of the error, before any plan was both emulated and measured."""

_EMULATION_WEIGHT = 4
"""Plans that were both emulated and measured that weigh as much as the assumption above."""

_STEPS, _LARGEST_STEP = 8, 2.0
"""Gauss-Newton steps, and how far one may move any ``u``: past that the linearisation says nothing."""

_CANDIDATES = 300
"""Random plans that the designed ones are chosen from."""

_FEWEST_GROUPS = 4
"""FP16 groups of a designed plan, at least: it is to tell of groups in company, not of one alone once more."""

_LEAST_FALL = 0.005
"""Fall of the sum of the weighted variances (weights of mean 1) that is worth an emulation: as where one group's error,
known to 10 %, becomes known to 9.3 %. Where one-group errors are as good as that nothing is emulated for them."""


class ErrorModel:
    """Posterior of ``u`` in ``log(error ** 2) = log(floor ** 2 + sum(exp(u_i)))``, the sum over a plan's FP16 groups.

    Where outputs have several parts, ``exp(u_i)`` is the squared error of group i in its worst part, and the sum is the
    largest over the parts p of ``sum(exp(u_i) * share[i, p])``, with known shares (``part_shares``). ``mode`` is the
    maximum a posteriori of ``u``, shape (n_groups,).
    """

    def __init__(self, prior: Prior, built: BuiltPlans) -> None:
        """Condition the prior on measured and emulated errors."""
        self._shares = None if prior.part_shares is None else np.array(prior.part_shares)
        measured = np.isfinite(built.error) & (built.finite > 0)
        plans, errors = built.plans[measured], built.error[measured]
        noise = np.full(len(plans), _LAW_NOISE)
        self._emulation_bias, self._emulation_noise = _emulation_accuracy(built.emulation_ratios)
        # Standard deviation of the log of an emulated squared error about the law.
        self.emulation_sd = math.hypot(_LAW_NOISE, self._emulation_noise)
        rows, values = built.emulations
        finite = np.isfinite(values)
        plans = np.vstack([plans, rows[finite]])
        errors = np.append(errors, values[finite] * math.exp(-0.5 * self._emulation_bias))
        noise = np.append(noise, np.full(int(finite.sum()), self.emulation_sd))
        self._plans, self._noise = plans.astype(float), noise
        self._values = np.log(np.maximum(errors, ERROR_FLOOR) ** 2)
        mean = self._prior_mean(prior)
        self._floor = ERROR_FLOOR**2
        informative = self._values > math.log(self._floor) + 0.1
        self._plans, self._values, self._noise = (a[informative] for a in (self._plans, self._values, self._noise))
        widths = _PRIOR_WIDTHS if prior.log_square_errors is not None else (4.5,)
        doubts = np.array(prior.log_square_sds or np.zeros(len(mean)), dtype=float)
        fits, start = [], mean
        for width in widths:  # each from the mode of the one before it, which is nearer than the prior's mean
            fits.append(self._fit(mean, np.hypot(width, doubts), math.log(width), start))
            start = fits[-1][1]
        self._model, self.mode, _ = max(fits, key=lambda fit: fit[2])

    def _prior_mean(self, prior: Prior) -> Floats:
        count = len(prior.groups)
        if prior.log_square_errors is None:
            # The largest error per FP16 group that any plan shows.
            level = (self._values - np.log(np.maximum(self._plans.sum(axis=1), 1.0))).max(initial=math.log(1e-6))
            return np.full(count, level)
        mean = np.array(prior.log_square_errors, dtype=float)
        finite = np.isfinite(mean)
        mean[np.isposinf(mean) | np.isnan(mean)] = mean[finite].max(initial=math.log(1e-2))
        bounded: Floats = np.maximum(mean, math.log(ERROR_FLOOR**2) - 10.0)
        return bounded

    def _predict(self, u: Floats, plans: Floats | None = None) -> tuple[Floats, Floats]:
        """Log squared errors of the plans (those that were learnt from), and each group's share of them."""
        parts = (self._plans if plans is None else plans) * np.exp(u)
        if self._shares is not None:  # the part that decides
            parts = parts * self._shares.T[(parts @ self._shares).argmax(axis=1)]
        total = parts.sum(axis=1) + self._floor
        return np.log(total), parts / total[:, None]

    def _fit(self, mean: Floats, sd: Floats, log_width: float, start: Floats) -> tuple[LinearGaussian, Floats, float]:
        """The posterior of ``u``, its mode, and the log evidence."""
        model, u = LinearGaussian(mean, sd), start.copy()
        if not len(self._values):
            return model, u, -log_width
        noise = self._noise

        def loss(at: Floats) -> float:
            residual = (self._values - self._predict(at)[0]) / noise
            return float(residual @ residual + (((at - mean) / sd) ** 2).sum())

        evidence, now = 0.0, loss(u)
        for _ in range(_STEPS):
            value, jacobian = self._predict(u)
            evidence = model.update(jacobian, self._values - value + jacobian @ u, noise)
            step = np.clip(model.posterior_mean - u, -_LARGEST_STEP, _LARGEST_STEP)
            while (then := loss(u + step)) > now and np.abs(step).max() > 1e-3:
                step = step / 2
            if then > now:
                break
            u, before, now = u + step, now, then
            if before - now < 1e-3 * max(1.0, now):
                break
        model.posterior_mean = u
        return model, u, evidence - _WIDTH_PENALTY * log_width

    def shares(self, plans: Bools) -> Floats:
        """Share of each group in each plan's squared error at the mode, shape (n_plans, n_groups)."""
        return self._predict(self.mode, plans.astype(float))[1]

    def covariance(self) -> Floats:
        """Of ``u``, shape (n_groups, n_groups)."""
        return self._model.covariance()

    def sample(self, generator: np.random.Generator, n_draws: int) -> Floats:
        """Draws of ``u``, shape (n_draws, n_groups)."""
        draws: Floats = np.clip(self._model.sample(generator, n_draws), -60.0, 10.0)
        return draws

    def predict(self, plans: Bools, u: Floats) -> Floats:
        """Errors of plans, shape (n_draws, n_plans), from draws of ``u``, shape (n_draws, n_groups)."""
        groups, terms = plans.astype(np.float32), np.exp(u).T.astype(np.float32)
        if self._shares is None:
            squares = (groups @ terms).T
        else:
            of_parts = (groups @ (terms * share[:, None]) for share in self._shares.T.astype(np.float32))
            squares = functools.reduce(np.maximum, of_parts).T
        error: Floats = np.sqrt(squares.astype(float) + self._floor)
        return error

    def combine(self, predicted: Floats, emulated_errors: Floats) -> Floats:
        """Weighted mean, in logarithms, of predicted errors (n_draws, n_plans) and known emulated ones."""
        trust = _LAW_NOISE**2 / (_LAW_NOISE**2 + self._emulation_noise**2)
        unbiased = np.log(np.maximum(emulated_errors, ERROR_FLOOR)) - 0.5 * self._emulation_bias
        mean = np.exp((1.0 - trust) * np.log(predicted) + trust * unbiased)
        errors: Floats = np.where(np.isnan(emulated_errors), predicted, mean)
        return errors


def _emulation_accuracy(ratios: Floats) -> tuple[float, float]:
    """Bias of the log of an emulated squared error, and the standard deviation about it.

    By medians: an engine that did not compute what its plan says must not count against emulation.
    """
    deviations, share = 2.0 * np.log(ratios), len(ratios) / (_EMULATION_WEIGHT + len(ratios))
    middle = float(np.median(deviations)) if len(deviations) else 0.0
    spread = robust_sd(deviations - middle) if len(deviations) else 0.0
    return share * middle, math.sqrt((1.0 - share) * _EMULATION_NOISE**2 + share * spread**2)


def design_plans(
    model: ErrorModel, weights: Floats, allowed: Bools, emulated: Bools, most: int, generator: np.random.Generator
) -> Bools:
    """At most ``most`` plans whose emulated errors tell most of the groups' errors; none where none is worth it.

    One-group errors may be off: taken on few samples, or other in the company of other groups. A whole plan's emulated
    error is nearly exact, and tells of the groups whose squares make most of it: a group test that measures. The plans
    are chosen one by one from random ones, each for the largest fall of the weighted sum of the posterior variances,
    linearised at the mode: a sequential A-optimal design (Pukelsheim, Optimal Design of Experiments, 2006, Chapter 6;
    Chaloner and Verdinelli, Bayesian experimental design: a review, Statistical Science 10(3), 1995).

    ``weights`` say what it matters to know each group's, shape (n_groups,), >= 0; ``allowed`` which groups may be FP16,
    shape (n_groups,), as one that overflows tells nothing; the errors of the plans in ``emulated`` are known.
    """
    candidates = _random_plans(model.mode, allowed, generator)
    candidates = candidates[~np.isin(plan_keys(candidates), plan_keys(emulated))]
    shares = model.shares(candidates)  # (n_candidates, n_groups)
    covariance, noise = model.covariance(), model.emulation_sd**2
    weights = weights / max(float(weights.mean()), 1e-300)
    chosen: list[int] = []
    while len(chosen) < min(most, len(candidates)):
        projected = shares @ covariance  # (n_candidates, n_groups)
        variance = (projected * shares).sum(axis=1) + noise
        falls = (projected**2 @ weights) / variance
        falls[chosen] = -math.inf
        best = int(np.argmax(falls))
        if falls[best] < _LEAST_FALL:
            break
        covariance = covariance - np.outer(projected[best], projected[best]) / variance[best]
        chosen.append(best)
    designed: Bools = candidates[chosen]
    return designed


def _random_plans(mode: Floats, allowed: Bools, generator: np.random.Generator) -> Bools:
    """Random parts of groups of similar errors: those of much smaller errors do not show beside large ones."""
    order = np.flatnonzero(allowed)[np.argsort(mode[allowed], kind="stable")]
    plans = np.zeros((_CANDIDATES, len(mode)), dtype=bool)
    if len(order) < _FEWEST_GROUPS:
        return plans[:0]
    few, all_ = math.log(_FEWEST_GROUPS), math.log(len(order))
    sizes = np.rint(np.exp(generator.uniform(few, all_, _CANDIDATES))).astype(np.int64)
    starts = generator.integers(len(order) - sizes + 1)
    ranks = np.arange(len(order)) - starts[:, None]
    is_similar = (ranks >= 0) & (ranks < sizes[:, None])
    chosen = is_similar & (generator.random(ranks.shape) < generator.uniform(0.3, 1.0, (_CANDIDATES, 1)))
    is_small = chosen.sum(axis=1) < _FEWEST_GROUPS
    chosen[is_small] = is_similar[is_small]
    plans[:, order] = chosen
    return np.unique(plans, axis=0)
