"""What a session does, held against TensorRT's rules on a device in host memory (``fake_device``); and on a GPU, where
there is one with TensorRT, the same contract as every session (``test_contract``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import runtime as cuda
from mptune.engines.tensorrt import session as tensorrt_session
from mptune.engines.tensorrt.builder import BuildOptions, build_engine
from mptune.engines.tensorrt.library import Kind, Library, load_library
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.engines.timing.latency import Repetitions
from mptune.settings import LatencySettings
from tests.engines.stopwatches import QUICK, calibrated, timed
from tests.engines.tensorrt.fake_device import FakeCuda, FakeTensorRt


class Device:
    """A device, and the sessions that are opened on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cuda = FakeCuda()
        self.trt = FakeTensorRt(self.cuda)
        self.sessions: list[TensorRtSession] = []
        monkeypatch.setattr(cuda, "runtime", lambda: self.cuda)
        monkeypatch.setattr(tensorrt_session, "load_library", lambda kind: Library(kind, self.trt, "10.16"))

    def open(self, program: str, kind: Kind = "tensorrt", latency: LatencySettings = QUICK) -> TensorRtSession:
        path = self.folder / f"{program}.engine"
        path.write_text(json.dumps({"program": program, "rows": 4}))
        cache = self.folder / "runtime.cache" if kind == "tensorrt-rtx" else None
        self.sessions.append(TensorRtSession(path, EngineOptions(kind, latency, cache)))
        return self.sessions[-1]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device(tmp_path, monkeypatch)
    yield device
    for session in device.sessions:
        session.close()
    assert not device.cuda.memory, "device memory was not freed"
    assert not device.cuda.streams


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)}


def test_outputs_follow_the_feeds_and_their_shapes(device: Device) -> None:
    session = device.open("double")
    for count in (1, 4, 2, 4):
        feeds = rows(count, seed=count)
        for _ in range(2):
            found = session.run(feeds)
            np.testing.assert_array_equal(found["y"], feeds["x"] * 2)
            assert found.keys() == {"y", "total"}
    assert len(device.cuda.memory) == 3


def test_a_graph_is_captured_once_a_shape_and_replayed(device: Device) -> None:
    session = device.open("double")
    latency = timed(session, rows(2))
    assert latency.raw_ms == (1.0,) * 10
    assert latency.transfer_ms is not None
    assert (device.cuda.captures, device.cuda.launches) == (1, 22)  # tried, warmed up, and ten timed behind one ahead
    timed(session, rows(2, seed=1))
    assert device.cuda.captures == 1
    timed(session, rows(3))
    assert device.cuda.captures == 2
    feeds = rows(2, seed=5)
    np.testing.assert_array_equal(session.run(feeds)["y"], feeds["x"] * 2)
    timed(session, rows(2))
    assert device.cuda.captures == 3
    assert session.warnings == ()


def test_transfers_are_timed_once_for_a_shape(device: Device) -> None:
    session = device.open("double")
    first = session.stopwatch(rows(2)).transfer_ms
    assert first is not None
    assert session.stopwatch(rows(2, seed=1)).transfer_ms == first
    assert session.stopwatch(rows(3)).transfer_ms != first


def test_repetitions_are_calibrated_and_kept(device: Device) -> None:
    session = device.open("double")
    repetitions = calibrated(session, rows(2))
    assert repetitions.iterations >= QUICK.min_iterations
    latency = timed(session, rows(2), Repetitions(1, 10, executions_per_value=7))
    assert latency.raw_ms == (1.0,) * 10


def test_without_a_graph_the_engine_is_enqueued(device: Device) -> None:
    device.cuda.capture_fails = True
    session = device.open("double")
    assert timed(session, rows(2)).raw_ms == (1.0,) * 10
    assert (device.cuda.captures, device.cuda.launches) == (0, 0)
    (warning,) = session.warnings
    assert warning.startswith("no CUDA graph (cudaStreamEndCapture failed with 900")
    other = device.open("double", latency=LatencySettings(**{**vars(QUICK), "cuda_graph": False}))
    timed(other, rows(2))
    assert other.warnings == ()


def test_outputs_whose_shape_depends_on_values(device: Device) -> None:
    session = device.open("nonzero")
    for values, where in (([0, 1, 2, 0], [[1, 2]]), ([1, 1, 1, 1], [[0, 1, 2, 3]]), ([0, 0, 0, 0], [[]])):
        feeds = {"x": np.array(values, np.float32)}
        np.testing.assert_array_equal(session.run(feeds)["where"], np.array(where, np.int64))
        assert len(timed(session, feeds).raw_ms) == 10
    assert device.cuda.captures == 0
    (warning,) = session.warnings
    assert "the shape of output 'where' depends on values" in warning


def test_inputs_that_shapes_are_computed_from_lie_on_the_host(device: Device) -> None:
    session = device.open("reshape")
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    for shape in ((3, 4), (12, 1), (3, 4)):
        feeds = {"x": x, "shape": np.array(shape, np.int64)}
        np.testing.assert_array_equal(session.run(feeds)["y"], x.reshape(shape))
        timed(session, feeds)
    assert device.cuda.captures == 3


def test_feeds_that_do_not_fit_are_engine_errors_in_tensorrts_words(device: Device) -> None:
    session = device.open("double")
    for feeds, words in (
        ({}, "no value is given for input 'x'"),
        ({"x": np.zeros((2, 3), np.float64)}, "of type float32, and float64 was given"),
        (rows(5), "Static dimension mismatch while setting input shape for x"),
    ):
        with pytest.raises(EngineError, match=words):
            session.run(feeds)
    np.testing.assert_array_equal(session.run(rows(2))["y"], rows(2)["x"] * 2)


def test_feeds_that_are_not_contiguous(device: Device) -> None:
    session = device.open("double")
    wide = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(session.run({"x": wide.T})["y"], wide.T * 2)


def test_a_type_that_numpy_lacks(device: Device) -> None:
    session = device.open("odd")
    with pytest.raises(EngineError, match="'x' is of type bfloat16, which NumPy lacks") as caught:
        session.run({"x": np.zeros((1, 3), np.float32)})
    assert caught.value.kind is FailureKind.UNSUPPORTED


def test_files_that_are_no_engine(device: Device, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.engine"
    damaged.write_bytes(b"damaged")
    with pytest.raises(
        EngineError, match=r"damaged\.engine cannot be loaded: Serialization: Version tag does not match"
    ):
        TensorRtSession(damaged, EngineOptions("tensorrt"))
    with pytest.raises(EngineError, match=r"the engine none\.engine cannot be read: No such file"):
        TensorRtSession(tmp_path / "none.engine", EngineOptions("tensorrt"))
    with pytest.raises(EngineError, match="vanished"):
        TensorRtSession(tmp_path / "vanished" / "vanished.engine", EngineOptions("tensorrt"))


def test_a_closed_session_says_so_and_closes_again(device: Device) -> None:
    session = device.open("double")
    timed(session, rows(2))
    session.close()
    session.close()
    for call in (lambda: session.run(rows(1)), lambda: timed(session, rows(1)), session.information):
        with pytest.raises(EngineError, match="closed"):
            call()  # type: ignore[no-untyped-call]


def test_an_engine_is_gone_before_its_stream_whoever_holds_a_stopwatch(device: Device) -> None:
    for latency in (QUICK, replace(QUICK, cuda_graph=False)):
        session = device.open("double", latency=latency)
        watches = [session.stopwatch(rows(count)) for count in (2, 3)]
        watches[-1].run_once()
        session.close()  # The device refuses to destroy a stream whose context is alive.
        assert not device.cuda.users
        assert not device.cuda.streams
        for watch in watches:
            with pytest.raises(EngineError, match="closed"):
                watch.run_once()


def test_a_context_that_is_kept_keeps_its_stream_and_is_reported(device: Device) -> None:
    session = device.open("double")
    session.run(rows(2))
    kept = session._context
    with pytest.warns(RuntimeWarning, match="TensorRT is still alive"):
        session.close()
    assert len(device.cuda.streams) == 1
    del kept
    device.cuda.streams.clear()


def test_two_sessions_live_side_by_side(device: Device) -> None:
    first, second = device.open("double"), device.open("nonzero")
    for _ in range(2):
        timed(first, rows(2))
        timed(second, {"x": np.ones(4, np.float32)})
    second.close()
    np.testing.assert_array_equal(first.run(rows(2))["y"], rows(2)["x"] * 2)


def test_the_inspector_is_asked_of_the_context(device: Device) -> None:
    session = device.open("double")
    assert json.loads(session.information())["bound"]


def test_tensorrt_rtx_compiles_at_once_and_keeps_its_kernels(device: Device) -> None:
    session = device.open("double", "tensorrt-rtx")
    config = device.trt.contexts[-1].engine.runtime_config
    strategies = device.trt.DynamicShapesKernelSpecializationStrategy
    assert config.dynamic_shapes_kernel_specialization_strategy is strategies.EAGER
    assert config.cache.read == []
    session.run(rows(1))
    session.close()
    assert (device.folder / "runtime.cache").read_bytes() == b"kernels"
    device.open("double", "tensorrt-rtx")
    assert device.trt.contexts[-1].engine.runtime_config.cache.read == [b"kernels"]


@pytest.mark.skipif(cuda.unavailable_reason() is None, reason="needs a machine without a GPU")
def test_without_a_device_the_reason_is_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    with pytest.raises(EngineError) as caught:
        TensorRtSession(tmp_path / "x.engine", EngineOptions("tensorrt-rtx"))
    assert caught.value.kind in {FailureKind.DEVICE_LOST, FailureKind.UNSUPPORTED}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tensorrt", "tensorrt-rtx"])
def test_an_engine_for_another_gpu_and_a_damaged_one(kind: Kind, mlp_path: Path, tmp_path: Path) -> None:
    try:
        library = load_library(kind)
    except EngineError as error:
        pytest.skip(error.message)
    path = tmp_path / "x.engine"
    path.write_bytes(b"damaged" * 100)
    with pytest.raises(EngineError, match=r"the engine x\.engine cannot be loaded: "):
        TensorRtSession(path, EngineOptions(kind))
    if kind == "tensorrt":
        pytest.skip("TensorRT builds for the GPU here only")
    options = BuildOptions(kind, capabilities=((12, 1),))
    path.write_bytes(build_engine(library, mlp_path, options, [{"x": np.zeros((1, 32), np.float32)}]).memory)
    with pytest.raises(EngineError, match=r"the engine x\.engine cannot be loaded: "):
        TensorRtSession(path, EngineOptions(kind))


def test_fp64_is_fp32_for_tensorrt_and_said_once(device: Device) -> None:
    """TensorRT's parser declares FP64 inputs FP32."""
    device.open("double")
    fp64 = EngineOptions("tensorrt", QUICK, fp64_inputs=frozenset({"x"}))
    session = TensorRtSession(device.folder / "double.engine", fp64)
    feeds = {"x": rows(2)["x"].astype(np.float64)}
    for _ in range(2):
        np.testing.assert_array_equal(session.run(feeds)["y"], rows(2)["x"] * 2)
    assert timed(session, feeds).transfer_ms is not None
    assert [text for text in session.warnings if "FP64" in text] == [
        "input 'x' is FP64, and FP32 in the engine: give FP32 where you deploy it"
    ]
    session.close()


def test_kernels_are_kept_from_the_first_execution_on(device: Device) -> None:
    session = device.open("double", "tensorrt-rtx")
    assert not (device.folder / "runtime.cache").exists()
    session.run(rows(1))
    assert (device.folder / "runtime.cache").read_bytes() == b"kernels"
    session.close()


@pytest.mark.parametrize("kind", ["tensorrt", "tensorrt-rtx"])
def test_engines_built_for_inspection_run_without_its_cost(device: Device, kind: Kind) -> None:
    device.open("double", kind)
    assert device.trt.contexts[-1].nvtx_verbosity is device.trt.ProfilingVerbosity.NONE
