"""What is observed beside the reference: the same, and nothing where it is in the way."""

from __future__ import annotations

import pytest

from mptune.engines.backends.onnxruntime import ONNXRUNTIME
from mptune.engines.base import Failure, FailureKind, Stage
from mptune.engines.context import RunContext
from mptune.engines.jobs.reference import ReferenceJob
from mptune.engines.toolchains.toolchain import MeasuredToolchain
from mptune.processes.parent import Worker
from mptune.settings import SearchSettings
from mptune.targets.target import load_target


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Jobs in their order with the number of the worker, where a CPU observes beside the reference as a GPU does."""
    monkeypatch.setattr("mptune.engines.toolchains.reference.observes_beside", lambda provider: True)
    called, call = list[tuple[str, int | None]](), Worker.call

    def noted(worker: Worker, job: object, timeout_s: float) -> object:
        called.append((type(job).__name__, id(worker)))
        return call(worker, job, timeout_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "call", noted)
    return called


def test_ranges_that_are_observed_beside_are_the_same(
    mlp_context: RunContext, settings: SearchSettings, jobs: list[tuple[str, int | None]]
) -> None:
    with MeasuredToolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        expected = toolchain.reference_model.observe()
    with MeasuredToolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        jobs.clear()
        assert not isinstance(toolchain.reference_model.reference("search"), Failure)
        assert toolchain.reference_model.observe() == expected
        assert toolchain.reference_model.observe() == expected
        assert not isinstance(toolchain.reference_model.reference("held_out"), Failure)
        assert not isinstance(toolchain.reference_model.reference("search"), Failure)
    assert sorted(name for name, _ in jobs) == ["ObserveJob", "ReferenceJob", "ReferenceJob", "ReferenceJob"]
    assert len({worker for name, worker in jobs if name == "ReferenceJob"}) == 1
    assert len({worker for _, worker in jobs}) == 2


def test_a_model_that_is_observed_in_parts_shows_the_same_ranges(
    mlp_context: RunContext,
    settings: SearchSettings,
    jobs: list[tuple[str, int | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MeasuredToolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        expected = toolchain.reference_model.observe()
    assert not isinstance(expected, Failure)
    monkeypatch.setattr("mptune.graph.writing.observe._MOST_OUTPUTS", 5)
    jobs.clear()
    stages: list[str] = []
    with MeasuredToolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        assert toolchain.reference_model.observe(stages.append) == expected
    assert len(stages) > 1
    assert all(stage.startswith("observing the ranges of values: ") for stage in stages)
    assert [name for name, _ in jobs] == ["ObserveJob"] * len(stages)


@pytest.mark.parametrize("kind", [FailureKind.OUT_OF_MEMORY, FailureKind.ERROR])
def test_what_starves_beside_it_is_tried_again_alone(
    kind: FailureKind, mlp_context: RunContext, settings: SearchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mptune.engines.toolchains.reference.observes_beside", lambda provider: True)
    call, failure, called = Worker.call, Failure(Stage.RUN, kind, "no room"), list[str]()

    def crowded(worker: Worker, job: object, timeout_s: float) -> object:
        called.append(type(job).__name__)
        first = called.count("ReferenceJob") == 1 and isinstance(job, ReferenceJob)
        return failure if first else call(worker, job, timeout_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "call", crowded)
    with MeasuredToolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        found = toolchain.reference_model.reference("search")
        assert isinstance(found, Failure) == (kind is FailureKind.ERROR)
        assert (toolchain.reference_model._observing is None) == (kind is not FailureKind.ERROR)
        assert not isinstance(toolchain.reference_model.observe(), Failure)


def test_a_failure_beside_is_tried_again_where_ranges_are_asked_for(
    mlp_context: RunContext, settings: SearchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mptune.engines.toolchains.reference.observes_beside", lambda provider: True)
    call, workers = Worker.call, list[Worker]()

    def failing(worker: Worker, job: object, timeout_s: float) -> object:
        if isinstance(job, ReferenceJob):
            return call(worker, job, timeout_s)
        workers.append(worker)
        return call(worker, job, timeout_s) if len(workers) > 1 else Failure(Stage.RUN, FailureKind.CRASH, "killed")  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "call", failing)
    with MeasuredToolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as toolchain:
        assert not isinstance(toolchain.reference_model.reference("search"), Failure)
        assert not isinstance(toolchain.reference_model.observe(), Failure)
    assert len(set(workers)) == 2
