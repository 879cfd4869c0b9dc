"""Timings that stop when their values are enough: what they cost, and that stopping does not bias them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest

from mptune.engines.timing.latency import are_lower
from mptune.engines.timing.spread import COARSE, EXACT, LEAST_VALUES, Enough, SessionSpread, SessionTiming, Standings
from tests.engines.timing.test_spread import latency_of

MOST = 40
"""Values of a timing that never has enough."""


class Machine:
    """Sessions of one model: values scatter around what a session differs by, and so does the baseline's session."""

    def __init__(self, seed: int, between: float | None = None, per_value: float | None = None) -> None:
        self.generator = np.random.default_rng([17, seed])
        drawn = (math.exp(self.generator.uniform(math.log(a), math.log(b))) for a, b in ((4e-4, 4e-3), (2e-4, 1e-2)))
        self.between, self.per_value = (
            given if given is not None else one for given, one in zip((between, per_value), drawn, strict=True)
        )
        self.baseline = self.generator.normal(0.0, self.between)

    def rounds(self) -> Iterator[tuple[float, float]]:
        """How far the logarithms of the baseline's and the plan's value are off in each round of a session."""
        for _ in range(MOST):
            common = self.generator.normal(0.0, 5e-3)  # what the device does in one round
            baseline, plan = self.generator.normal(0.0, self.per_value, 2)
            yield common + baseline, common + plan

    def session(self, log_ratio: float, enough: Enough) -> tuple[SessionTiming, int]:
        """A session of a plan, and how many values it took."""
        own = log_ratio + self.generator.normal(0.0, self.between)
        values: list[float] = []
        baseline: list[float] = []
        for of_baseline, of_plan in self.rounds():
            baseline.append(math.exp(self.baseline + of_baseline))
            values.append(math.exp(own + of_plan))
            if enough.is_reached(values, baseline):
                break
        return SessionTiming.of_values("first", values, baseline), len(values)

    def begin(self) -> tuple[Standings, dict[str, list[SessionTiming]]]:
        """As a search begins: both baselines, opened 4 times each, and a front of some plans."""
        standings = Standings()
        known: dict[str, list[SessionTiming]] = {}
        plans = {"fp32": (0.0, 1e-7), "fp16": (-0.7, 1e-2), "a": (-0.2, 1e-4), "b": (-0.35, 1e-3), "c": (-0.6, 5e-3)}
        for plan, (log_ratio, error) in plans.items():
            for _ in range(4 if plan.startswith("fp") else 1):
                timing, _ = self.session(log_ratio, standings.enough(plan))
                standings.add(plan, [timing], error)
                known.setdefault(plan, []).append(timing)
        return standings, known


def enough_for(standings: Standings, error: float) -> Enough:
    known = standings.enough("another")
    return Enough(known.spread, known.others, error)


def judge(machines: Iterable[Machine], places: Sequence[float]) -> tuple[float, float, float, float]:
    """Share of intervals that hold the truth and of pairs of sessions that are ranked; the mean bias and its error."""
    held, ranked, pairs, biases = [], 0, 0, []
    for machine in machines:
        standings, known = machine.begin()
        spread = SessionSpread(known)
        for place in places:
            sessions = [machine.session(place, enough_for(standings, 2e-3))[0] for _ in range(4)]
            truth = math.exp(place - machine.baseline)
            latencies = [latency_of(spread.estimate([session])) for session in sessions]
            held += [low <= truth <= high for low, high in (latency.ci95_ms for latency in latencies)]
            ranked += int(are_lower(latencies).sum())
            pairs += math.comb(len(sessions), 2)
            scale = math.hypot(machine.between, 1.25 * machine.per_value / math.sqrt(LEAST_VALUES))
            biases += [(session.log_ratio - place + machine.baseline) / scale for session in sessions]
    return float(np.mean(held)), ranked / pairs, float(np.mean(biases)), float(np.std(biases)) / math.sqrt(len(biases))


PLACES = (-0.3, -0.349, 0.1)
"""Apart from every other plan, beside one, and behind one that is more exact."""


def test_timings_that_stopped_are_known_as_well_as_they_say() -> None:
    held, ranked, bias, sd = judge(map(Machine, range(20)), PLACES)
    assert 0.91 <= held <= 0.995
    assert ranked <= 0.02, "the same plan twice is not ranked"
    assert abs(bias) <= 3.0 * sd, "stopping early does not bias"


@pytest.mark.slow
def test_many_timings_that_stopped_are_known_as_well_as_they_say() -> None:
    held, ranked, bias, sd = judge(map(Machine, range(300)), PLACES)
    assert 0.93 <= held <= 0.97
    assert ranked <= 0.01
    assert abs(bias) <= 3.0 * sd


def test_a_noisy_plan_beside_another_takes_every_value_and_one_far_behind_the_fewest() -> None:
    machine = Machine(1, between=1e-3, per_value=2e-2)
    standings, _ = machine.begin()
    beside = [machine.session(-0.349, enough_for(standings, 2e-3))[1] for _ in range(5)]
    behind = [machine.session(0.2, enough_for(standings, 2e-3))[1] for _ in range(5)]
    assert beside == [MOST] * 5
    assert behind == [LEAST_VALUES] * 5


def test_a_plan_that_may_be_on_the_front_is_never_known_coarsely_only() -> None:
    front = ((0.0, 1e-7), (-0.7, 1e-2))
    values = np.exp(-0.3 + np.random.default_rng(0).normal(0.0, 1e-2, LEAST_VALUES))
    timing = SessionTiming.of_values("", values, np.ones(LEAST_VALUES))
    assert timing.sd > COARSE
    assert not Enough(1e-4, front, 1e-3).is_reached(values, np.ones(LEAST_VALUES)), "apart from all, but coarse"
    assert Enough(1e-4, (*front, (-0.65, 1e-4)), 1e-3).is_reached(values, np.ones(LEAST_VALUES)), "far behind"


def test_values_are_not_looked_at_after_each_one() -> None:
    rng = np.random.default_rng(0)
    looks = []
    for count in range(1, MOST + 1):
        values = 1.0 + 1e-9 * rng.normal(size=count)
        if Enough().is_reached(values, np.ones(count)):
            looks.append(count)
    assert looks == [5, 7, 10, 14, 19, 27, 38]


def test_a_plan_is_not_compared_with_itself() -> None:
    standings = Standings()
    standings.add("a", [SessionTiming("first", -0.3, 1e-4)], 1e-3)
    standings.add("b", [SessionTiming("first", -0.2, 1e-4), SessionTiming("first", -0.202, 1e-4)], 1e-4)
    standings.add("broken", [SessionTiming("first", -0.2, 1e-4)], math.inf)
    standings.add("unknown", [SessionTiming("first", -0.2, 1e-4)])
    assert standings.enough("a").others == ((pytest.approx(-0.201), 1e-4),)
    assert len(standings.enough("c").others) == 2
    assert standings.enough("c").spread == pytest.approx(1.4e-3, rel=0.1), "what the two sessions of b show"
    assert Standings().enough("a").spread > EXACT
