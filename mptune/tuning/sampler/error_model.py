"""The additive law of SEARCH.md with its uncertainties: prior from sensitivity and roofline, posterior from builds.

Latency is ``base - gains of the FP16 groups + costs of the crossed boundaries``, linear and Gaussian. The squared error
is ``exp(u) summed over the FP16 groups``, with Gaussian ``u``; its posterior is taken by iterated extended Kalman steps
(Gauss-Newton; Bell and Cathey, IEEE TAC 38(2), 1993). How far the prior and the law can be trusted is not assumed:
of a few widths and noises the most probable given the evaluations are taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.min_cut import Bools, Floats, Tie

ERROR_FLOOR = 1e-7
"""Errors are told apart down to this (as in ``mptune.tuning.front``)."""

_ERROR_WIDTHS = (0.15, 0.6, 2.0, 4.5)
_ERROR_NOISE = 0.1
"""Of the log of a squared error, by which the law of squares misses: 5 % of the error."""

_EMULATION_NOISE, _EMULATION_WEIGHT = 0.06, 4
"""The same for emulation of whole plans, 3 % of the error, and how many plans that were measured too weigh as much: the
few samples of an emulation say little of a network that is nearly chaotic."""

_MAD_TO_SD = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""

_MULTIPLIER, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
_STEPS = 8
_LARGEST_STEP = 2.0


@dataclass(frozen=True)
class Prior:
    """What is known of a search space before any build, as plain data; all sequences are parallel to ``groups``.

    Attributes:
        groups: ids of the free groups.
        log_square_errors: log of each group's squared error when it alone is FP16; ``inf`` where that overflows. None
            where nothing is known.
        gains_ms: what FP16 gains in each group, up to a common factor that the builds of all-FP32 and all-FP16 fix.
            None where nothing is known.
        ties: the boundaries, by position of the groups.
        tie_costs_ms: what each costs, in the same unit as the gains.
        fixed_gain_ms: what groups that are FP16 under every plan of the space gain, against all-FP32.
        exact: the latency terms are the very law that latencies are predicted by.
        kinds: what each group is, from coarse to fine, such as ``("matmul", hash of its structure)``: the prior's gains
            of groups that have one of these in common are likely to miss alike. Empty where nothing is known.
    """

    groups: tuple[str, ...]
    log_square_errors: tuple[float, ...] | None = None
    gains_ms: tuple[float, ...] | None = None
    ties: tuple[Tie, ...] = ()
    tie_costs_ms: tuple[float, ...] = ()
    fixed_gain_ms: float = 0.0
    exact: bool = False
    kinds: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Observations:
    """What has been evaluated, or is being evaluated.

    Attributes:
        plans: observations x groups, True is FP16.
        latency_ms: median; NaN where none was taken.
        latency_sd_ms: its standard error as measured; 0 where unknown or predicted.
        error: objective error; NaN where there is none.
        finite: 1.0 where the plan built and its outputs are finite, 0.0 where not, NaN while it runs.
        base_ms: latency of all-FP32; NaN before it is known.
        base_sd_ms: its standard error.
        emulated: plans that were emulated, not measured (in rows as ``plans``), and their errors, ``inf`` where not
            finite. None where there are none.
        emulation_ratios: emulated error over measured one, of each plan that has both.
        group_ms: what each group took by the engine's own profiler, in rows as ``plans``; NaN where that is not known.
            None where nothing was profiled.
    """

    plans: Bools
    latency_ms: Floats
    latency_sd_ms: Floats
    error: Floats
    finite: Floats
    base_ms: float
    base_sd_ms: float = 0.0
    emulated: tuple[Bools, Floats] | None = None
    emulation_ratios: Floats = field(default_factory=lambda: np.ones(0))
    group_ms: Floats | None = None


class Linear:
    """A Gaussian over independent parameters, and what linear observations teach of it."""

    def __init__(self, mean: Floats, sd: Floats) -> None:
        self.mean = mean
        self.sd = sd
        self._jacobian: Floats = np.zeros((0, len(mean)))
        self._noise: Floats = np.zeros(0)
        self._gain: Floats = np.zeros((len(mean), 0))
        self.posterior_mean = mean

    def update(self, jacobian: Floats, values: Floats, noise: Floats) -> float:
        """Condition on ``values = jacobian @ parameters + noise``; returns the log evidence up to a constant."""
        spread = self.sd**2
        residual = values - jacobian @ self.mean
        weighed = jacobian / noise[:, None] ** 2
        if len(jacobian) <= len(spread):  # solve in whichever space is smaller
            factor = _cholesky((jacobian * spread) @ jacobian.T + np.diag(noise**2))
            inverse = np.linalg.inv(factor)
            self._gain = (spread[:, None] * jacobian.T) @ (inverse.T @ inverse)
            determinant = np.log(np.diag(factor)).sum()
        else:
            factor = _cholesky(jacobian.T @ weighed + np.diag(1.0 / spread))
            inverse = np.linalg.inv(factor)
            self._gain = (inverse.T @ inverse) @ weighed.T
            determinant = np.log(np.diag(factor)).sum() + np.log(noise).sum() + np.log(self.sd).sum()
        self._jacobian, self._noise = jacobian, noise
        self.posterior_mean = self.mean + self._gain @ residual
        solved = (residual - jacobian @ (self.posterior_mean - self.mean)) / noise**2
        return float(-0.5 * residual @ solved - determinant)

    def misses(self, values: Floats) -> tuple[Floats, Floats]:
        """By how much each observation misses what all others say of it, and how well they know it.

        Args:
            values: as ``update`` had them.

        Returns:
            The misses, and the standard deviations of what all others say, without the observations' own noise.
        """
        leverage = np.clip(np.einsum("ij,ji->i", self._jacobian, self._gain), 0.0, 1.0 - 1e-9)
        misses = (values - self._jacobian @ self.posterior_mean) / (1.0 - leverage)
        return misses, self._noise * np.sqrt(leverage / (1.0 - leverage))

    def sample(self, generator: np.random.Generator, count: int) -> Floats:
        """Draws from the posterior (Matheron's rule), count x parameters."""
        offsets = generator.normal(size=(count, len(self.mean))) * self.sd
        misses = generator.normal(size=(count, len(self._noise))) * self._noise
        drawn: Floats = self.posterior_mean + offsets - (offsets @ self._jacobian.T + misses) @ self._gain.T
        return drawn


def _cholesky(matrix: Floats) -> Floats:
    try:
        factor = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        shift = 1e-9 * float(np.trace(matrix)) + 1e-300
        factor = np.linalg.cholesky(matrix + shift * np.eye(len(matrix)))
    return np.asarray(factor, dtype=np.float64)


class ErrorModel:
    """Posterior of the one-group errors: ``log(error ** 2) = log(floor ** 2 + sum(exp(u_i)))`` over FP16 groups."""

    def __init__(self, prior: Prior, seen: Observations) -> None:
        """Condition the prior on the errors that are known."""
        known = np.isfinite(seen.error) & (seen.finite > 0)
        plans, errors = seen.plans[known], seen.error[known]
        noise = np.full(len(plans), _ERROR_NOISE)
        self._emulation_bias, self._emulation_noise = _judge_emulation(seen.emulation_ratios)
        if seen.emulated is not None:
            finite = np.isfinite(seen.emulated[1])
            emulated = seen.emulated[1][finite] * math.exp(-0.5 * self._emulation_bias)
            plans, errors = np.vstack([plans, seen.emulated[0][finite]]), np.append(errors, emulated)
            noise = np.append(noise, np.full(int(finite.sum()), math.hypot(_ERROR_NOISE, self._emulation_noise)))
        self._plans, self._noise = plans.astype(float), noise
        self._values = np.log(np.maximum(errors, ERROR_FLOOR) ** 2)
        mean = self._prior_mean(prior)
        self._floor = ERROR_FLOOR**2
        informative = self._values > math.log(self._floor) + 0.1
        self._plans, self._values, self._noise = (a[informative] for a in (self._plans, self._values, self._noise))
        widths = _ERROR_WIDTHS if prior.log_square_errors is not None else (4.5,)
        fits = [self._fit(mean, np.full(len(mean), width), math.log(width)) for width in widths]
        self._model, self.typical, _ = max(fits, key=lambda fit: fit[2])

    def _prior_mean(self, prior: Prior) -> Floats:
        count = len(prior.groups)
        if prior.log_square_errors is None:
            # Whatever the most inexact plan erred, spread over its groups.
            level = (self._values - np.log(np.maximum(self._plans.sum(axis=1), 1.0))).max(initial=math.log(1e-6))
            return np.full(count, level)
        mean = np.array(prior.log_square_errors, dtype=float)
        finite = np.isfinite(mean)
        mean[np.isposinf(mean) | np.isnan(mean)] = mean[finite].max(initial=math.log(1e-2))
        bounded: Floats = np.maximum(mean, math.log(ERROR_FLOOR**2) - 10.0)
        return bounded

    def _predict(self, u: Floats) -> tuple[Floats, Floats]:
        parts = self._plans * np.exp(u)
        total = parts.sum(axis=1) + self._floor
        return np.log(total), parts / total[:, None]

    def _fit(self, mean: Floats, sd: Floats, log_width: float) -> tuple[Linear, Floats, float]:
        model, u = Linear(mean, sd), mean.copy()
        if not len(self._values):
            return model, u, -log_width
        noise = self._noise

        def loss(at: Floats) -> float:
            miss = (self._values - self._predict(at)[0]) / noise
            return float(miss @ miss + (((at - mean) / sd) ** 2).sum())

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
        return model, u, evidence - 0.1 * log_width

    def samples(self, generator: np.random.Generator, count: int) -> Floats:
        """Draws of ``u``, count x groups."""
        return np.clip(self._model.sample(generator, count), -60.0, 10.0)

    def predict(self, plans: Bools, u: Floats) -> Floats:
        """Errors, draws x plans."""
        squares = (plans.astype(np.float32) @ np.exp(u).T.astype(np.float32)).T
        error: Floats = np.sqrt(squares.astype(float) + self._floor)
        return error

    def weigh(self, predicted: Floats, emulated: Floats) -> Floats:
        """Predicted errors with what emulation says of the same plans: each counts by what it is known to miss.

        Args:
            predicted: draws x plans.
            emulated: of the plans; NaN where nothing is known.
        """
        trust = _ERROR_NOISE**2 / (_ERROR_NOISE**2 + self._emulation_noise**2)
        told = np.log(np.maximum(emulated, ERROR_FLOOR)) - 0.5 * self._emulation_bias
        weighed = np.exp((1.0 - trust) * np.log(predicted) + trust * told)
        errors: Floats = np.where(np.isnan(emulated), predicted, weighed)
        return errors


def _judge_emulation(ratios: Floats) -> tuple[float, float]:
    """By what the log of a squared error is too large as emulated, and the standard deviation of what is left.

    Both by medians: one engine that did not do what its plan says tells nothing of emulation.
    """
    misses, share = 2.0 * np.log(ratios), len(ratios) / (_EMULATION_WEIGHT + len(ratios))
    middle = float(np.median(misses)) if len(misses) else 0.0
    spread = _MAD_TO_SD * float(np.median(np.abs(misses - middle))) if len(misses) else 0.0
    return share * middle, math.sqrt((1.0 - share) * _EMULATION_NOISE**2 + share * spread**2)


def stack(plans: Sequence[Bools], groups: int) -> Bools:
    """Plans of several sources, each once, in the order of their first occurrence."""
    rows = np.concatenate([np.asarray(p, dtype=bool).reshape(-1, groups) for p in plans])
    kept: Bools = rows[np.sort(np.unique(keys(rows), return_index=True)[1])]
    return kept


def keys(plans: Bools) -> NDArray[np.uint64]:
    """What tells plans apart, a number for each row: of up to 64 groups the plan itself, of more its hash."""
    packed = np.packbits(plans, axis=1)
    words = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8))).view(np.uint64)
    mixed: NDArray[np.uint64] = np.zeros(len(plans), dtype=np.uint64)
    for word in words.T:
        mixed = (mixed ^ (mixed >> _HALF)) * _MULTIPLIER ^ word
    return mixed
