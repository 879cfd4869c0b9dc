"""What a session does, held against TensorRT's rules on a device in host memory (``tests.device``); and on a GPU, where
there is one with TensorRT, the same contract as every session (``test_contract``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from mptune.engines import cuda
from mptune.engines.base import EngineError
from mptune.engines.tensorrt.library import Kind
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession, host_memory
from tests.device.cuda import FakeCuda
from tests.device.programs import PROGRAMS
from tests.engines.engine_support import timed


class Device:
    """A device, and the sessions that are opened on it."""

    def __init__(self, folder: Path, fake_cuda: FakeCuda) -> None:
        self.folder, self.cuda, self.sessions = folder, fake_cuda, ExitStack()

    def open(self, program: str, kind: Kind = "tensorrt", *, cuda_graph: bool = True) -> TensorRtSession:
        path = self.folder / f"{program}.engine"
        path.write_bytes(PROGRAMS[program]().to_bytes())
        return self.sessions.enter_context(closing(TensorRtSession(path, EngineOptions(kind, cuda_graph))))


@pytest.fixture
def device(tmp_path: Path, fake_cuda: FakeCuda) -> Iterator[Device]:
    device = Device(tmp_path, fake_cuda)
    with device.sessions:
        yield device


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)}


def test_a_graph_is_captured_once_a_shape_and_replayed(device: Device) -> None:
    session = device.open("double")
    latency = timed(session, rows(2))
    assert latency.raw_ms == (1.0,) * 10
    assert (device.cuda.captures, device.cuda.launches) == (1, 22)  # tried, warmed up, and ten timed behind one ahead
    timed(session, rows(2, seed=1))
    assert device.cuda.captures == 1
    timed(session, rows(3))
    assert device.cuda.captures == 2
    feeds = rows(2, seed=5)
    np.testing.assert_array_equal(session.run(feeds)["y"], feeds["x"] * 2)
    assert len(device.cuda.memory) == 5, "of the engine, of its context, and of three tensors"
    timed(session, rows(2))
    assert device.cuda.captures == 3
    assert session.warnings == ()
    session.close()
    with pytest.raises(EngineError, match="closed"):
        session.information()


def test_without_a_graph_the_engine_is_enqueued(device: Device) -> None:
    session = device.open("branching")
    assert timed(session, rows(2)).raw_ms == (1.0,) * 10
    assert (device.cuda.captures, device.cuda.launches) == (0, 0)
    (warning,) = session.warnings
    assert warning.startswith("no CUDA graph (the engine could not be enqueued: ")
    assert "not permitted when stream is capturing" in warning
    other = device.open("double", cuda_graph=False)
    timed(other, rows(2))
    assert other.warnings == ()
    dynamic = device.open("nonzero")
    timed(dynamic, {"x": np.array([0, 1, 2, 0], np.float32)})
    assert device.cuda.captures == 0
    (warning,) = dynamic.warnings
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
    """Of FP64 inputs, which TensorRT's parser declares FP32, it has no word. ``infer_shapes`` raises (pyCore.cpp)."""
    double, reshape = device.open("double"), device.open("reshape")
    beyond = {"x": np.zeros((2, 6), np.float32), "shape": np.array([24, 1], np.int64)}
    for session, feeds, words in (
        (double, {}, "no value is given for input 'x'"),
        (double, {"x": np.zeros((2, 3), np.int64)}, "of type float32, and int64 was given"),
        (double, rows(5), "not satisfy any optimization profiles"),
        (reshape, beyond, r"do not fit together, or cannot be inferred: values \[24, 1\] of shape are out of"),
    ):
        with pytest.raises(EngineError, match=words):
            session.run(feeds)
    for dtype in (np.float32, np.float64):
        feeds = {"x": rows(2)["x"].astype(dtype)}
        np.testing.assert_array_equal(double.run(feeds)["y"], rows(2)["x"] * 2)
        assert timed(double, feeds).median_ms > 0.0


def test_files_that_are_no_engine(device: Device, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.engine"
    damaged.write_bytes(b"damaged")
    for path, words in (
        (damaged, r"damaged\.engine cannot be loaded: Serialization: Version tag does not match"),
        (tmp_path / "none" / "none.engine", r"the engine none\.engine cannot be read: No such file"),
    ):
        with pytest.raises(EngineError, match=words):
            TensorRtSession(path, EngineOptions("tensorrt"))


def test_a_context_that_is_kept_keeps_its_stream_and_is_reported(device: Device) -> None:
    session = device.open("double")
    session.run(rows(2))
    kept = session._context
    with pytest.warns(RuntimeWarning, match="TensorRT is still alive"):
        session.close()
    (stream,) = device.cuda.streams
    del kept
    device.cuda.cudaStreamDestroy(stream)


def test_tensorrt_rtx_compiles_at_once(device: Device) -> None:
    session = device.open("double", "tensorrt-rtx")
    config, strategies = session._context._runtime_config, session.library.trt.DynamicShapesKernelSpecializationStrategy
    assert config.dynamic_shapes_kernel_specialization_strategy is strategies.EAGER
    # Engines are built for inspection, and run without its cost.
    assert session._context.nvtx_verbosity is session.library.trt.ProfilingVerbosity.NONE


def test_nothing_is_released_while_the_device_still_works(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timing that fails in the middle leaves executions on the stream; their memory may not be freed before them."""
    for cuda_graph in (True, False):
        session = device.open("double", cuda_graph=cuda_graph)
        watch = session.stopwatch(rows(2))
        with monkeypatch.context() as patch:
            patch.setattr(cuda.Event, "record", lambda event, stream: cuda.check((2,), "cudaEventRecord"))
            for _ in range(2):
                with pytest.raises(EngineError, match="cudaEventRecord failed"):
                    watch.value_ms(3)
        assert device.cuda.streams[-1].queue
        session.run(rows(3))  # other shapes bind other memory
        session.stopwatch(rows(3)).enqueue()
        session.close()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2)])
def test_memory_on_the_host_is_aligned(shape: tuple[int, ...]) -> None:
    """TensorRT takes no address of less than 256-byte alignment (NvInferRuntime.h, setTensorAddress)."""
    for count in range(5):
        place = host_memory(shape, np.dtype(np.int64))
        assert place.ctypes.data % 256 == 0
        place[...] = count
        np.testing.assert_array_equal(place, np.full(shape, count))
