"""CUDA calls, TF32, launches outside of the interval that is timed; the system's library in place of cuda-python."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import closing
from ctypes import CFUNCTYPE, c_int
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mptune.engines import cuda
from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import StreamStopwatch, SystemRuntime, enqueue_delay, load_system_runtime, system_libraries
from mptune.engines.latency import Repetitions, time_in_turn
from mptune.engines.ort.cuda_session import NO_TF32, CudaSession, provider_options
from mptune.engines.ort.session import Preset, SessionOptions, Tf32
from mptune.engines.tensorrt import session as tensorrt_session
from mptune.engines.tensorrt.library import Library
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.processes.child import WorkerState
from mptune.processes.parent import Worker
from mptune.settings import LatencySettings
from tests.device.cuda import FakeCuda
from tests.device.programs import double
from tests.device.tensorrt import make_module
from tests.graph import models


def test_calls_are_unpacked_and_checked() -> None:
    bindings = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-python")
    success = bindings.cudaError_t.cudaSuccess
    assert cuda.check((success,), "call") is None
    assert cuda.check((success, 3), "call") == 3
    assert cuda.check((success, 3, 4), "call") == (3, 4)
    with pytest.raises(EngineError, match=r"cudaMalloc failed with cudaErrorMemoryAllocation: out of memory") as caught:
        cuda.check((bindings.cudaError_t.cudaErrorMemoryAllocation, None), "cudaMalloc")
    assert caught.value.kind is FailureKind.OUT_OF_MEMORY


@pytest.mark.gpu
def test_a_delay_keeps_the_stream_busy() -> None:
    stream, start, end = cuda.Stream(), cuda.Event(), cuda.Event()
    enqueue_delay(stream)  # The first launch also loads the kernel's module: 66 ms on an H200.
    start.record(stream)
    enqueue_delay(stream, span_us=3000)
    end.record(stream)
    stream.synchronize()
    assert 2.9 < start.elapsed_ms(end) < 30.0
    for thing in (start, end, stream):
        thing.close()


@pytest.mark.parametrize(
    ("tf32", "variable", "expected"),
    [
        ("off", None, "0"),
        ("off", "0", "0"),  # cuBLAS does not always obey the variable
        ("off by environment", None, "0"),  # nothing else would switch TF32 off
        ("off by environment", "1", "0"),
        ("off by environment", "0", "1"),
        ("on", None, "1"),
        ("on", "0", "1"),
    ],
)
def test_who_switches_tf32_off(
    monkeypatch: pytest.MonkeyPatch, tf32: Tf32, variable: str | None, expected: str
) -> None:
    (name,) = NO_TF32
    if variable is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, variable)
    options = SessionOptions("cuda", "timed", tf32=tf32)
    assert provider_options(options, 1, graph=False)["use_tf32"] == expected


def test_what_is_timed_has_the_kernels_that_a_user_gets() -> None:
    def choice(preset: Preset) -> str:
        return provider_options(SessionOptions("cuda", preset), 1, graph=False)["cudnn_conv_algo_search"]

    assert choice("timed") == "EXHAUSTIVE"  # ONNX Runtime's default
    assert {choice("reference"), choice("values"), choice("emulation")} == {"HEURISTIC"}


@dataclass(frozen=True)
class ProductErrorJob:
    path: Path
    tf32: Tf32

    def run(self, state: WorkerState | None = None) -> float:
        x = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
        exact = x.astype(np.float64) @ x.astype(np.float64)
        with closing(CudaSession(self.path, SessionOptions("cuda", tf32=self.tf32))) as session:
            return float(np.linalg.norm(session.run({"x": x})["y"] - exact) / np.linalg.norm(exact))


@pytest.mark.gpu
def test_tf32_changes_the_result_and_the_environment_variable_switches_it_off(tmp_path: Path) -> None:
    product = models.save(models.text("(float[512, 512] x) => (float[512, 512] y) { y = MatMul (x, x) }"), tmp_path)
    off, on = ProductErrorJob(product, "off"), ProductErrorJob(product, "on")
    assert off.run() < 1e-6
    assert on.run() > 1e-5  # Compute capability 8.0 and up; an older GPU has no TF32.
    with Worker(tmp_path / "logs", environment=NO_TF32) as worker:
        for job in (off, on):
            error = worker.call(job, 60.0)
            assert isinstance(error, float), error
            assert error < 1e-6


@pytest.mark.parametrize("launch_us", [20.0, 150.0])
@pytest.mark.parametrize("executions", [1, 2, 4])
def test_no_launch_is_inside(launch_us: float, executions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 ms against 3 ms, as a baseline and its candidate: both must come out as they are. Host and device have a clock
    each: a call costs the host time, and arrives when the host has made it."""
    now_ms = {"host": 0.0, "device": 0.0}

    def enqueue(work_ms: float) -> None:
        now_ms["host"] += launch_us / 1000
        now_ms["device"] = max(now_ms.values()) + work_ms

    def wait(stream: int) -> tuple[int]:
        now_ms["host"] = max(now_ms.values())
        return (0,)

    runtime = SimpleNamespace(
        cudaStreamNonBlocking=1,
        cudaStreamCreateWithFlags=lambda flags: (0, 1),
        cudaStreamSynchronize=wait,
        cudaEventCreate=lambda: (0, []),
        cudaEventRecord=lambda event, stream: (event.append(max(now_ms.values())) or 0,),
        cudaEventElapsedTime=lambda start, end: (0, end[-1] - start[-1]),
        cudaEventDestroy=lambda event: (0,),
    )
    monkeypatch.setattr(cuda, "runtime", lambda: runtime)
    stream = cuda.Stream()
    watches = [StreamStopwatch(partial(enqueue, ms), stream, lambda: now_ms["host"]) for ms in (12.0, 3.0)]
    latencies = time_in_turn(watches, Repetitions(10, executions), LatencySettings(warmup_ms=0.0))
    assert [latency.median_ms for latency in latencies] == pytest.approx([12.0, 3.0])


class CLibrary:
    """``FakeCuda`` with the C interface of ``libcudart``: pointers in and out, handles as addresses."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device
        for name, types in cuda.CALLS.items():
            setattr(self, cuda.SYMBOLS.get(name, name), self.function(name, types))
        name, words = map(ctypes.create_string_buffer, (b"cudaErrorStreamCaptureInvalidated", b"words of CUDA"))
        place = CFUNCTYPE(ctypes.c_void_p, c_int)  # as an address: what a callback returns as text is lost
        self.cudaGetErrorName = place(lambda code: ctypes.addressof(name))
        self.cudaGetErrorString = place(lambda code: ctypes.addressof(words))

    def function(self, name: str, types: tuple[Any, ...]) -> Any:
        def call(*arguments: Any) -> int:
            typed = list(zip(arguments, types, strict=True))
            written = [value for value, kind in typed if hasattr(kind, "contents")]
            code, *values = getattr(self.device, name)(*(v for v, kind in typed if not hasattr(kind, "contents")))
            if written and code == 0:
                written[0][0] = values[0] if isinstance(values[0], float) else int(values[0])
            return int(code)

        return CFUNCTYPE(c_int, *types)(call)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    cuda.runtime.cache_clear()
    yield
    cuda.runtime.cache_clear()


def bindings(monkeypatch: pytest.MonkeyPatch, code: int, count: int, driver: int = 13000) -> Any:
    """A ``cuda.bindings.runtime`` that answers so, without a system's library beside it."""

    class Error(int):
        @property
        def name(self) -> str:
            return {0: "cudaSuccess", 35: "cudaErrorInsufficientDriver", 100: "cudaErrorNoDevice"}[self]

    module = SimpleNamespace(
        cudaGetDeviceCount=lambda: (Error(code), count), cudaDriverGetVersion=lambda: (Error(0), driver)
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=module))
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: None)
    cuda.runtime.cache_clear()
    return module


TOO_OLD = f"the driver is older than the CUDA of cuda-python: {cuda.INSTALL[12]}, or update the driver"


@pytest.mark.parametrize(("code", "driver"), [(35, 12060), (35, 0), (100, 13000), (0, 13000)])
def test_only_a_driver_that_is_too_old_is_a_matter_of_packages(
    code: int, driver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings(monkeypatch, code, 0, driver)
    monkeypatch.setattr(cuda, "detect_gpus", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(EngineError) as caught:
        cuda.require_device()
    not_visible = FailureKind.DEVICE_LOST, "no CUDA device is visible (CUDA_VISIBLE_DEVICES is '')"
    expected = (FailureKind.DRIVER, TOO_OLD) if driver == 12060 else not_visible
    assert (caught.value.kind, caught.value.message) == expected


def test_the_systems_library_takes_the_place_of_refused_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bindings(monkeypatch, 35, 0)
    system = SystemRuntime(CLibrary(FakeCuda()))
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: system)
    assert cuda.runtime() is system
    assert cuda.unavailable_reason() is None
    working = bindings(monkeypatch, 0, 1)
    assert cuda.runtime() is working is not module
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # without either the package is named
    cuda.runtime.cache_clear()
    assert "pip install 'cuda-bindings<13'" in (cuda.unavailable_reason() or "")


def test_an_engine_runs_on_the_systems_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its errors have CUDA's name and words."""
    device = FakeCuda()
    system = SystemRuntime(CLibrary(device))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # cuda-python is not installed
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: system)
    trt = make_module("10.16.2", device)
    monkeypatch.setattr(tensorrt_session, "load_library", lambda kind, plugins: Library(kind, trt, "10.16"))
    (tmp_path / "e").write_bytes(double().to_bytes())
    session = TensorRtSession(tmp_path / "e", EngineOptions("tensorrt"))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(session.run({"x": x})["y"], 2 * x)
    watch = session.stopwatch({"x": x})
    assert (device.captures, device.launches) == (1, 1)
    assert watch.value_ms(3) == pytest.approx(1.0)
    session.close()
    assert device.leaks == []
    assert device.rules.forbidden == device.rules.refused == []
    stream = cuda.Stream()
    with pytest.raises(EngineError, match="failed with cudaErrorStreamCaptureInvalidated: words of CUDA"):
        cuda.Graph(stream, lambda: device.cudaMalloc(1))


def test_libraries_are_tried_newest_first(tmp_path: Path) -> None:
    for name in (
        "usr/local/cuda/lib64/libcudart.so.12.6.68",
        "usr/local/cuda/targets/aarch64-linux/lib/libcudart.so.13.0.48",
        "usr/lib/aarch64-linux-gnu/libcudart.so.11.4",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"no library")
    versions = [Path(name).name for name in system_libraries(tmp_path)][:3]
    assert versions == ["libcudart.so.13.0.48", "libcudart.so.12.6.68", "libcudart.so.11.4"]
    system = load_system_runtime(tmp_path)  # those that are no libraries are passed over
    assert system is None or cuda.unavailable_reason() is None


@pytest.mark.parametrize(("code", "sms"), [(0, 4), (35, None)])
def test_the_multiprocessors_that_cuda_reports(code: int, sms: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bindings(monkeypatch, 0, 1)
    module.cudaDeviceAttr = SimpleNamespace(cudaDevAttrMultiProcessorCount=16)
    module.cudaDeviceGetAttribute = lambda attribute, device: (code, {16: 4}[attribute])  # driver_types.h
    module.cudaGetErrorString = lambda code: (0, b"words")
    assert cuda.multiprocessors() == sms
