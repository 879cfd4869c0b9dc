from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import runtime as cuda
from mptune.engines.cuda.runtime import StreamStopwatch, enqueue_delay
from mptune.engines.ort.cuda_session import NO_TF32, CudaSession, provider_options
from mptune.engines.ort.session import SessionOptions, Tf32
from mptune.engines.timing.latency import monotonic_ms
from mptune.processes.child import WorkerState
from mptune.processes.parent import Worker
from tests.device.cuda import FakeCuda


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


def test_what_waits_inside_is_enqueued_behind_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda()
    monkeypatch.setattr(cuda, "runtime", lambda: device)
    stream = cuda.Stream()
    done: list[str] = []
    watch = StreamStopwatch(lambda: done.append("run"), stream, monotonic_ms, delay=lambda: done.append("delay"))
    assert watch.value_ms(2) >= 0.0
    assert done == ["run", "delay", "run", "delay", "run"]
    assert watch.enqueue_ms is None
    stream.close()


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A model that multiplies a 512 x 512 matrix by itself."""
    import onnx
    from onnx import TensorProto, helper

    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [512, 512]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "g", info[:1], info[1:])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


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
def test_tf32_changes_the_result_and_is_off_by_default(product: Path) -> None:
    assert product_error(product, tf32="off") < 1e-6
    assert product_error(product, tf32="on") > 1e-5  # Compute capability 8.0 and up; an older GPU has no TF32.


@pytest.mark.gpu
def test_the_environment_variable_switches_tf32_off_whatever_the_option_says(product: Path, tmp_path: Path) -> None:
    with Worker(tmp_path / "logs", environment=NO_TF32) as worker:
        tf32: Tf32
        for tf32 in ("off", "on"):
            error = worker.call(ProductError(product, tf32), 60.0)
            assert isinstance(error, float), error
            assert error < 1e-6
