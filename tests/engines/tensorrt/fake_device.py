# ruff: noqa: N802, N815 (the names are CUDA's and TensorRT's)
"""A device in host memory, and engines that NumPy computes on it: what a session does is held against TensorRT's rules.

No machine that these tests run on has a GPU with TensorRT. The rules that are kept here are NVIDIA's: work is done when
the stream is synchronised and not before; nothing may be captured before an execution with the same shapes; an address
must be set for every tensor; a shape outside of the optimization profile is refused.
"""

from __future__ import annotations

import ctypes
import enum
import json
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

Work = Callable[[], None]


class FakeStream:
    """Work that waits for a synchronisation, or is captured."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.queue: list[Work] = []
        self.captured: list[Work] | None = None

    def __int__(self) -> int:
        return self.address

    def add(self, work: Work) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def finish(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()


class FakeCuda:
    """What is used of ``cuda.bindings.runtime``, on host memory. Time goes by 1 ms an execution of an engine."""

    cudaStreamNonBlocking = 1
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.streams: dict[int, FakeStream] = {}
        self.executions = 0
        self.captures = 0
        self.launches = 0
        self.capture_fails = False
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """Execution contexts; none may outlive a stream, or its teardown crashes."""

    def cudaSetDevice(self, index: int) -> tuple[int]:
        return (0,)

    def cudaGetErrorString(self, code: int) -> tuple[int, bytes]:
        return 0, b"fake words"

    def cudaGetLastError(self) -> tuple[int]:
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        block = ctypes.create_string_buffer(b"\xff" * size, size)
        self.memory[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: FakeStream) -> tuple[int]:
        stream.add(lambda: ctypes.memmove(to, source, size) and None)
        return (0,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, FakeStream]:
        assert flags == self.cudaStreamNonBlocking
        stream = FakeStream(len(self.streams) + 1)
        self.streams[stream.address] = stream
        return 0, stream

    def cudaStreamDestroy(self, stream: FakeStream) -> tuple[int]:
        del self.streams[stream.address]
        stream.queue.clear()
        assert not any(context.address == stream.address for context in self.users), "a context outlives its stream"
        return (0,)

    def cudaStreamSynchronize(self, stream: FakeStream) -> tuple[int]:
        assert stream.captured is None, "a capture is under way"
        stream.finish()
        return (0,)

    def cudaStreamBeginCapture(self, stream: FakeStream, mode: int) -> tuple[int]:
        stream.captured = []
        return (0,)

    def cudaStreamEndCapture(self, stream: FakeStream) -> tuple[int, list[Work] | None]:
        captured, stream.captured = stream.captured, None
        if self.capture_fails:
            return 900, None  # cudaErrorStreamCaptureUnsupported
        self.captures += 1
        return 0, captured

    def cudaGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[int, list[Work]]:
        return 0, list(graph)

    def cudaGraphDestroy(self, graph: list[Work]) -> tuple[int]:
        return (0,)

    def cudaGraphExecDestroy(self, graph: list[Work]) -> tuple[int]:
        graph.clear()
        return (0,)

    def cudaGraphLaunch(self, graph: list[Work], stream: FakeStream) -> tuple[int]:
        assert graph, "the graph was destroyed"
        self.launches += 1
        for work in graph:
            stream.add(work)
        return (0,)

    def cudaEventCreate(self) -> tuple[int, list[int]]:
        return 0, []

    def cudaEventRecord(self, event: list[int], stream: FakeStream) -> tuple[int]:
        stream.add(lambda: event.append(self.executions))
        return (0,)

    def cudaEventSynchronize(self, event: list[int]) -> tuple[int]:
        for stream in self.streams.values():
            stream.finish()
        return (0,)

    def cudaEventElapsedTime(self, start: list[int], end: list[int]) -> tuple[int, float]:
        return 0, float(end[-1] - start[-1])

    def cudaEventDestroy(self, event: list[int]) -> tuple[int]:
        return (0,)


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class FakeTensorRt:
    """TensorRT's module. An engine file is JSON: the name of one of ``PROGRAMS`` and the largest number of rows."""

    class ILogger:
        Severity = Severity
        ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO

    class IOutputAllocator:
        pass

    class IProfiler:
        pass

    ProfilingVerbosity = enum.Enum("ProfilingVerbosity", ["LAYER_NAMES_ONLY", "NONE", "DETAILED"])
    TensorIOMode = enum.Enum("TensorIOMode", ["INPUT", "OUTPUT"])
    TensorLocation = enum.Enum("TensorLocation", ["DEVICE", "HOST"])
    LayerInformationFormat = enum.Enum("LayerInformationFormat", ["JSON"])
    DynamicShapesKernelSpecializationStrategy = enum.Enum(
        "DynamicShapesKernelSpecializationStrategy", ["LAZY", "EAGER"]
    )

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.contexts: list[FakeContext] = []

    def Runtime(self, log: Any) -> SimpleNamespace:
        def deserialize(data: bytes) -> FakeEngine | None:
            try:
                return FakeEngine(self, log, **json.loads(data))
            except ValueError:
                log.log(
                    Severity.ERROR,
                    "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion"
                    " stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. Note: Version: 237)",
                )
                return None

        return SimpleNamespace(deserialize_cuda_engine=deserialize)

    def nptype(self, kind: Any) -> Any:
        if kind.name == "bfloat16":
            raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
        return np.dtype(kind.name)


def _double(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"y": x * 2, "total": np.array([x.sum()], np.float32)}


def _nonzero(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"where": np.flatnonzero(x)[None].astype(np.int64)}


def _reshape(x: np.ndarray, shape: np.ndarray) -> dict[str, np.ndarray]:
    return {"y": x.reshape(shape)}


def _odd(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"y": x}


PROGRAMS: dict[str, tuple[Callable[..., dict[str, np.ndarray]], dict[str, str], dict[str, str]]] = {
    "double": (_double, {"x": "float32"}, {"y": "float32", "total": "float32"}),
    "nonzero": (_nonzero, {"x": "float32"}, {"where": "int64"}),
    "reshape": (_reshape, {"x": "float32", "shape": "int64"}, {"y": "float32"}),
    "odd": (_odd, {"x": "bfloat16"}, {"y": "float32"}),
}
"""Name -> what it computes, and the types of inputs and outputs. ``shape`` lies on the host; ``where`` is dynamic."""


LAYERS: dict[str, tuple[tuple[str, float, str], ...]] = {
    "double": (
        ("/a/MatMul_myl0_0", 0.5, "[ONNX Layer: /a/MatMul]\x1e[ONNX Layer: /a/Relu]"),
        ("Reformatting CopyNode for Input Tensor 0 to /b/Conv", 0.25, ""),
        ("/b/Conv_myl0_1", 2.0, "[ONNX Layer: /b/Conv]"),
    ),
    "odd": (("a layer", 1.0, ""),),
}
"""Program -> its layers: name, milliseconds and metadata. A profiler hears nothing of programs without any."""


class FakeEngine:
    def __init__(self, trt: FakeTensorRt, log: Any, program: str, rows: int) -> None:
        self.trt, self.log, self.rows = trt, log, rows
        self.compute, self.inputs, self.outputs = PROGRAMS[program]
        self.layers = LAYERS.get(program, ())
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self.names)
        self.get_tensor_name = self.names.__getitem__
        self.runtime_config: Any = None

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode["INPUT" if name in self.inputs else "OUTPUT"]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name={**self.inputs, **self.outputs}[name])

    def get_tensor_location(self, name: str) -> Any:
        return self.trt.TensorLocation["HOST" if name == "shape" else "DEVICE"]

    def create_runtime_config(self) -> SimpleNamespace:
        kept: list[bytes] = []
        cache = SimpleNamespace(deserialize=lambda data: not kept.append(data), serialize=lambda: b"kernels", read=kept)
        config = SimpleNamespace(create_runtime_cache=lambda: cache, cache=None)
        config.set_runtime_cache = lambda given: setattr(config, "cache", given)
        return config

    def create_execution_context(self, runtime_config: Any = None) -> FakeContext:
        self.runtime_config = runtime_config
        context = FakeContext(self)
        self.trt.contexts.append(weakref.proxy(context))
        self.trt.cuda.users.add(context)
        return context

    def create_engine_inspector(self) -> SimpleNamespace:
        inspector = SimpleNamespace(execution_context=None)
        layers = [{"Name": name, "Metadata": metadata} for name, _, metadata in self.layers]
        inspector.get_engine_information = lambda form: json.dumps(
            {"Layers": layers, "bound": bool(inspector.execution_context)}
        )
        return inspector


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.has_run = False
        self.address = 0  # Of the stream that it last ran on.
        self.profiler: Any = None
        self.nvtx_verbosity = engine.trt.ProfilingVerbosity.DETAILED  # that of the engine

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if shape and shape[0] > self.engine.rows:
            self.engine.log.log(
                Severity.ERROR,
                f"IExecutionContext::setInputShape: Error Code 3: API Usage Error (Parameter check failed, condition:"
                f" engineDims.d[i] == dims.d[i]. Static dimension mismatch while setting input shape for {name}.)",
            )
            return False
        self.shapes[name] = tuple(shape)
        self.has_run = False
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name == "where":
            return (1, -1)
        return self.compute()[name].shape

    def compute(self) -> dict[str, np.ndarray]:
        return self.engine.compute(**{name: self.read(name) for name in self.engine.inputs})

    def read(self, name: str) -> np.ndarray:
        dtype, shape = np.dtype(self.engine.inputs[name]), self.shapes[name]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return np.frombuffer(ctypes.string_at(self.addresses[name], size), dtype).reshape(shape)

    def execute_async_v3(self, address: int) -> bool:
        stream, self.address = self.engine.trt.cuda.streams[address], address
        missing = [n for n in self.engine.names if n not in self.addresses and n not in self.allocators]
        if missing:
            self.engine.log.log(Severity.ERROR, f"Error Code 3: API Usage Error (Address is not set for {missing[0]}.)")
            return False
        if stream.captured is not None:
            assert self.has_run, "captured before it ran with these shapes"
            assert self.profiler is None, "a graph tells a profiler nothing"
        self.has_run = True
        stream.add(self.execute)
        return True

    def execute(self) -> None:
        self.engine.trt.cuda.executions += 1
        for name, values in self.compute().items():
            data = np.ascontiguousarray(values)
            if name in self.allocators:
                address = self.allocators[name].reallocate_output(name, 0, max(1, data.nbytes), 256)
                self.allocators[name].notify_shape(name, data.shape)
            else:
                address = self.addresses[name]
            ctypes.memmove(address, data.ctypes.data, data.nbytes)
        if self.profiler is not None:
            for layer, ms, _ in self.engine.layers:
                self.profiler.report_layer_time(layer, ms)
