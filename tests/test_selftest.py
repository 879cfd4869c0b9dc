"""The self-test: it holds on this machine's CPU, and a fault is found by its own line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from mptune.engines.backend import Availability
from mptune.engines.base import EngineSession
from mptune.engines.latency import HostStopwatch, monotonic_ms
from mptune.engines.ort import session as ort_session
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.engines.ort.cuda_session import OrtEngine
from mptune.selftest import FP32, Figures, SelfTest, engines_here, judge, run_engine, run_selftest

(CPU,) = (engines for engines in engines_here() if engines.can.title == "onnxruntime-cpu")
SOUND = [
    Figures("e", FP32, error=1e-6, emulated_error=0.0, change=0.0, span_ratio=0.99),
    Figures("e", "half", error=1e-3, emulated_error=1e-3, change=0.0, span_ratio=1.0),
    Figures("e", "all-fp16", error=2e-3, emulated_error=1.5e-3, change=0.0, span_ratio=0.98),
]


def failing(tested: list[Figures]) -> dict[str, str]:
    return {check.name: check.text for check in judge("e", tested) if check.status != "holds"}


@pytest.mark.smoke
def test_every_check_holds_on_the_cpu(tmp_path: Path) -> None:
    tested = run_engine(CPU, tmp_path, lambda text: None)
    checks = {check.name: check.status for check in judge("onnxruntime-cpu", tested)}
    assert checks == dict.fromkeys(("builds", "fp32", "fp16", "repeat", "clock"), "holds")
    assert [each.plan for each in tested] == ["all-fp32", "half", "all-fp16"]
    assert all(each.latency_ms is not None and each.latency_ms > 0 for each in tested)


@pytest.mark.parametrize(
    ("plan", "field", "value", "line"),
    [
        (0, "error", 3e-4, "fp32"),
        *((plan, "error", value, "fp16") for plan, value in ((1, 4e-3), (1, 0.0), (2, float("inf")))),
        (2, "change", 1e-2, "repeat"),
        *((plan, "span_ratio", value, "clock") for plan, value in ((0, 0.5), (2, 2.0))),
    ],
)
def test_each_fault_fails_its_own_line(plan: int, field: str, value: float, line: str) -> None:
    assert failing(SOUND) == {}
    lines = failing([replace(each, **{field: value}) if k == plan else each for k, each in enumerate(SOUND)])
    assert list(lines) == [line]
    assert SOUND[plan].plan in lines[line]


def test_figures_of_a_plan_that_fails_are_not_judged() -> None:
    failed = [replace(each, failure="build: no kernel") for each in SOUND]
    lines = failing([SOUND[0], *failed[1:]])
    assert lines.keys() == {"builds", "fp16"}
    assert "half: build: no kernel" in lines["builds"]
    assert not SelfTest(tuple(judge("e", failed)), (), 1.0).holds


@dataclass(frozen=True)
class FaultyEngine(OrtEngine):
    """Opens with a fault in the code that serves it."""

    fault: str = ""

    def open(self) -> EngineSession:
        session = OrtEngine(self.path, self.options).open()
        if self.fault == "fast clock":
            ort_session.HostStopwatch = lambda run: HostStopwatch(run, lambda: 2.0 * monotonic_ms())
            return session
        run, noise = session.run, np.random.default_rng(0)

        def noisy(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {n: x * (1 + 1e-3 * noise.standard_normal(x.shape)).astype(x.dtype) for n, x in run(feeds).items()}

        session.run = noisy
        return session


@dataclass(frozen=True)
class FaultyBackend:
    """ONNX Runtime with faulty engines."""

    fault: str
    name: str = "onnxruntime"

    def builder(self, *run: object) -> object:
        builder = ONNXRUNTIME.builder(*run)
        build = builder.build

        def faulty(plan: object, **more: object) -> object:
            result = build(plan, **more)
            return replace(result, engine=FaultyEngine(result.engine.path, result.engine.options, self.fault))

        builder.build = faulty
        return builder


@pytest.mark.parametrize(("fault", "lines"), [("fast clock", {"clock"}), ("noisy", {"fp32", "repeat"})])
def test_a_fault_of_an_engine_is_found(fault: str, lines: set[str], tmp_path: Path) -> None:
    tested = run_engine(replace(CPU, backend=FaultyBackend(fault)), tmp_path, lambda text: None)
    assert failing(tested).keys() == lines


def test_an_engine_that_cannot_run_here_is_named_with_the_reason() -> None:
    result = run_selftest([replace(CPU, can=Availability("", "onnxruntime-cuda", "the driver is too old"))])
    (check,) = result.checks
    assert (check.status, check.text) == ("cannot be checked here", "the driver is too old")
    assert not result.holds, "nothing was checked"


@pytest.mark.slow
def test_doctor_prints_what_a_user_sends_us() -> None:
    command = [sys.executable, "-m", "mptune", "doctor", "--selftest", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    document = json.loads(done.stdout)
    assert document["environment"]["versions"]["onnx"]
    selftest = document["selftest"]
    assert done.returncode == (0 if selftest["holds"] else 1)
    assert {"engine", "name", "status", "figure", "limit", "text"} == set(selftest["checks"][0])
    assert selftest["engines"][0]["plan"] == FP32
