"""Intervals that hold what they say, on simulated sessions whose spreads are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mptune.engines.timing.latency import Latency, are_lower
from mptune.engines.timing.spread import RatioEstimate, SessionSpread, SessionTiming, log_ratio_sd

REOPENED = 6
"""Sessions of all-FP32 and of all-FP16 beside their evaluations, as at the start of a search."""


class Machine:
    """Sessions of one model on one device: a spread between sessions, and one within."""

    def __init__(self, seed: int, between: float | None = None) -> None:
        self._generator = np.random.default_rng([99, seed])
        drawn = math.exp(self._generator.uniform(math.log(5e-4), math.log(5e-3)))
        self.between = drawn if between is None else between
        self.within = math.exp(self._generator.uniform(math.log(1e-4), math.log(2e-3)))
        self.baselines: dict[str, float] = {}

    @property
    def sd(self) -> float:
        return math.hypot(self.between, self.within)

    def session(self, log_ratio: float, baseline: str = "first") -> SessionTiming:
        if baseline not in self.baselines:
            self.baselines[baseline] = self._generator.normal(0.0, self.between)
        noise = self._generator.normal(0.0, self.sd)
        return SessionTiming(baseline, log_ratio + noise - self.baselines[baseline], self.within)

    def begin(self) -> dict[str, list[SessionTiming]]:
        """What is known after the two seeds of a search."""
        return {
            "fp32": [self.session(0.0) for _ in range(1 + REOPENED)],
            "fp16": [self.session(-0.7) for _ in range(1 + REOPENED)],
        }

    def truth(self, log_ratio: float) -> float:
        """What a plan's sessions scatter around, relative to the first session of the baseline."""
        return math.exp(log_ratio - self.baselines["first"])


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


def test_sessions_beside_another_session_of_the_baseline_are_corrected_for_it() -> None:
    held = 0
    for seed in range(2000):
        machine = Machine(seed)
        timings = machine.begin()
        timings["fp32"] += [machine.session(0.0, "restarted") for _ in range(2)]
        spread = SessionSpread(timings)
        held += is_held(spread, [machine.session(-0.3, "restarted")], machine.truth(-0.3))
    assert 0.93 <= held / 2000 <= 0.97


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


def test_the_spread_between_sessions_is_found() -> None:
    found = [SessionSpread(Machine(seed, between=2e-3).begin()).sd or 0.0 for seed in range(400)]
    assert math.sqrt(np.mean(np.square(found))) == pytest.approx(2e-3, rel=0.1)


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
    assert log_ratio_sd(values, baseline) == log_ratio_sd(values, baseline)
    assert log_ratio_sd([1.0], [2.0]) == 0.0
