"""TensorRT's runtime: engines that ONNX Runtime computes on the device in host memory, by the rules of its headers.

Sources: NvInferRuntime.h of TensorRT 11.1 (``ICudaEngine``, ``IExecutionContext``, ``IOutputAllocator``: the words are
the same in 10.3) for what is returned and what is undefined, pyCore.cpp for what keeps what alive, and the developer
guide for CUDA graphs: "Call enqueueV3() once after an input shape change to update internal state".
"""

from __future__ import annotations

import ctypes
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto

from tests.device.blueprint import DATA_TYPES, NUMPY_TYPES, Blueprint, Tensor
from tests.device.cuda import FakeCuda
from tests.device.handles import Allocation, Work
from tests.device.native import Native, Overridable, enumeration, require_made
from tests.device.program import Program

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

TensorIOMode = enumeration("TensorIOMode", _NONE=0, INPUT=1, _OUTPUT=2)
TensorLocation = enumeration("TensorLocation", _DEVICE=0, HOST=1)
LayerInformationFormat = enumeration("LayerInformationFormat", _ONELINE=0, JSON=1)
ProfilingVerbosity = enumeration("ProfilingVerbosity", _LAYER_NAMES_ONLY=0, NONE=1, DETAILED=2)
DataType = enumeration("DataType", **{name: number for number, name in enumerate(dict.fromkeys(DATA_TYPES.values()))})


def nptype(kind: Any) -> type[Any]:
    """NumPy's type (``tensorrt/__init__.py``)."""
    if kind.name not in NUMPY_TYPES:
        raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
    return NUMPY_TYPES[kind.name]


class IOutputAllocator(Overridable):
    """Memory for outputs whose shape depends on values."""


class IProfiler(Overridable):
    """Takes the time of each layer."""


class EngineInspector(Native):
    execution_context: Any = None

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine  # py::keep_alive<0, 1> of create_engine_inspector
        self._context: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "execution_context":  # no keep_alive
            name, value = "_context", weakref.ref(value)
        super().__setattr__(name, value)

    def get_engine_information(self, format: Any) -> str:
        assert format == LayerInformationFormat.JSON
        context = None
        if self._context is not None:
            context = self._context()
            if context is None:
                self._engine._cuda.rules.forbid("EngineInspector: its execution context was freed")
        is_known = context is not None and context._bindings.is_specified()
        return json.dumps(self._engine._describe(is_known or not self._engine._is_dynamic))


class ICudaEngine(Native):
    def __init__(self, blueprint: Blueprint, cuda: FakeCuda, log: Any, weights: Allocation) -> None:
        self._blueprint, self._cuda, self._log, self._weights = blueprint, cuda, log, weights
        self._program = blueprint.program()
        self._tensors = {one.name: one for one in blueprint.tensors}
        self._is_dynamic = any(-1 in one.shape for one in blueprint.tensors if one.is_input)
        weakref.finalize(self, cuda.release, weights, "ICudaEngine")
        self._layers = blueprint.timed_layers(self._program)
        self._ms = sum(layer.ms for layer in self._layers)
        self._kernels = {node.op_type for node, *_ in self._program.layers}
        self._on_host = [one.name for one in blueprint.tensors if one.on_host]

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def device_memory_size_v2(self) -> int:
        return 1024 * sum(1 if TensorProto.FLOAT16 in layer.outputs else 2 for layer in self._layers)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if self._tensors[name].is_input else TensorIOMode._OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(DataType, self._tensors[name].kind)

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.HOST if self._tensors[name].on_host else TensorLocation._DEVICE

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self)

    def create_execution_context(self) -> IExecutionContext | None:
        scratch = self._cuda.allocate(self.device_memory_size_v2)
        if scratch is None:
            self._error(
                "IExecutionContext::createExecutionContext: Error Code 2: OutOfMemory (Requested size was"
                f" {self.device_memory_size_v2} bytes.)"
            )
            return None
        return IExecutionContext(self, scratch)

    def _error(self, text: str) -> None:
        self._log._say("ERROR", text)

    def _refuse(self, text: str) -> bool:
        """Log an error of usage. Returns False, as the call does."""
        call, _, reason = text.partition(": ")
        self._error(f"{call}: Error Code 3: API Usage Error ({reason})")
        self._cuda.rules.refuse(text)
        return False

    def _describe(self, is_known: bool) -> dict[str, Any]:
        """The inspector's JSON; of 11 on with the type beside the format."""
        is_split = int(self._blueprint.version.split(".")[0]) >= 11

        def tensors(types: Sequence[int]) -> list[dict[str, str]]:
            found = [_TYPE_NAMES.get(one, "") if is_known else "N/A" for one in types]
            return [
                {"Format": "Row major linear", "Datatype": one}
                if is_split
                else {"Format/Datatype": f"Row major linear {one} format"}
                for one in found
            ]

        if not self._blueprint.is_detailed:
            return {"Layers": [layer.name for layer in self._layers]}
        layers = [
            {
                "Name": layer.name,
                "Inputs": tensors(layer.inputs),
                "Outputs": tensors(layer.outputs),
                "Metadata": layer.metadata,
            }
            for layer in self._layers
        ]
        return {"Layers": layers, "I/O Tensors" if is_split else "Bindings": list(self._tensors)}


Shape = tuple[int, ...]


@dataclass
class Bindings:
    """Tensors of an engine, bound to shapes and memory, as they are or as they were when an execution was enqueued."""

    tensors: Mapping[str, Tensor]
    program: Program
    cuda: FakeCuda
    shapes: dict[str, Shape] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)

    def frozen(self) -> Bindings:
        """A copy: an execution uses what was bound when it was enqueued."""
        return Bindings(self.tensors, self.program, self.cuda, dict(self.shapes), dict(self.addresses))

    @property
    def inputs(self) -> list[Tensor]:
        """All inputs."""
        return [one for one in self.tensors.values() if one.is_input]

    def is_shaped(self, tensor: Tensor) -> bool:
        """Whether the shape of an input is known."""
        return -1 not in tensor.shape or tensor.name in self.shapes

    def is_sufficient(self, tensor: Tensor) -> bool:
        """Whether an input is specified as far as shapes of outputs need it (``inferShapes``)."""
        return self.is_shaped(tensor) and (not tensor.on_host or bool(self.addresses.get(tensor.name)))

    def is_specified(self) -> bool:
        """Whether all inputs are."""
        return all(self.is_sufficient(one) for one in self.inputs)

    def shape(self, name: str) -> Shape:
        """The shape of a tensor; -1 where it depends on values."""
        tensor = self.tensors[name]
        if tensor.is_input:
            return self.shapes.get(name, tensor.shape)
        on_host = {one.name: self.host_values(one.name) for one in self.inputs if one.on_host}
        shapes = {one.name: self.shape(one.name) for one in self.inputs}
        return self.program.output_shapes(shapes, on_host)[name]

    def host_values(self, name: str) -> np.ndarray:
        """What lies at the address of a tensor on the host, now: it is copied when the engine is enqueued."""
        kind, shape = np.dtype(NUMPY_TYPES[self.tensors[name].kind]), self.shape(name)
        size, address = int(np.prod(shape, dtype=np.int64)) * kind.itemsize, self.addresses[name]
        if self.cuda.is_device_address(address):
            self.cuda.rules.forbid(f"IExecutionContext: {name} must lie on the host")
        return np.frombuffer(ctypes.string_at(address, size), kind).reshape(shape)

    def places(self) -> dict[str, Allocation]:
        """The memory of all tensors on the device that have an address; too little of it is forbidden."""
        found = {}
        for name, address in self.addresses.items():
            tensor = self.tensors[name]
            if address and not tensor.on_host:
                item = 2 if tensor.kind == "BF16" else np.dtype(NUMPY_TYPES[tensor.kind]).itemsize
                elements = math.prod(max(size, 0) for size in self.shape(name))
                found[name] = self.cuda.allocation(address, elements * item, f"IExecutionContext::enqueueV3, {name}")
        return found

    def feeds(self) -> dict[str, np.ndarray]:
        """The values of all inputs."""
        return {one.name: self._value(one) for one in self.inputs}

    def _value(self, tensor: Tensor) -> np.ndarray:
        if tensor.on_host:
            return self.host_values(tensor.name)
        kind, shape, address = np.dtype(NUMPY_TYPES[tensor.kind]), self.shape(tensor.name), self.addresses[tensor.name]
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        place = self.cuda.allocation(address, size, tensor.name)
        first = address - place.address
        return np.frombuffer(place.data[first : first + size].tobytes(), kind).reshape(shape)

    def write(self, name: str, value: np.ndarray, address: int) -> None:
        """Write an output."""
        data = np.ascontiguousarray(value)
        if self.tensors[name].on_host:
            if self.cuda.is_device_address(address):
                self.cuda.rules.forbid(f"IExecutionContext: {name} must lie on the host")
            ctypes.memmove(address, data.ctypes.data, data.nbytes)
            return
        place = self.cuda.allocation(address, data.nbytes, f"IExecutionContext::enqueueV3, {name}")
        first = address - place.address
        place.data[first : first + data.nbytes] = np.frombuffer(data.tobytes(), np.uint8)
        place.version += 1


class IExecutionContext(Native):
    profiler: Any = None
    nvtx_verbosity: Any = ProfilingVerbosity.DETAILED

    def __init__(self, engine: ICudaEngine, scratch: Allocation) -> None:
        self._engine = engine  # py::keep_alive<0, 1> of create_execution_context
        self._cuda = engine._cuda
        self._scratch = scratch
        self._bindings = Bindings(engine._tensors, engine._program, engine._cuda)
        self._allocators: dict[str, Any] = {}  # py::keep_alive<1, 3>
        self._has_run = False
        self._stream = 0
        self._done: Any = None
        engine._cuda.contexts.add(self)
        weakref.finalize(self, engine._cuda.release, scratch, "IExecutionContext")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "profiler":
            require_made(value, IProfiler)
        super().__setattr__(name, value)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        tensor, given = self._engine._tensors.get(name), tuple(shape)
        call = "IExecutionContext::setInputShape"
        if tensor is None or not tensor.is_input:
            return self._refuse(f"{call}: {name} is no input")
        if len(given) != len(tensor.shape) or any(
            wanted not in (-1, size) for wanted, size in zip(tensor.shape, given, strict=True)
        ):
            return self._refuse(
                f"{call}: Parameter check failed, condition: engineDims.d[i] == dims.d[i]. Static dimension mismatch"
                f" while setting input shape for {name}."
            )
        low, _, high = self._engine._blueprint.shapes.get(name, (given, given, given))
        if not all(a <= size <= b for a, size, b in zip(low, given, high, strict=True)):
            return self._refuse(
                f"{call}: Supplied binding dimension {list(given)} for {name} not satisfy any optimization profiles."
                f" Minimum dimensions in profile are {list(low)}, maximum {list(high)}."
            )
        self._bindings.shapes[name] = given
        self._has_run = False
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        call = "IExecutionContext::setTensorAddress"
        if name not in self._engine._tensors:
            return self._refuse(f"{call}: {name} is no input or output")
        if memory % _ADDRESS_ALIGNMENT:
            return self._refuse(f"{call}: the address of {name} is not aligned to {_ADDRESS_ALIGNMENT} bytes")
        self._bindings.addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        tensor = self._engine._tensors.get(name)
        if tensor is None or tensor.is_input:
            return self._refuse(f"IExecutionContext::setOutputAllocator: {name} is no output")
        require_made(output_allocator, IOutputAllocator)
        self._allocators[name] = output_allocator
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        tensor = self._engine._tensors[name]
        is_known = tensor.is_input or self._bindings.is_specified()
        return self._bindings.shape(name) if is_known else tensor.shape

    def infer_shapes(self) -> list[str]:
        bindings = self._bindings
        for name, (low, _, high) in self._engine._blueprint.values.items():
            if bindings.is_sufficient(self._engine._tensors[name]):
                found = bindings.host_values(name).ravel().tolist()
                if not all(a <= value <= b for a, value, b in zip(low, found, high, strict=True)):
                    self._refuse(f"IExecutionContext::inferShapes: values {found} of {name} are out of the profile")
                    raise RuntimeError("infer_shapes error code: -1")  # pyCore.cpp, infer_shapes
        return [one.name for one in bindings.inputs if not bindings.is_sufficient(one)]

    def execute_async_v3(self, stream_handle: int) -> bool:
        call = "IExecutionContext::enqueueV3"
        cuda, engine, bindings = self._cuda, self._engine, self._bindings
        stream = cuda.stream(stream_handle, call)
        elsewhere = [work.owner for one in cuda.streams if one is not stream for work in one.queue]
        if any(owner is not None and owner() is self for owner in elsewhere):
            cuda.rules.forbid(f"{call}: one context on two streams at a time")
        missing = [one.name for one in bindings.inputs if not bindings.is_shaped(one)]
        if missing:
            return self._refuse(f"{call}: Input shapes are not specified for {missing[0]}.")
        unset = [n for n in engine._tensors if not bindings.addresses.get(n) and n not in self._allocators]
        if unset:
            return self._refuse(f"{call}: Address is not set for {unset[0]}.")
        if stream.captured is not None:
            if not engine._program.can_be_captured or self.profiler is not None:
                engine._error(f"{call}: Error Code 1: Cuda Runtime (operation not permitted when stream is capturing)")
                cuda.invalidate(stream)
                return False
            if not self._has_run:
                cuda.rules.forbid(f"{call}: captured before an execution with these shapes")
        self._stream = int(stream)
        places = bindings.places()
        if not self._allocators and self.profiler is None:
            me, then = weakref.ref(self), bindings.frozen()
            used = (self._scratch, engine._weights, *places.values())
            cuda.put(stream, Work(lambda: me()._execute(then, places), used, me))
            self._has_run = True
            return True
        # Shapes that depend on values, and times of layers, are known when enqueueV3 returns: it waits for the device.
        cuda.finish(stream)
        is_done = self._execute_and_allocate(int(stream))
        for layer in engine._layers if is_done and self.profiler is not None else ():
            self.profiler.report_layer_time(layer.name, layer.ms)
        self._has_run = is_done
        return is_done

    def _refuse(self, text: str) -> bool:
        return self._engine._refuse(text)

    def _execute(self, bindings: Bindings, places: Mapping[str, Allocation]) -> float:
        """Compute all outputs; not again where neither inputs nor outputs were written since."""
        on_host = [bindings.host_values(name).tobytes() for name in self._engine._on_host]
        state = bindings.addresses, bindings.shapes, on_host
        if (*state, [place.version for place in places.values()]) != self._done:
            for name, value in bindings.program.run(bindings.feeds()).items():
                bindings.write(name, value, bindings.addresses[name])
            self._done = (*state, [place.version for place in places.values()])
        return self._count()

    def _execute_and_allocate(self, stream: int) -> bool:
        bindings = self._bindings
        for name, value in bindings.program.run(bindings.feeds()).items():
            address, allocator = bindings.addresses.get(name, 0), self._allocators.get(name)
            if allocator is not None:
                size = max(1, value.nbytes)  # "Always positive, even for an empty tensor"
                address = allocator.reallocate_output_async(name, address, size, _ADDRESS_ALIGNMENT, stream)
                if not address:
                    return self._refuse(f"IExecutionContext::enqueueV3: no memory was given for {name}")
                allocator.notify_shape(name, value.shape)
            bindings.write(name, value, address)
        self._cuda.now_ms += self._count()
        return True

    def _count(self) -> float:
        self._cuda.executions += 1
        return self._engine._ms


DynamicShapesKernelSpecializationStrategy = enumeration(
    "DynamicShapesKernelSpecializationStrategy", _LAZY=0, EAGER=1, _NONE=2
)


class IRuntimeConfig(Native):
    dynamic_shapes_kernel_specialization_strategy: Any = DynamicShapesKernelSpecializationStrategy._LAZY


class RtxEngine(ICudaEngine):
    """TensorRT-RTX's, whose contexts have settings."""

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: IRuntimeConfig | None = None) -> IExecutionContext | None:
        context = super().create_execution_context()
        if context is not None and runtime_config is not None:
            context._runtime_config = runtime_config
        return context


RtxEngine.__name__ = "ICudaEngine"
