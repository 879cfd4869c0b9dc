from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from mptune.data.archive import read_sample_shapes, read_samples, save_samples
from mptune.data.metrics.parts import PARTS_JSON, load_parts
from mptune.data.samples import Rollout
from mptune.engines.base import EngineError, Failure, FailureKind, ReferenceReport, Stage
from mptune.engines.context import RunContext
from mptune.engines.failures import did_not_run
from mptune.engines.ort import cuda_session
from mptune.engines.ort import session as side_by_side
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.engines.ort.cuda_session import probe
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions
from mptune.engines.outputs import value_error
from mptune.engines.toolchains import reference
from mptune.engines.toolchains.jobs import ObserveJob, ReferenceJob
from mptune.engines.toolchains.rows import row_feeds
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.loading.model import load_model
from mptune.graph.writing.variants import observed_parts, write_with_outputs
from mptune.processes.child import WorkerState
from mptune.processes.parent import Worker
from mptune.targets.target import load_target
from mptune.tuning.baseline import check_reference
from tests.engines import faults
from tests.engines.engine_support import run_here, save_graph
from tests.graph import models


def take_reference(model: Path, folder: Path, *feeds: np.ndarray | dict[str, np.ndarray]) -> ReferenceReport:
    samples = folder / "samples.npz"
    named = tuple(feed if isinstance(feed, dict) else {"x": feed} for feed in feeds)
    save_samples(samples, named)
    return run_here(ReferenceJob(model, samples, folder / "reference.npz", "cpu"))


def ramp(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)


def test_the_reference_is_kept_and_described(tmp_path: Path) -> None:
    model = save_graph(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["n", 4])
    report = take_reference(model, tmp_path, ramp(2, 4), 2 * ramp(2, 4))
    assert report.provider == "CPUExecutionProvider"
    assert report.outputs == {"y": {"size": 16.0, "non_finite": 0.0, "zero_fraction": 0.5, "absmax": 2.0}}
    assert report.repeat_error == 0.0
    assert set(report.rows.mixed.values()) == {0.0}
    assert not report.rows.failure
    first, second = read_samples(tmp_path / "reference.npz")
    np.testing.assert_array_equal(first["y"], np.maximum(ramp(2, 4), 0))
    np.testing.assert_array_equal(second["y"], 2 * first["y"])
    model = save_graph(tmp_path / "log.onnx", [helper.make_node("Log", ["x"], ["y"])], [4])
    report = take_reference(model, tmp_path, np.array([-1, 0, 1, np.e], np.float32))
    assert (report.outputs["y"]["non_finite"], report.repeat_error) == (2.0, 0.0)
    assert report.outputs["y"]["absmax"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ({"x": [4, 3], "y": [4, 2, 2], "threshold": [1], "scale": []}, {"x": 0, "y": 0}),
        ({"signal": [1, 5, 3], "hidden": [4, 1, 8], "cell": [4, 1, 8]}, None),  # layers and directions of an LSTM
        ({"nodes": [10, 3], "edges": [2, 20]}, None),
    ],
)
def test_fixed_sizes_that_differ_are_no_batch(shapes: dict[str, list[int]], axes: dict[str, int] | None) -> None:
    samples = [{name: factor * ramp(*shape) for name, shape in shapes.items()} for factor in (1, 2)]
    feeds = row_feeds(shapes, samples)
    assert (None if feeds is None else feeds.axes) == axes


def test_a_large_model_has_batches_of_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = save_graph(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["n", 4]), tmp_path / "s"
    save_samples(samples, tuple({"x": ramp(1, 4) * k} for k in range(1, 7)))
    sizes, run = list[int](), OrtSession.run

    def noted(session: OrtSession, feeds: Mapping[str, np.ndarray], **options: bool) -> dict[str, np.ndarray]:
        sizes.append(len(feeds["x"]))
        return run(session, feeds, **options)

    monkeypatch.setattr(OrtSession, "run", noted)
    for run_bytes, rows in ((None, 4), (1 << 20, 4), (1 << 29, 2), (1 << 40, 2)):
        sizes.clear()
        ReferenceJob(model, samples, tmp_path / "reference.npz", "cpu", run_bytes=run_bytes).run(WorkerState())
        assert max(sizes) == rows


def test_outputs_do_not_hold_the_memory_of_a_session(tmp_path: Path) -> None:
    model = save_graph(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["n", 4])
    for gives_back in (False, True):
        outputs = OrtSession(model, SessionOptions()).run({"x": ramp(1, 4)}, gives_back=gives_back)
        assert outputs["y"].flags.owndata
        np.testing.assert_array_equal(outputs["y"], np.maximum(ramp(1, 4), 0))


def test_a_batch_that_is_another_number_is_named_with_that_number(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["h"], name="flatten"), helper.make_node("Neg", ["h"], ["y"])]
    model = save_graph(tmp_path / "m.onnx", nodes, ["n", 3], {"shape": np.array([4, 3], np.int64)})
    (finding,) = check_reference(take_reference(model, tmp_path, ramp(4, 3)))
    assert "fails with a batch of 1 (" in finding.text
    assert finding.cure == "fix it at 4", "the samples run with it"


@pytest.mark.skipif(onnx.IR_VERSION < 14, reason="this onnx writes no version that ONNX Runtime 1.31 does not read")
def test_an_ir_version_beyond_onnx_runtimes_is_told_with_the_one_that_it_reads(tmp_path: Path) -> None:
    model = save_graph(tmp_path / "m.onnx", [helper.make_node("Neg", ["x"], ["y"])], ["n", 3])
    proto = onnx.load(model)
    proto.ir_version = onnx.IR_VERSION
    onnx.save(proto, model)
    with pytest.raises(EngineError) as caught:
        take_reference(model, tmp_path, ramp(1, 3))
    hint = did_not_run("it does not run", Failure(Stage.BUILD, caught.value.kind, str(caught.value))).hint
    assert hint.startswith("save it with ir_version = 13")


def test_a_cache_of_stacked_keys_and_values_has_its_batch_at_axis_1(tmp_path: Path) -> None:
    graph = """(float[batch, 3] x, float[2, batch, 3] past) => (float[batch, 3] y, float[2, batch, 3] present) {
        key = Gather <axis = 0> (past, first)
        y = Add (x, key)
        present = Neg (past)
    }"""
    model = models.save(models.text(graph, models.constant("first", 0, np.int64)), tmp_path)
    report = take_reference(model, tmp_path, {"x": ramp(1, 3), "past": ramp(2, 1, 3)})
    assert not report.rows.failure
    assert set(report.rows.mixed.values()) == {0.0}


@pytest.mark.parametrize(
    ("values", "reference", "error"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], math.inf),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_value_error(values: list[float], reference: list[float], error: float) -> None:
    assert value_error(np.array(values), np.array(reference)) == pytest.approx(error)


def test_reference_and_ranges_are_the_same_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "usable_cores", lambda: 2)
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Relu", ["e"], ["y"])]
    model, samples = save_graph(tmp_path / "m.onnx", nodes, [1, 2]), tmp_path / "samples.npz"
    feeds = tuple({"x": ramp(1, 2) * k} for k in (3, 100, -1, 2))
    save_samples(samples, feeds)
    loaded = load_model(model)
    (part,) = observed_parts(loaded, {})
    write_with_outputs(loaded, None, tmp_path / "observing.onnx", part.outputs)
    reference = ReferenceJob(model, samples, tmp_path / "reference.npz", "cpu")
    observe = ObserveJob(tmp_path / "observing.onnx", part, samples, "cpu")
    one_by_one = reference.run(WorkerState()), read_samples(reference.outputs), observe.run(WorkerState())
    pairs, together, compute = [], threading.Barrier(2, timeout=30.0), OrtSession.run

    def run_with_another(session: OrtSession, feeds: dict[str, np.ndarray], **kind: bool) -> dict[str, np.ndarray]:
        if threading.current_thread() is not threading.main_thread():  # where one sample is run again
            pairs.append(together.wait())
        return compute(session, feeds, **kind)

    monkeypatch.setattr(OrtSession, "run", run_with_another)
    report = replace(reference, run_bytes=1024).run(WorkerState())
    outputs, ranges = read_samples(reference.outputs), replace(observe, run_bytes=1024).run(WorkerState())
    assert sorted(pairs) == 4 * [0] + 4 * [1], "four samples of the reference, and four that are observed"
    assert repr((report, ranges)) == repr((one_by_one[0], one_by_one[2])), "as text: NaN differs from itself"
    assert all(np.array_equal(a["y"], b["y"]) for a, b in zip(outputs, one_by_one[1], strict=True))


@pytest.mark.parametrize("provider", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_provider_that_starts_has_no_obstacle(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_session, "_reasons", {})
    with Worker() as worker:
        assert probe(provider, worker) is None


@pytest.mark.parametrize("count", [8, 7])
def test_the_parts_of_a_rollout_are_those_of_its_sequences(count: int, tmp_path: Path) -> None:
    """Two sequences of three steps or four: there are fewer outputs than samples."""
    model = save_graph(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [1, 4])
    samples = tmp_path / "samples.npz"
    save_samples(samples, tuple({"x": ramp(1, 4) * k} for k in range(1, count + 1)))
    rollout = Rollout((("y", "x"),), count // 2)
    run_here(ReferenceJob(model, samples, tmp_path / "reference.npz", "cpu", rollout=rollout))
    found = load_parts(tmp_path / PARTS_JSON)
    assert (found["y"].axis, len(found["y"].scales)) == (1, 4), "axis 0 is the batch"


@pytest.fixture(autouse=True)
def _observes_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU observes beside the reference, as a GPU does."""
    monkeypatch.setattr("mptune.engines.toolchains.reference.has_room_beside", lambda provider: True)


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
