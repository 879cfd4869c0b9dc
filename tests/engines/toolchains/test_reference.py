"""What is observed beside the reference: the same, and nothing where it is in the way."""

from __future__ import annotations

import time

import pytest

from mptune.data.archive import read_sample_shapes
from mptune.engines.base import Failure, FailureKind, Stage
from mptune.engines.context import RunContext
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.engines.toolchains import reference
from mptune.engines.toolchains.jobs import ReferenceJob
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.processes.parent import Worker
from mptune.targets.target import load_target
from tests.engines import faults


@pytest.fixture(autouse=True)
def _observes_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU observes beside the reference, as a GPU does."""
    monkeypatch.setattr("mptune.engines.toolchains.reference.observes_beside", lambda provider: True)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Jobs in their order with the number of the worker."""
    called, call = list[tuple[str, int | None]](), Worker.call

    def noted(worker: Worker, job: object, timeout_s: float | None = None) -> object:
        called.append((type(job).__name__, id(worker)))
        return call(worker, job, timeout_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "call", noted)
    return called


def test_ranges_that_are_observed_beside_are_the_same(
    mlp_context: RunContext, jobs: list[tuple[str, int | None]]
) -> None:
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        expected = toolchain.observe()
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        jobs.clear()
        assert not isinstance(toolchain.reference("search"), Failure)
        assert toolchain.observe() == expected
        assert toolchain.observe() == expected
        assert not isinstance(toolchain.reference("held_out"), Failure)
        assert not isinstance(toolchain.reference("search"), Failure)
    assert sorted(name for name, _ in jobs) == ["ObserveJob", "ReferenceJob", "ReferenceJob", "ReferenceJob"]
    assert len({worker for name, worker in jobs if name == "ReferenceJob"}) == 1
    assert len({worker for _, worker in jobs}) == 2


def test_few_samples_are_observed_where_their_values_take_much_memory(
    mlp_context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_OBSERVED_BYTES", 1)
    monkeypatch.setattr(reference, "LEAST_OBSERVED", 3)
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        ranges = toolchain.observe()
    assert not isinstance(ranges, Failure)
    assert len(read_sample_shapes(mlp_context.samples("search"))) == 4
    assert {value.samples for value in ranges.values()} == {3}


def test_a_model_that_is_observed_in_parts_shows_the_same_ranges(
    mlp_context: RunContext, jobs: list[tuple[str, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        expected = toolchain.observe()
    assert not isinstance(expected, Failure)
    monkeypatch.setattr("mptune.graph.writing.variants._MOST_OUTPUTS", 5)
    jobs.clear()
    stages: list[str] = []
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        assert toolchain.observe(stages.append) == expected
    assert len(stages) > 1
    assert all(stage.startswith("observing the ranges of values: ") for stage in stages)
    assert [name for name, _ in jobs] == ["ObserveJob"] * len(stages)


def test_a_restart_ends_what_is_observed_beside(mlp_context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """What starves beside it is tried again in a fresh process, alone."""
    call, first = Worker.call, list[Worker]()

    def crowded(worker: Worker, job: object, timeout_s: float | None = None) -> object:
        if isinstance(job, ReferenceJob):
            return Failure(Stage.RUN, FailureKind.OUT_OF_MEMORY, "no room")
        first.append(worker)
        if len(first) == 1:
            job = faults.hang(mlp_context.logs_dir / "pids")
        return call(worker, job, timeout_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "call", crowded)
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        assert isinstance(toolchain.reference("search"), Failure)
        while not first:
            time.sleep(0.01)
        toolchain.restart()
        assert not isinstance(toolchain.observe(), Failure)
        assert [worker is toolchain.worker for worker in first] == [False, True]


def test_a_failure_beside_is_tried_again_where_ranges_are_asked_for(
    mlp_context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, workers = Worker.call, list[Worker]()

    def failing(worker: Worker, job: object, timeout_s: float | None = None) -> object:
        if isinstance(job, ReferenceJob):
            return call(worker, job, timeout_s)
        workers.append(worker)
        return call(worker, job, timeout_s) if len(workers) > 1 else Failure(Stage.RUN, FailureKind.CRASH, "killed")  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "call", failing)
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        assert not isinstance(toolchain.reference("search"), Failure)
        assert not isinstance(toolchain.observe(), Failure)
    assert len(set(workers)) == 2
