"""How far sessions of one plan differ, and the intervals of latencies that follow from it.

A session opened anew differs from the one before: memory lies elsewhere, other kernels are chosen. On an H200 sessions
of one plan differ by 0.12 to 0.33 % (standard deviation of the log ratio to the baseline, 14 sessions of three
networks), while the bootstrap of one session's values says 0.01 to 0.07 %. So a latency's variance adds up what is
within its session and what is between sessions, and the latter is estimated from plans that were opened more than once.

The model is linear with mixed effects. For session k of plan p, timed in turn with session b of the baseline:

    y_pk = log(median / median of the baseline) = mu_p - s_b + e_pk

``e_pk`` has the variance ``sigma^2 + w_pk^2``: between sessions, and within this one. The effect ``s_b`` of the
baseline's session, variance ``sigma^2``, is common to all plans that were timed beside it, and changes when a worker is
started anew. Latencies are stated relative to the first session of the baseline, the anchor: ``mu_p - s_anchor``. So
plans that were timed beside the anchor owe nothing to the baseline's sessions.

``sigma^2 + mean w^2`` is estimated by the residual mean square of the two-way layout of plans and baseline sessions;
it is unbiased, with as many degrees of freedom as there are timings beyond the effects. Effects of the baseline's
sessions are predicted with their prior variance (best linear unbiased prediction: Searle, Casella and McCulloch,
Variance Components, 1992, chapter 7). With few degrees of freedom intervals are Student's t, theirs by Satterthwaite's
approximation (Biometrics Bulletin 2, 1946), in which the variance within a session has few degrees of its own: a
session that stopped after 5 values and scatters more than others is not known as well as it says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.paired import t_quantile
from mptune.engines.timing.session_timing import SessionTiming

Floats = NDArray[np.float64]

_COVERAGE = 0.95

_WITHIN_DEGREES = 4.0
"""Degrees of freedom of one session's variance. The bootstrap of a median is slow to learn it (Hall and Martin,
Probability Theory and Related Fields 80, 1988): simulated, 3.2 of 5 values, 5 of 7, 11 of 38."""


@dataclass(frozen=True)
class RatioEstimate:
    """The log ratio of a plan's latency to the first session of the baseline, over all of its sessions.

    Attributes:
        sd: its standard error.
        degrees: degrees of freedom of ``sd``; infinite where it is known.
    """

    log_ratio: float
    sd: float
    degrees: float

    def interval(self, coverage: float = _COVERAGE) -> tuple[float, float]:
        """Student's t interval of the ratio (not of its logarithm)."""
        half = t_quantile(0.5 + coverage / 2.0, self.degrees) * self.sd
        return math.exp(self.log_ratio - half), math.exp(self.log_ratio + half)


class SessionSpread:
    """The spread between sessions of one model on one device, estimated from all of its timings. See the module.

    Attributes:
        sd: between sessions, relative; None where no plan was timed more than once, so that nothing is known of it.
        degrees: degrees of freedom of the estimate.
        residual_variance: mean square that it was estimated from, the variance within sessions counted in.
    """

    def __init__(self, timings: Mapping[str, Sequence[SessionTiming]], anchor: str | None = None) -> None:
        """Estimate.

        Args:
            anchor: session of the baseline that latencies are stated relative to; None takes the first timing's.
        """
        every = [timing for sessions in timings.values() for timing in sessions]
        first = anchor if anchor is not None or not every else every[0].baseline
        named = dict.fromkeys([*([] if first is None else [first]), *(timing.baseline for timing in every)])
        self._index = {name: number for number, name in enumerate(named)}
        repeated = [sessions for sessions in timings.values() if len(sessions) > 1]
        self.residual_variance, self.degrees = _residual(repeated, self._index)
        within = [timing.sd**2 for sessions in repeated for timing in sessions]
        self._within = float(np.mean(within)) if within else 0.0
        self._between = max(0.0, self.residual_variance - self._within) if self.degrees else 0.0
        # Where timings differ by less than their sessions say, the bootstrap of few values has overstated it.
        self._scale = min(1.0, self.residual_variance / self._within) if self._within > 0.0 and self.degrees else 1.0
        self.sd = math.sqrt(self._between) if self.degrees else None
        self._effects, self._covariance = self._predict(repeated)

    def _predict(self, repeated: Sequence[Sequence[SessionTiming]]) -> tuple[Floats, Floats]:
        """Effects of the baseline's sessions, shape (sessions,), and their covariance in units of ``sigma^2``."""
        count = len(self._index)
        precision, response = np.eye(count), np.zeros(count)  # the prior's, in units of 1 / sigma^2
        if self._between <= 0.0:
            return np.zeros(count), np.eye(count)
        weight = self._between / max(self.residual_variance, self._between)
        for sessions in repeated:  # a plan's own effect is eliminated: nothing is known of it beforehand
            numbers = [self._index[timing.baseline] for timing in sessions]
            values = np.array([timing.log_ratio for timing in sessions])
            design = np.eye(count)[numbers]
            precision += weight * (design.T @ design - np.outer(design.sum(0), design.sum(0)) / len(sessions))
            response -= weight * design.T @ (values - values.mean())
        covariance: Floats = np.linalg.inv(precision).astype(np.float64)
        return covariance @ response, covariance

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
        if not self.degrees:
            return RatioEstimate(log_ratio, math.sqrt(variance), math.inf)
        # Satterthwaite: all that was estimated from the mean square is as uncertain as it, and all that is beyond it as
        # uncertain as what is within these sessions. Where nothing is between sessions the mean square scales both.
        by_residual = least / count + self._between * common if self._between > 0.0 else variance
        by_values = float(np.sum((own - least) ** 2)) / count**4
        if variance <= 0.0:
            return RatioEstimate(log_ratio, 0.0, float(self.degrees))
        degrees = variance**2 / (by_residual**2 / self.degrees + by_values / _WITHIN_DEGREES)
        return RatioEstimate(log_ratio, math.sqrt(variance), degrees)


def _residual(repeated: Sequence[Sequence[SessionTiming]], index: Mapping[str, int]) -> tuple[float, int]:
    """Residual mean square of the two-way layout of plans and baseline sessions, and its degrees of freedom."""
    rows = [(number, index[timing.baseline]) for number, plan in enumerate(repeated) for timing in plan]
    if not rows:
        return 0.0, 0
    values = np.array([timing.log_ratio for plan in repeated for timing in plan])
    plans, baselines = np.array(rows).T
    design = np.hstack([np.eye(len(repeated))[plans], np.eye(len(index))[baselines]])
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    degrees = len(values) - int(rank)
    squares = float(np.sum((values - design @ solution) ** 2))
    return (squares / degrees if degrees else 0.0), degrees
