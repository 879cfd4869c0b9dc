"""Intervals that hold what they say, on simulated sessions; latencies that differ beyond noise; timings that stop when
their values are enough."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import binom

from mptune.data.metrics.accuracy import t_quantile
from mptune.engines.latency import (
    LEVEL,
    HostStopwatch,
    Latency,
    Repetitions,
    are_lower,
    calibrate,
    is_lower,
    summarise,
    time_in_turn,
)
from mptune.engines.spread import (
    EXACT,
    LEAST_VALUES,
    Enough,
    RatioEstimate,
    SessionSpread,
    SessionTiming,
    Standings,
    bootstrap_median_interval,
    log_ratio_sd,
)
from mptune.engines.toolchains.measuring import TimingRecord
from mptune.files import write_json
from mptune.settings import LatencySettings

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
        places = {"fp32": 0.0, "fp16": -0.7}
        return {plan: [self.session(place) for _ in range(1 + REOPENED)] for plan, place in places.items()}

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
    for machine in map(Machine, range(400)):
        spread = SessionSpread(machine.begin())
        latencies = [latency_of(spread.estimate([machine.session(-0.3)])) for _ in range(5)]
        for low, high in (latency.ci95_ms for latency in latencies):
            held += low <= machine.truth(-0.3) <= high
            half_widths.append((high - low) / 2 / machine.truth(-0.3) / machine.sd)
        ranked += int(are_lower(latencies).sum())
    assert 0.93 <= held / 2000 <= 0.97
    assert ranked / 4000 <= 0.01
    assert np.mean(half_widths) <= 3.0


def test_rounds_of_confirmation_are_pooled_and_add_degrees_of_freedom() -> None:
    held = []
    for machine in map(Machine, range(300)):
        timings = machine.begin()
        before, plans = SessionSpread(timings), [-0.1 * number for number in range(6)]
        for place in plans:
            once = machine.session(place)
            timings[f"plan {place}"] = [once, *(machine.session(place, f"round {k}") for k in range(3))]
        spread = SessionSpread(timings)
        assert spread.degrees == before.degrees + 6 * 3
        for place in plans:
            sessions = timings[f"plan {place}"]
            held.append(is_held(spread, sessions, machine.truth(place)))
            assert spread.estimate(sessions).sd < spread.estimate(sessions[:1]).sd
    assert 0.93 <= np.mean(held) <= 0.97


def test_sessions_that_have_a_baseline_each_are_known_as_well() -> None:
    """As where plans are opened side by side: each baseline is met once, and takes no degree of freedom."""
    held, half_widths = [], []
    for machine in map(Machine, range(400)):
        names = (f"process {number}" for number in itertools.count())
        machine.baselines["first"] = 0.0
        places = {"fp32": 0.0, "fp16": -0.2, "a": -0.1, "b": -0.15}
        timings = {plan: [machine.session(place, next(names)) for _ in range(4)] for plan, place in places.items()}
        timings["fp32"].insert(0, machine.session(0.0))
        spread = SessionSpread(timings, "first")
        assert spread.degrees == 13
        for plan, place in places.items():
            held.append(is_held(spread, timings[plan], machine.truth(place)))
            low, high = spread.estimate(timings[plan]).interval()
            half_widths.append((high - low) / 2 / machine.truth(place) / machine.sd)
    assert 0.92 <= np.mean(held) <= 0.98
    assert np.mean(half_widths) <= 3.0


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


def test_where_nothing_is_repeated_a_spread_is_assumed() -> None:
    timing, both = SessionTiming("first", -0.3, 2e-3), math.hypot(2.5e-3, 2e-3)
    spread = SessionSpread({"plan": [timing]})
    assert (spread.sd, spread.degrees) == (2.5e-3, 0)
    low, high = spread.estimate([timing]).interval()
    assert (math.log(low), math.log(high)) == pytest.approx((-0.3 - 1.96 * both, -0.3 + 1.96 * both), abs=1e-6)
    other = spread.estimate([replace(timing, baseline="another")]).sd
    assert other == pytest.approx(math.hypot(both, 2.5e-3, 2.5e-3)), "neither baseline's effect is known"


def test_what_a_device_does_in_one_round_cancels() -> None:
    generator = np.random.default_rng(0)
    slow = np.exp(generator.normal(0.0, 0.05, 60))
    baseline, values = 2.0 * slow, slow * np.exp(generator.normal(0.0, 1e-3, 60))
    assert 5.0 * log_ratio_sd(values, baseline) < log_ratio_sd(values, generator.permutation(baseline))
    assert log_ratio_sd(np.array([1.0]), np.array([2.0])) == 0.0


PAIRS = 4_000


def latency_within(ms: float, half_ms: float, degrees: float = math.inf) -> Latency:
    return Latency(ms, ms, ms, (ms - half_ms, ms + half_ms), 0.0, "measured", degrees=degrees)


@pytest.mark.parametrize("degrees", [1, 3, 6, 20])
@pytest.mark.parametrize("sds", [(1.0, 1.0), (1.0, 0.1), (0.0, 1.0)])
def test_of_one_latency_no_more_pairs_are_called_different_than_promised(
    degrees: int, sds: tuple[float, float]
) -> None:
    """All intervals rest on one estimate of a variance."""
    generator = np.random.default_rng(0)
    medians = 1000.0 + np.array(sds)[:, None] * generator.normal(size=(2, PAIRS))
    estimated = np.sqrt(generator.chisquare(degrees, PAIRS) / degrees)
    halves = t_quantile(0.975, degrees) * np.array(sds)[:, None] * estimated
    ranked = 0
    for pair in zip(medians.T, halves.T, strict=True):
        first, second = (latency_within(ms, half, degrees) for ms, half in zip(*pair, strict=True))
        ranked += is_lower(first, second) + is_lower(second, first)
    assert ranked <= (LEVEL + 3.0 * math.sqrt(LEVEL / PAIRS)) * PAIRS


@pytest.mark.parametrize(
    ("degrees", "ms", "slower_degrees", "is_apart"),
    [
        (math.inf, 1.19, math.inf, False),  # intervals that overlap
        (math.inf, 1.21, math.inf, True),
        (math.inf, 1.21, 30.0, True),
        (3.0, 1.21, 3.0, False),
        (math.inf, 1.21, 3.0, False),  # few degrees of freedom of one of both are enough
        (3.0, 1.4, 3.0, True),
    ],
)
def test_intervals_that_overlap_are_never_apart_and_few_degrees_of_freedom_want_more(
    degrees: float, ms: float, slower_degrees: float, is_apart: bool
) -> None:
    faster, slower = latency_within(1.0, 0.1, degrees), latency_within(ms, 0.1, slower_degrees)
    assert is_lower(faster, slower) is is_apart
    assert not is_lower(slower, faster)


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
    ones, front = np.ones(LEAST_VALUES), ((0.0, 1e-7), (-0.7, 1e-2))
    fine, coarse = (np.exp(-0.3 + np.random.default_rng(0).normal(0.0, sd, LEAST_VALUES)) for sd in (4e-3, 1e-2))
    assert SessionTiming.of_values("", fine, ones).sd < EXACT < SessionTiming.of_values("", coarse, ones).sd
    assert Enough(1e-4, front, 1e-3).is_reached((ones, fine))
    assert not Enough(1e-4, front, 1e-3).is_reached((ones, coarse)), "apart from all, but coarse"
    assert Enough(1e-4, (*front, (-0.65, 1e-4)), 1e-3).is_reached((ones, coarse)), "far behind"


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


@pytest.mark.parametrize("drift", [0.0, 1e-3])
def test_the_baselines_of_several_processes_tell_the_spread_where_no_plan_was_timed_again(drift: float) -> None:
    """Drift of the clocks from one to the next is smaller than that."""
    generator, standings = np.random.default_rng(0), Standings()
    for number in range(60):
        baseline_ms = 2.0 * math.exp(drift * number + generator.normal(0.0, 1e-2))
        standings.add(f"plan {number}", [SessionTiming(f"process {number}", -0.3, 1e-4, baseline_ms)], 1e-3)
    assert standings.enough("another").spread == pytest.approx(1e-2, rel=0.25)


SETTINGS = LatencySettings(warmup_ms=200.0, duration_ms=400.0, min_iterations=10)


class Engine:
    """Takes a fixed time on a clock of its own."""

    def __init__(self, once_ms: float, first_ms: float = 0.0) -> None:
        self.once_ms, self.first_ms = once_ms, first_ms
        self.now = 0.0
        self.runs = 0

    def run(self) -> None:
        self.now += self.once_ms if self.runs else self.once_ms + self.first_ms
        self.runs += 1

    def clock(self) -> float:
        return self.now

    @property
    def watch(self) -> HostStopwatch:
        return HostStopwatch(self.run, self.clock)


@pytest.mark.parametrize(("count", "p", "index"), [(100, 90, 89), (100, 99, 98), (10, 90, 8), (1, 99, 0)])
def test_percentiles_are_trtexecs(count: int, p: float, index: int) -> None:
    latency = summarise(range(1, count + 1))
    assert (latency.p90_ms if p == 90 else latency.p99_ms) == index + 1


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_a_summary_is_ordered_and_inside_the_values(values: list[float]) -> None:
    latency = summarise(values, LatencySettings())
    low, high = latency.ci95_ms
    assert min(values) <= low <= high <= max(values)
    assert min(values) <= latency.median_ms <= latency.p99_ms <= max(values)
    assert latency.p90_ms <= latency.p99_ms
    assert latency.source == "measured"
    assert latency.raw_ms == tuple(round(v, 6) for v in values)
    assert Latency.from_json(json.loads(json.dumps(latency.to_json()))) == latency


def test_the_interval_is_of_the_exact_distribution_of_resampled_medians() -> None:
    """Of 51 values, a resample's median is at most the k-th where 26 of its values are (Efron 1979)."""
    below = binom.sf(25, 51, np.arange(52) / 51)
    low = int(np.argmax(below >= 0.025))
    assert bootstrap_median_interval(np.arange(52.0)[1:], 20_000) == (low, 52 - low)


@pytest.mark.parametrize(
    ("make", "words", "cure"),
    [
        (lambda: summarise([2.0, 3.0] * 10), "varies by", "lock the clocks"),
        (lambda: summarise([0.01] * 10, executions_per_value=50), "spans only 0.500 ms", "--batch"),
        (lambda: summarise([2.0] * 10, enqueue_ms=1.7), "host-bound", "--batch"),
    ],
)
def test_each_warning_ends_with_what_to_do(make: Callable[[], Latency], words: str, cure: str) -> None:
    (warning,) = make().warnings
    assert words in warning
    assert cure in warning.rpartition(": ")[2]


@pytest.mark.parametrize(("once_ms", "first_ms", "values"), [(100.0, 0.0, 10), (5.0, 0.0, 40), (5.0, 60_000.0, 40)])
def test_calibration_reaches_both_the_count_and_the_duration(once_ms: float, first_ms: float, values: int) -> None:
    engine = Engine(once_ms, first_ms)
    assert calibrate(engine.run, engine.clock, SETTINGS) == Repetitions(values, 2 if values > 10 else 1, 200.0)


@pytest.mark.parametrize(("once_ms", "warm_ups"), [(0.5, 400), (500.0, 1)])
def test_any_engine_is_warmed_up_and_its_values_are_the_time_of_one_execution(once_ms: float, warm_ups: int) -> None:
    engine, warm = Engine(once_ms, first_ms=9.0 if once_ms < 1.0 else 0.0), Engine(once_ms)
    (latency,) = time_in_turn([engine.watch], Repetitions(6, 8), clock=engine.clock)
    assert latency.raw_ms == (once_ms,) * 6
    assert engine.runs == (1 + 6) * (1 + 8)  # a value to warm up; an untimed execution before each
    time_in_turn([warm.watch], Repetitions(1, warmup_ms=200.0), clock=warm.clock)
    assert warm.runs == warm_ups + 1


def test_timing_stops_when_its_values_are_enough() -> None:
    device, counts = Engine(1.0), list[int]()

    def is_enough(values: Sequence[Sequence[float]]) -> bool:
        counts.append(len(values[1]))
        return len(values[1]) == 7

    latencies = time_in_turn([device.watch] * 2, Repetitions(40, 3), SETTINGS, device.clock, is_enough)
    assert [len(latency.raw_ms) for latency in latencies] == [7, 7]
    assert counts == [4, 5, 6, 7], "not asked before 10 executions"
    latencies = time_in_turn([device.watch] * 2, Repetitions(5), clock=device.clock, is_enough=lambda values: False)
    assert [len(latency.raw_ms) for latency in latencies] == [5, 5]


@pytest.mark.parametrize("steady_ms", [0.0, 215.0, 240.0, 280.0])
def test_rounds_before_the_device_is_steady_do_not_count(steady_ms: float) -> None:
    """An H200 that was idle is faster at first, for longer than the warm-up takes."""
    device, generator = Engine(0.0), np.random.default_rng(0)

    def run(once_ms: float) -> None:
        device.now += once_ms * generator.normal(1.0, 1e-3) - (0.1 if device.now < steady_ms else 0.0)

    watches = [HostStopwatch(partial(run, once_ms), device.clock) for once_ms in (1.5, 1.2)]
    repetitions = Repetitions(40, 7, warmup_ms=200.0)
    slow, fast = time_in_turn(watches, repetitions, SETTINGS, device.clock, Enough().is_reached)
    assert (slow.median_ms, fast.median_ms) == (pytest.approx(1.5, rel=3e-3), pytest.approx(1.2, rel=3e-3))
    assert max(slow.cv, fast.cv) < 3e-3
    assert device.now < max(steady_ms, 200.0) + (LEAST_VALUES + 3) * 8 * 2.7, "few values are enough then"


def test_engines_are_timed_in_turn_so_that_what_slows_the_device_slows_all() -> None:
    device = Engine(0.0)

    def run(share: float) -> None:
        device.now += share * (1.0 + 0.001 * device.now)  # slower and slower

    watches = [HostStopwatch(partial(run, share), device.clock) for share in (2.0, 1.0)]
    slow, fast = time_in_turn(watches, Repetitions(11, 3), clock=device.clock)
    assert slow.median_ms > 2.1
    assert slow.median_ms / fast.median_ms == pytest.approx(2.0, rel=0.02)
    assert len(slow.raw_ms) == len(fast.raw_ms) == 7, "the last ones: it is not steady"


def test_a_record_counts_for_the_settings_that_it_was_taken_with(tmp_path: Path) -> None:
    path, record = tmp_path / "timing.json", TimingRecord(Repetitions(2), 3.0, LatencySettings())
    write_json(path, record.to_json())
    assert TimingRecord.read(path, LatencySettings()) == record
    assert TimingRecord.read(path, LatencySettings(duration_ms=1.0)) is None
    assert TimingRecord.read(tmp_path / "absent.json", LatencySettings()) is None
