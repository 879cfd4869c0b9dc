"""An engine's file: what the builder settled, and the model that it was built from."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from tests.device.program import Program

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
    """A layer of an engine, with the element types of what it reads and writes; ``metadata`` has its ONNX nodes."""

    name: str
    ms: float
    metadata: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


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
        given_layers: None for one layer a node, whose duration is estimated.
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
    given_layers: tuple[Layer, ...] | None = None

    def to_bytes(self) -> bytes:
        """The file."""
        return pickle.dumps(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Blueprint | None:
        """Inverse of ``to_bytes``; None for what is no such file, or is not whole."""
        try:
            blueprint = pickle.loads(data)
        except Exception:
            return None
        return blueprint if isinstance(blueprint, cls) else None

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
            Tensor(name, is_input, DATA_TYPES[kind.elem_type], _dimensions(kind), name in on_host)
            for is_input, named in ((True, program.inputs), (False, program.outputs))
            for name, kind in named.items()
        ]
        return cls(tuple(tensors), model.SerializeToString(), **fields)

    def program(self) -> Program:
        """What the engine computes."""
        return _program(self.model)

    def layers(self) -> tuple[Layer, ...]:
        """The engine's layers: FP16 takes half the time, a Cast costs a little."""
        if self.given_layers is not None:
            return self.given_layers
        layers = []
        for index, (node, inputs, outputs) in enumerate(self.program().layers):
            ms = (_FULL_MS if node.op_type in _HEAVY else _LIGHT_MS) / (2 if TensorProto.FLOAT16 in outputs else 1)
            metadata = f"[ONNX Layer: {node.name}]" if node.name else ""
            name = f"{node.name or node.op_type}_myl0_{index}"
            layers.append(Layer(name, _CAST_MS if node.op_type == "Cast" else ms, metadata, inputs, outputs))
        return tuple(layers)


@lru_cache(maxsize=4)
def _program(model: bytes) -> Program:
    """Engines of one file share what ONNX Runtime compiled: a file is opened dozens of times to be timed."""
    return Program(ModelProto.FromString(model))


def _dimensions(kind: Any) -> tuple[int, ...]:
    """The shape of an ONNX tensor type; -1 for what is not a number."""
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
