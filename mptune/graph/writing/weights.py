"""Constants of written models: inline, in a data file, or in the weight bank, rounded once to each precision."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import ModelError
from mptune.files import READ_ERRORS, files_sha256, read_json, whole_file, writing
from mptune.graph.casting.value_types import Resolution, ValueTypes
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import (
    EXTERNAL_HINT,
    Initializer,
    external_location,
    from_stored,
    is_external,
    to_stored,
)
from mptune.graph.plan import DEFAULT_PRECISIONS, PRECISIONS, Precision

_BANK_FROM_BYTES = 1024

_ALIGN = 4096

"""Page size: lets a runtime map a tensor instead of copying it (onnx/docs/ExternalData.md)."""

_CHUNK = 1 << 22

"""Values that are read at once."""

UNBANKABLE = frozenset({"string", "int4", "uint4", "int2", "uint2", "float4e2m1"})

"""Element types whose values do not lie one after the other in whole bytes."""


def bank_file(precision: Precision) -> str:
    """The name of the bank's file of one precision."""
    return f"{precision}.bin"


INDEX_FILE = "weights.json"


def bank_files(precisions: Iterable[str]) -> tuple[str, ...]:
    """The names of the files of a bank that was asked for these precisions."""
    wanted = [Precision.FP32, *map(Precision.named, precisions)]
    return (INDEX_FILE, *(bank_file(precision) for precision in PRECISIONS if precision in wanted))


@dataclass(frozen=True)
class Rounding:
    """What rounding one constant to a reduced precision did to it.

    Attributes:
        absmax: largest finite magnitude before.
        overflowed: finite values that would round to infinity, and are held as the largest finite value.
        vanished: values other than zero that became zero.
    """

    tensor: str
    absmax: float
    overflowed: int
    vanished: int
    size: int


def round_values(values: np.ndarray, precision: Precision) -> np.ndarray:
    """Round FP32 to the nearest finite value of a reduced precision, ties to even.

    Signs and infinities are kept; a finite value beyond the largest becomes the largest. A mask of -1e9
    stays a number so, which ``0 * mask`` and a row that is masked whole need. ONNX Runtime's float16 converter and
    ModelOpt AutoCast do the same; a Cast while the model runs gives infinity.

    Returns:
        As ``to_stored``.
    """
    return _rounded(values, precision)[0]


def _rounded(values: np.ndarray, precision: Precision) -> tuple[np.ndarray, int]:
    """What ``round_values`` returns, and how many values are beyond the largest."""
    rounded = to_stored(values, precision)
    infinite = np.isinf(from_stored(rounded) if rounded.dtype == np.uint16 else rounded)
    if not infinite.any():
        return rounded, 0
    beyond = infinite & np.isfinite(values)
    largest = to_stored(np.copysign(np.float32(precision.largest), values), precision)
    return np.where(beyond, largest, rounded), int(np.count_nonzero(beyond))


def rounded_tensor(values: np.ndarray, precision: Precision, name: str = "") -> onnx.TensorProto:
    """A self-contained TensorProto of FP32 values, rounded to a reduced precision (``round_values``)."""
    rounded = round_values(values, precision)
    if rounded.dtype == np.uint16:
        raw = rounded.astype("<u2", copy=False).tobytes()
        return onnx.TensorProto(name=name, data_type=precision.onnx_type, dims=values.shape, raw_data=raw)
    return onnx.numpy_helper.from_array(rounded, name)


def measure_rounding(tensor: str, values: np.ndarray, precision: Precision) -> tuple[np.ndarray, Rounding]:
    """Round values of a constant; what ``round_values`` gives, and what that did to them."""
    stored, overflowed = _rounded(values, precision)
    rounded = from_stored(stored) if stored.dtype == np.uint16 else stored
    absmax = float(max(np.max(values, initial=0.0), -np.min(values, initial=0.0)))
    if not np.isfinite(rounded).all():
        absmax = float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))
    vanished = np.count_nonzero(values != 0) - np.count_nonzero(rounded != 0)
    return stored, Rounding(tensor, absmax, overflowed, int(vanished), int(values.size))


def rounding_of(constant: Initializer, precision: Precision) -> Rounding:
    """What rounding a constant would do to it."""
    return _join([measure_rounding(constant.name, chunk, precision)[1] for chunk in chunks(constant)])


def largest_magnitude(values: np.ndarray) -> float:
    """Zero where there are no values."""
    return float(np.max(np.abs(values), initial=0.0))


def chunks(constant: Initializer) -> Iterator[np.ndarray]:
    """The values, flat, a few megabytes at a time, so that a huge constant is never held whole; at least one chunk."""
    if is_external(constant.proto) and constant.nbytes:
        yield from _external_chunks(constant)
        return
    flat = constant.numpy().reshape(-1)
    for start in range(0, max(flat.size, 1), _CHUNK):
        yield flat[start : start + _CHUNK]


def _external_chunks(constant: Initializer) -> Iterator[np.ndarray]:
    """Plain reads: the pages of a memory map would count as this process's memory."""
    where = external_location(constant.proto, constant.base_dir)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(constant.proto.data_type))
    try:
        with where.path.open("rb") as file:
            file.seek(where.offset)
            left = where.length
            while left:
                block = file.read(min(left, _CHUNK * dtype.itemsize))
                if not block:
                    raise ModelError(f"external data of {constant.name!r} ends early", "leave the model's files alone")
                left -= len(block)
                yield np.frombuffer(block, dtype)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"external data of {constant.name!r} cannot be read: {reason}", EXTERNAL_HINT) from None


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file of the bank, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True)
class WeightBank:
    """The files of one model's large constants, one for each precision.

    Attributes:
        places: precision -> constant -> place in its file, for those that it was asked for. The file of FP32 holds
            constants of any element type, as they are; those of the reduced precisions hold FP32 constants, rounded.
    """

    directory: Path
    places: Mapping[Precision, Mapping[str, Place]]

    @classmethod
    def write(
        cls,
        model: Model,
        directory: Path,
        convertible: Collection[str] | None = None,
        precisions: Sequence[str] = DEFAULT_PRECISIONS,
    ) -> WeightBank:
        """Write the bank, or take the one that is there when it is this model's.

        Args:
            convertible: FP32 constants that some plan reads in a reduced precision; None takes all FP32 ones.
            precisions: those that plans use besides FP32. What the bank has in others stays.
        """
        all_of = {
            n for n, c in model.initializers.items() if c.nbytes >= _BANK_FROM_BYTES and c.dtype not in UNBANKABLE
        }
        rounded = {
            n for n in all_of if model.initializers[n].dtype == "float" and (convertible is None or n in convertible)
        }
        wanted = {
            precision: all_of if precision is Precision.FP32 else rounded
            for precision in PRECISIONS
            if precision in (Precision.FP32, *precisions)
        }
        bank = cls._read(model, directory, wanted)
        if bank is not None:
            return bank
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            return cls._write(model, directory, wanted)

    @classmethod
    def _write(cls, model: Model, directory: Path, wanted: Mapping[Precision, Collection[str]]) -> WeightBank:
        places: dict[Precision, dict[str, Place]] = {precision: {} for precision in wanted}
        with ExitStack() as stack:
            parts = {p: stack.enter_context(whole_file(directory / bank_file(p))) for p in wanted}
            files = {p: stack.enter_context(part.open("wb")) for p, part in parts.items()}
            for name in sorted(wanted[Precision.FP32]):
                into = {p: file for p, file in files.items() if name in wanted[p]}
                starts = {p: align(file) for p, file in into.items()}
                for chunk in chunks(model.initializers[name]):
                    for precision, file in into.items():
                        stored = chunk if precision is Precision.FP32 else round_values(chunk, precision)
                        file.write(stored.tobytes())
                for precision, file in into.items():
                    places[precision][name] = Place(starts[precision], file.tell() - starts[precision])
        bank = cls(directory, places)
        document = {
            "model_sha256": model.sha256,
            **{
                str(p): {n: [place.offset, place.length] for n, place in entries.items()}
                for p, entries in places.items()
            },
            "sha256": {bank_file(p): files_sha256(directory / bank_file(p)) for p in wanted},
        }
        with whole_file(directory / INDEX_FILE) as part:
            part.write_text(json.dumps(document))
        return bank

    @classmethod
    def _read(cls, model: Model, directory: Path, wanted: Mapping[Precision, Collection[str]]) -> WeightBank | None:
        """The bank that is there, if it is whole and this model's."""
        try:
            document = read_json(directory / INDEX_FILE)
            if document["model_sha256"] != model.sha256:
                return None
            there = [p for p in PRECISIONS if p in wanted or str(p) in document]
            places = {p: {n: Place(*place) for n, place in document[str(p)].items()} for p in there}
            whole = all(
                max((place.offset + place.length for place in entries.values()), default=0)
                <= (directory / bank_file(p)).stat().st_size
                for p, entries in places.items()
            )
            complete = all(set(places[p]) >= set(names) for p, names in wanted.items())
            if not whole or not complete or set(places[Precision.FP32]) != set(wanted[Precision.FP32]):
                return None
            if not all(_is_intact(directory / name, sha256) for name, sha256 in document["sha256"].items()):
                return None
            return cls(directory, places)
        except READ_ERRORS:
            return None

    def tensor(self, constant: Initializer, name: str, rounded_to: Precision | None = None) -> onnx.TensorProto | None:
        """A reference to a banked constant under ``name``, or None where the bank does not hold it."""
        precision = rounded_to or Precision.FP32
        place = self.places.get(precision, {}).get(constant.name)
        if place is None:
            return None
        return external_tensor(name, type_code(constant, rounded_to), constant.shape, bank_file(precision), place)

    def tensor_or_inline(
        self, constant: Initializer, name: str, rounded_to: Precision | None = None
    ) -> onnx.TensorProto:
        """As ``tensor``; a self-contained one where the bank does not hold the constant."""
        return self.tensor(constant, name, rounded_to) or inline_tensor(constant, name, rounded_to)


def type_code(constant: Initializer, rounded_to: Precision | None) -> int:
    """ONNX's element type of a constant that is rounded to a precision, or left as it is."""
    return constant.proto.data_type if rounded_to is None else rounded_to.onnx_type


def external_tensor(name: str, data_type: int, shape: tuple[int, ...], location: str, place: Place) -> onnx.TensorProto:
    """A TensorProto whose data lie in a file beside the model."""
    proto = onnx.TensorProto(name=name, data_type=data_type, dims=shape, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", place.offset), ("length", place.length)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def inline_tensor(constant: Initializer, name: str, rounded_to: Precision | None = None) -> onnx.TensorProto:
    """A self-contained TensorProto of a constant, rounded to a precision or as it is."""
    if rounded_to is not None:
        return rounded_tensor(constant.numpy(), rounded_to, name)
    proto = onnx.TensorProto()
    if is_external(constant.proto):
        proto.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(constant.numpy()), name))
    else:
        proto.CopyFrom(constant.proto)
        proto.name = name
    return proto


def align(file: BinaryIO) -> int:
    """Move to the next page boundary and return where that is."""
    end = file.seek(0, os.SEEK_END)
    start = -(-end // _ALIGN) * _ALIGN
    file.write(b"\0" * (start - end))
    return start


_intact: set[tuple[str, int, int, str]] = set()

"""Files that this process has compared with their hash: path, time of change, size, hash."""


def _is_intact(path: Path, sha256: str) -> bool:
    """Whether a file still has the content of this hash; read once in a process, unless it is written again."""
    facts = path.stat()
    key = (str(path.resolve()), facts.st_mtime_ns, facts.st_size, sha256)
    if key not in _intact and files_sha256(path) == sha256:
        _intact.add(key)
    return key in _intact


def _join(parts: list[Rounding]) -> Rounding:
    return Rounding(
        parts[0].tensor,
        max(p.absmax for p in parts),
        sum(p.overflowed for p in parts),
        sum(p.vanished for p in parts),
        sum(p.size for p in parts),
    )


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
        return self.constant.nbytes // Precision.FP32.nbytes * self.rounded_to.nbytes

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
        for name in self._types.model.initializers:
            if name in unread:
                continue
            precisions = resolution.constants.get(name, ()) if name in self._types.constants else (Precision.FP32,)
            for precision in PRECISIONS:
                if precision not in precisions or (precision is Precision.FP32 and name in self._nodes):
                    continue
                reduced = None if precision is Precision.FP32 else precision
                held = self._types.in_precision(name, reduced)
                stored = store(held, name if reduced is None else name + self._suffixes[reduced], reduced)
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


def in_file(file: BinaryIO, location: str) -> ConstantStore:
    """Large constants in a file beside the model, which is called ``location`` there; small ones inline.

    For models past 2 GiB. Passes OSError on.
    """

    def store(constant: Initializer, name: str, rounded_to: Precision | None) -> StoredConstant:
        if constant.nbytes < _BESIDE_FROM_BYTES or constant.dtype in UNBANKABLE:
            return inline(constant, name, rounded_to)
        start = align(file)
        for chunk in raw_chunks(constant, rounded_to):
            file.write(chunk)
        place = Place(start, file.tell() - start)
        return external_tensor(name, type_code(constant, rounded_to), constant.shape, location, place)

    return store


def raw_chunks(constant: Initializer, rounded_to: Precision | None) -> Iterator[bytes]:
    """The raw data of a constant, rounded to a precision or as it is."""
    for chunk in chunks(constant):
        yield (chunk if rounded_to is None else round_values(chunk, rounded_to)).tobytes()
