"""Plans that are emulated to learn the groups' errors: they tell more than random ones, and none where all is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from mptune.tuning.dominance import ERROR_FLOOR
from mptune.tuning.sampler.error_model import ErrorModel, design_plans
from mptune.tuning.sampler.plans import Bools, Floats
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN, PrecisionSampler
from mptune.tuning.sampler.trials import BuiltPlans, Prior

GROUPS = 24
EVERY = np.ones(GROUPS, dtype=bool)
NONE = np.zeros((0, GROUPS), dtype=bool)


class Model:
    """Errors that add in squares, and a prior that is off by a normal of 0.35 decades."""

    def __init__(self, seed: int, decades: float = 0.35, groups: int = GROUPS) -> None:
        rng = np.random.default_rng(seed)
        self.ids = tuple(f"g{i:02d}" for i in range(groups))
        self.squares = np.log(10 ** rng.uniform(-4.5, -2.2, groups)) * 2.0
        self.known = self.squares + np.log(10.0) * 2.0 * decades * rng.normal(size=groups)
        self.prior = Prior(self.ids, log_square_errors=tuple(self.known))
        self.asked: list[Bools] = []

    def errors(self, plans: Bools) -> Floats:
        return np.sqrt(plans @ np.exp(self.squares) + ERROR_FLOOR**2)

    def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        plans = np.array([[choice[group] == "fp16" for group in self.ids] for choice in choices])
        self.asked.append(plans)
        return [float(error) for error in self.errors(plans)]

    def built(self) -> BuiltPlans:
        plans = np.array([[False] * len(self.ids), [True] * len(self.ids)])
        return BuiltPlans(plans, np.array([10.0, 6.0]), np.full(2, 0.01), self.errors(plans), np.ones(2), 10.0)

    def miss(self, model: ErrorModel) -> float:
        """Root mean square error of the logs of the groups' errors."""
        return float(np.sqrt(np.mean((0.5 * (model.mode - self.squares)) ** 2)))


@pytest.mark.parametrize("seed", range(4))
def test_as_many_emulations_as_groups_tell_the_errors_and_random_plans_do_not(seed: int) -> None:
    model = Model(seed)
    rng = np.random.default_rng(seed)
    designed, random = model.built(), model.built()
    for _ in range(GROUPS // 4):
        emulated = designed.emulations[0]
        plans = design_plans(ErrorModel(model.prior, designed), np.ones(GROUPS), EVERY, emulated, 4, rng)
        assert plans.sum(axis=1).min() >= 4, "groups in company, not alone once more"
        designed = designed.with_emulated(plans, model.errors(plans))
        halves = rng.random((4, GROUPS)) < 0.5
        random = random.with_emulated(halves, model.errors(halves))
    before = model.miss(ErrorModel(model.prior, model.built()))
    assert model.miss(ErrorModel(model.prior, designed)) < 0.45 * before
    assert model.miss(ErrorModel(model.prior, random)) > 0.6 * before


def test_no_plan_twice_and_none_with_a_group_that_overflows() -> None:
    model, allowed = Model(0), EVERY.copy()
    allowed[[3, 7]] = False
    learnt = ErrorModel(model.prior, model.built())
    first = design_plans(learnt, np.ones(GROUPS), allowed, NONE, 8, np.random.default_rng(0))
    assert len(np.unique(first, axis=0)) == len(first) == 8
    assert not first[:, [3, 7]].any()
    again = design_plans(learnt, np.ones(GROUPS), allowed, first, 8, np.random.default_rng(0))
    assert not {row.tobytes() for row in again} & {row.tobytes() for row in first}
    allowed[4:] = False
    assert not len(design_plans(learnt, np.ones(GROUPS), allowed, NONE, 8, np.random.default_rng(0)))


def proposals(model: Model, sampler: PrecisionSampler, count: int) -> list[int]:
    """Plans that were emulated for each proposal."""
    built, found = model.built(), []
    for number in range(count):
        model.asked.clear()
        plan, _ = sampler.propose(model.prior, built, np.random.default_rng(number))
        assert plan is not None
        found.append(sum(map(len, model.asked)))
        for plans in model.asked:
            built = built.with_emulated(plans, model.errors(plans))
    return found


def test_the_sampler_emulates_to_learn_as_long_as_there_is_doubt_and_as_many_as_are_allowed() -> None:
    model = Model(0)
    without = proposals(model, PrecisionSampler(seed=0, emulate=model.emulate, emulations_to_learn=0), 3)
    assert max(without) <= 12
    first, second = proposals(model, PrecisionSampler(seed=0, emulate=model.emulate, emulations_to_learn=3), 2)
    assert 12 <= first <= 12 + 12, "four times as many before the first"
    assert 3 <= second <= 3 + 12
    many = proposals(model, PrecisionSampler(seed=0, emulate=model.emulate), 12)
    assert many[0] >= 4 * EMULATIONS_TO_LEARN
    assert min(many[-3:]) < EMULATIONS_TO_LEARN, "the errors are known by then"


def test_before_the_first_plan_doubt_that_shows_in_the_first_emulations_is_followed_up() -> None:
    model = Model(0, groups=100)
    first = proposals(model, PrecisionSampler(seed=0, emulate=model.emulate), 1)[0]
    assert 96 <= first <= 96 + 12, "one for each group, in whole rounds"
    assert len(model.asked[0]) < 96
