"""How a written model holds its constants: inline, in the weight bank, or in a data file beside it.

A large constant passes through a few megabytes at a time, so its size does not matter to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx

from mptune.graph.bfloat16 import from_bfloat16, to_bfloat16
from mptune.graph.casting.value_types import Resolution, ValueTypes
from mptune.graph.loading.tensors import Initializer
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import (
    UNBANKABLE,
    Place,
    WeightBank,
    align,
    chunks,
    external_tensor,
    inline_tensor,
    round_values,
    rounded_tensor,
    rounding_of,
    type_code,
)

_FP32_BYTES, _REDUCED_BYTES = 4, 2
_STREAM_FROM_BYTES = 1 << 12
_BESIDE_FROM_BYTES = 1 << 10


@dataclass(frozen=True)
class LargeConstant:
    """A constant whose data are read only while the model is written."""

    tensor: onnx.TensorProto
    constant: Initializer
    rounded_to: Precision | None

    @property
    def nbytes(self) -> int:
        """Size of the raw data."""
        if self.rounded_to is None:
            return self.constant.nbytes
        return self.constant.nbytes // _FP32_BYTES * _REDUCED_BYTES

    def chunks(self) -> Iterator[bytes]:
        """The raw data, a few megabytes at a time."""
        return raw_chunks(self.constant, self.rounded_to)


StoredConstant = onnx.TensorProto | LargeConstant
ConstantStore = Callable[[Initializer, str, Precision | None], StoredConstant]
"""(constant, its name in the written model, precision that it is rounded to or None) -> how the model holds it."""


def inline(constant: Initializer, name: str, rounded_to: Precision | None = None) -> StoredConstant:
    """A constant held by the model's own file; the data of a large one are read when the file is written."""
    if constant.nbytes < _STREAM_FROM_BYTES or constant.dtype in UNBANKABLE:
        return inline_tensor(constant, name, rounded_to)
    tensor = onnx.TensorProto(name=name, data_type=type_code(constant, rounded_to), dims=constant.shape)
    if constant.proto.HasField("doc_string"):
        tensor.doc_string = constant.proto.doc_string
    return LargeConstant(tensor, constant, rounded_to)


def banked(bank: WeightBank) -> ConstantStore:
    """Constants by reference into the weight bank; small ones inline."""

    def store(constant: Initializer, name: str, rounded_to: Precision | None) -> StoredConstant:
        return bank.tensor(constant, name, rounded_to) or inline(constant, name, rounded_to)

    return store


def unlimited(store: ConstantStore) -> ConstantStore:
    """A store whose constants beyond a reduced precision become infinite in it, as a plain conversion makes them."""

    def plain(constant: Initializer, name: str, rounded_to: Precision | None) -> StoredConstant:
        if rounded_to is None or not rounding_of(constant, rounded_to).overflowed:
            return store(constant, name, rounded_to)
        values = constant.numpy()
        if rounded_to is Precision.BF16:
            return rounded_tensor(from_bfloat16(to_bfloat16(values)), rounded_to, name)
        with np.errstate(over="ignore"):
            return rounded_tensor(values.astype(np.float16).astype(np.float32), rounded_to, name)

    return plain


class NeededConstants:
    """Which constants a model needs under a plan, and in which precisions."""

    def __init__(self, types: ValueTypes, bank: WeightBank | None, suffixes: Mapping[Precision, str]) -> None:
        """Prepare for one model; Constant nodes that the bank holds become constants of the graph."""
        self._types = types
        self._suffixes = suffixes
        in_bank = {} if bank is None else bank.places[Precision.FP32]
        self._nodes = {  # those that stay nodes in FP32
            name: constant.node_index
            for name, constant in types.model.initializers.items()
            if constant.node_index is not None and name not in in_bank
        }
        indices = {c.node_index for c in types.model.initializers.values() if c.node_index is not None}
        self._moved = indices - {*self._nodes.values()}

    def add_to(
        self,
        graph: onnx.GraphProto,
        resolution: Resolution,
        store: ConstantStore,
        unread: AbstractSet[str] = frozenset(),
    ) -> list[LargeConstant]:
        """Add the constants of a plan to a graph, but ``unread`` ones; returns those with data yet to be written."""
        large = []
        for name, constant in self._types.model.initializers.items():
            if name in unread:
                continue
            precisions = resolution.constants.get(name, ()) if name in self._types.constants else (Precision.FP32,)
            for precision in Precision:
                if precision not in precisions or (precision is Precision.FP32 and name in self._nodes):
                    continue
                reduced = None if precision is Precision.FP32 else precision
                stored = store(constant, name if reduced is None else name + self._suffixes[reduced], reduced)
                if isinstance(stored, LargeConstant):
                    large.append(stored)
                else:
                    graph.initializer.append(stored)
        return large

    def dropped_nodes(self, resolution: Resolution) -> frozenset[int]:
        """Indices of the Constant nodes that the plan does not need."""
        constants = self._types.constants
        unread = (
            index
            for name, index in self._nodes.items()
            if name in constants and Precision.FP32 not in resolution.constants.get(name, ())
        )
        return frozenset((*self._moved, *unread))


class DataFile:
    """Large constants in one file beside a model, small ones inline: for models past 2 GiB.

    Every method passes OSError on.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Write to ``path``; ``name`` is the file's name in the model."""
        self._path = path
        self._name = name

    def __enter__(self) -> DataFile:
        self._file = self._path.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __call__(self, constant: Initializer, name: str, rounded_to: Precision | None) -> StoredConstant:
        """As ``ConstantStore``."""
        if constant.nbytes < _BESIDE_FROM_BYTES or constant.dtype in UNBANKABLE:
            return inline(constant, name, rounded_to)
        start = align(self._file)
        for chunk in raw_chunks(constant, rounded_to):
            self._file.write(chunk)
        place = Place(start, self._file.tell() - start)
        return external_tensor(name, type_code(constant, rounded_to), constant.shape, self._name, place)


def raw_chunks(constant: Initializer, rounded_to: Precision | None) -> Iterator[bytes]:
    """The raw data of a constant, rounded to a precision or as it is."""
    for chunk in chunks(constant):
        yield (chunk if rounded_to is None else round_values(chunk, rounded_to)).tobytes()
