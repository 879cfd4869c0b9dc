"""The additive law of latency and error (SEARCH.md), fitted to plans that were measured, and how far it is off.

latency = all-FP32 - gains of the FP16 groups + costs of the boundaries that are crossed
error^2 = sum of the squared errors of the FP16 groups
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares, lsq_linear

from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.sampler.boundaries import Boundary
from mptune.tuning.sampler.plan_rows import Bools, Floats
from mptune.tuning.sampler.posterior import Prior

_PULL = 0.3
"""Weight of the roofline's terms beside one plan's: only for terms that the plans cannot separate."""

_DRAW = 1.0
"""Weight of a factor of e between a group's squared error in the law and alone, beside the same between plans."""

FOLDS = 5


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
    def fit(cls, prior: Prior, rows: Bools, latency_ms: Floats, error: Floats, base_ms: float) -> AdditiveLaw:
        """Fit.

        Args:
            prior: of the free groups: boundaries, the roofline's terms, and one-group errors.
            rows: plans over the free groups, shape (plans, groups), True is FP16; all of them finite.
            latency_ms: of the plans.
            error: of the plans.
            base_ms: latency of all-FP32.
        """
        columns = _columns(prior.boundaries, rows)
        expected = _expected(prior, rows, latency_ms, base_ms)
        groups = rows.shape[1]
        low = np.concatenate([np.full(groups, -np.inf), np.zeros(len(prior.boundaries))])
        stacked = np.vstack([columns, _PULL * np.eye(len(expected))])
        wanted = np.concatenate([latency_ms - base_ms, _PULL * expected])
        terms = lsq_linear(stacked, wanted, (low, np.inf), method="trf").x
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
        latency: standard deviation of predicted over measured latency, less 1.
        bias: mean of the same.
        log_error: standard deviation of the natural logarithm of predicted over measured error.
    """

    plans: int
    latency: float
    bias: float
    log_error: float

    @classmethod
    def of(cls, law: AdditiveLaw, rows: Bools, latency_ms: Floats, error: Floats) -> Residual:
        """Of a law on plans."""
        return _residual(*law.predict(rows), latency_ms, error)

    def to_json(self) -> dict[str, Any]:
        """Four digits."""
        return {"plans": self.plans} | {k: float(f"{v:.4g}") for k, v in vars(self).items() if k != "plans"}


def cross_validated(prior: Prior, rows: Bools, latency_ms: Floats, error: Floats, base_ms: float) -> Residual:
    """The residual of laws that are each fitted without a fifth of the plans, on that fifth; plans in random order."""
    predicted = np.empty((2, len(rows)))
    fold = np.arange(len(rows)) % FOLDS
    for number in range(FOLDS):
        out = fold == number
        law = AdditiveLaw.fit(prior, rows[~out], latency_ms[~out], error[~out], base_ms)
        predicted[:, out] = law.predict(rows[out])
    return _residual(predicted[0], predicted[1], latency_ms, error)


def unit_squares(prior: Prior) -> Floats:
    """Squared one-group errors of a prior, within what a fit can bear."""
    assert prior.log_square_errors is not None
    return np.exp(np.clip(prior.log_square_errors, -40.0, 0.0))


def _fit_squares(prior: Prior, rows: Bools, error: Floats) -> Floats:
    """Squared errors of the groups: least squares of the plans' log errors, drawn weakly to the one-group errors."""
    unit, counted = unit_squares(prior), (error > ERROR_FLOOR) & rows.any(axis=1)
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


def _residual(predicted_ms: Floats, log_error: Floats, latency_ms: Floats, error: Floats) -> Residual:
    off = predicted_ms / latency_ms - 1.0
    wrong = log_error - np.log(np.maximum(error, ERROR_FLOOR))
    counted = error > ERROR_FLOOR
    return Residual(len(off), float(off.std()), float(off.mean()), float(wrong[counted].std()))


def _columns(boundaries: tuple[Boundary, ...], rows: Bools) -> Floats:
    return np.column_stack([rows, *(boundary.crossed(rows) for boundary in boundaries)]).astype(float)


def _expected(prior: Prior, rows: Bools, latency_ms: Floats, base_ms: float) -> Floats:
    """The roofline's terms, scaled so that its most FP16 plan has the measured latency."""
    gains = np.zeros(rows.shape[1]) if prior.gains_ms is None else np.array(prior.gains_ms)
    terms = np.concatenate([-gains, prior.boundary_costs_ms])
    most = int(rows.sum(axis=1).argmax())
    predicted = float(_columns(prior.boundaries, rows[[most]])[0] @ terms)
    scale = (latency_ms[most] - base_ms) / predicted if predicted < 0.0 else 1.0
    return terms * max(scale, 0.0)
