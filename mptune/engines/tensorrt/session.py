"""A session on a TensorRT or TensorRT-RTX engine: its buffers, its stream, its CUDA graph, its timing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import runtime as cuda
from mptune.engines.cuda.runtime import StreamStopwatch
from mptune.engines.lifetime import are_gone, references
from mptune.engines.tensorrt.builder import RuntimeCache
from mptune.engines.tensorrt.library import (
    Kind,
    Library,
    build_failure,
    collector_paused,
    copied_to_host,
    empty_on_host,
    load_library,
    made,
    open_log,
)
from mptune.engines.timing.latency import Stopwatch, monotonic_ms
from mptune.files import read_bytes
from mptune.settings import LatencySettings


@cache
def allocator_class(trt: Any) -> Any:
    """The class of ``IOutputAllocator`` that keeps an output in a buffer of its own."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Memory for one output whose shape depends on values; it grows and never shrinks."""

        def __init__(self) -> None:
            super().__init__()
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

        def download(self, stream: cuda.Stream, dtype: np.dtype[Any]) -> np.ndarray:
            if self._buffer is None:
                return np.empty(self._shape, dtype)
            size = int(np.prod(self._shape, dtype=np.int64)) * dtype.itemsize
            return self._buffer.download(stream)[:size].view(dtype).reshape(self._shape)

        def close(self) -> None:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None

    return Allocator


Place = cuda.DeviceBuffer | np.ndarray
"""Memory of a tensor: on the device, or on the host where shapes are computed from it."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is opened."""

    kind: Kind
    latency: LatencySettings = field(default_factory=LatencySettings)
    runtime_cache: Path | None = None
    """File in which TensorRT-RTX keeps the kernels that it compiles on first use; None for none."""
    plugins: tuple[Path, ...] = ()
    """Libraries with plugins of the user's."""
    fp64_inputs: frozenset[str] = frozenset()
    """Inputs that the model declares FP64 and TensorRT's parser FP32: feeds are cast."""


@dataclass
class _Bound:
    """Tensors at fixed addresses for one set of input shapes, and the graph that was captured with them."""

    key: tuple[Any, ...]
    inputs: dict[str, Place]
    outputs: dict[str, Place]
    allocators: dict[str, Any]
    graph: cuda.Graph | None = None

    def close(self) -> None:
        """Free the device memory."""
        if self.graph is not None:
            self.graph.close()
            self.graph = None
        for place in (*self.inputs.values(), *self.outputs.values()):
            if isinstance(place, cuda.DeviceBuffer):
                place.close()
        for allocator in self.allocators.values():
            allocator.close()


class TensorRtSession:
    """A loaded engine. Implements ``EngineSession``.

    One set of input shapes is bound at a time: other shapes bind anew and capture a new CUDA graph.
    """

    @collector_paused()
    def __init__(self, path: Path, options: EngineOptions) -> None:
        """Load an engine file."""
        self.options = options
        self._warnings: list[str] = []
        self._bound: _Bound | None = None
        self._stream: cuda.Stream | None = None
        self._engine: Any = None
        self._context: Any = None
        self._kernels: RuntimeCache | None = None
        self._kernels_are_kept = False
        self.library: Library = load_library(options.kind, options.plugins)
        self._log = open_log(self.library.trt)
        cuda.set_device(0)
        trt = self.library.trt
        self._runtime: Any = made(lambda: trt.Runtime(self._log), self._log)
        try:
            self._engine = self._load(path)
            self._context = self._new_context()
            self._stream = cuda.Stream()
        except BaseException:
            self.close()
            raise

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
        self._enqueue()
        stream.synchronize()
        self._keep_kernels()
        outputs = {}
        for name in self.tensor_names(self.library.trt.TensorIOMode.OUTPUT):
            if name in bound.allocators:
                outputs[name] = bound.allocators[name].download(stream, self.tensor_type(name))
            else:
                place = bound.outputs[name]
                outputs[name] = place.copy() if isinstance(place, np.ndarray) else place.download(stream)
        return outputs

    @collector_paused()
    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> Stopwatch:
        bound, stream = self._bind(feeds), self._opened()
        return StreamStopwatch(self._launcher(bound, stream), stream, monotonic_ms)

    def attach(self, profiler: Any) -> None:
        """Have an ``IProfiler`` called with the time of each layer, before each execution returns.

        Only where CUDA graphs are off: TensorRT reports nothing of a graph launch.
        """
        self._opened()
        context = self._context
        context.profiler = profiler

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
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None
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

    def _load(self, path: Path) -> Any:
        try:
            data = read_bytes(path)
        except OSError as error:
            message = f"the engine {path.name} cannot be read: {error.strerror}"
            raise EngineError(FailureKind.ERROR, message) from error
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            failure = build_failure(self._log.errors, self._log.warnings, "TensorRT gives no reason")
            raise EngineError(failure.kind, f"the engine {path.name} cannot be loaded: {failure.message}")
        return engine

    def _new_context(self) -> Any:
        engine, trt = self._engine, self.library.trt
        if self.library.is_rtx:
            runtime_config = engine.create_runtime_config()
            # By default kernels for the very shapes are compiled in the background, and the first runs use slower ones.
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            runtime_config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
            if self.options.runtime_cache is not None:
                self._kernels = RuntimeCache(self.options.runtime_cache, runtime_config)
            context = engine.create_execution_context(runtime_config)
        else:
            context = engine.create_execution_context()
        if context is None:
            raise build_failure(self._log.errors, self._log.warnings, "TensorRT made no execution context")
        # Engines are built DETAILED for the inspector, and contexts inherit that: enqueueing would take longer
        # (NvInferRuntime.h, setNvtxVerbosity).
        if hasattr(context, "nvtx_verbosity"):
            context.nvtx_verbosity = trt.ProfilingVerbosity.NONE
        return context

    def tensor_names(self, mode: Any) -> list[str]:
        """Inputs or outputs: ``TensorIOMode.INPUT`` or ``.OUTPUT`` of ``library.trt``."""
        engine = self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        return [name for name in names if engine.get_tensor_mode(name) == mode]

    def tensor_type(self, name: str) -> np.dtype[Any]:
        """NumPy's type of an input or output."""
        engine, trt = self._engine, self.library.trt
        kind = engine.get_tensor_dtype(name)
        try:
            dtype: np.dtype[Any] = np.dtype(trt.nptype(kind))
        except TypeError as error:
            raise EngineError(FailureKind.UNSUPPORTED, f"{name!r} is of type {kind.name}, which NumPy lacks") from error
        return dtype

    def _is_on_host(self, name: str) -> bool:
        engine, trt = self._engine, self.library.trt
        return bool(engine.get_tensor_location(name) == trt.TensorLocation.HOST)

    # -- binding ------------------------------------------------------------------------------------------------

    def _bind(self, feeds: Mapping[str, np.ndarray]) -> _Bound:
        """Copy the feeds to the engine's inputs; new shapes bind all tensors again."""
        stream = self._opened()
        open_log(self.library.trt)  # Messages of other sessions are not about this one.
        arrays = self._checked(feeds)
        key = tuple(
            (name, array.shape, array.tobytes() if self._is_on_host(name) else b"") for name, array in arrays.items()
        )
        if self._bound is None or self._bound.key != key:
            if self._bound is not None:
                stream.synchronize()  # What was bound may not be released before (NvInferRuntime.h, enqueueV3).
                self._bound.close()
                self._bound = None
            self._bound = self._bind_anew(arrays, key)
        for name, place in self._bound.inputs.items():
            if isinstance(place, cuda.DeviceBuffer):
                place.upload(arrays[name], stream)
        return self._bound

    def _checked(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = {}
        for name in self.tensor_names(self.library.trt.TensorIOMode.INPUT):
            if name not in feeds:
                raise EngineError(FailureKind.ERROR, f"no value is given for input {name!r}")
            array, wanted = np.asarray(feeds[name], order="C"), self.tensor_type(name)
            if name in self.options.fp64_inputs and wanted == np.float32:
                # TensorRT has no FP64: its parser declares such inputs FP32 (onnx-tensorrt's ModelImporter).
                self._warn(f"input {name!r} is FP64, and FP32 in the engine: give FP32 where you deploy it")
                array = array.astype(np.float32)
            if array.dtype != wanted:
                text = f"input {name!r} is of type {wanted}, and {array.dtype} was given"
                raise EngineError(FailureKind.ERROR, text)
            arrays[name] = array
        return arrays

    def _bind_anew(self, arrays: Mapping[str, np.ndarray], key: tuple[Any, ...]) -> _Bound:
        context = self._context
        bound = _Bound(key, {}, {}, {})
        try:
            for name, array in arrays.items():
                if not context.set_input_shape(name, array.shape):
                    raise self._refused(f"shape {array.shape} of input {name!r} is not what the engine was built for")
                on_host = self._is_on_host(name)
                bound.inputs[name] = copied_to_host(array) if on_host else cuda.DeviceBuffer(array.shape, array.dtype)
                self._place(name, bound.inputs[name])
            try:
                unknown = context.infer_shapes()
            except RuntimeError as error:  # pyCore.cpp raises where TensorRT returns -1
                raise self._refused("the shapes do not fit together") from error
            if unknown:
                raise self._refused(f"the shapes of {', '.join(unknown)} cannot be inferred")
            for name in self.tensor_names(self.library.trt.TensorIOMode.OUTPUT):
                shape = tuple(context.get_tensor_shape(name))
                if -1 in shape:
                    bound.allocators[name] = allocator_class(self.library.trt)()
                    if not context.set_output_allocator(name, bound.allocators[name]):
                        raise self._refused(f"the memory for {name!r} is refused")
                elif self._is_on_host(name):
                    bound.outputs[name] = empty_on_host(shape, self.tensor_type(name))
                    self._place(name, bound.outputs[name])
                else:
                    bound.outputs[name] = cuda.DeviceBuffer(shape, self.tensor_type(name))
                    self._place(name, bound.outputs[name])
        except BaseException:
            bound.close()
            raise
        return bound

    def _place(self, name: str, place: Place) -> None:
        context = self._context
        address = place.ctypes.data if isinstance(place, np.ndarray) else place.address
        if not context.set_tensor_address(name, address):
            raise self._refused(f"the address of {name!r} is refused")

    def _refused(self, what: str) -> EngineError:
        failure = build_failure(self._log.errors, self._log.warnings, "TensorRT gives no reason")
        return EngineError(failure.kind, f"{what}: {failure.message}")

    # -- running ------------------------------------------------------------------------------------------------

    @collector_paused()
    def _enqueue(self) -> None:
        context, stream = self._context, self._opened()
        if not context.execute_async_v3(stream.address):
            raise self._refused("the engine could not be enqueued")

    def _launcher(self, bound: _Bound, stream: cuda.Stream) -> Callable[[], None]:
        """Run once (TensorRT-RTX compiles kernels then), capture a graph where that works. Returns what enqueues it."""
        self._enqueue()
        stream.synchronize()
        self._keep_kernels()
        if self.options.latency.cuda_graph and bound.graph is None:
            bound.graph = self._capture(bound, stream)
        graph = bound.graph
        # Neither holds the engine: a stopwatch may live longer than the session.
        return self._enqueue if graph is None else lambda: graph.launch(self._opened())

    def _keep_kernels(self) -> None:
        """Write what the first execution compiled: the baseline's session stays open while candidates come and go."""
        if self._kernels is not None and not self._kernels_are_kept:
            self._kernels.save()
            self._kernels_are_kept = True

    def _capture(self, bound: _Bound, stream: cuda.Stream) -> cuda.Graph | None:
        on_host = [name for name, place in bound.outputs.items() if isinstance(place, np.ndarray)]
        dynamic = [*bound.allocators, *on_host]
        if dynamic:
            self._warn(
                f"no CUDA graph: the shape of output {dynamic[0]!r} depends on values, so latency contains launch"
                " costs: cut the model before it"
            )
            return None
        try:
            graph = cuda.Graph(stream, self._enqueue)
            graph.launch(stream)
            stream.synchronize()
        except EngineError as error:
            if error.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.DEVICE_LOST, FailureKind.CRASH):
                raise
            open_log(self.library.trt)
            self._warn(
                f"no CUDA graph ({error.message}): latency contains launch costs; keep loops and conditions out of the"
                " model"
            )
            return None
        return graph

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)
