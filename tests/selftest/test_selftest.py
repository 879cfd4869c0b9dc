"""The self-test: it holds on this machine's CPU, and each planted fault is found by its own line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mptune.engines.backends.backend import Availability
from mptune.engines.base import Failure, FailureKind, Stage
from mptune.selftest.cases import FP16, FP32, Case, make_cases
from mptune.selftest.checks import Seen, judge
from mptune.selftest.run import Engines, EngineTest, SelfTest, engines_here, run_selftest
from tests.selftest.faulty import FaultyTest

(CPU,) = (engines for engines in engines_here() if engines.name == "onnxruntime-cpu")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, ...]:
    return make_cases(tmp_path_factory.mktemp("selftest"))


def statuses(test: EngineTest) -> dict[str, str]:
    return {check.name: check.status for check in test.run()}


@pytest.mark.smoke
def test_every_check_holds_on_the_cpu(cases: Sequence[Case], tmp_path: Path) -> None:
    test = EngineTest(CPU, cases, tmp_path, lambda text: None)
    checks = {check.name: check for check in test.run()}
    found = {name: check.status for name, check in checks.items()}
    assert found == dict.fromkeys(("builds", "outputs", "precisions", "tf32", "repeat", "clock"), "holds")
    assert 0.1 < checks["outputs"].figure < 3
    assert checks["tf32"].figure < 5e-6
    facts = test.facts()
    assert len(facts) == 8
    assert all(fact["build_s"] > 0 for fact in facts)
    assert {fact["plan"] for fact in facts if fact["latency_ms"] is not None} == {FP32, FP16}


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        pytest.param("slow clock", "clock", marks=pytest.mark.slow),
        ("fast clock", "clock"),
        ("all-fp32", "precisions"),
        pytest.param("all-fp16", "precisions", marks=pytest.mark.slow),
        ("tf32", "tf32"),
        ("stale", "repeat"),
        pytest.param("frozen", "repeat", marks=pytest.mark.slow),
        ("off", "outputs"),
        pytest.param("slightly off", "tf32", marks=pytest.mark.slow),
    ],
)
def test_each_fault_fails_its_own_line(cases: Sequence[Case], tmp_path: Path, fault: str, line: str) -> None:
    test = FaultyTest(CPU, cases[1:2], tmp_path, lambda text: None)
    test.fault = fault
    found = statuses(test)
    assert [name for name, status in found.items() if status == "does not hold"] == [line], found


def test_an_engine_that_cannot_be_built_is_a_line(cases: Sequence[Case]) -> None:
    failure = Failure(Stage.BUILD, FailureKind.NO_TACTIC, "no kernel for conv0")
    checks = judge("tensorrt", [Seen(cases[0], FP16, True, failure)])
    assert [(check.name, check.status) for check in checks] == [("builds", "does not hold")]
    assert "convolutions, all-fp16: build: no tactic: no kernel for conv0" in checks[0].text
    assert not SelfTest(checks, (), 1.0).holds


def test_an_engine_that_cannot_run_here_is_named_with_the_reason() -> None:
    can = Availability("", "onnxruntime-cuda", "the driver is too old")
    result = run_selftest([Engines(CPU.backend, CPU.place, can)])
    (check,) = result.checks
    assert (check.status, check.text) == ("cannot be checked here", "the driver is too old")
    assert not result.holds  # nothing was checked


@pytest.mark.parametrize("index", range(2), ids=["convolutions", "attention"])
def test_tensorrt_rtx_builds_the_tiny_models(cases: Sequence[Case], index: int, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    from mptune.engines.tensorrt.builder import BuildOptions, build_engine
    from mptune.engines.tensorrt.library import load_library
    from mptune.selftest.cases import samples_of

    case = cases[index]
    options = BuildOptions("tensorrt-rtx", capabilities=((8, 9),))
    for name, plan in case.plans.items():
        model = case.workload.rewriter.write(plan, case.workload.workspace.scratch("rtx"))
        samples = samples_of(case.workload.model.proto)
        built = build_engine(load_library("tensorrt-rtx"), model, options, samples)
        assert built.memory.nbytes > 0, name


@pytest.mark.slow
def test_doctor_prints_what_a_user_sends_us() -> None:
    command = [sys.executable, "-m", "mptune", "doctor", "--selftest", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=None)
    document = json.loads(done.stdout)
    assert document["environment"]["versions"]["onnx"]
    selftest = document["selftest"]
    assert done.returncode == (0 if selftest["holds"] else 1)
    assert {"engine", "name", "status", "figure", "limit", "text"} == set(selftest["checks"][0])
    assert selftest["engines"][0]["latency_ms"] is None or selftest["engines"][0]["latency_ms"] > 0
