"""Three precisions: BF16 is proposed where something overflows and around it, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import optuna
import pytest

from mptune.graph.precision import Precision
from mptune.tuning.sampler.cuts.boundaries import Boundary
from mptune.tuning.sampler.cuts.in_question import narrowed
from mptune.tuning.sampler.error_model import assumed_error
from mptune.tuning.sampler.group_tests.emulation_design import unknown_alone
from mptune.tuning.sampler.plan_rows import exclusive
from mptune.tuning.sampler.posterior import BuiltPlans, Prior
from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.sampler.trials import set_feasible
from tests.tuning.sampler.test_precision import PRIOR
from tests.tuning.sampler.test_stock import CAST, ERRORS, GAIN, GROUPS

LESS_EXACT = 8.0
SMALL = {group: error / 30 for group, error in ERRORS.items()}
"""Errors of FP16: in BF16 every group can be wanted."""
TWO = replace(PRIOR, log_square_errors=tuple(math.log(SMALL[g] ** 2) for g in GROUPS))


def three(bf16: tuple[int, ...] = (), cast_ms: float = CAST) -> Prior:
    """The chain of ``TWO``: these groups may be BF16 and not FP16, all others both."""
    n = len(GROUPS)
    both = [i for i in range(n) if i not in bf16]
    ends = [(i,) if i in bf16 else (i, n + both.index(i)) for i in range(n)]
    assert TWO.log_square_errors is not None
    assert TWO.gains_ms is not None
    squares = [s + 2 * math.log(LESS_EXACT) * (i in bf16) for i, s in enumerate(TWO.log_square_errors)]
    assumed = [assumed_error(squares[i], 0.0, Precision.FP16, Precision.BF16) for i in both]
    return replace(
        TWO,
        groups=(*GROUPS, *(GROUPS[i] for i in both)),
        log_square_errors=(*squares, *(square for square, _ in assumed)),
        log_square_sds=(*(0.0 for _ in GROUPS), *(sd for _, sd in assumed)),
        gains_ms=(*TWO.gains_ms, *(TWO.gains_ms[i] for i in both)),
        boundaries=tuple(Boundary(a, (b,)) for a, b in pairwise(ends)),
        boundary_costs_ms=(cast_ms,) * (n - 1),
        precisions=(*("bf16" if i in bf16 else "fp16" for i in range(n)), *("bf16" for _ in both)),
    )


def law(params: Mapping[str, str], cast_ms: float = CAST) -> tuple[float, float]:
    chosen = [params[g] for g in GROUPS]
    casts = sum(a != b for a, b in pairwise(chosen))
    factors = {"fp32": 0.0, "fp16": 1.0, "bf16": LESS_EXACT}
    error = math.hypot(1e-7, *(factors[p] * SMALL[g] for g, p in zip(GROUPS, chosen, strict=True)))
    return len(GROUPS) - GAIN * sum(p != "fp32" for p in chosen) + cast_ms * casts, error


def searched(
    prior: Prior, trials: int, overflows: Callable[[Mapping[str, str]], bool] = lambda _: False, cast_ms: float = CAST
) -> list[dict[str, str]]:
    """The plans of a search, all-FP32 and all of the preferred precisions first."""
    study = optuna.create_study(
        directions=["minimize", "minimize"],
        sampler=PrecisionSampler(prior, 0, emulate=lambda plans: [law(plan, cast_ms)[1] for plan in plans]),
    )
    options = prior.columns.options
    for end in (0, 1):
        study.enqueue_trial({group: of[end] for group, of in options.items()})
    plans = []
    for _ in range(trials):
        trial = study.ask({g: optuna.distributions.CategoricalDistribution(of) for g, of in options.items()})
        plans.append(dict(trial.params))
        finite = not overflows(trial.params)
        set_feasible(trial, finite)
        if finite:
            study.tell(trial, law(trial.params, cast_ms))
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return plans


def test_where_nothing_overflows_the_proposals_are_those_of_two_precisions() -> None:
    assert searched(three(), 5) == searched(TWO, 5)


def test_what_only_a_build_shows_to_overflow_becomes_bf16() -> None:
    guilty = GROUPS[17]
    plans = searched(three(), 9, overflows=lambda plan: plan[guilty] == "fp16")
    assert [plan[guilty] for plan in plans[:2]] == ["fp32", "fp16"]
    assert any(plan[guilty] == "bf16" for plan in plans[2:])
    assert sum(plan[guilty] == "fp16" for plan in plans[5:]) <= 2


def test_a_group_between_two_in_bf16_is_bf16_where_that_saves_casts() -> None:
    """A Cast costs half of what a group gains."""
    plans = searched(three((15, 17), cast_ms=0.5), 8, cast_ms=0.5)
    ends = [plan for plan in plans[2:] if plan[GROUPS[15]] == plan[GROUPS[17]] == "bf16"]
    assert any(plan[GROUPS[16]] == "bf16" for plan in ends)
    far = [g for i, g in enumerate(GROUPS) if min(abs(i - 15), abs(i - 17)) > 2]
    assert all(plan[g] != "bf16" for plan in plans for g in far)


def test_a_plan_goes_through_its_row_and_back() -> None:
    columns = three((3,)).columns
    choices = {g: ("fp32", "fp16", "bf16")[i % 3] for i, g in enumerate(GROUPS)} | {GROUPS[3]: "bf16"}
    row = columns.row(choices)
    assert row is not None
    assert columns.choices(np.array(row)) == choices
    assert columns.row({**choices, GROUPS[3]: "fp16"}) is None, "FP16 is none of its choices"


def test_emulated_errors_keep_the_bits_of_all_columns() -> None:
    prior, n = three((0,)), len(GROUPS)
    built = BuiltPlans(np.zeros((0, 2 * n - 1), dtype=bool), *(np.zeros(0) for _ in range(4)), base_ms=1.0)
    now = narrowed(prior, built)
    assert now.prior.further == ((1, n),), "the group after the one that is BF16"
    assert now.widened({"1" * (n + 1): 0.5}) == {"1" * (n + 1) + "0" * (n - 2): 0.5}


def test_columns_of_one_group_exclude_each_other() -> None:
    before = np.array([[1, 0], [0, 1], [0, 0]], dtype=bool)
    plans = exclusive(np.ones((3, 2), dtype=bool), before, ((0, 1),))
    assert plans.tolist() == [[False, True], [True, False], [False, True]]


def test_an_error_in_bf16_is_that_of_fp16_times_8() -> None:
    assert assumed_error(-5.0, 0.0, Precision.FP16, Precision.BF16)[0] == pytest.approx(-5.0 + 2 * math.log(LESS_EXACT))
    assert math.isnan(assumed_error(math.inf, 0.0, Precision.FP16, Precision.BF16)[0])


def test_bf16_alone_is_emulated_only_where_fp16_says_nothing() -> None:
    """Of two groups that FP16 was emulated in, one overflows."""
    precisions = ("fp16", "fp16", "bf16", "bf16")
    prior = Prior(("a", "b", "a", "b"), (math.inf, -9.0, math.nan, -4.8), precisions=precisions)
    alone = unknown_alone(prior, np.array([0.9, 0.01, 0.0, 0.0]), np.zeros((0, 4), dtype=bool))
    assert alone.tolist() == [[False, False, True, False]]
    assert not len(unknown_alone(prior, np.array([0.9, 0.01, 0.0, 0.0]), alone))
