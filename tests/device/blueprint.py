"""An engine's file: what the builder settled, the model that it was built from, and TensorRT-RTX's own engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from tests.device.program import Program

_MAGIC = b"engine of tests/device\n"

DATA_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.DOUBLE: "FLOAT",  # onnx-tensorrt's ModelImporter
    TensorProto.INT8: "INT8",
    TensorProto.UINT8: "UINT8",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.BOOL: "BOOL",
}
"""Element type of ONNX -> name in TensorRT's ``DataType``."""

NUMPY_TYPES: Mapping[str, type[Any]] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}
"""NumPy's type of each ``DataType`` that it has."""

_HEAVY = ("MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU")
_FULL_MS, _LIGHT_MS, _CAST_MS = 0.2, 0.04, 0.008

Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, usual and largest."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine: -1 in ``shape`` is a dimension that is known at run time only."""

    name: str
    is_input: bool
    kind: str
    shape: tuple[int, ...]
    on_host: bool = False


@dataclass(frozen=True)
class Layer:
    """A layer of an engine: name, milliseconds, ONNX nodes, and element types of what it reads and writes."""

    name: str
    ms: float
    metadata: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Blueprint:
    """An engine.

    Attributes:
        tensors: inputs and outputs.
        model: the ONNX model, serialised.
        version: of the TensorRT that built it; no other loads it.
        capability: of the GPU that it was built for.
        tf32: whether FP32 layers use TF32.
        is_typed: whether the network was strongly typed.
        averaged: timings of a tactic that were averaged.
        is_detailed: whether the inspector knows more of a layer than its name.
        shapes: of dynamic inputs, by the optimization profile.
        values: of inputs that are shapes.
        layers: name, milliseconds and metadata of each layer; None for one a node, whose duration is estimated.
        rtx: TensorRT-RTX's engine of the same network; empty where none was built.
    """

    tensors: tuple[Tensor, ...]
    model: bytes
    version: str = "10.16.2"
    capability: tuple[int, int] = (8, 9)
    tf32: bool = False
    is_typed: bool = True
    averaged: int = 1
    is_detailed: bool = True
    shapes: Mapping[str, Range] = field(default_factory=dict)
    values: Mapping[str, Range] = field(default_factory=dict)
    layers: tuple[tuple[str, float, str], ...] | None = None
    rtx: bytes = b""

    def to_bytes(self) -> bytes:
        """The file."""
        fields = {**asdict(self), "model": len(self.model), "rtx": len(self.rtx)}
        header = json.dumps(fields).encode()
        return _MAGIC + len(header).to_bytes(8, "big") + header + self.model + self.rtx

    @classmethod
    def from_bytes(cls, data: bytes) -> Blueprint | None:
        """Inverse of ``to_bytes``; None for what is no such file, or is not whole."""
        begin = len(_MAGIC) + 8
        if not data.startswith(_MAGIC):
            return None
        end = begin + int.from_bytes(data[len(_MAGIC) : begin], "big")
        fields: dict[str, Any] = json.loads(data[begin:end])
        middle = end + fields["model"]
        if len(data) != middle + fields["rtx"]:
            return None
        tensors = tuple(Tensor(**{**one, "shape": tuple(one["shape"])}) for one in fields.pop("tensors"))
        for name in ("shapes", "values"):
            fields[name] = {key: tuple(tuple(one) for one in value) for key, value in fields[name].items()}
        if fields["layers"] is not None:
            fields["layers"] = tuple(tuple(one) for one in fields["layers"])
        fields |= {"model": data[end:middle], "rtx": data[middle:], "capability": tuple(fields["capability"])}
        return cls(tensors, **fields)

    @classmethod
    def of_model(cls, model: ModelProto, on_host: tuple[str, ...] = (), **fields: Any) -> Blueprint:
        """An engine as of a builder, for tests of what runs it.

        Args:
            model: with shapes of all inputs and outputs; a dimension with a name is dynamic.
            on_host: names of inputs from which shapes are computed.
            fields: others of the class.
        """
        program = Program(model)
        tensors = [
            Tensor(name, is_input, DATA_TYPES[kind.elem_type], dimensions(kind), name in on_host)
            for is_input, named in ((True, program.inputs), (False, program.outputs))
            for name, kind in named.items()
        ]
        return cls(tuple(tensors), model.SerializeToString(), **fields)

    def program(self) -> Program:
        """What the engine computes."""
        return _program(self.model)

    def timed_layers(self, program: Program) -> tuple[Layer, ...]:
        """The engine's layers: FP16 takes half the time, a Cast costs a little."""
        if self.layers is not None:
            return tuple(Layer(name, ms, metadata, (), ()) for name, ms, metadata in self.layers)
        found = []
        for index, (node, *types) in enumerate(program.layers):
            inputs, outputs = types
            is_half = TensorProto.FLOAT16 in outputs
            ms = (_FULL_MS if node.op_type in _HEAVY else _LIGHT_MS) / (2 if is_half else 1)
            metadata = f"[ONNX Layer: {node.name}]" if node.name else ""
            name = f"{node.name or node.op_type}_myl0_{index}"
            found.append(
                Layer(name, _CAST_MS if node.op_type == "Cast" else ms, metadata, tuple(inputs), tuple(outputs))
            )
        return tuple(found)


@lru_cache(maxsize=4)
def _program(model: bytes) -> Program:
    """Engines of one file share what ONNX Runtime compiled: a file is opened dozens of times to be timed."""
    return Program(ModelProto.FromString(model))


def dimensions(kind: Any) -> tuple[int, ...]:
    """The shape of an ONNX tensor type; -1 for what is not a number."""
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
