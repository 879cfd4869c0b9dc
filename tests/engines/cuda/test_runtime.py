# ruff: noqa: N802, N815 (the names are CUDA's)
"""CUDA calls, TF32, and launches that lie outside of the interval that is timed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mptune.engines import cuda
from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import StreamStopwatch, enqueue_delay
from mptune.engines.latency import Repetitions, monotonic_ms, time_in_turn
from mptune.engines.ort.cuda_session import NO_TF32, CudaSession, provider_options
from mptune.engines.ort.session import SessionOptions, Tf32
from mptune.processes.child import WorkerState
from mptune.processes.parent import Worker
from mptune.settings import LatencySettings
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


@pytest.mark.usefixtures("fake_cuda")
def test_what_waits_inside_is_enqueued_behind_a_delay() -> None:
    stream = cuda.Stream()
    done: list[str] = []
    watch = StreamStopwatch(lambda: done.append("run"), stream, monotonic_ms, delay=lambda: done.append("delay"))
    assert watch.value_ms(2) >= 0.0
    assert done == ["run", "delay", "run", "delay", "run"]
    assert watch.enqueue_ms is None
    stream.close()


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


def product_error(path: Path, *, tf32: Tf32) -> float:
    x = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ x.astype(np.float64)
    session = CudaSession(path, SessionOptions("cuda", tf32=tf32))
    error = float(np.linalg.norm(session.run({"x": x})["y"] - exact) / np.linalg.norm(exact))
    session.close()
    return error


@dataclass(frozen=True)
class ProductError:
    path: Path
    tf32: Tf32

    def run(self, state: WorkerState) -> float:
        return product_error(self.path, tf32=self.tf32)


@pytest.mark.gpu
def test_tf32_changes_the_result_and_the_environment_variable_switches_it_off(tmp_path: Path) -> None:
    nodes = [models.node("MatMul", ["x", "x"], "y")]
    infos = ([models.value(name, [512, 512])] for name in ("x", "y"))
    product = models.save(models.model(nodes, *infos), tmp_path)
    assert product_error(product, tf32="off") < 1e-6
    assert product_error(product, tf32="on") > 1e-5  # Compute capability 8.0 and up; an older GPU has no TF32.
    with Worker(tmp_path / "logs", environment=NO_TF32) as worker:
        tf32: Tf32
        for tf32 in ("off", "on"):
            error = worker.call(ProductError(product, tf32), 60.0)
            assert isinstance(error, float), error
            assert error < 1e-6


class SlowLaunches:
    """A host and a device, each with a clock: a call costs the host time, and arrives when the host has made it."""

    cudaStreamNonBlocking = 1

    def __init__(self, launch_us: float) -> None:
        self.launch_ms = launch_us / 1000
        self.host_ms = self.device_ms = 0.0

    def enqueue(self, work_ms: float) -> None:
        self.host_ms += self.launch_ms
        self.device_ms = max(self.device_ms, self.host_ms) + work_ms

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        return 0, 1

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        self.host_ms = max(self.host_ms, self.device_ms)
        return (0,)

    def cudaEventCreate(self) -> tuple[int, list[float]]:
        return 0, []

    def cudaEventRecord(self, event: list[float], stream: int) -> tuple[int]:
        event[:] = [max(self.device_ms, self.host_ms)]
        return (0,)

    def cudaEventElapsedTime(self, start: list[float], end: list[float]) -> tuple[int, float]:
        return 0, end[0] - start[0]

    def cudaEventDestroy(self, event: Any) -> tuple[int]:
        return (0,)


@pytest.mark.parametrize("launch_us", [20.0, 150.0])
@pytest.mark.parametrize("executions", [1, 2, 4])
def test_no_launch_is_inside(launch_us: float, executions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 ms against 3 ms, as a baseline and its candidate: both must come out as they are."""
    device = SlowLaunches(launch_us)
    monkeypatch.setattr(cuda, "runtime", lambda: device)
    stream = cuda.Stream()
    watches = [StreamStopwatch(lambda ms=ms: device.enqueue(ms), stream, lambda: device.host_ms) for ms in (12.0, 3.0)]
    repetitions = Repetitions(10, executions)
    baseline, candidate = time_in_turn(watches, repetitions, LatencySettings(warmup_ms=0.0))
    assert baseline.median_ms == pytest.approx(12.0)
    assert candidate.median_ms == pytest.approx(3.0)
