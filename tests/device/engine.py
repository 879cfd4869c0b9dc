"""TensorRT's runtime: engines that ONNX Runtime computes on the device in host memory, by the rules of its headers.

Sources: NvInferRuntime.h of TensorRT 11.1 (``ICudaEngine``, ``IExecutionContext``, ``IOutputAllocator``: the words are
the same in 10.3) for what is returned and what is undefined, pyCore.cpp for what keeps what alive, and the developer
guide for CUDA graphs: "Call enqueueV3() once after an input shape change to update internal state".
"""

from __future__ import annotations

import ctypes
import enum
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from tests.device.blueprint import DATA_TYPES, NUMPY_TYPES, Blueprint, Tensor
from tests.device.cuda import Allocation, FakeCuda, Work
from tests.device.program import Program, Shape

_ADDRESS_ALIGNMENT = 256
_TYPE_NAMES = {
    TensorProto.FLOAT: "FP32",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT64: "Int64",
    TensorProto.INT32: "Int32",
    TensorProto.INT8: "Int8",
    TensorProto.BOOL: "Bool",
}
"""As the inspector writes them."""
_DataType = enum.Enum("_DataType", [*dict.fromkeys(DATA_TYPES.values())])  # type: ignore[misc]


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class LayerInformationFormat(enum.Enum):
    JSON = 1


class ProfilingVerbosity(enum.Enum):
    NONE = 1
    DETAILED = 2


class _Severity(enum.IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    """For sessions where TensorRT-RTX, whose logger has more to forward, is not installed."""

    ERROR, WARNING, INFO = _Severity.ERROR, _Severity.WARNING, _Severity.INFO


def nptype(kind: Any) -> type[Any]:
    """NumPy's type (``tensorrt/__init__.py``)."""
    if kind.name not in NUMPY_TYPES:
        raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
    return NUMPY_TYPES[kind.name]


class _Overridable:
    """A class of which Python inherits: pybind11 needs its ``__init__`` called."""

    def __init__(self) -> None:
        self._is_made = True


class IOutputAllocator(_Overridable):
    """Memory for outputs whose shape depends on values."""


class IProfiler(_Overridable):
    """Takes the time of each layer."""


def _require_made(given: Any, kind: type[Any]) -> None:
    """Raise as pybind11 does for what is no instance, or one without ``super().__init__()``."""
    if not isinstance(given, kind) or not hasattr(given, "_is_made"):
        raise TypeError(f"incompatible function arguments: {type(given).__name__} is no {kind.__name__} that was made")


class Runtime:
    def __init__(self, module: Any, logger: Any) -> None:
        self._module, self._log = module, logger  # py::keep_alive<1, 2>

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        module, blueprint = self._module, Blueprint.from_bytes(serialized_engine)
        weights, problem = None, ""
        if blueprint is None or blueprint.version != module.__version__:
            problem = (
                "Error Code 1: Serialization (Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed."
                "Version tag does not match. Note: Current Version: 240)"
            )
        elif blueprint.capability != module.capability:
            here, there = (".".join(map(str, each)) for each in (module.capability, blueprint.capability))
            problem = (
                "Error Code 6: API Usage Error (The engine plan file is generated on an incompatible device, expecting"
                f" compute {here} got compute {there}, please rebuild.)"
            )
        else:
            weights = module.cuda.allocate(len(blueprint.model))
        if weights is None:
            problem = problem or "Error Code 2: OutOfMemory"
            self._log.log(module.ILogger.ERROR, f"IRuntime::deserializeCudaEngine: {problem}")
            return None
        return module.ICudaEngine(self, blueprint, weights)


class EngineInspector:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine  # py::keep_alive<0, 1> of create_engine_inspector
        self._context: Any = None

    def _set_context(self, context: IExecutionContext) -> None:
        self._context = weakref.ref(context)  # no keep_alive

    execution_context = property(None, _set_context)

    def get_engine_information(self, format: Any) -> str:
        """The layers' JSON, from 11 on with the type beside the format; types of dynamic layers need a context."""
        assert format == LayerInformationFormat.JSON
        engine, context = self._engine, None if self._context is None else self._context()
        if self._context is not None and context is None:
            engine._cuda.rules.forbid("EngineInspector: its execution context was freed")
        is_dynamic = any(-1 in tensor.shape for tensor in engine._tensors.values() if tensor.is_input)
        has_types = not is_dynamic or (context is not None and not context._bindings.unspecified())
        is_split = int(engine._blueprint.version.split(".")[0]) >= 11

        def tensors(types: Sequence[int]) -> list[dict[str, str]]:
            names = [_TYPE_NAMES.get(each, "") if has_types else "N/A" for each in types]
            if is_split:
                return [{"Format": "Row major linear", "Datatype": name} for name in names]
            return [{"Format/Datatype": f"Row major linear {name} format"} for name in names]

        if not engine._blueprint.is_detailed:
            return json.dumps({"Layers": [layer.name for layer in engine._layers]})
        layers = [
            {
                "Name": layer.name,
                "Inputs": tensors(layer.inputs),
                "Outputs": tensors(layer.outputs),
                "Metadata": layer.metadata,
            }
            for layer in engine._layers
        ]
        return json.dumps({"Layers": layers, "I/O Tensors" if is_split else "Bindings": list(engine._tensors)})


class ICudaEngine:
    def __init__(self, runtime: Runtime, blueprint: Blueprint, weights: Allocation) -> None:
        self._runtime = runtime  # py::keep_alive<0, 1>: the runtime must outlive it
        self._blueprint, self._weights, self._program = blueprint, weights, blueprint.program()
        self._cuda: FakeCuda = runtime._module.cuda
        self._tensors = {tensor.name: tensor for tensor in blueprint.tensors}
        self._layers = blueprint.layers()
        self._ms = sum(layer.ms for layer in self._layers)
        weakref.finalize(self, self._cuda.release, weights, "ICudaEngine")

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def device_memory_size_v2(self) -> int:
        return 1024 * sum(1 if TensorProto.FLOAT16 in layer.outputs else 2 for layer in self._layers)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if self._tensors[name].is_input else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return _DataType[self._tensors[name].kind]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self._tensors[name].on_host else TensorLocation.DEVICE

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self)

    def create_execution_context(self) -> IExecutionContext | None:
        size = self.device_memory_size_v2
        scratch = self._cuda.allocate(size)
        if scratch is None:
            words = f"Error Code 2: OutOfMemory (Requested size was {size} bytes.)"
            self._error(f"IExecutionContext::createExecutionContext: {words}")
            return None
        return IExecutionContext(self, scratch)

    def _error(self, text: str) -> None:
        self._runtime._log.log(self._runtime._module.ILogger.ERROR, text)

    def _refuse(self, call: str, reason: str) -> bool:
        """Log an error of usage. Returns False, as the call does."""
        self._error(f"IExecutionContext::{call}: Error Code 3: API Usage Error ({reason})")
        self._cuda.rules.refuse(f"{call}: {reason}")
        return False


@dataclass
class _Bindings:
    """Tensors of an engine, bound to shapes and memory, as they are or as they were when an execution was enqueued."""

    tensors: Mapping[str, Tensor]
    program: Program
    cuda: FakeCuda
    shapes: dict[str, Shape] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)

    def frozen(self) -> _Bindings:
        """A copy: an execution uses what was bound when it was enqueued."""
        return replace(self, shapes=dict(self.shapes), addresses=dict(self.addresses))

    def unspecified(self, *, needs_values: bool = True) -> list[str]:
        """Inputs without a shape, or whose values are needed on the host and are not there (``inferShapes``)."""
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.is_input
            and (
                (-1 in tensor.shape and name not in self.shapes)
                or (needs_values and tensor.on_host and not self.addresses.get(name))
            )
        ]

    def shape(self, name: str) -> Shape:
        """The shape of a tensor; -1 where it depends on values."""
        if self.tensors[name].is_input:
            return self.shapes.get(name, self.tensors[name].shape)
        inputs = [tensor for tensor in self.tensors.values() if tensor.is_input]
        values = {tensor.name: self.array(tensor.name) for tensor in inputs if tensor.on_host}
        return self.program.output_shapes({tensor.name: self.shape(tensor.name) for tensor in inputs}, values)[name]

    def place(self, name: str) -> Allocation | None:
        """The memory of a tensor on the device that has an address; too little of it is forbidden."""
        tensor, address = self.tensors[name], self.addresses.get(name, 0)
        if not address or tensor.on_host:
            return None
        size = math.prod(max(each, 0) for each in self.shape(name)) * np.dtype(NUMPY_TYPES[tensor.kind]).itemsize
        return self.cuda.allocation(address, size, f"IExecutionContext::enqueueV3, {name}")

    def array(self, name: str, shape: Shape | None = None) -> np.ndarray:
        """The memory of a tensor as it is now; that on the host is read when the engine is enqueued."""
        kind, shape = np.dtype(NUMPY_TYPES[self.tensors[name].kind]), self.shape(name) if shape is None else shape
        address, size = self.addresses[name], math.prod(shape) * kind.itemsize
        if self.tensors[name].on_host:
            if self.cuda.is_device_address(address):
                self.cuda.rules.forbid(f"IExecutionContext: {name} must lie on the host")
            memory: Any = (ctypes.c_char * size).from_address(address)
            return np.frombuffer(memory, kind).reshape(shape)
        place = self.cuda.allocation(address, size, f"IExecutionContext::enqueueV3, {name}")
        return place.data[address - place.address :][:size].view(kind).reshape(shape)

    def compute(self) -> dict[str, np.ndarray]:
        return self.program.run({n: self.array(n).copy() for n, tensor in self.tensors.items() if tensor.is_input})

    def write(self, name: str, value: np.ndarray) -> None:
        self.array(name, value.shape)[...] = value
        if not self.tensors[name].on_host:
            self.cuda.allocation(self.addresses[name], value.nbytes, name).version += 1


class IExecutionContext:
    nvtx_verbosity: Any = ProfilingVerbosity.DETAILED

    def __init__(self, engine: ICudaEngine, scratch: Allocation) -> None:
        self._engine = engine  # py::keep_alive<0, 1> of create_execution_context
        self._cuda, self._scratch = engine._cuda, scratch
        self._bindings = _Bindings(engine._tensors, engine._program, engine._cuda)
        self._allocators: dict[str, Any] = {}  # py::keep_alive<1, 3>
        self._profiler: Any = None
        self._has_run = False
        self._stream = 0
        self._done: Any = None
        engine._cuda.contexts.add(self)
        weakref.finalize(self, engine._cuda.release, scratch, "IExecutionContext")

    def _set_profiler(self, profiler: Any) -> None:
        _require_made(profiler, IProfiler)
        self._profiler = profiler

    profiler = property(lambda self: self._profiler, _set_profiler)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        tensor, given, call = self._engine._tensors.get(name), tuple(shape), "setInputShape"
        if tensor is None or not tensor.is_input:
            return self._engine._refuse(call, f"{name} is no input")
        if len(given) != len(tensor.shape) or any(
            wanted not in (-1, size) for wanted, size in zip(tensor.shape, given, strict=True)
        ):
            return self._engine._refuse(
                call,
                "Parameter check failed, condition: engineDims.d[i] == dims.d[i]. Static dimension mismatch while"
                f" setting input shape for {name}.",
            )
        low, _, high = self._engine._blueprint.shapes.get(name, (given, given, given))
        if not all(a <= size <= b for a, size, b in zip(low, given, high, strict=True)):
            return self._engine._refuse(
                call,
                f"Supplied binding dimension {list(given)} for {name} not satisfy any optimization profiles. Minimum"
                f" dimensions in profile are {list(low)}, maximum {list(high)}.",
            )
        self._bindings.shapes[name] = given
        self._has_run = False
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._tensors:
            return self._engine._refuse("setTensorAddress", f"{name} is no input or output")
        if memory % _ADDRESS_ALIGNMENT:
            reason = f"the address of {name} is not aligned to {_ADDRESS_ALIGNMENT} bytes"
            return self._engine._refuse("setTensorAddress", reason)
        self._bindings.addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        tensor = self._engine._tensors.get(name)
        if tensor is None or tensor.is_input:
            return self._engine._refuse("setOutputAllocator", f"{name} is no output")
        _require_made(output_allocator, IOutputAllocator)
        self._allocators[name] = output_allocator
        return True

    def get_tensor_shape(self, name: str) -> Shape:
        tensor = self._engine._tensors[name]
        is_computed = tensor.is_input or not self._bindings.unspecified()
        return self._bindings.shape(name) if is_computed else tensor.shape

    def infer_shapes(self) -> list[str]:
        unspecified = self._bindings.unspecified()
        for name, (low, _, high) in self._engine._blueprint.values.items():
            values = [] if name in unspecified else self._bindings.array(name).ravel().tolist()
            if values and not all(a <= value <= b for a, value, b in zip(low, values, high, strict=True)):
                self._engine._refuse("inferShapes", f"values {values} of {name} are out of the profile")
                raise RuntimeError("infer_shapes error code: -1")  # pyCore.cpp, infer_shapes
        return unspecified

    def execute_async_v3(self, stream_handle: int) -> bool:
        call = "enqueueV3"
        cuda, engine, bindings = self._cuda, self._engine, self._bindings
        stream = cuda.stream(stream_handle, call)
        elsewhere = [work.owner for other in cuda.streams if other is not stream for work in other.queue]
        if any(owner is not None and owner() is self for owner in elsewhere):
            cuda.rules.forbid(f"{call}: one context on two streams at a time")
        unspecified = bindings.unspecified(needs_values=False)
        if unspecified:
            return engine._refuse(call, f"Input shapes are not specified for {unspecified[0]}.")
        unset = [n for n in engine._tensors if not bindings.addresses.get(n) and n not in self._allocators]
        if unset:
            return engine._refuse(call, f"Address is not set for {unset[0]}.")
        if stream.captured is not None:
            if not engine._program.can_be_captured or self.profiler is not None:
                words = "Error Code 1: Cuda Runtime (operation not permitted when stream is capturing)"
                engine._error(f"IExecutionContext::{call}: {words}")
                stream.is_invalid = True
                return False
            if not self._has_run:
                cuda.rules.forbid(f"{call}: captured before an execution with these shapes")
        self._stream = int(stream)
        places = tuple(place for name in engine._tensors if (place := bindings.place(name)) is not None)
        if not self._allocators and self.profiler is None:
            me, then = weakref.ref(self), bindings.frozen()
            used = (self._scratch, engine._weights, *places)
            cuda.put(stream, Work(lambda: me()._execute(then, places), used, me))
            self._has_run = True
            return True
        # Shapes that depend on values, and times of layers, are known when enqueueV3 returns: it waits for the device.
        cuda.finish(stream)
        self._has_run = self._execute_and_allocate(int(stream))
        for layer in engine._layers if self._has_run and self.profiler is not None else ():
            self.profiler.report_layer_time(layer.name, layer.ms)
        return self._has_run

    def _execute(self, bindings: _Bindings, places: Sequence[Allocation]) -> float:
        """Compute all outputs; not again where neither inputs nor outputs were written since."""
        on_host = [bindings.array(n).tobytes() for n, t in bindings.tensors.items() if t.on_host and t.is_input]
        state = bindings.addresses, bindings.shapes, on_host
        if (*state, [place.version for place in places]) != self._done:
            for name, value in bindings.compute().items():
                bindings.write(name, value)
            self._done = (*state, [place.version for place in places])
        return self._engine._ms

    def _execute_and_allocate(self, stream: int) -> bool:
        bindings = self._bindings
        for name, value in bindings.compute().items():
            address, allocator = bindings.addresses.get(name, 0), self._allocators.get(name)
            if allocator is not None:
                size = max(1, value.nbytes)  # "Always positive, even for an empty tensor"
                address = allocator.reallocate_output_async(name, address, size, _ADDRESS_ALIGNMENT, stream)
                if not address:
                    return self._engine._refuse("enqueueV3", f"no memory was given for {name}")
                allocator.notify_shape(name, value.shape)
            replace(bindings, addresses={**bindings.addresses, name: address}).write(name, value)
        self._cuda.now_ms += self._engine._ms
        return True


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1


class IRuntimeConfig:
    dynamic_shapes_kernel_specialization_strategy: Any = DynamicShapesKernelSpecializationStrategy.LAZY


class RtxEngine(ICudaEngine):
    """TensorRT-RTX's, whose contexts have settings."""

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: IRuntimeConfig | None = None) -> IExecutionContext | None:
        context = super().create_execution_context()
        if context is not None and runtime_config is not None:
            context._runtime_config = runtime_config  # type: ignore[attr-defined]
        return context


class Engine10(ICudaEngine):
    """Until 11 the size had a name without a version, too."""

    @property
    def device_memory_size(self) -> int:
        return self.device_memory_size_v2
