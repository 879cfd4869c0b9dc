"""The additive law of latency and error, fitted to plans that were measured, and how far it is off.

latency = all-FP32 - gains of the FP16 groups + costs of the boundaries that are crossed
error^2 = sum of the squared errors of the FP16 groups
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares, lsq_linear

from mptune.tuning.dominance import ERROR_FLOOR
from mptune.tuning.sampler.plans import Bools, Boundary, Columns, Crossings, Floats
from mptune.tuning.sampler.trials import Prior

PULLS = (0.1, 0.3, 1.0, 3.0)
"""Weights of the roofline's terms beside one plan's, for terms that the plans cannot separate."""

_DRAW = 1.0
"""Weight of a factor of e between a group's squared error in the law and alone, beside the same between plans."""

FOLDS = 5

_PASSES, _ODD = 3, 6.0
"""The law is fitted so often, each time without the plans whose latency is off by so many robust standard deviations:
a few timings of an H200 are off by tens of per cent, and would bend all terms."""


@dataclass(frozen=True)
class AdditiveLaw:
    """The fitted terms over the free groups of one model.

    Attributes:
        base_ms: latency of all-FP32.
        gains_ms: what FP16 saves in each group.
        boundaries: between the groups.
        costs_ms: what crossing each boundary costs, at least 0.
        squares: squared error of each group in FP16.
    """

    base_ms: float
    gains_ms: Floats
    boundaries: tuple[Boundary, ...]
    costs_ms: Floats
    squares: Floats

    @classmethod
    def fit(
        cls, prior: Prior, rows: Bools, latency_ms: Floats, error: Floats, base_ms: float, pull: float = PULLS[1]
    ) -> AdditiveLaw:
        """Fit.

        Args:
            prior: of the free groups: boundaries, the roofline's terms, and one-group errors.
            rows: plans over the free groups, shape (plans, groups), True is FP16; all of them finite.
            latency_ms: of the plans.
            error: of the plans.
            base_ms: latency of all-FP32.
            pull: of ``PULLS``.
        """
        columns, groups = _columns(prior.boundaries, rows), rows.shape[1]
        # The roofline's terms, scaled so that its most FP16 plan has the measured latency.
        gains = np.zeros(groups) if prior.gains_ms is None else np.array(prior.gains_ms)
        roofline = np.concatenate([-gains, prior.boundary_costs_ms])
        most = int(rows.sum(axis=1).argmax())
        predicted = float(columns[most] @ roofline)
        expected = roofline * max((latency_ms[most] - base_ms) / predicted if predicted < 0.0 else 1.0, 0.0)
        low = np.concatenate([np.full(groups, -np.inf), np.zeros(len(prior.boundaries))])
        kept = np.ones(len(rows), dtype=bool)
        for _ in range(_PASSES):
            stacked = np.vstack([columns[kept], pull * np.eye(len(expected))])
            wanted = np.concatenate([latency_ms[kept] - base_ms, pull * expected])
            terms = lsq_linear(stacked, wanted, (low, np.inf), method="trf").x
            kept = ~_is_odd((base_ms + columns @ terms) / latency_ms - 1.0)
        return cls(base_ms, -terms[:groups], prior.boundaries, terms[groups:], _fit_squares(prior, rows, error))

    def predict(self, rows: Bools) -> tuple[Floats, Floats]:
        """Latency in milliseconds, and natural logarithm of the error."""
        terms = np.concatenate([-self.gains_ms, self.costs_ms])
        square = rows @ self.squares + ERROR_FLOOR**2
        return self.base_ms + _columns(self.boundaries, rows) @ terms, 0.5 * np.log(square)


@dataclass(frozen=True)
class Residual:
    """How far a law is off, on plans that it was not fitted to.

    Attributes:
        plans: how many.
        latency: standard deviation of predicted over measured latency, less 1; without the odd plans.
        bias: mean of the same.
        odd: plans whose latency is off by more than six robust standard deviations.
        log_error: standard deviation of the natural logarithm of predicted over measured error.
    """

    plans: int
    latency: float
    bias: float
    odd: int
    log_error: float

    @classmethod
    def of(cls, predicted_ms: Floats, log_error: Floats, latency_ms: Floats, error: Floats) -> Residual:
        """Of predictions (``AdditiveLaw.predict``) and what was measured."""
        off = predicted_ms / latency_ms - 1.0
        wrong = log_error - np.log(np.maximum(error, ERROR_FLOOR))
        odd = _is_odd(off)
        rest = off[~odd]
        log_sd = float(wrong[error > ERROR_FLOOR].std())
        return cls(len(off), float(rest.std()), float(rest.mean()), int(odd.sum()), log_sd)

    def to_json(self) -> dict[str, Any]:
        """Four digits."""
        return {k: v if isinstance(v, int) else float(f"{v:.4g}") for k, v in vars(self).items()}


def cross_validated(
    prior: Prior, rows: Bools, latency_ms: Floats, error: Floats, base_ms: float, left_out: Bools
) -> tuple[Residual, float]:
    """The smallest residual of latency over ``PULLS``, and the pull that it has.

    Laws are each fitted without a fifth of the plans that are ``left_out`` in turn, and judged on it; the arguments
    before are those of ``AdditiveLaw.fit``.
    """
    positions = np.random.default_rng(0).permutation(np.flatnonzero(left_out))
    fold = np.full(len(rows), -1)
    fold[positions] = np.arange(len(positions)) % FOLDS
    residuals = []
    for pull in PULLS:
        predicted = np.empty((2, len(rows)))
        for number in range(FOLDS):
            out = fold == number
            law = AdditiveLaw.fit(prior, rows[~out], latency_ms[~out], error[~out], base_ms, pull)
            predicted[:, out] = law.predict(rows[out])
        residuals.append((Residual.of(*predicted[:, left_out], latency_ms[left_out], error[left_out]), pull))
    return min(residuals, key=lambda row: row[0].latency)


def _fit_squares(prior: Prior, rows: Bools, error: Floats) -> Floats:
    """Squared errors of the groups: least squares of the plans' log errors, drawn weakly to the one-group errors."""
    assert prior.log_square_errors is not None
    unit = np.exp(np.clip(prior.log_square_errors, -40.0, 0.0))  # within what a fit can bear
    counted = (error > ERROR_FLOOR) & rows.any(axis=1)
    rows, wanted = rows[counted].astype(float), np.log(error[counted])

    def parts(logs: Floats) -> tuple[Floats, Floats]:
        squares = rows * (unit * np.exp(logs))
        return squares, squares.sum(axis=1) + ERROR_FLOOR**2

    def residuals(logs: Floats) -> Floats:
        return np.concatenate([0.5 * np.log(parts(logs)[1]) - wanted, _DRAW * logs])

    def slopes(logs: Floats) -> Floats:
        squares, total = parts(logs)
        return np.vstack([0.5 * squares / total[:, None], _DRAW * np.eye(len(logs))])

    return unit * np.exp(least_squares(residuals, np.zeros(len(unit)), slopes).x)


def _is_odd(off: Floats) -> Bools:
    """Which deviations are far outside of the rest, by the median absolute deviation."""
    centre = np.median(off)
    odd: Bools = np.abs(off - centre) > _ODD * 1.4826 * np.median(np.abs(off - centre))
    return odd


def _columns(boundaries: tuple[Boundary, ...], rows: Bools) -> Floats:
    crossings = Crossings(Columns.fp16(map(str, range(rows.shape[1]))), boundaries)
    return np.column_stack([rows, crossings.count(np.ascontiguousarray(rows.T)).T]).astype(float)
