"""The shapes and addresses of an execution context, as they are or as they were when an execution was enqueued."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.device.blueprint import NUMPY_TYPES, Tensor
from tests.device.cuda import FakeCuda
from tests.device.handles import Allocation
from tests.device.program import Program

Shape = tuple[int, ...]


@dataclass
class Bindings:
    """Tensors of an engine, bound to shapes and memory."""

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
