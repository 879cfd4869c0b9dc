"""What a search of a simulated model loses: what it takes the model for, and the shares."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.search_loss import believed, run_one
from benchmarks.simulator import Hard, Truth
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.posterior import BuiltPlans


def test_a_believed_model_has_the_latencies_that_the_sampler_predicts() -> None:
    truth = Truth(16, 1, hard=Hard())
    prior, rng = truth.prior("precision"), np.random.default_rng(0)
    plans = rng.random((9, 16)) < 0.5
    plans[0] = False
    latency, ones = truth.latency(plans), np.ones(9)
    built = BuiltPlans(plans, latency, 0.003 * latency, truth.error(plans), ones, truth.base, 0.003 * truth.base)
    model, own = LatencyModel(prior, built), believed(truth, prior, built)
    others = rng.random((5, 16)) < 0.5
    terms = model.mean()
    predicted = model.predict(others, terms[None])[0] + terms[-1]  # the fixed gain is all plans'
    assert own.latency(others) == pytest.approx(predicted, rel=1e-6)
    assert not np.allclose(own.latency(others), truth.latency(others), rtol=1e-3)
    assert truth.tactics.std() > 0  # the true model is as it was


@pytest.mark.slow
def test_of_few_groups_every_front_is_reachable_and_found_but_for_what_is_unknown() -> None:
    loss = run_one((9, 0, "hard"))
    assert loss["reachable"] == pytest.approx(1.0)
    assert 0.98 < loss["found"] <= 1.0
    assert 0.5 < loss["anew, knowing 25"] <= loss["reachable"]
    assert 0 <= loss["beaten"] < 50
