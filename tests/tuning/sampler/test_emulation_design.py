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
from tests.tuning.additive import built

GROUPS = 24
EVERY, WORTH = np.ones(GROUPS, dtype=bool), np.ones(GROUPS)


class Model:
    """Errors that add in squares, a prior that is off by a normal of 0.35 decades, and both seeds built."""

    def __init__(self, seed: int, groups: int = GROUPS) -> None:
        rng = np.random.default_rng(seed)
        self.squares = np.log(10 ** rng.uniform(-4.5, -2.2, groups)) * 2.0
        known = self.squares + np.log(10.0) * 2.0 * 0.35 * rng.normal(size=groups)
        self.prior = Prior(tuple(f"g{i:02d}" for i in range(groups)), log_square_errors=tuple(known))
        self.asked: list[Bools] = []
        plans = np.array([[False] * groups, [True] * groups])
        self.seeds = built(plans, latency_ms=np.array([10.0, 6.0]), error=self.errors(plans), base_ms=10.0)

    def errors(self, plans: Bools) -> Floats:
        return np.sqrt(plans @ np.exp(self.squares) + ERROR_FLOOR**2)

    def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        self.asked.append(np.array([[choice[group] == "fp16" for group in self.prior.groups] for choice in choices]))
        return self.errors(self.asked[-1]).tolist()

    def miss(self, seen: BuiltPlans) -> float:
        """Root mean square error of the logs of the groups' errors."""
        return float(np.sqrt(np.mean((0.5 * (ErrorModel(self.prior, seen).mode - self.squares)) ** 2)))

    def emulated_for(self, count: int, **options: int) -> list[int]:
        """Plans that the sampler emulates for each of so many proposals."""
        sampler, seen, counts = PrecisionSampler(seed=0, emulate=self.emulate, **options), self.seeds, []
        for number in range(count):
            self.asked.clear()
            sampler.propose(self.prior, seen, np.random.default_rng(number))
            counts.append(sum(map(len, self.asked)))
            for plans in self.asked:
                seen = seen.with_emulated(plans, self.errors(plans))
        return counts


@pytest.mark.parametrize("seed", range(4))
def test_as_many_emulations_as_groups_tell_the_errors_and_random_plans_do_not(seed: int) -> None:
    model, rng = Model(seed), np.random.default_rng(seed)
    designed = random = model.seeds
    for _ in range(GROUPS // 4):
        plans = design_plans(ErrorModel(model.prior, designed), WORTH, EVERY, designed.emulations[0], 4, rng)
        assert plans.sum(axis=1).min() >= 4, "groups in company, not alone once more"
        designed = designed.with_emulated(plans, model.errors(plans))
        halves = rng.random((4, GROUPS)) < 0.5
        random = random.with_emulated(halves, model.errors(halves))
    before = model.miss(model.seeds)
    assert model.miss(designed) < 0.45 * before
    assert model.miss(random) > 0.6 * before


def test_no_plan_twice_and_none_with_a_group_that_overflows() -> None:
    model, allowed = Model(0), EVERY.copy()
    allowed[[3, 7]] = False
    learnt, none = ErrorModel(model.prior, model.seeds), np.zeros((0, GROUPS), dtype=bool)
    first = design_plans(learnt, WORTH, allowed, none, 8, np.random.default_rng(0))
    assert len(np.unique(first, axis=0)) == len(first) == 8
    assert not first[:, [3, 7]].any()
    again = design_plans(learnt, WORTH, allowed, first, 8, np.random.default_rng(0))
    assert not {row.tobytes() for row in again} & {row.tobytes() for row in first}
    allowed[4:] = False
    assert not len(design_plans(learnt, WORTH, allowed, none, 8, np.random.default_rng(0)))


def test_the_sampler_emulates_to_learn_as_long_as_there_is_doubt_and_as_many_as_are_allowed() -> None:
    assert max(Model(0).emulated_for(3, emulations_to_learn=0)) <= 12
    first, second = Model(0).emulated_for(2, emulations_to_learn=3)
    assert 12 <= first <= 12 + 12, "four times as many before the first"
    assert 3 <= second <= 3 + 12
    many = Model(0).emulated_for(12)
    assert many[0] >= 4 * EMULATIONS_TO_LEARN
    assert min(many[-3:]) < EMULATIONS_TO_LEARN, "the errors are known by then"


def test_before_the_first_plan_doubt_that_shows_in_the_first_emulations_is_followed_up() -> None:
    model = Model(0, groups=100)
    (first,) = model.emulated_for(1)
    assert 96 <= first <= 96 + 12, "one for each group, in whole rounds"
    assert len(model.asked[0]) < 96
