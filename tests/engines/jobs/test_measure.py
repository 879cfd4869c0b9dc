from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from mptune.data.calibration import CalibrationSet, read_outputs, save_outputs
from mptune.engines.base import EngineError, ReferenceReport, Session
from mptune.engines.jobs.measure import MeasureJob, ObserveJob, ProbeJob, ReferenceJob, relative_l2
from mptune.engines.ort.session import OrtSession, SessionOptions
from mptune.engines.timing.latency import Repetitions
from mptune.engines.worker.child import WorkerState
from mptune.graph.loading.model import load_model
from mptune.graph.writing.observe import write_observing_model
from mptune.settings import LatencySettings

FLOAT = TensorProto.FLOAT
QUICK = LatencySettings(warmup_ms=1.0, duration_ms=1.0, min_iterations=10, bootstrap_samples=50)


def value(name: str, shape: list[int | str] | None, dtype: int = FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def save(
    path: Path,
    nodes: list[NodeProto],
    shape: list[int | str],
    constants: dict[str, np.ndarray] | None = None,
    output: list[int | str] | None = None,
) -> Path:
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", [value("x", shape)], [value("y", output)], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def take_reference(model: Path, folder: Path, *feeds: np.ndarray) -> ReferenceReport:
    samples = folder / "samples.npz"
    CalibrationSet(tuple({"x": feed} for feed in feeds), "test", False).save(samples)
    state = WorkerState()
    try:
        return ReferenceJob(model, samples, folder / "reference.npz", "cpu").run(state)
    finally:
        state.close()


def ramp(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)


def test_the_reference_is_kept_and_described(tmp_path: Path) -> None:
    model = save(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["n", 4])
    report = take_reference(model, tmp_path, ramp(2, 4), 2 * ramp(2, 4))
    assert report.provider == "CPUExecutionProvider"
    assert report.outputs == {"y": {"non_finite": 0.0, "zero_fraction": 0.5, "absmax": 2.0}}
    assert (report.repeat_error, report.identical_rows_error, report.batch_size_error) == (0.0, 0.0, 0.0)
    assert report.warnings == ()
    first, second = read_outputs(tmp_path / "reference.npz")
    np.testing.assert_array_equal(first["y"], np.maximum(ramp(2, 4), 0))
    np.testing.assert_array_equal(second["y"], 2 * first["y"])


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    model = save(tmp_path / "m.onnx", [helper.make_node("Log", ["x"], ["y"])], [4])
    report = take_reference(model, tmp_path, np.array([-1, 0, 1, np.e], np.float32))
    assert report.outputs["y"]["non_finite"] == 2.0
    assert report.outputs["y"]["absmax"] == pytest.approx(1.0)
    assert report.repeat_error == 0.0


def test_a_model_that_rolls_dice_does_not_repeat(tmp_path: Path) -> None:
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["r"]), helper.make_node("Add", ["x", "r"], ["y"])]
    assert take_reference(save(tmp_path / "m.onnx", nodes, [4]), tmp_path, ramp(4)).repeat_error > 0.01


def test_a_broken_broadcast_shows_in_identical_rows(tmp_path: Path) -> None:
    node = helper.make_node("Add", ["x", "bias"], ["y"])
    model = save(tmp_path / "m.onnx", [node], [2, 3], {"bias": np.array([[0], [1]], np.float32)})
    report = take_reference(model, tmp_path, ramp(2, 3))
    assert report.identical_rows_error is not None
    assert report.identical_rows_error > 0.1
    assert report.batch_size_error is None


def test_a_batch_that_leaks_into_its_rows_shows_in_the_batch_size(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x", "axis"], ["s"], keepdims=1),
        helper.make_node("Add", ["x", "s"], ["y"]),
    ]
    model = save(tmp_path / "m.onnx", nodes, ["n", 3], {"axis": np.array([0], np.int64)})
    report = take_reference(model, tmp_path, ramp(1, 3))
    assert report.identical_rows_error == 0.0
    assert report.batch_size_error is not None
    assert report.batch_size_error > 0.1


def test_a_batch_that_is_dynamic_in_name_only_is_a_warning(tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = save(tmp_path / "m.onnx", [node], ["n", 3], {"shape": np.array([1, 3], np.int64)})
    report = take_reference(model, tmp_path, ramp(1, 3))
    assert report.identical_rows_error is None
    (warning,) = report.warnings
    assert "fails with 2 rows" in warning
    assert warning.endswith(": fix it at 1")


def test_a_model_without_a_batch_is_not_asked_for_rows(tmp_path: Path) -> None:
    model = save(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], [1, 3])
    report = take_reference(model, tmp_path, ramp(1, 3))
    assert (report.identical_rows_error, report.batch_size_error) == (None, None)


@pytest.mark.parametrize(
    ("values", "reference", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], math.inf),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.inf, 1.0], [math.inf, 2.0], 0.5),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_relative_l2(values: list[float], reference: list[float], error: float) -> None:
    assert relative_l2(np.array(values), np.array(reference)) == pytest.approx(error)


def test_ranges_are_reduced_over_all_samples(tmp_path: Path) -> None:
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Relu", ["e"], ["y"])]
    model = save(tmp_path / "m.onnx", nodes, ["n", 2], output=["n", 2])
    observing = tmp_path / "observing.onnx"
    taps = write_observing_model(load_model(model), None, observing)
    samples = tmp_path / "samples.npz"
    feeds = [np.array([[0, 1]], np.float32), np.array([[2, 100], [-9, 0]], np.float32)]
    CalibrationSet(tuple({"x": feed} for feed in feeds), "test", False).save(samples)
    ranges = ObserveJob(observing, taps, samples, "cpu").run(WorkerState())
    assert ranges["x"].absmax == 100.0
    assert (ranges["e"].shape, ranges["e"].non_finite) == ((1, 2), 1)
    assert ranges["e"].absmax == pytest.approx(math.exp(2), rel=1e-5)


def prepare(folder: Path, shift: float = 0.0) -> tuple[Path, Path, Path]:
    """A model, samples, and reference outputs that are off by a shift."""
    model = save(folder / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["n", 2])
    feeds = [np.array([[3, 4]], np.float32), np.array([[6, 8]], np.float32)]
    CalibrationSet(tuple({"x": feed} for feed in feeds), "test", False).save(folder / "s.npz")
    save_outputs(folder / "r.npz", [{"y": feed + np.float32(shift)} for feed in feeds])
    return model, folder / "s.npz", folder / "r.npz"


def test_a_measurement_keeps_the_baselines_session_open(tmp_path: Path) -> None:
    model, samples, reference = prepare(tmp_path)
    state = WorkerState()
    job = MeasureJob(model, model, samples, samples, reference, "cpu", latency=QUICK)
    first = job.run(state)
    ((_, baseline),) = [entry for slot, entry in state._cache.items() if slot == "baseline"]
    assert first.repetitions.iterations >= 10
    assert len(first.latency.raw_ms) == first.repetitions.iterations
    assert len(first.baseline.raw_ms) == first.repetitions.iterations
    assert first.error.value("max_abs") == 0.0
    frozen = MeasureJob(
        model, model, samples, samples, reference, "cpu", latency=QUICK, repetitions=Repetitions(1, 12, 2)
    )
    second, third = frozen.run(state), frozen.run(state)
    assert second.repetitions == third.repetitions == Repetitions(1, 12, 2)
    assert len(third.latency.raw_ms) == 12
    assert state._cache["baseline"][1] is baseline
    state.close()
    with pytest.raises(EngineError, match="closed"):
        baseline.run({"x": np.zeros((1, 2), np.float32)})


@dataclass(frozen=True)
class Opening(MeasureJob):
    """Keeps how the candidate's session was opened."""

    seen: list[SessionOptions] = field(default_factory=list)

    def _compare(self, candidate: Session, baseline: Session) -> tuple[str, ...]:
        assert isinstance(candidate, OrtSession)
        self.seen.append(candidate.options)
        return super()._compare(candidate, baseline)


def test_both_sessions_leave_tf32_to_the_environment_where_the_job_says_so(tmp_path: Path) -> None:
    model, samples, reference = prepare(tmp_path)
    state = WorkerState()
    job = Opening(model, model, samples, samples, reference, "cpu", latency=QUICK)
    found = []
    for by_environment in (False, True):
        replace(job, tf32_by_environment=by_environment).run(state)
        found.append(state._cache["baseline"][1].options)
    assert [options.tf32_by_environment for options in job.seen] == [False, True]
    assert [options.tf32_by_environment for options in found] == [False, True]
    replace(job, tf32=True).run(state)
    assert (job.seen[-1].tf32, state._cache["baseline"][1].options.tf32) == (True, False)
    state.close()


def test_the_cpu_provider_starts() -> None:
    ProbeJob("cpu").run(WorkerState())


@pytest.mark.gpu
def test_the_cuda_provider_starts() -> None:
    report = ProbeJob("cuda").run(WorkerState())
    assert report.cuda_python is None or report.cuda_versions is None
