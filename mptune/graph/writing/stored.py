"""Constants by reference into another written model: a second model of the same weights takes kilobytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from mptune.graph.loading.tensors import Initializer, is_external
from mptune.graph.plan import Precision
from mptune.graph.writing.constants import ConstantStore, StoredConstant, inline
from mptune.graph.writing.weights import Place, external_tensor, type_code

_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_NAME, _TENSOR_TYPE, _TENSOR_RAW_DATA = 7, 5, 8, 2, 9
"""Field numbers in onnx.proto."""

_FROM_BYTES = 1 << 10
_HEADER_BYTES = 1 << 16
"""A tensor without data of its own is no longer than this."""


@dataclass(frozen=True)
class StoredData:
    """Where the data of a constant lie."""

    location: str
    place: Place
    data_type: int


def stored_in(model: Path) -> ConstantStore:
    """Constants by reference into a model that mptune wrote, or into the file of weights beside it; small ones inline.

    ONNX's external data may lie anywhere in any file (onnx/docs/ExternalData.md), also in the middle of a model.
    """
    places = stored_data(model)

    def store(constant: Initializer, name: str, rounded_to: Precision | None) -> StoredConstant:
        stored = places.get(name)
        code = type_code(constant, rounded_to)
        if stored is None or stored.data_type != code or stored.place.length < _FROM_BYTES:
            return inline(constant, name, rounded_to)
        return external_tensor(name, code, constant.shape, stored.location, stored.place)

    return store


def stored_data(model: Path) -> dict[str, StoredData]:
    """Where the data of the initializers of the main graph lie; without those that are not raw.

    Only tags and lengths are read (protobuf.dev/programming-guides/encoding), whatever the model's size.
    """
    places: dict[str, StoredData] = {}
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number, start, end in _fields(data, 0, len(data)):
            if number != _MODEL_GRAPH:
                continue
            for inner, first, last in _fields(data, start, end):
                if inner == _GRAPH_INITIALIZER:
                    places.update(_tensor(data, first, last, model.name))
    return places


def _tensor(data: mmap.mmap, start: int, end: int, file: str) -> dict[str, StoredData]:
    fields = {number: (first, last) for number, first, last in _fields(data, start, end)}
    name, code, raw = (fields.get(number) for number in (_TENSOR_NAME, _TENSOR_TYPE, _TENSOR_RAW_DATA))
    if name is None or code is None:
        return {}
    text = data[name[0] : name[1]].decode("utf-8")
    if raw is not None:
        return {text: StoredData(file, Place(raw[0], raw[1] - raw[0]), _varint(data, code[0])[0])}
    if end - start > _HEADER_BYTES:
        return {}
    tensor = onnx.TensorProto.FromString(data[start:end])
    if not is_external(tensor):
        return {}
    entries = {entry.key: entry.value for entry in tensor.external_data}
    place = Place(int(entries.get("offset", 0)), int(entries.get("length", 0)))
    return {text: StoredData(entries["location"], place, tensor.data_type)}


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field's value."""
    while at < end:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 2:
            size, at = _varint(data, at)
            after = at + size
        elif kind == 0:
            after = _varint(data, at)[1]
        else:
            after = at + (8 if kind == 1 else 4)
        yield tag >> 3, at, after
        at = after


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number, and where the next begins."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
