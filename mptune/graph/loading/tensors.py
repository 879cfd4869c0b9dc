"""Values of an ONNX model: types (BFLOAT16 in NumPy, too), constants, and where external data lies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import ModelError
from mptune.graph.plan import Precision

_QUIET_NAN = 0x7FC0


def to_stored(values: np.ndarray, precision: Precision) -> np.ndarray:
    """Round FP32 to the nearest value of a precision, ties to even; overflow gives infinity, NaN stays NaN.

    Returns:
        float16 or float32, as its ONNX type is; of BF16, which NumPy lacks, its 16 bits as uint16.
    """
    if precision.dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(values.astype(np.float16))
    values = np.asarray(values, np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    cut = np.uint32(Precision.FP32.mantissa_bits - precision.mantissa_bits)
    # Half of the last kept digit less one, and one more where that digit is odd. Finite values cannot wrap around.
    odd = (bits >> cut) & np.uint32(1)
    rounded: np.ndarray = (bits + np.uint32((1 << int(cut) >> 1) - 1) + odd) >> cut << cut
    unordered = np.isnan(values)
    if unordered.any():
        rounded = np.where(unordered, bits & np.uint32(0x80000000) | np.uint32(_QUIET_NAN << 16), rounded)
    return rounded.view(np.float32) if precision.dtype == "float" else (rounded >> np.uint32(16)).astype(np.uint16)


def from_stored(stored: np.ndarray) -> np.ndarray:
    """The FP32 numbers that ``to_stored`` gave, exactly."""
    if stored.dtype != np.uint16:
        return stored.astype(np.float32, copy=False)
    wide: np.ndarray = np.asarray(stored.astype(np.uint32) << np.uint32(16))
    return wide.view(np.float32)


STANDARD_DOMAINS = frozenset({"", "ai.onnx"})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of one value.

    Attributes:
        dtype: ONNX element type in lower case, such as ``float``, ``float16``, ``int64``; ``sequence``, ``optional``
            and ``undefined`` where it is no tensor or could not be inferred.
        shape: one entry per dimension, int where fixed, str where symbolic, None where unknown; None for unknown rank.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

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


@dataclass(frozen=True, slots=True)
class Initializer:
    """A constant of the model: a graph initializer, or the value of a Constant node.

    Attributes:
        overridable: also a graph input, so a caller may replace its value at run time.
        node_index: index of the Constant node that holds it; None for a graph initializer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    proto: onnx.TensorProto = field(repr=False, compare=False)
    base_dir: Path = field(repr=False, compare=False)
    overridable: bool = False
    node_index: int | None = None

    def numpy(self) -> np.ndarray:
        """The values; a read-only memory map where they lie in external data."""
        if not is_external(self.proto):
            return onnx.numpy_helper.to_array(self.proto)
        where = external_location(self.proto, self.base_dir)
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.proto.data_type))
        if self.nbytes == 0:
            return np.empty(self.shape, dtype)
        try:
            return np.memmap(where.path, dtype=dtype, mode="r", offset=where.offset, shape=self.shape)
        except (OSError, ValueError) as error:
            raise ModelError(f"external data of {self.name!r} cannot be read: {error}", EXTERNAL_HINT) from None


EXTERNAL_HINT = "keep the model's .onnx file and its data files together in one folder"


@dataclass(frozen=True)
class ExternalPlace:
    """Where one constant's raw data lie, in bytes."""

    path: Path
    offset: int
    length: int


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the values lie in another file."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def external_location(tensor: onnx.TensorProto, base_dir: Path) -> ExternalPlace:
    """Where external data lies; refuses what leaves the model's folder (path traversal) or does not fit its file."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    try:
        path = (base_dir / location).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a null character
        path = base_dir
    if not location or Path(location).is_absolute() or not path.is_relative_to(base_dir):
        raise ModelError(
            f"external data of {tensor.name!r} points outside the model's folder: {location!r}", EXTERNAL_HINT
        )
    expected = tensor_nbytes(tensor)
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", expected))
    except ValueError:
        raise ModelError(f"external data of {tensor.name!r} has a bad offset or length", EXTERNAL_HINT) from None
    if not path.is_file():
        raise ModelError(f"external data of {tensor.name!r} is missing: {location!r}", EXTERNAL_HINT)
    size = path.stat().st_size
    if offset < 0 or length != expected or offset + length > size:
        raise ModelError(
            f"external data of {tensor.name!r} does not fit {location!r}: {length} of {expected} bytes at {offset}, "
            f"the file has {size}",
            EXTERNAL_HINT,
        )
    return ExternalPlace(path, offset, length)


_TYPE_NAMES: dict[int, str] = {code: name.lower() for name, code in onnx.TensorProto.DataType.items()}

_PACKED_BITS = {"int4": 4, "uint4": 4, "float4e2m1": 4, "int2": 2, "uint2": 2}


def tensor_nbytes(tensor: onnx.TensorProto) -> int:
    """Size of the raw data in bytes."""
    count = math.prod(tensor.dims)
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(s) for s in tensor.string_data)
    name = _TYPE_NAMES.get(tensor.data_type, "undefined")
    if name == "undefined":
        text = f"{tensor.name!r} has unknown element type {tensor.data_type}"
        raise ModelError(text, "export the model again")
    bits = _PACKED_BITS.get(name) or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return int(count * bits + 7) // 8


def is_known_type(code: int) -> bool:
    """Whether ``code`` is an element type of ONNX, ``UNDEFINED`` included."""
    return code in _TYPE_NAMES


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


def make_initializer(
    name: str, proto: onnx.TensorProto, base_dir: Path, *, overridable: bool = False, node_index: int | None = None
) -> Initializer:
    """Describe a constant that a graph holds under ``name``."""
    dtype = _TYPE_NAMES[proto.data_type]
    return Initializer(name, dtype, tuple(proto.dims), tensor_nbytes(proto), proto, base_dir, overridable, node_index)


def constant_value(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant node in whichever attribute it stands; None for strings and sparse tensors."""
    for a in node.attribute:
        value = onnx.helper.get_attribute_value(a)
        if a.name == "value":
            return cast("onnx.TensorProto", value)
        if a.name in ("value_float", "value_floats"):
            return onnx.numpy_helper.from_array(np.array(value, np.float32))
        if a.name in ("value_int", "value_ints"):
            return onnx.numpy_helper.from_array(np.array(value, np.int64))
    return None


def fill_value(node: onnx.NodeProto) -> np.ndarray:
    """The one value that a ConstantOfShape fills with; FP32 zero where it states none (ONNX's default)."""
    stated = next((a.t for a in node.attribute if a.name == "value"), None)
    return np.zeros(1, np.float32) if stated is None else onnx.numpy_helper.to_array(stated)


def fixed_shape(shape: tuple[int | str | None, ...] | None) -> tuple[int, ...] | None:
    """A shape whose dimensions are all numbers; None for others."""
    sizes = tuple(dim for dim in shape or () if isinstance(dim, int))
    return sizes if shape is not None and len(sizes) == len(shape) else None


def type_of(proto: onnx.TypeProto) -> tuple[str, tuple[int | str | None, ...] | None]:
    """``TensorInfo``'s dtype and shape of a declared type."""
    kind = proto.WhichOneof("value")
    if kind != "tensor_type":
        return (kind.removesuffix("_type") if kind else "undefined"), None
    tensor = proto.tensor_type
    dtype = _TYPE_NAMES[tensor.elem_type]
    if not tensor.HasField("shape"):
        return dtype, None
    dims: list[int | str | None] = []
    for dim in tensor.shape.dim:
        which = dim.WhichOneof("value")
        dims.append(None if which is None else dim.dim_value if which == "dim_value" else (dim.dim_param or None))
    return dtype, tuple(dims)
