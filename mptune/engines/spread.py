"""How well a median is known, how far sessions of one plan differ, and when a timing is exact enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import t_quantile
from mptune.json_form import JsonForm

Floats = NDArray[np.float64]
_RESAMPLES = 400
_LEAST_MS = 1e-9  # a clock that is too coarse gives 0, which has no logarithm
_WITHIN_DEGREES = 4.0
"""Degrees of freedom of one session's variance, simulated: 3.2 of 5 values, 5 of 7 (Hall and Martin, Probability Theory
and Related Fields 80, 1988)."""
LEAST_VALUES = 5
"""Values of each engine that every timing takes: the median of fewer is at the mercy of one outlier."""
CLEAR = 4.0  # a difference of this many standard errors is clear
EXACT = 1e-3
"""Standard error of a log ratio that is smaller than any spread between sessions that was seen."""
_OF_SPREAD = 0.5
"""A standard error within a session of this share of the spread between sessions widens intervals by 12 %."""
_ASSUMED_SPREAD = 2.5e-3
"""Relative standard deviation between sessions where nothing is known of it: on an H200 it was 0.0012 to 0.0033."""
_LOOK_GROWTH = 1.4


def bootstrap_median_interval(values: Floats, samples: int = 1000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the median (Efron 1979), the same each time."""
    generator = np.random.default_rng(0)
    medians = np.median(values[generator.integers(0, len(values), size=(samples, len(values)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class SessionTiming(JsonForm):
    """The latency of one session of a plan, relative to the session of the baseline that it was timed in turn with."""

    baseline: str  # which session of the baseline; all candidates of one worker process share it
    log_ratio: float  # ``log(median / median of the baseline)``
    sd: float  # standard error of ``log_ratio`` within these two sessions
    baseline_ms: float = 1.0  # median of the baseline

    @classmethod
    def of_values(cls, baseline: str, values_ms: Sequence[float], baseline_ms: Sequence[float]) -> SessionTiming:
        """From values taken in turn, ``values_ms[i]`` right after ``baseline_ms[i]``."""
        values, others = np.maximum(values_ms, _LEAST_MS), np.maximum(baseline_ms, _LEAST_MS)
        median_ms, other_ms = float(np.median(values)), float(np.median(others))
        return cls(baseline, math.log(median_ms / other_ms), log_ratio_sd(values, others), other_ms)


def log_ratio_sd(values: Floats, baseline: Floats) -> float:
    """Standard error of the log ratio of two medians whose values were taken in turn.

    The bootstrap (Efron 1979) draws rounds, a value of each engine: what a device does in one round is common to both
    and cancels. The same each time; 0 for a single round.
    """
    rounds = np.random.default_rng(0).integers(0, len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(values[rounds], axis=1), np.median(baseline[rounds], axis=1)
    return float(np.std(np.log(medians[0] / medians[1]), ddof=1)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class RatioEstimate:
    """The log ratio of a plan's latency to the first session of the baseline, over all of its sessions."""

    log_ratio: float
    sd: float
    degrees: float

    def interval(self) -> tuple[float, float]:
        """Student's t interval of the ratio (not of its logarithm), 95 %."""
        half = t_quantile(0.975, self.degrees) * self.sd
        return math.exp(self.log_ratio - half), math.exp(self.log_ratio + half)


class SessionSpread:
    """The spread between sessions of one model on one device, estimated from all of its timings.

    A mixed model: a plan's log ratio, plus the effect of its session, less that of the baseline's session, and noise.
    Effects have one variance, whosever they are: a plan opened beside a baseline of its own does not tell them apart.
    """

    def __init__(self, timings: Mapping[str, Sequence[SessionTiming]], anchor: str | None = None) -> None:
        """``anchor`` is the session of the baseline that latencies are stated relative to; else the first timing's."""
        every = [timing for sessions in timings.values() for timing in sessions]
        first = anchor if anchor is not None or not every else every[0].baseline
        named = dict.fromkeys([*([] if first is None else [first]), *(timing.baseline for timing in every)])
        self._index = {name: number for number, name in enumerate(named)}
        count = len(self._index)

        # Plans that were timed again: generalised least squares of their values on the plans.
        repeated = [sessions for sessions in timings.values() if len(sessions) > 1]
        values = np.array([timing.log_ratio for plan in repeated for timing in plan])
        plans = np.array([number for number, plan in enumerate(repeated) for _ in plan], dtype=np.int64)
        baselines = np.array([self._index[t.baseline] for plan in repeated for t in plan], dtype=np.int64)
        self.degrees = len(values) - len(repeated)
        self._between, self._scale = _ASSUMED_SPREAD**2, 1.0
        self.residual_variance = self._between  # of one session against a baseline whose effect is known
        if repeated:
            design = np.eye(len(repeated))[plans]
            weights = np.linalg.inv(np.eye(len(values)) + (baselines[:, None] == baselines))
            fitted = weights @ design
            residual = weights - fitted @ np.linalg.solve(design.T @ fitted, fitted.T)
            within = np.array([timing.sd**2 for plan in repeated for timing in plan])
            mean_square = max(0.0, float(values @ residual @ values)) / self.degrees
            noise = float(np.diag(residual) @ within) / self.degrees  # what is within sessions has in it
            self._between = max(0.0, mean_square - noise)
            # Where timings differ by less than their sessions say, the bootstrap of few values has overstated it.
            self._scale = min(1.0, mean_square / noise) if noise > 0.0 else 1.0
            self.residual_variance = self._between + self._scale * float(within.mean())
        self.sd = math.sqrt(self._between)  # relative; assumed where no plan was timed again

        # Effects of the baseline's sessions, shape (sessions,), and their covariance in units of ``_between``: the best
        # linear prediction, in which a plan's own effect is eliminated, since nothing is known of it beforehand.
        self._effects, self._covariance = np.zeros(count), np.eye(count)
        if self._between > 0.0:
            weight = self._between / max(self.residual_variance, self._between)
            precision, response = np.eye(count), np.zeros(count)
            for number in range(len(repeated)):
                of_plan = values[plans == number]
                design = np.eye(count)[baselines[plans == number]]
                precision += weight * (design.T @ design - np.outer(design.sum(0), design.sum(0)) / len(of_plan))
                response -= weight * design.T @ (of_plan - of_plan.mean())
            self._covariance = np.linalg.inv(precision).astype(np.float64)
            self._effects = self._covariance @ response

    def estimate(self, sessions: Sequence[SessionTiming]) -> RatioEstimate:
        """The ratio of one plan; ``sessions`` (at least one) are all of its timings that count.

        Effects of baseline sessions that the estimate has not seen are unknown, with the spread of any other.
        """
        count = len(sessions)
        weights = np.zeros(len(self._index))
        unseen: dict[str, float] = {}
        for timing in sessions:
            number = self._index.get(timing.baseline)
            if number is None:
                unseen[timing.baseline] = unseen.get(timing.baseline, 0.0) + 1.0 / count
            else:
                weights[number] += 1.0 / count
        if len(weights):
            weights[0] -= 1.0  # relative to the anchor
        log_ratio = float(np.mean([timing.log_ratio for timing in sessions])) + float(weights @ self._effects)
        common = float(weights @ self._covariance @ weights) + sum(share**2 for share in unseen.values())
        # The few values of a session do not show that it is steadier than others are.
        least = self.residual_variance
        own = np.array([max(least, self._between + self._scale * timing.sd**2) for timing in sessions])
        variance = float(own.sum()) / count**2 + self._between * common
        if not self.degrees or variance <= 0.0:
            return RatioEstimate(log_ratio, math.sqrt(variance), self.degrees or math.inf)
        # Satterthwaite: all that was estimated from the mean square is as uncertain as it, and all that is beyond it as
        # uncertain as what is within these sessions. Where nothing is between sessions the mean square scales both.
        by_residual = least / count + self._between * common if self._between > 0.0 else variance
        by_values = float(np.sum((own - least) ** 2)) / count**4
        degrees = variance**2 / (by_residual**2 / self.degrees + by_values / _WITHIN_DEGREES)
        return RatioEstimate(log_ratio, math.sqrt(variance), degrees)


@dataclass(frozen=True)
class Enough:
    """What one timing has to show."""

    spread: float = _ASSUMED_SPREAD  # between sessions of one plan, relative standard deviation
    others: tuple[tuple[float, float], ...] = ()  # log ratio to the baseline, and error, of plans timed before
    error: float = math.nan  # of the plan that is timed; NaN where it is not known or not to be judged by it

    def is_reached(self, in_turn_ms: Sequence[Sequence[float]]) -> bool:
        """Whether values of the baseline and of a plan, taken in turn, are enough; asked at 5, 7, 10, 14, 19, ... ."""
        baseline_ms, values_ms = in_turn_ms
        look = float(LEAST_VALUES)
        while round(look) < len(values_ms):
            look *= _LOOK_GROWTH
        if round(look) != len(values_ms):
            return False
        timing = SessionTiming.of_values("", values_ms, baseline_ms)
        if timing.sd <= max(EXACT, _OF_SPREAD * self.spread):
            return True
        # Far behind the fastest plan whose error is no larger? Both sessions have the spread.
        margin = CLEAR * math.hypot(timing.sd, math.sqrt(2.0) * self.spread)
        fastest = min((log_ratio for log_ratio, error in self.others if error <= self.error), default=math.inf)
        return timing.log_ratio - fastest >= margin


class Standings:
    """The timings of this process, by plan: what the next timing has to tell apart."""

    def __init__(self) -> None:
        self._timings: dict[str, list[SessionTiming]] = {}
        self._errors: dict[str, float] = {}

    def add(self, plan: str, timings: Sequence[SessionTiming], error: float = math.nan) -> None:
        """Take sessions of a plan, by its fingerprint, and its error; NaN leaves the error that is known."""
        self._timings.setdefault(plan, []).extend(timings)
        if not math.isnan(error):
            self._errors[plan] = error

    def enough(self, plan: str) -> Enough:
        """What the next timing of a plan has to show."""
        spread = SessionSpread(self._timings)
        # Where few plans were timed again: one session of the baseline differs from the next one as a plan's do.
        logs = [*{t.baseline: math.log(t.baseline_ms) for each in self._timings.values() for t in each}.values()]
        sd = spread.sd if spread.degrees >= 3 or len(logs) < 3 else math.sqrt(np.mean(np.diff(logs) ** 2) / 2.0)
        others = (
            (float(np.mean([timing.log_ratio for timing in timings])), self._errors[other])
            for other, timings in self._timings.items()
            if other != plan and math.isfinite(self._errors.get(other, math.nan))
        )
        return Enough(sd, tuple(others))
