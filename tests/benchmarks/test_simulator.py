"""The simulated models, default and harder, are those that published figures were taken with."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulator import Hard, Truth


def test_the_default_models_are_what_they_were() -> None:
    truth = Truth(40, 3)
    plans = np.random.default_rng(0).random((3, 40)) < 0.5
    assert truth.latency(plans).sum() / truth.base == pytest.approx(2.78870062, rel=1e-6)
    assert truth.error(plans).sum() == pytest.approx(0.0182539443, rel=1e-6)


def test_the_harder_models_are_what_they_were() -> None:
    """Errors and boundaries that the prior has wrong, and overflows that only builds see."""
    truth = Truth(400, 0, hard=Hard())
    plans = np.random.default_rng(0).random((3, 400)) < 0.5
    assert truth.latency(plans).sum() / truth.base == pytest.approx(2.6687994967, rel=1e-6)
    assert truth.error(plans).sum() == pytest.approx(0.0844117924, rel=1e-6)
    assert np.log(truth.emulated).sum() == pytest.approx(-3138.648872, rel=1e-6)
    assert (truth.overflows.sum(), truth.missed.sum()) == (15, 4)
    assert np.isinf(truth.prior().log_square_errors).sum() == 11
