"""Numbers as people read them, and the rows of a front."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.engines.environment import Environment
from mptune.engines.latency import Latency
from mptune.reporting.text import environment_facts, error_source, format_duration, latency_source, speedup_text
from mptune.tuning.evaluation import ORIGIN_FP32, Origin
from mptune.tuning.front import Front, front_rows
from mptune.tuning.texts import format_error, format_interval, format_ms, format_speedup
from tests.reporting.conftest import Bench, Evaluations, make_error, predicted
from tests.tuning.factory import make_evaluation


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (format_ms(1.23456), "1.235"), (format_ms(0.01234), "0.01234"), (format_ms(0.0), "0.00000"),
        (format_ms(123.456), "123.5"), (format_ms(math.nan), "-"),
        (format_error(None), "-"), (format_error(0.0), "0"), (format_error(0.00781), "7.8e-03"),
        (format_error(0.25), "0.25"), (format_error(41.27), "41.3"), (format_error(4e4), "4.0e+04"),
        (format_error(math.nan), "not finite"), (format_error(math.inf), "not finite"),
        (format_duration(0), "0 s"), (format_duration(59.4), "59 s"), (format_duration(60), "1 min"),
        (format_duration(200), "3 min 20 s"), (format_duration(3600), "1 h"), (format_duration(7500), "2 h 5 min"),
        (format_speedup(2.314), "2.31x"), (format_speedup(math.inf), "-"),
    ],
)  # fmt: skip
def test_figures(shown: str, text: str) -> None:
    assert shown == text


def test_a_speedup_within_noise_is_not_significant() -> None:
    fp32 = replace(make_evaluation(10.0, 1e-7, width=0.3, origin=ORIGIN_FP32), speedup=1.0)
    close = replace(make_evaluation(9.9, 1e-3, width=0.3, number=1), speedup=10.0 / 9.9)
    fast = replace(make_evaluation(5.0, 1e-3, width=0.3, number=2), speedup=2.0)
    shown = [speedup_text(each, fp32) for each in (close, fast, fp32)]
    assert shown == ["1.01x, not significant", "2.00x", "1.00x"]
    guess = replace(close, latency=Latency.predicted(9.9))
    assert speedup_text(guess, replace(fp32, latency=Latency.predicted(10.0))) == "1.01x", "a prediction has no noise"
    assert (format_interval(fast) != "", format_interval(guess)) == (True, "")


def test_rows_are_sorted_and_marked(front: Front, evaluations: Evaluations, bench: Bench) -> None:
    rows = [(row.evaluation.latency.median_ms, row.name, row.is_chosen, row.on_front) for row in front_rows(front)]
    assert rows == [
        (0.9, "all-FP16", False, True), (1.2, "sampler", True, True),
        (1.7, "norms and softmax in FP32", False, True), (2.0, "all-FP32", False, True),
    ]  # fmt: skip
    # Baselines are shown off the front, too, and a plan that was picked there.
    nan, origin = make_error(math.nan, non_finite=5.0), Origin("seed", "all-fp16")
    broken = replace(bench.evaluation(len(bench.groups), 0.9, math.nan, origin=origin), error=nan)
    dominated = next(e for e in evaluations if e.latency.median_ms == 1.9)
    front = replace(front, fp16=broken, points=front.points[1:-1], chosen=dominated)
    rows = [(row.name, row.is_chosen, row.on_front) for row in front_rows(front)]
    assert {("all-FP16", False, False), ("all-FP32", False, False), ("sampler", True, False)} <= {*rows}


def test_sources_cannot_be_mistaken(front: Front, run_dir: Path) -> None:
    assert latency_source(front).startswith("measured on NVIDIA H200; 1 of 4 points re-measured")
    assert "measured on the outputs" in error_source(front)
    other = predicted(front)
    assert re.match("PREDICTED for jetson-orin-nano-8gb.*within a factor of 1.5", latency_source(other))
    assert "emulated" in error_source(other)
    mixed = replace(front, fp16=replace(front.fp16, error_source="emulated"), points=front.points[1:])
    assert "as marked" in error_source(mixed)


def test_environment(environment: Environment) -> None:
    facts = dict(environment_facts(environment))
    assert facts["GPU 0"] == "NVIDIA H200, 140 GiB, driver 580.1, 1980 of 1980 MHz"
    assert facts["CPU"] == "A CPU, 16 cores"
    assert dict(environment_facts(replace(environment, gpus=())))["GPU"] == "none"
