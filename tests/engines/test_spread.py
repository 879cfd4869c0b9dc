"""Intervals that hold what they say, on simulated sessions; latencies that differ beyond noise; timings that stop when
their values are enough."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mptune.data.metrics.accuracy import t_quantile
from mptune.engines.latency import LEVEL, Latency, are_lower, is_lower
from mptune.engines.spread import (
    COARSE,
    EXACT,
    LEAST_VALUES,
    Enough,
    RatioEstimate,
    SessionSpread,
    SessionTiming,
    Standings,
    log_ratio_sd,
)

REOPENED = 6
"""Sessions of all-FP32 and of all-FP16 beside their evaluations, as at the start of a search."""
MOST = 40
"""Values of a timing that never has enough."""


class Machine:
    """Sessions of one model on one device: a spread between sessions, within one, and from value to value."""

    def __init__(self, seed: int, between: float | None = None) -> None:
        self._generator = np.random.default_rng([99, seed])

        def drawn(low: float, high: float) -> float:
            return math.exp(self._generator.uniform(math.log(low), math.log(high)))

        own = drawn(5e-4, 5e-3)
        self.between = own if between is None else between
        self.within = drawn(1e-4, 2e-3)
        self.per_value = math.exp(np.random.default_rng([17, seed]).uniform(math.log(2e-4), math.log(1e-2)))
        self.baselines: dict[str, float] = {}

    @property
    def sd(self) -> float:
        return math.hypot(self.between, self.within)

    def baseline(self, name: str = "first") -> float:
        if name not in self.baselines:
            self.baselines[name] = self._generator.normal(0.0, self.between)
        return self.baselines[name]

    def session(self, log_ratio: float, baseline: str = "first") -> SessionTiming:
        effect = self.baseline(baseline)
        return SessionTiming(baseline, log_ratio + self._generator.normal(0.0, self.sd) - effect, self.within)

    def timed(self, log_ratio: float, enough: Enough) -> SessionTiming:
        """A session whose values are taken one by one, in turn with the baseline's, until they are enough."""
        offsets = self.baseline(), log_ratio + self._generator.normal(0.0, self.between)
        in_turn: tuple[list[float], list[float]] = ([], [])
        for _ in range(MOST):
            common = self._generator.normal(0.0, 5e-3)  # what the device does in one round
            for values, offset in zip(in_turn, offsets, strict=True):
                values.append(math.exp(offset + common + self._generator.normal(0.0, self.per_value)))
            if enough.is_reached(in_turn):
                break
        return SessionTiming.of_values("first", in_turn[1], in_turn[0])

    def begin(self) -> dict[str, list[SessionTiming]]:
        """What is known after the two seeds of a search."""
        return {
            "fp32": [self.session(0.0) for _ in range(1 + REOPENED)],
            "fp16": [self.session(-0.7) for _ in range(1 + REOPENED)],
        }

    def truth(self, log_ratio: float) -> float:
        """What a plan's sessions scatter around, relative to the first session of the baseline."""
        return math.exp(log_ratio - self.baseline())


def latency_of(estimate: RatioEstimate) -> Latency:
    """As a search has it, where the baseline takes 1 ms."""
    ms = math.exp(estimate.log_ratio)
    return Latency(ms, ms, ms, estimate.interval(), 0.0, "measured", degrees=estimate.degrees)


def is_held(spread: SessionSpread, sessions: list[SessionTiming], truth: float) -> bool:
    low, high = spread.estimate(sessions).interval()
    return low <= truth <= high


def test_intervals_of_2000_sessions_hold_the_truth_as_often_as_they_say() -> None:
    held, ranked, half_widths = 0, 0, []
    for seed in range(400):
        machine = Machine(seed)
        spread = SessionSpread(machine.begin())
        latencies = [latency_of(spread.estimate([machine.session(-0.3)])) for _ in range(5)]
        intervals = [latency.ci95_ms for latency in latencies]
        truth = machine.truth(-0.3)
        held += sum(low <= truth <= high for low, high in intervals)
        half_widths += [(high - low) / 2 / truth / machine.sd for low, high in intervals]
        ranked += int(are_lower(latencies).sum())
    assert 0.93 <= held / 2000 <= 0.97
    assert ranked / 4000 <= 0.01
    assert np.mean(half_widths) <= 3.0


def test_rounds_of_confirmation_are_pooled_and_add_degrees_of_freedom() -> None:
    held, narrower, total = 0, 0, 0
    for seed in range(300):
        machine = Machine(seed)
        timings = machine.begin()
        before = SessionSpread(timings)
        for number in range(6):
            log_ratio = -0.1 * number
            once = machine.session(log_ratio)
            again = [machine.session(log_ratio, f"round {k}") for k in range(3)]
            timings[f"plan {number}"] = [once, *again]
        spread = SessionSpread(timings)
        assert spread.degrees == before.degrees + 6 * 3 - 3
        for number in range(6):
            sessions = timings[f"plan {number}"]
            total += 1
            held += is_held(spread, sessions, machine.truth(-0.1 * number))
            narrower += spread.estimate(sessions).sd < spread.estimate(sessions[:1]).sd
    assert 0.93 <= held / total <= 0.97
    assert narrower == total


def test_a_session_of_few_values_that_scatters_more_than_others_is_not_known_as_well_as_it_says() -> None:
    """Its 5 values say how exactly they are known with few degrees of freedom, whatever the others' values say."""
    generator = np.random.default_rng(0)
    held, steady, noisy = 0, [], []
    for seed in range(1000):
        machine = Machine(seed, between=2e-4)
        spread = SessionSpread(machine.begin())
        values, baseline = np.exp(generator.normal(0.0, 1e-2, (2, 5)))
        own = machine.session(-0.3).log_ratio
        timing = SessionTiming.of_values("first", math.exp(own) * values, baseline)
        held += is_held(spread, [timing], machine.truth(-0.3))
        noisy.append(spread.estimate([timing]).degrees)
        steady.append(spread.estimate([SessionTiming("first", own, machine.within)]).degrees)
    assert 0.93 <= held / 1000 <= 0.98
    assert np.median(noisy) == pytest.approx(4.0, abs=0.1)
    assert np.median(steady) == pytest.approx(12.0, abs=0.1), "as many as the spread"


def test_nothing_repeated_leaves_the_doubt_within_the_session() -> None:
    timing = SessionTiming("first", -0.3, 1e-3)
    spread = SessionSpread({"plan": [timing]})
    assert spread.sd is None
    low, high = spread.estimate([timing]).interval()
    assert (math.log(low), math.log(high)) == pytest.approx((-0.3 - 1.96e-3, -0.3 + 1.96e-3), abs=1e-6)
    assert SessionSpread({}).estimate([timing]).sd == pytest.approx(math.hypot(1e-3, 0.0))


def test_what_a_device_does_in_one_round_cancels() -> None:
    generator = np.random.default_rng(0)
    slow = np.exp(generator.normal(0.0, 0.05, 60))
    baseline, values = 2.0 * slow, slow * np.exp(generator.normal(0.0, 1e-3, 60))
    assert 5.0 * log_ratio_sd(values, baseline) < log_ratio_sd(values, generator.permutation(baseline))
    assert log_ratio_sd([1.0], [2.0]) == 0.0


PAIRS = 4_000


def known(ms: float, half_ms: float, degrees: float = math.inf) -> Latency:
    return Latency(ms, ms, ms, (ms - half_ms, ms + half_ms), 0.0, "measured", degrees=degrees)


@pytest.mark.parametrize("degrees", [1, 3, 6, 20])
@pytest.mark.parametrize("sds", [(1.0, 1.0), (1.0, 0.1), (0.0, 1.0)])
def test_of_one_latency_no_more_pairs_are_called_different_than_promised(
    degrees: int, sds: tuple[float, float]
) -> None:
    """All intervals rest on one estimate of a variance."""
    generator = np.random.default_rng(0)
    medians = 1000.0 + np.array(sds)[:, None] * generator.normal(size=(2, PAIRS))
    found = np.sqrt(generator.chisquare(degrees, PAIRS) / degrees)
    halves = t_quantile(0.975, degrees) * np.array(sds)[:, None] * found
    ranked = 0
    for (one, other), (half, other_half) in zip(medians.T, halves.T, strict=True):
        pair = known(one, half, degrees), known(other, other_half, degrees)
        ranked += is_lower(*pair) + is_lower(*reversed(pair))
    assert ranked <= (LEVEL + 3.0 * math.sqrt(LEVEL / PAIRS)) * PAIRS


def test_intervals_that_overlap_are_never_apart_and_few_degrees_of_freedom_want_more() -> None:
    one, other = known(1.0, 0.1), known(1.21, 0.1)
    assert not is_lower(one, known(1.19, 0.1))
    assert is_lower(one, other)
    assert not is_lower(other, one)
    few = replace(other, degrees=3.0)
    assert is_lower(one, replace(other, degrees=30.0))
    assert not is_lower(replace(one, degrees=3.0), few)
    assert not is_lower(one, few), "one of both is enough"
    assert is_lower(replace(one, degrees=3.0), replace(few, median_ms=1.4, ci95_ms=(1.3, 1.5)))


@pytest.mark.parametrize(
    ("machines", "least", "most", "most_ranked"),
    [(20, 0.91, 0.995, 0.02), pytest.param(300, 0.93, 0.97, 0.01, marks=pytest.mark.slow)],
)
def test_timings_that_stopped_are_known_as_well_as_they_say(
    machines: int, least: float, most: float, most_ranked: float
) -> None:
    """As a search begins: both baselines, opened 4 times each, a front of some plans, then plans apart from every other
    one, beside one, and behind one that is more exact."""
    begun = {"fp32": (0.0, 1e-7), "fp16": (-0.7, 1e-2), "a": (-0.2, 1e-4), "b": (-0.35, 1e-3), "c": (-0.6, 5e-3)}
    held, ranked, pairs, biases = [], 0, 0, []
    for machine in map(Machine, range(machines)):
        standings, timings = Standings(), dict[str, list[SessionTiming]]()
        for plan, (log_ratio, error) in begun.items():
            for _ in range(4 if plan.startswith("fp") else 1):
                timings.setdefault(plan, []).append(machine.timed(log_ratio, standings.enough(plan)))
                standings.add(plan, timings[plan][-1:], error)
        spread, enough = SessionSpread(timings), replace(standings.enough("another"), error=2e-3)
        scale = math.hypot(machine.between, 1.25 * machine.per_value / math.sqrt(LEAST_VALUES))
        for place in (-0.3, -0.349, 0.1):
            sessions = [machine.timed(place, enough) for _ in range(4)]
            latencies = [latency_of(spread.estimate([session])) for session in sessions]
            held += [low <= machine.truth(place) <= high for low, high in (each.ci95_ms for each in latencies)]
            ranked, pairs = ranked + int(are_lower(latencies).sum()), pairs + math.comb(4, 2)
            biases += [(session.log_ratio - math.log(machine.truth(place))) / scale for session in sessions]
    assert least <= np.mean(held) <= most
    assert ranked / pairs <= most_ranked, "the same plan twice is not ranked"
    assert abs(np.mean(biases)) <= 3.0 * np.std(biases) / math.sqrt(len(biases)), "stopping early does not bias"


def test_a_plan_that_may_be_on_the_front_is_never_known_coarsely_only() -> None:
    front = ((0.0, 1e-7), (-0.7, 1e-2))
    values = np.exp(-0.3 + np.random.default_rng(0).normal(0.0, 1e-2, LEAST_VALUES))
    timing = SessionTiming.of_values("", values, np.ones(LEAST_VALUES))
    assert timing.sd > COARSE
    assert not Enough(1e-4, front, 1e-3).is_reached((np.ones(LEAST_VALUES), values)), "apart from all, but coarse"
    assert Enough(1e-4, (*front, (-0.65, 1e-4)), 1e-3).is_reached((np.ones(LEAST_VALUES), values)), "far behind"


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
