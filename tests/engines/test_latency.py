from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.engines.latency import HostStopwatch, Latency, Repetitions, calibrate, summarise, time_in_turn
from mptune.engines.spread import bootstrap_median_interval
from mptune.engines.toolchains.measuring import TimingRecord
from mptune.files import write_json
from mptune.settings import LatencySettings

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


def test_the_interval_covers_the_median_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        low, high = bootstrap_median_interval(generator.normal(5.0, 1.0, 50), 400, seed=trial)
        inside += low <= 5.0 <= high
    assert 175 <= inside <= 199


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


def test_calibration_reaches_both_the_count_and_the_duration_whatever_the_first_execution_takes() -> None:
    for once_ms, first_ms, expected in (
        (100.0, 0.0, Repetitions(10, 1, 200.0)),
        (5.0, 0.0, Repetitions(40, 2, 200.0)),
        (5.0, 60_000.0, Repetitions(40, 2, 200.0)),
    ):
        engine = Engine(once_ms, first_ms)
        assert calibrate(engine.run, engine.clock, SETTINGS) == expected


@pytest.mark.parametrize(("once_ms", "warm_ups"), [(0.5, 400), (500.0, 1)])
def test_any_engine_is_warmed_up_and_its_values_are_the_time_of_one_execution(once_ms: float, warm_ups: int) -> None:
    engine, warm = Engine(once_ms, first_ms=9.0 if once_ms < 1.0 else 0.0), Engine(once_ms)
    repetitions = Repetitions(6, 8)
    (latency,) = time_in_turn([HostStopwatch(engine.run, engine.clock)], repetitions, clock=engine.clock)
    assert latency.raw_ms == (once_ms,) * 6
    assert engine.runs == 1 + 6 * (1 + 8)  # an untimed one before each value
    time_in_turn([HostStopwatch(warm.run, warm.clock)], Repetitions(1, warmup_ms=200.0), clock=warm.clock)
    assert warm.runs == warm_ups + 1


def test_timing_stops_when_its_values_are_enough() -> None:
    device = Engine(1.0)
    seen: list[int] = []

    def is_enough(values: Sequence[Sequence[float]]) -> bool:
        seen.append(len(values[1]))
        return len(values[1]) == 7

    watches = [HostStopwatch(device.run, device.clock) for _ in range(2)]
    latencies = time_in_turn(watches, Repetitions(40, 3), SETTINGS, device.clock, is_enough)
    assert [len(latency.raw_ms) for latency in latencies] == [7, 7]
    assert seen == [4, 5, 6, 7], "not asked before 10 executions"
    latencies = time_in_turn(watches, Repetitions(5), clock=device.clock, is_enough=lambda values: False)
    assert [len(latency.raw_ms) for latency in latencies] == [5, 5]


def test_engines_are_timed_in_turn_so_that_what_slows_the_device_slows_all() -> None:
    device = Engine(1.0)

    def run(share: float) -> Callable[[], None]:
        def once() -> None:
            device.runs += 1
            device.now += share * (1.0 + 0.001 * device.now)  # slower and slower

        return once

    watches = [HostStopwatch(run(share), device.clock) for share in (2.0, 1.0)]
    slow, fast = time_in_turn(watches, Repetitions(11, 3), clock=device.clock)
    assert slow.median_ms > 2.1
    assert slow.median_ms / fast.median_ms == pytest.approx(2.0, rel=0.02)
    assert len(slow.raw_ms) == len(fast.raw_ms) == 11


def test_a_record_counts_for_the_settings_that_it_was_taken_with(tmp_path: Path) -> None:
    path, record = tmp_path / "timing.json", TimingRecord(Repetitions(2), 3.0, LatencySettings())
    write_json(path, record.to_json())
    assert TimingRecord.read(path, LatencySettings()) == record
    assert TimingRecord.read(path, LatencySettings(duration_ms=1.0)) is None
    assert TimingRecord.read(tmp_path / "absent.json", LatencySettings()) is None
