"""A session on a TensorRT or TensorRT-RTX engine: its buffers, its stream, its CUDA graph, its timing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mptune.engines import cuda
from mptune.engines.base import EngineError, FailureKind, Stage
from mptune.engines.latency import Stopwatch, monotonic_ms
from mptune.engines.ort.session import FATAL, are_gone, references
from mptune.engines.samples import cached_samples
from mptune.engines.tensorrt.layers import LayerTime, layer_times, profiler_class, read_layers
from mptune.engines.tensorrt.library import (
    Kind,
    Library,
    build_failure,
    collector_paused,
    construct,
    load_library,
    open_log,
)
from mptune.files import read_bytes
from mptune.processes.child import WorkerState

PROFILED_RUNS, UNTIMED_RUNS = 20, 5
"""Executions that a profile averages over, without the longest; warm-up executions before these."""
_ALIGNMENT = 256  # NvInferRuntime.h, setTensorAddress: "The pointer must have at least 256-byte alignment"


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is opened."""

    kind: Kind
    cuda_graph: bool = True  # time a captured CUDA graph where capture works
    plugins: tuple[Path, ...] = ()  # libraries with plugins of the user's


def host_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """A contiguous array at an aligned address that is not null, even where it has no elements."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    aligned: np.ndarray = np.ndarray(shape, dtype, buffer=raw, offset=-raw.ctypes.data % _ALIGNMENT)
    return aligned


@cache
def _allocator_class(trt: Any) -> Any:
    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Memory for one output whose shape depends on values; it grows and never shrinks."""

        def __init__(self, dtype: np.dtype[Any]) -> None:
            super().__init__()
            self._dtype = dtype
            self._buffer: cuda.DeviceBuffer | None = None
            self._shape: tuple[int, ...] = ()

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            if self._buffer is None or self._buffer.nbytes < size:
                self.close()
                self._buffer = cuda.DeviceBuffer((size,), np.dtype(np.uint8))  # cudaMalloc aligns to 256 bytes.
            return self._buffer.address

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self._shape = tuple(shape)

        def download(self, stream: cuda.Stream) -> np.ndarray:
            if self._buffer is None:
                return np.empty(self._shape, self._dtype)
            size = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
            return self._buffer.download(stream)[:size].view(self._dtype).reshape(self._shape)

        def close(self) -> None:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None

    return Allocator


@dataclass
class _Bound:
    """Places (buffer, allocator or host array) for one set of input shapes, and the graph captured with them."""

    key: tuple[Any, ...]
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    graph: cuda.Graph | None = None

    def close(self) -> None:
        for place in (self.graph, *self.inputs.values(), *self.outputs.values()):
            if place is not None and not isinstance(place, np.ndarray):
                place.close()


class TensorRtSession:
    """A loaded engine. Implements ``EngineSession``.

    One set of input shapes is bound at a time: other shapes bind anew and capture a new CUDA graph.
    """

    @collector_paused()
    def __init__(self, path: Path, options: EngineOptions) -> None:
        self.options = options
        self.inputs: dict[str, np.dtype[Any]] = {}
        self.outputs: dict[str, np.dtype[Any]] = {}
        self._on_host: set[str] = set()
        self._warnings: dict[str, None] = {}  # a set that keeps its order
        self._bound: _Bound | None = None
        self._stream: cuda.Stream | None = None
        self._engine: Any = None
        self._context: Any = None
        self.library: Library = load_library(options.kind, options.plugins)
        self._log = open_log(self.library.trt)
        cuda.call("cudaSetDevice", 0)
        trt = self.library.trt
        self._runtime: Any = construct(lambda: trt.Runtime(self._log), self._log)
        try:
            self._load(path)
            self._stream = cuda.Stream()
        except BaseException:
            self.close()
            raise

    def _load(self, path: Path) -> None:
        """Load the engine and make its context. No variable holds them: they would live as long as a traceback."""
        trt = self.library.trt
        try:
            data = read_bytes(path)
        except OSError as error:
            message = f"the engine {path.name} cannot be read: {error.strerror}"
            raise EngineError(FailureKind.ERROR, message) from error
        self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise self._refused(f"the engine {path.name} cannot be loaded")
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            kind = self._engine.get_tensor_dtype(name)
            try:
                dtype: np.dtype[Any] = np.dtype(trt.nptype(kind))
            except TypeError as error:
                message = f"{name!r} is of type {kind.name}, which NumPy lacks"
                raise EngineError(FailureKind.UNSUPPORTED, message) from error
            is_input = self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (self.inputs if is_input else self.outputs)[name] = dtype
            if self._engine.get_tensor_location(name) == trt.TensorLocation.HOST:
                self._on_host.add(name)
        if self.library.is_rtx:
            runtime_config = self._engine.create_runtime_config()
            # By default kernels for the very shapes are compiled in the background, and the first runs use slower ones.
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            runtime_config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
            self._context = self._engine.create_execution_context(runtime_config)
        else:
            self._context = self._engine.create_execution_context()
        if self._context is None:
            raise build_failure(self._log, "TensorRT made no execution context")
        # Engines are built DETAILED for the inspector, and contexts inherit that: enqueueing would take longer
        # (NvInferRuntime.h, setNvtxVerbosity).
        if hasattr(self._context, "nvtx_verbosity"):
            self._context.nvtx_verbosity = trt.ProfilingVerbosity.NONE

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    @property
    def context_bytes(self) -> int | None:
        """Memory of the device that the execution context takes; None where TensorRT does not say.

        ``device_memory_size_v2`` came with 10.1, and 11 has nothing else (NvInferRuntime.h, getDeviceMemorySizeV2).
        """
        self._opened()
        nbytes = getattr(self._engine, "device_memory_size_v2", None)
        nbytes = getattr(self._engine, "device_memory_size", None) if nbytes is None else nbytes
        return None if nbytes is None else int(nbytes)

    @collector_paused()
    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        bound, stream = self._bind(feeds), self._opened()
        self._execute()
        return {
            name: place.copy() if isinstance(place, np.ndarray) else place.download(stream)
            for name, place in bound.outputs.items()
        }

    @collector_paused()
    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> Stopwatch:
        bound, stream = self._bind(feeds), self._opened()
        self._execute()  # TensorRT-RTX compiles kernels now, and a graph is captured after an execution only.
        if self.options.cuda_graph and bound.graph is None:
            bound.graph = self._capture(bound, stream)
        graph = bound.graph
        # Neither holds the engine: a stopwatch may live longer than the session.
        enqueue: Callable[[], None] = self._enqueue if graph is None else lambda: graph.launch(self._opened())
        return cuda.StreamStopwatch(enqueue, stream, monotonic_ms)

    def attach(self, profiler: Any) -> None:
        """Have an ``IProfiler`` called with the time of each layer, which it is where CUDA graphs are off."""
        self._context.profiler = profiler

    @collector_paused()
    def information(self) -> str:
        """TensorRT's description of the engine's layers, JSON; complete once shapes are bound."""
        self._opened()
        inspector = self._engine.create_engine_inspector()
        inspector.execution_context = self._context  # Types of dynamic layers are known to a context only.
        return str(inspector.get_engine_information(self.library.trt.LayerInformationFormat.JSON))

    @collector_paused()
    def close(self) -> None:
        if self._bound is not None:
            if self._stream is not None:
                with contextlib.suppress(EngineError):  # A lost device executes no more.
                    self._stream.synchronize()
            self._bound.close()
            self._bound = None
        # TensorRT's objects are freed before those that made them, and all of them before the stream.
        watched = references(self._context, self._engine, self._runtime)
        self._context = None
        self._engine = None
        self._runtime = None
        is_gone = are_gone(watched, "an engine of TensorRT")
        if self._stream is not None and is_gone:
            self._stream.close()
        self._stream = None

    def _opened(self) -> cuda.Stream:
        if self._stream is None or self._context is None:
            raise EngineError(FailureKind.ERROR, "the session is closed")
        return self._stream

    def _bind(self, feeds: Mapping[str, np.ndarray]) -> _Bound:
        """Copy the feeds to the engine's inputs; new shapes bind all tensors again."""
        stream = self._opened()
        open_log(self.library.trt)  # Messages of other sessions are not about this one.
        arrays = {}
        for name, dtype in self.inputs.items():
            if name not in feeds:
                raise EngineError(FailureKind.ERROR, f"no value is given for input {name!r}")
            array = np.asarray(feeds[name], order="C")
            arrays[name] = array.astype(dtype, copy=False)
            # Floats are cast to another width (TensorRT has no FP64), integers where that keeps their values.
            if array.dtype.kind != dtype.kind or (dtype.kind in "iu" and not np.array_equal(arrays[name], array)):
                message = f"input {name!r} is of type {dtype}, and {array.dtype} was given"
                raise EngineError(FailureKind.ERROR, message)
        # Shapes of outputs may depend on the values of inputs on the host.
        key = tuple((name, a.shape, a.tobytes() if name in self._on_host else b"") for name, a in arrays.items())
        if self._bound is None or self._bound.key != key:
            if self._bound is not None:
                stream.synchronize()  # What was bound may not be released before (NvInferRuntime.h, enqueueV3).
                self._bound.close()
                self._bound = None
            bound = _Bound(key)
            try:
                self._bind_all(bound, arrays)
            except BaseException:
                bound.close()
                raise
            self._bound = bound
        for name, place in self._bound.inputs.items():
            if name not in self._on_host:
                place.upload(arrays[name], stream)
        return self._bound

    def _bind_all(self, bound: _Bound, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the shapes of inputs and the addresses of all tensors."""
        context = self._context

        def place(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], places: dict[str, Any]) -> None:
            on_host = name in self._on_host
            places[name] = host_memory(shape, dtype) if on_host else cuda.DeviceBuffer(shape, dtype)
            address = places[name].ctypes.data if on_host else places[name].address
            if not context.set_tensor_address(name, address):
                raise self._refused(f"the address of {name!r} is refused")

        for name, array in arrays.items():
            if not context.set_input_shape(name, array.shape):
                raise self._refused(f"shape {array.shape} of input {name!r} is not what the engine was built for")
            place(name, self.inputs[name], array.shape, bound.inputs)
            if name in self._on_host:
                bound.inputs[name][...] = array
        try:
            unknown = context.infer_shapes()
        except RuntimeError:  # pyCore.cpp raises where TensorRT returns -1
            unknown = list(self.inputs)
        if unknown:
            raise self._refused(f"the shapes of {', '.join(unknown)} do not fit together, or cannot be inferred")
        for name, dtype in self.outputs.items():
            shape = tuple(context.get_tensor_shape(name))
            if -1 not in shape:
                place(name, dtype, shape, bound.outputs)
                continue
            bound.outputs[name] = _allocator_class(self.library.trt)(dtype)
            if not context.set_output_allocator(name, bound.outputs[name]):
                raise self._refused(f"the memory for {name!r} is refused")

    def _refused(self, what: str) -> EngineError:
        failure = build_failure(self._log, "TensorRT gives no reason")
        return EngineError(failure.kind, f"{what}: {failure.message}")

    @collector_paused()
    def _enqueue(self) -> None:
        context, stream = self._context, self._opened()
        if not context.execute_async_v3(stream.address):
            raise self._refused("the engine could not be enqueued")

    def _execute(self) -> None:
        self._enqueue()
        self._opened().synchronize()

    def _capture(self, bound: _Bound, stream: cuda.Stream) -> cuda.Graph | None:
        """The CUDA graph of an execution; None, with a warning, where it cannot be captured."""
        dynamic = [name for name, place in bound.outputs.items() if not isinstance(place, cuda.DeviceBuffer)]
        if dynamic:
            text = f"no CUDA graph: the shape of output {dynamic[0]!r} depends on values, so latency contains launch"
            self._warnings[f"{text} costs: end the model before it"] = None
            return None
        try:
            graph = cuda.Graph(stream, self._enqueue)
            graph.launch(stream)
            stream.synchronize()
            return graph
        except EngineError as error:
            if error.kind in FATAL:
                raise
            open_log(self.library.trt)
            text = f"no CUDA graph ({error.message}): latency contains launch costs"
            self._warnings[f"{text}; keep loops and conditions out of the model"] = None
            return None


@dataclass(frozen=True)
class TensorRtEngine:
    """An engine file. Implements ``Engine``."""

    path: Path
    options: EngineOptions

    def open(self) -> TensorRtSession:
        return TensorRtSession(self.path, self.options)


@dataclass(frozen=True)
class EngineProfileJob:
    """Take the layer times of an engine file in a session of its own, since the one that is timed has a CUDA graph."""

    built: TensorRtEngine
    samples: Path

    def run(self, state: WorkerState) -> tuple[LayerTime, ...]:
        feed = cached_samples(state, self.samples)[0]
        options = replace(self.built.options, cuda_graph=False)
        session = state.transient(partial(TensorRtSession, self.built.path, options))
        state.enter(Stage.TIME)
        profiler = profiler_class(session.library.trt)()
        session.attach(profiler)
        watch = session.stopwatch(feed)
        for _ in range(UNTIMED_RUNS):
            watch.run_once()
        for _ in range(PROFILED_RUNS):
            profiler.start_execution()
            watch.run_once()
        return layer_times(profiler.executions, read_layers(session.information()))
