from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

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
from tests.engines.engine_support import run_here
from tests.graph import models


def take_reference(model: Path, folder: Path, *feeds: np.ndarray | dict[str, np.ndarray]) -> ReferenceReport:
    samples = folder / "samples.npz"
    save_samples(samples, tuple(feed if isinstance(feed, dict) else {"x": feed} for feed in feeds))
    return run_here(ReferenceJob(model, samples, folder / "reference.npz", "cpu"))


def computing(folder: Path, nodes: str, shape: str = "n, 4") -> Path:
    return models.save(models.text(f"(float[{shape}] x) => (float[] y) {{ {nodes} }}"), folder)


def ramp(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)


def test_the_reference_is_kept_and_described(tmp_path: Path) -> None:
    report = take_reference(computing(tmp_path, "y = Relu (x)"), tmp_path, ramp(2, 4), 2 * ramp(2, 4))
    assert report.provider == "CPUExecutionProvider"
    assert report.outputs == {"y": {"size": 16.0, "non_finite": 0.0, "zero_fraction": 0.5, "absmax": 2.0}}
    assert report.repeat_error == 0.0
    assert set(report.rows.mixed.values()) == {0.0}
    assert not report.rows.failure
    first, second = read_samples(tmp_path / "reference.npz")
    np.testing.assert_array_equal(first["y"], np.maximum(ramp(2, 4), 0))
    np.testing.assert_array_equal(second["y"], 2 * first["y"])
    report = take_reference(computing(tmp_path, "y = Log (x)", "4"), tmp_path, np.array([-1, 0, 1, np.e], np.float32))
    assert (report.outputs["y"]["non_finite"], report.repeat_error) == (2.0, 0.0)
    assert report.outputs["y"]["absmax"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ({"x": [4, 3], "y": [4, 2, 2], "threshold": [1], "scale": []}, {"x": 0, "y": 0}),
        ({"signal": [1, 5, 3], "hidden": [4, 1, 8], "cell": [4, 1, 8]}, None),  # layers and directions of an LSTM
        ({"nodes": [10, 3], "edges": [2, 20]}, None),
        ({"x": ["batch", 3], "past": [2, "batch", 3]}, {"x": 0, "past": 1}),  # a cache of stacked keys and values
    ],
)
def test_fixed_sizes_that_differ_are_no_batch(shapes: dict[str, list[Any]], axes: dict[str, int] | None) -> None:
    sizes = {name: [1 if size == "batch" else size for size in shape] for name, shape in shapes.items()}
    samples = [{name: factor * ramp(*shape) for name, shape in sizes.items()} for factor in (1, 2)]
    feeds = row_feeds(shapes, samples)
    assert (None if feeds is None else feeds.axes) == axes


def test_a_large_model_has_batches_of_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = computing(tmp_path, "y = Relu (x)"), tmp_path / "s"
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
    model = computing(tmp_path, "y = Relu (x)")
    for gives_back in (False, True):
        outputs = OrtSession(model, SessionOptions()).run({"x": ramp(1, 4)}, gives_back=gives_back)
        assert outputs["y"].flags.owndata
        np.testing.assert_array_equal(outputs["y"], np.maximum(ramp(1, 4), 0))


def test_a_batch_that_is_another_number_is_named_with_that_number(tmp_path: Path) -> None:
    nodes = 'shape = Constant <value_ints = [4, 3]> () ["flatten"] h = Reshape (x, shape) y = Neg (h)'
    model = computing(tmp_path, nodes, "n, 3")
    (finding,) = check_reference(take_reference(model, tmp_path, ramp(4, 3)))
    assert "fails with a batch of 1 (" in finding.text
    assert finding.cure == "fix it at 4", "the samples run with it"


@pytest.mark.skipif(onnx.IR_VERSION < 14, reason="this onnx writes no version that ONNX Runtime 1.31 does not read")
def test_an_ir_version_beyond_onnx_runtimes_is_told_with_the_one_that_it_reads(tmp_path: Path) -> None:
    model = computing(tmp_path, "y = Neg (x)", "n, 3")
    proto = onnx.load(model)
    proto.ir_version = onnx.IR_VERSION
    onnx.save(proto, model)
    with pytest.raises(EngineError) as caught:
        take_reference(model, tmp_path, ramp(1, 3))
    hint = did_not_run("it does not run", Failure(Stage.BUILD, caught.value.kind, str(caught.value))).hint
    assert hint.startswith("save it with ir_version = 13")


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
    model, samples = computing(tmp_path, "e = Exp (x) y = Relu (e)", "1, 2"), tmp_path / "samples.npz"
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
    model = computing(tmp_path, "y = Add (x, x)", "1, 4")
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


class Calls:
    """The workers of each job; ``instead`` may take the place of a job, or of its answer."""

    def __init__(self) -> None:
        self.workers: dict[type, list[Worker]] = {ReferenceJob: [], ObserveJob: []}
        self.instead: Callable[[Any], Any] = lambda job: job


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    call, calls = Worker.call, Calls()

    def noted(worker: Worker, job: Any, timeout_s: float | None = None) -> Any:
        calls.workers[type(job)].append(worker)
        job = calls.instead(job)
        return job if isinstance(job, Failure) else call(worker, job, timeout_s)

    monkeypatch.setattr(Worker, "call", noted)
    return calls


@pytest.fixture
def opened(mlp_context: RunContext) -> Iterator[Callable[[], Toolchain]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context))


def test_ranges_are_the_same_beside_the_reference_and_in_parts(
    opened: Callable[[], Toolchain], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened().observe()
    calls.workers[ObserveJob].clear()
    toolchain = opened()
    assert not isinstance(toolchain.reference("search"), Failure)
    assert toolchain.observe() == toolchain.observe() == expected
    for which in ("held_out", "search"):
        assert not isinstance(toolchain.reference(which), Failure)
    (beside,), (first, second, third) = calls.workers[ObserveJob], calls.workers[ReferenceJob]
    assert beside is not first is second is third
    monkeypatch.setattr("mptune.graph.writing.variants._MOST_OUTPUTS", 5)
    calls.workers[ObserveJob].clear()
    stages: list[str] = []
    assert opened().observe(stages.append) == expected
    assert len(calls.workers[ObserveJob]) == len(stages) > 1
    assert all(stage.startswith("observing the ranges of values: ") for stage in stages)


def test_few_samples_are_observed_where_their_values_take_much_memory(
    opened: Callable[[], Toolchain], mlp_context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_OBSERVED_BYTES", 1)
    monkeypatch.setattr(reference, "LEAST_OBSERVED", 3)
    ranges = opened().observe()
    assert not isinstance(ranges, Failure)
    assert {value.samples for value in ranges.values()} == {3}
    assert len(read_sample_shapes(mlp_context.samples("search"))) == 4


@pytest.mark.parametrize("hangs", [True, False])
def test_what_fails_beside_is_tried_again_in_another_process(
    hangs: bool, opened: Callable[[], Toolchain], mlp_context: RunContext, calls: Calls
) -> None:
    """Once ranges are asked for; what starves beside the reference is ended by a restart."""

    def crowded(job: Any) -> Any:
        if isinstance(job, ReferenceJob):
            return Failure(Stage.RUN, FailureKind.OUT_OF_MEMORY, "no room") if hangs else job
        if len(calls.workers[ObserveJob]) > 1:
            return job
        return faults.hang(mlp_context.logs_dir / "pids") if hangs else Failure(Stage.RUN, FailureKind.CRASH, "killed")

    calls.instead, toolchain = crowded, opened()
    assert isinstance(toolchain.reference("search"), Failure) is hangs
    while not calls.workers[ObserveJob]:
        time.sleep(0.01)
    if hangs:
        toolchain.restart()
    assert not isinstance(toolchain.observe(), Failure)
    first, again = calls.workers[ObserveJob]
    assert first is not again is toolchain.worker
