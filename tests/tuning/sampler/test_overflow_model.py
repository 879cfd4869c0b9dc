"""Overflows are blamed on the right groups: held against the posterior over all sets of culprits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mptune.tuning.sampler.overflow_model import OverflowModel
from mptune.tuning.sampler.plans import Bools, Floats
from mptune.tuning.sampler.trials import Prior
from tests.tuning.additive import built

GROUPS = 8
ALL = (np.arange(2**GROUPS)[:, None] >> np.arange(GROUPS) & 1).astype(bool)


def learn(
    plans: Bools,
    finite: list[float] | Floats,
    emulated: tuple[Bools, Floats] | None = None,
    failed: list[bool] | None = None,
    squares: tuple[float, ...] | None = None,
) -> OverflowModel:
    """What came of the plans is known, and which gave no outputs at all."""
    prior = Prior(tuple(map(str, range(plans.shape[1]))), log_square_errors=squares)
    gave_nothing = None if failed is None else np.array(failed)
    return OverflowModel(prior, built(plans, finite=np.array(finite), emulated=emulated, failed=gave_nothing))


def rows(*members: list[int]) -> Bools:
    return np.array([[group in groups for group in range(GROUPS)] for groups in members])


def posterior(plans: Bools, finite: Floats) -> Floats:
    """Of every set of culprits: what Bayes says where each group is one with a chance of 1 %."""
    weights = 0.01 ** ALL.sum(axis=1) * 0.99 ** (~ALL).sum(axis=1)
    for plan, good in zip(plans, finite, strict=True):
        weights = weights * (~(ALL & plan).any(axis=1) == bool(good))
    return weights / weights.sum()


@given(st.integers(0, 2**GROUPS - 1), st.lists(st.integers(1, 2**GROUPS - 1), min_size=1, max_size=8))
def test_chances_are_those_of_the_exact_posterior(culprits: int, numbers: list[int]) -> None:
    plans = ALL[numbers]
    finite = (~(plans & ALL[culprits]).any(axis=1)).astype(float)
    exact, overflow = posterior(plans, finite), learn(plans, finite)
    assert overflow.probabilities == pytest.approx(exact @ ALL, abs=0.06)
    clear = np.array([exact[~(ALL & plan).any(axis=1)].sum() for plan in ALL])
    assert overflow.p_sound(ALL) == pytest.approx(clear, abs=0.06)


def test_what_holds_all_of_a_failed_plan_fails() -> None:
    overflow = learn(rows([0, 1, 2]), [0.0])
    same, more, less, other = overflow.p_sound(rows([0, 1, 2], [0, 1, 2, 3], [0, 1], [3, 4]))
    assert same == more == 0.0
    assert less == pytest.approx(1 / 3, abs=0.02)
    assert other == pytest.approx(0.99**2)
    # A thousand explanations are too many to hold plans against: a sample stands for them.
    many, own = learn(np.arange(1001)[None] < 1000, [0.0]), np.eye(1001, dtype=bool)
    assert many.p_sound(own[[0, 1000]]) == pytest.approx([0.99, 0.99], abs=0.02)


def test_two_culprits_are_found_among_many_groups() -> None:
    groups, culprits = 120, [33, 59]
    plans = np.random.default_rng(0).random((40, groups)) < 0.4
    overflow = learn(plans, ~plans[:, culprits].any(axis=1) * 1.0)
    assert sorted(np.argsort(-overflow.probabilities)[:2].tolist()) == culprits
    assert overflow.probabilities[culprits].min() > 0.9
    without = np.ones((1, groups), dtype=bool)
    without[0, culprits] = False
    assert overflow.p_sound(without)[0] > 0.5


def test_more_culprits_than_an_explanation_may_have_do_no_harm() -> None:
    overflow = learn(np.eye(60, dtype=bool)[:20], np.zeros(20))
    assert np.isfinite(overflow.probabilities).all()
    assert overflow.probabilities[:20].mean() > 5 * overflow.probabilities[20:].max()


def test_what_emulation_says_counts() -> None:
    foreseen = learn(rows([0, 1]), [0.0], squares=(math.inf, *([-20.0] * (GROUPS - 1))))
    assert foreseen.probabilities[0] > 0.9
    assert foreseen.probabilities[1] == pytest.approx(0.01), "what group 0 explains is nobody else's fault"
    told = learn(rows([2]), [1.0], (rows([0, 1], [4, 5, 6, 7]), np.array([math.inf, 1e-3])))
    assert told.probabilities[:2] == pytest.approx([0.5, 0.5], abs=0.02)
    assert told.probabilities[4:].max() == pytest.approx(0.01), "what emulation finds finite may still fail"


def test_a_failure_that_no_group_explains_is_one_of_all_together() -> None:
    overflow = learn(rows([0, 1, 2, 3], [0, 1, 4], [2, 3, 4]), [0.0, 1.0, 1.0])
    assert overflow.probabilities[:5].max() < 0.01
    less, same, more = overflow.p_sound(rows([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]))
    assert less > 0.99
    assert same == more == pytest.approx(0.0, abs=1e-3)


def test_a_plan_that_gave_no_outputs_says_little_of_others_and_several_blame_what_they_share() -> None:
    overflow = learn(rows([0, 1], [2]), [0.0, 1.0], failed=[True, False])
    assert overflow.p_sound(rows([0, 1]))[0] == pytest.approx(0.0, abs=1e-6)
    assert overflow.p_sound(rows([0], [1], [0, 3])).min() > 0.85
    assert overflow.probabilities[2] < 1e-6
    plans, failed = rows([0, 1, 2], [0, 3, 4], [0, 5, 6], [1, 2, 3, 4, 5, 6]), [True, True, True, False]
    shared = learn(plans, [0.0, 0.0, 0.0, 1.0], failed=failed)
    assert shared.probabilities[0] > 0.85
    assert shared.p_sound(rows([0, 7]))[0] < 0.15
    assert shared.p_sound(rows([1, 3, 5]))[0] > 0.9
