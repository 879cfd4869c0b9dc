"""What the sampler reads back from Optuna's trials."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from mptune.tuning.sampler import trials
from mptune.tuning.sampler.plans import Columns
from mptune.tuning.sampler.trials import EMULATED_ATTR, OUTCOME_ATTR, PLAN_ATTR, read_plans, set_outcome

GROUPS = ("a", "b")
CHOICES = dict.fromkeys(GROUPS, CategoricalDistribution(("fp32", "fp16")))


def make_trial(
    bits: str, values: tuple[float, float] | None = None, state: TrialState | None = None, **attrs: Any
) -> optuna.trial.FrozenTrial:
    """COMPLETE where it has values, else PRUNED."""
    params = {group: "fp16" if bit == "1" else "fp32" for group, bit in zip(GROUPS, bits, strict=True)}
    state = state or (TrialState.PRUNED if values is None else TrialState.COMPLETE)
    return create_trial(params=params, distributions=CHOICES, values=values, state=state, user_attrs=attrs)


def read(*done: optuna.trial.FrozenTrial, **options: Any) -> trials.BuiltPlans:
    return read_plans(done, Columns.fp16(GROUPS), **options)


def timed(ms: float, sd_ms: float) -> dict[str, object]:
    return {"evaluation": {"latency": {"median_ms": ms, "ci95_ms": [ms - 1.96 * sd_ms, ms + 1.96 * sd_ms]}}}


def test_a_failed_plan_is_timed() -> None:
    built = read(make_trial("11", **{OUTCOME_ATTR: {"values": None, **timed(3.0, 0.2), "group_ms": {"a": 1.0}}}))
    assert (built.latency_ms, built.latency_sd_ms, built.finite) == ([3.0], pytest.approx([0.2]), [0.0])
    np.testing.assert_array_equal(built.group_ms, [[1.0, math.nan]])


def test_what_the_states_say() -> None:
    built = read(
        make_trial("00", (4.0, 1e-7), **{OUTCOME_ATTR: timed(9.0, 0.1)}),
        make_trial("01", (3.0, 1e-3)),
        make_trial("00", (5.0, 1e-7)),
        make_trial("11", state=TrialState.FAIL),
        make_trial("10", state=TrialState.PRUNED),
    )
    assert built.plans.tolist() == [[False, False], [False, True], [False, False], [True, False]]
    np.testing.assert_array_equal(built.latency_ms, [4.0, 3.0, 5.0, math.nan])
    np.testing.assert_array_equal(built.error, [1e-7, 1e-3, 1e-7, math.nan])
    assert built.finite.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert (built.base_ms, built.base_sd_ms) == (4.0, pytest.approx(0.1)), "the first all-FP32"
    assert not len(built.emulations[1])
    assert built.group_ms is None


def test_a_running_trial_counts_and_the_one_that_asks_does_not() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"])
    for bit in ("fp16", "fp32"):
        study.enqueue_trial({"a": bit, "b": "fp16"})
        study.ask()
    built = read(*study.trials, asking=1)
    assert built.plans.tolist() == [[True, True]]
    assert np.isnan(built.finite).all()
    assert np.isnan(built.base_ms)


def test_all_fp32_outside_of_the_space_is_the_baseline_and_no_row() -> None:
    outside = make_trial("00", (4.0, 1e-7), **{PLAN_ATTR: dict.fromkeys(GROUPS, "fp32")})
    built = read(outside, make_trial("00", (3.0, 1e-4)))
    assert built.base_ms == 4.0
    assert built.latency_ms.tolist() == [3.0]


def test_emulated_errors_beside_measured_ones() -> None:
    emulated = {"01": 3e-3, "10": "inf", "11": 2e-2, "111": 1.0, "00": 1e-9}
    built = read(make_trial("00", (4.0, 0.0), **{EMULATED_ATTR: emulated}), make_trial("01", (3.0, 2e-3)))
    plans, errors = built.emulations
    assert plans.tolist() == [[True, False], [True, True]]
    assert errors.tolist() == [math.inf, 2e-2]
    assert built.emulation_ratios == pytest.approx([1.5]), "an error below the floor says nothing of emulation"


def test_feasible_or_not() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"])
    for values, violation in (([1.0, 0.0], 0.0), (None, 1.0)):
        set_outcome(study.ask(), {"values": values})
        assert trials.constraints_of(study.trials[-1]) == (violation,)
    study.ask()
    assert trials.constraints_of(study.trials[-1]) == (0.0,)
