"""How a variant of a model holds its constants: inline, in the weight bank, or in a data file beside it.

A constant passes through a few megabytes at a time, so its size does not matter to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx

from mptune.graph.casting.value_types import Flow, Resolution
from mptune.graph.loading.tensors import Initializer
from mptune.graph.writing import wire
from mptune.graph.writing.weights import (
    UNBANKABLE,
    Place,
    WeightBank,
    align,
    chunks,
    external_tensor,
    inline_tensor,
    round_to_fp16,
)

ConstantSource = Callable[[Initializer, str, bool], wire.Piece]
"""(constant, name in the variant, in FP16?) -> the constant, as a field of the graph."""

_STREAM_FROM_BYTES = 1 << 12
_BESIDE_FROM_BYTES = 1 << 10


def inline(constant: Initializer, name: str, half: bool) -> wire.Piece:
    """A constant held by the model's own file; a large one is read when the file is written."""
    if constant.nbytes < _STREAM_FROM_BYTES or constant.dtype in UNBANKABLE:
        return _field(inline_tensor(constant, name, half))
    tensor = onnx.TensorProto(name=name, data_type=_type_code(constant, half), dims=constant.shape)
    if constant.proto.HasField("doc_string"):
        tensor.doc_string = constant.proto.doc_string
    size = constant.nbytes // 2 if half else constant.nbytes
    shell = bytes(tensor.SerializeToString(deterministic=True)) + wire.opening(wire.TENSOR_RAW_DATA, size)
    head = wire.opening(wire.GRAPH_INITIALIZER, len(shell) + size) + shell
    return wire.Streamed(head, size, lambda: raw_chunks(constant, half))


def banked(bank: WeightBank) -> ConstantSource:
    """Constants by reference into the weight bank; small ones inline."""

    def source(constant: Initializer, name: str, half: bool) -> wire.Piece:
        reference = bank.tensor(constant, name, half)
        return inline(constant, name, half) if reference is None else _field(reference)

    return source


class Shelf:
    """The constants of a model's variants: says which of them a plan needs, and asks the source once for each."""

    def __init__(self, flow: Flow, bank: WeightBank | None, source: ConstantSource, half_suffix: str) -> None:
        self._source = source
        self._suffix = half_suffix
        self._free: list[Initializer] = []
        self._dropped: set[int] = set()
        self._nodes: dict[str, int] = {}
        fixed: list[wire.Piece] = []
        for name, constant in flow.model.initializers.items():
            stays_node = constant.node_index is not None and (bank is None or name not in bank.fp32)
            if constant.node_index is not None and not stays_node:
                self._dropped.add(constant.node_index)
            if name in flow.constants:
                self._free.append(constant)
                if stays_node and constant.node_index is not None:
                    self._nodes[name] = constant.node_index
            elif not stays_node:
                fixed.append(source(constant, name, False))
        self._fixed = np.arange(len(fixed))
        # Behind the fixed ones: those of FP32 type as they are, then in FP16, each made when a plan first needs it.
        self._table = wire.Table([*fixed, *[b""] * (2 * len(self._free))])
        unmade = [*(c.name not in self._nodes for c in self._free), *[True] * len(self._free)]
        self._unmade = np.array(unmade, np.bool_)

    def take(self, resolution: Resolution) -> tuple[wire.Piece, set[int]]:
        """The constants that a plan needs, as fields of the graph, and the indices of Constant nodes to leave out."""
        wanted = np.concatenate((resolution.constants_fp32.flags, resolution.constants_fp16.flags))
        for position in np.flatnonzero(wanted & self._unmade).tolist():
            half, which = divmod(position, len(self._free))
            constant = self._free[which]
            name = constant.name + self._suffix if half else constant.name
            self._table[len(self._fixed) + position] = self._source(constant, name, bool(half))
        self._unmade &= ~wanted
        chosen = np.concatenate((self._fixed, len(self._fixed) + np.flatnonzero(wanted)))
        unread = {index for name, index in self._nodes.items() if name not in resolution.constants_fp32}
        return self._table.selected(chosen), self._dropped | unread


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

    def __call__(self, constant: Initializer, name: str, half: bool) -> wire.Piece:
        """As ``ConstantSource``."""
        if constant.nbytes < _BESIDE_FROM_BYTES or constant.dtype in UNBANKABLE:
            return inline(constant, name, half)
        start = align(self._file)
        for chunk in raw_chunks(constant, half):
            self._file.write(chunk)
        place = Place(start, self._file.tell() - start)
        return _field(external_tensor(name, _type_code(constant, half), constant.shape, self._name, place))


def raw_chunks(constant: Initializer, half: bool) -> Iterator[bytes]:
    """The raw data of a constant, rounded to FP16 if ``half``."""
    for chunk in chunks(constant):
        yield (round_to_fp16(chunk) if half else chunk).tobytes()


def _type_code(constant: Initializer, half: bool) -> int:
    return onnx.TensorProto.FLOAT16 if half else constant.proto.data_type


def _field(tensor: onnx.TensorProto) -> bytes:
    return wire.field(wire.GRAPH_INITIALIZER, tensor.SerializeToString(deterministic=True))
