"""Values of an ONNX model: types, roundings, constants, and where external data lies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import ModelError
from mptune.graph.plan import Precision

_QUIET_NAN = 0x7FC00000


def rounded(values: np.ndarray, precision: Precision) -> np.ndarray:
    """FP32 values rounded to the nearest value of a precision, ties to even; overflow gives infinity, NaN stays NaN."""
    values = np.asarray(values, np.float32)
    if precision.dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(values.astype(np.float16), np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    cut = np.uint32(Precision.FP32.mantissa_bits - precision.mantissa_bits)
    # Half of the last kept digit less one, and one more where that digit is odd. Finite values cannot wrap around.
    odd = (bits >> cut) & np.uint32(1)
    nearest: np.ndarray = (bits + np.uint32((1 << int(cut) >> 1) - 1) + odd) >> cut << cut
    nearest = np.where(np.isnan(values), bits & np.uint32(0x80000000) | np.uint32(_QUIET_NAN), nearest)
    return nearest.view(np.float32)


STANDARD_DOMAINS = frozenset({"", "ai.onnx"})

Shape = tuple[int | str | None, ...]
"""One entry for each dimension: int where fixed, str where symbolic, None where unknown."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of one value."""

    name: str
    # ONNX element type in lower case, such as ``float``, ``float16``, ``int64``; ``sequence``, ``optional`` and
    # ``undefined`` where it is no tensor or could not be inferred.
    dtype: str
    shape: Shape | None  # None for unknown rank

    @property
    def is_float32(self) -> bool:
        """Whether mptune may change the type of this value."""
        return self.dtype == "float"

    @property
    def numpy_dtype(self) -> np.dtype:
        """The NumPy type of an array of this value."""
        try:
            code = onnx.TensorProto.DataType.Value(self.dtype.upper())
            return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
        except (ValueError, KeyError):
            raise ModelError(f"{self.name!r} is a {self.dtype}, not a tensor", "mptune feeds tensors only") from None


@dataclass(frozen=True)
class Initializer:
    """A constant of the model: a graph initializer, or the value of a Constant node."""

    name: str
    proto: onnx.TensorProto = field(repr=False, compare=False)
    base_dir: Path = field(repr=False, compare=False)
    overridable: bool = False  # also a graph input, so a caller may replace its value at run time
    node_index: int | None = None  # index of the Constant node that holds it; None for a graph initializer

    @cached_property
    def dtype(self) -> str:
        """As of ``TensorInfo``."""
        return TYPE_NAMES[self.proto.data_type]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        return tuple(self.proto.dims)

    @cached_property
    def nbytes(self) -> int:
        """Size of the raw data in bytes."""
        return tensor_nbytes(self.proto)

    def numpy(self) -> np.ndarray:
        """The values; a read-only memory map where they lie in external data."""
        if not is_external(self.proto):
            return onnx.numpy_helper.to_array(self.proto)
        path, offset, _ = external_location(self.proto, self.base_dir)
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.proto.data_type))
        if self.nbytes == 0:
            return np.empty(self.shape, dtype)
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=self.shape)


_EXTERNAL_HINT = "keep the model's .onnx file and its data files together in one folder"


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the values lie in another file."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def external_location(tensor: onnx.TensorProto, base_dir: Path) -> tuple[Path, int, int]:
    """Where external data lies: file, offset and length in bytes.

    Raises:
        ModelError: it leaves the model's folder (path traversal), or does not fit its file.
    """
    entries = {e.key: e.value for e in tensor.external_data}
    location, expected = entries.get("location", ""), tensor_nbytes(tensor)
    data = f"external data of {tensor.name!r}"
    try:
        path = (base_dir / location).resolve()
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
    except (OSError, RuntimeError, ValueError):  # a loop of links, a null character, no number
        raise ModelError(f"{data} has a bad location, offset or length", _EXTERNAL_HINT) from None
    if not location or Path(location).is_absolute() or not path.is_relative_to(base_dir):
        raise ModelError(f"{data} points outside the model's folder: {location!r}", _EXTERNAL_HINT)
    if not path.is_file():
        raise ModelError(f"{data} is missing: {location!r}", _EXTERNAL_HINT)
    size = path.stat().st_size
    if offset < 0 or length != expected or offset + length > size:
        what = f"{length} of {expected} bytes at {offset}, the file has {size}"
        raise ModelError(f"{data} does not fit {location!r}: {what}", _EXTERNAL_HINT)
    return path, offset, length


TYPE_NAMES: dict[int, str] = {code: name.lower() for name, code in onnx.TensorProto.DataType.items()}
"""Code of an element type -> its name, as ``TensorInfo`` has it."""

_PACKED_BITS = {"int4": 4, "uint4": 4, "float4e2m1": 4, "int2": 2, "uint2": 2}


def tensor_nbytes(tensor: onnx.TensorProto) -> int:
    """Size of the raw data in bytes."""
    count = math.prod(tensor.dims)
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(s) for s in tensor.string_data)
    whole_bytes = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    bits = _PACKED_BITS.get(TYPE_NAMES[tensor.data_type], 8 * whole_bytes)
    return int(count * bits + 7) // 8


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and every subgraph below it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a node's attributes hold (If, Loop, Scan), without those inside them."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every constant of the graph and its subgraphs, in initializers and attributes."""
    for inner in all_graphs(graph):
        yield from inner.initializer
        for sparse in inner.sparse_initializer:
            yield sparse.values
            yield sparse.indices
        for node in inner.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    yield attribute.t
                yield from attribute.tensors


def constant_value(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant node in whichever attribute it stands; None for strings and sparse tensors."""
    dtypes = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for a in node.attribute:
        value = onnx.helper.get_attribute_value(a)
        if a.name == "value":
            return cast("onnx.TensorProto", value)
        if a.name in dtypes:
            return onnx.numpy_helper.from_array(np.array(value, dtypes[a.name]))
    return None


def fill_value(node: onnx.NodeProto) -> np.ndarray:
    """The one value that a ConstantOfShape fills with; FP32 zero where it states none (ONNX's default)."""
    stated = [a.t for a in node.attribute if a.name == "value"]
    return onnx.numpy_helper.to_array(stated[0]) if stated else np.zeros(1, np.float32)


def fixed_shape(shape: Shape | None) -> tuple[int, ...] | None:
    """A shape whose dimensions are all numbers; None for others."""
    sizes = tuple(dim for dim in shape or () if isinstance(dim, int))
    return sizes if shape is not None and len(sizes) == len(shape) else None


def type_of(proto: onnx.TypeProto) -> tuple[str, Shape | None]:
    """``TensorInfo``'s dtype and shape of a declared type."""
    kind = proto.WhichOneof("value")
    if kind != "tensor_type":
        return (kind.removesuffix("_type") if kind else "undefined"), None
    dims = proto.tensor_type.shape.dim
    sizes = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims)
    return TYPE_NAMES[proto.tensor_type.elem_type], tuple(sizes) if proto.tensor_type.HasField("shape") else None


def declaration(info: TensorInfo) -> onnx.ValueInfoProto:
    """A tensor's name, type and shape as ONNX declares them."""
    code = onnx.TensorProto.DataType.Value(info.dtype.upper())
    return onnx.helper.make_tensor_value_info(info.name, code, info.shape)


def element_type(text: str) -> str:
    """``TensorInfo``'s dtype of a type as runtimes write it, such as ``tensor(float)``; "" where it is no tensor."""
    inner = text.removeprefix("tensor(").removesuffix(")")
    return inner if text == f"tensor({inner})" and inner.upper() in onnx.TensorProto.DataType.keys() else ""  # noqa: SIM118
