"""Constants of written models: in the model's own file, in one beside it, or in the weight bank; rounded once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import onnx
import onnx.external_data_helper
import onnx.numpy_helper

from mptune.files import READ_ERRORS, read_json, whole_file, write_bytes, writing
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import Initializer, is_external, rounded
from mptune.graph.plan import DEFAULT_PRECISIONS, PRECISIONS, Precision

SELF_CONTAINED_LIMIT = 1_900_000_000  # bytes up to which one file holds the model: protobuf messages end at 2 GiB
INDEX_FILE = "weights.json"
_UNBANKABLE = frozenset({"string", "int4", "uint4", "int2", "uint2", "float4e2m1"})
"""Element types whose values do not lie one after the other in whole bytes."""
_LARGE_FROM_BYTES = 1024  # smaller constants stand in the model's own file
_ALIGN = 4096  # page size: lets a runtime map a tensor instead of copying it (onnx/docs/ExternalData.md)
_CHUNK = 1 << 22  # values that are rounded or written at once


# -- rounding -----------------------------------------------------------------------------------------------------


class Rounding(NamedTuple):
    """What rounding one constant to FP16 does to it."""

    absmax: float  # largest finite magnitude before
    overflowed: int  # finite values that would round to infinity, and are held as the largest finite value
    vanished: int  # values other than zero that become zero


def round_values(values: np.ndarray, precision: Precision) -> np.ndarray:
    """FP32 values rounded to the nearest finite value of a reduced precision, ties to even, as FP32.

    Signs and infinities are kept; a finite value beyond the largest becomes the largest. A mask of -1e9
    stays a number so, which ``0 * mask`` and a row that is masked whole need. ONNX Runtime's float16 converter and
    ModelOpt AutoCast do the same; a Cast while the model runs gives infinity.
    """
    return rounded(_limited(values, precision), precision)


def _limited(values: np.ndarray, precision: Precision) -> np.ndarray:
    """The values, finite ones no larger than the largest finite value of a reduced precision."""
    return np.where(np.isinf(values), values, np.clip(values, -precision.largest, precision.largest))


def fp16_rounding(constant: Initializer) -> Rounding:
    """What rounding a constant to FP16 would do to it. By magnitudes: nothing is rounded."""
    absmax, overflowed, vanished = 0.0, 0, 0
    for values in chunks(constant):
        magnitudes = np.abs(np.asarray(values, np.float32))
        finite = magnitudes < np.inf
        absmax = max(absmax, float(np.max(magnitudes, where=finite, initial=0.0)))
        overflowed += int(np.count_nonzero((magnitudes >= 65520.0) & finite))  # half a unit beyond 65504's last place
        vanished += int(np.count_nonzero(magnitudes <= Precision.FP16.smallest / 2) - np.count_nonzero(magnitudes == 0))
    return Rounding(absmax, overflowed, vanished)


def chunks(constant: Initializer) -> Iterator[np.ndarray]:
    """The values, flat, a few megabytes at a time: external data are mapped, never held whole; at least one chunk."""
    flat = constant.numpy().reshape(-1)
    for start in range(0, max(flat.size, 1), _CHUNK):
        yield flat[start : start + _CHUNK]


# -- tensors of written models ------------------------------------------------------------------------------------

NeededConstant = tuple[Initializer, str, Precision | None]
"""A constant, its name in the written model, and the precision that it is rounded to; None leaves it as it is."""


class Place(NamedTuple):
    """Where a tensor lies in a file, in bytes."""

    offset: int
    length: int


def inline_tensor(constant: Initializer, name: str, rounded_to: Precision | None = None) -> onnx.TensorProto:
    """A self-contained TensorProto of a constant, rounded to a precision or as it is."""
    if rounded_to is not None:
        return rounded_tensor(constant.numpy(), rounded_to, name)
    proto = onnx.TensorProto()
    proto.CopyFrom(constant.proto)
    if is_external(proto):
        proto.ClearField("data_location")
        del proto.external_data[:]
        proto.raw_data = constant.numpy().tobytes()
    proto.name = name
    return proto


def rounded_tensor(values: np.ndarray, precision: Precision, name: str = "") -> onnx.TensorProto:
    """A self-contained TensorProto of FP32 values, rounded to a reduced precision (``round_values``)."""
    return onnx.numpy_helper.from_array(_stored(values, precision), name)


def _stored(values: np.ndarray, precision: Precision | None) -> np.ndarray:
    """The values as a model has them: rounded, in the NumPy type that onnx has for a precision; None as they are."""
    if precision is None:
        return values
    return _limited(values, precision).astype(onnx.helper.tensor_dtype_to_np_dtype(precision.onnx_type))


def _reference(
    constant: Initializer, name: str, rounded_to: Precision | None, location: str, place: Place
) -> onnx.TensorProto:
    """A TensorProto of a constant whose values lie in another file (onnx/docs/ExternalData.md)."""
    code = constant.proto.data_type if rounded_to is None else rounded_to.onnx_type
    tensor = onnx.TensorProto(name=name, data_type=code, dims=constant.shape, raw_data=b"")  # onnx asks for raw data
    onnx.external_data_helper.set_external_data(tensor, location, *place)
    tensor.ClearField("raw_data")
    if rounded_to is None and constant.proto.doc_string:
        tensor.doc_string = constant.proto.doc_string
    if rounded_to is None:
        tensor.metadata_props.extend(constant.proto.metadata_props)
    return tensor


def _is_large(constant: Initializer) -> bool:
    return constant.nbytes >= _LARGE_FROM_BYTES and constant.dtype not in _UNBANKABLE


def _nbytes(constant: Initializer, rounded_to: Precision | None) -> int:
    return constant.nbytes * (rounded_to or Precision.FP32).nbytes // Precision.FP32.nbytes


def _append_values(file: BinaryIO, constant: Initializer, rounded_to: Precision | None) -> Place:
    """Write the values of a constant at the next page boundary, a few megabytes at a time."""
    end = file.seek(0, os.SEEK_END)
    start = -(-end // _ALIGN) * _ALIGN
    file.write(bytes(start - end))
    for values in chunks(constant):
        file.write(_stored(values, rounded_to).tobytes())
    return Place(start, file.tell() - start)


def is_self_contained(proto: onnx.ModelProto, constants: Iterable[NeededConstant]) -> bool:
    """Whether one file holds the model with these constants."""
    nbytes: int = proto.ByteSize() + sum(_nbytes(constant, rounded_to) for constant, _, rounded_to in constants)
    return nbytes <= SELF_CONTAINED_LIMIT


def write_self_contained(proto: onnx.ModelProto, constants: Sequence[NeededConstant], path: Path) -> Path:
    """Write a model with these constants, which it has not yet; past 2 GiB they lie in ``path`` + ``.data``."""
    if is_self_contained(proto, constants):
        proto.graph.initializer.extend(inline_tensor(*needed) for needed in constants)
        return write_bytes(path, [proto.SerializeToString(deterministic=True)])
    data_path = path.with_name(path.name + ".data")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The last ends first, so the data have their name before the model has.
        with whole_file(path) as model_part, whole_file(data_path) as data_part:
            with data_part.open("wb") as file:
                for needed in constants:
                    place = _append_values(file, needed[0], needed[2]) if _is_large(needed[0]) else None
                    tensor = _reference(*needed, data_path.name, place) if place else inline_tensor(*needed)
                    proto.graph.initializer.append(tensor)
            model_part.write_bytes(proto.SerializeToString(deterministic=True))
    return path


# -- the weight bank ----------------------------------------------------------------------------------------------


def bank_file(precision: Precision) -> str:
    """The name of the bank's file of one precision."""
    return f"{precision}.bin"


def bank_files(precisions: Iterable[str]) -> tuple[str, ...]:
    """The names of the files of a bank that was asked for these precisions."""
    wanted = [Precision.FP32, *map(Precision.named, precisions)]
    return (INDEX_FILE, *(bank_file(precision) for precision in PRECISIONS if precision in wanted))


@dataclass(frozen=True)
class WeightBank:
    """The files of one model's large constants, one for each precision.

    That of FP32 holds constants of any element type, as they are; those of the reduced ones FP32 constants, rounded.
    """

    directory: Path
    # Precision -> constant -> place in its file, for those that it was asked for.
    places: Mapping[Precision, Mapping[str, Place]]

    @property
    def fp32_bytes(self) -> int:
        """What the constants take, without the rounded ones."""
        return sum(place.length for place in self.places[Precision.FP32].values())

    @classmethod
    def write(cls, model: Model, directory: Path, precisions: Sequence[str] = DEFAULT_PRECISIONS) -> WeightBank:
        """Write the bank, or take the one that is there when it is this model's and whole.

        ``precisions`` are those that plans use besides FP32. What the bank has in others stays.
        """
        large = [constant for _, constant in sorted(model.initializers.items()) if _is_large(constant)]
        index, is_of_model = directory / INDEX_FILE, False
        with contextlib.suppress(*READ_ERRORS):
            is_of_model = read_json(index)["model_sha256"] == model.sha256
        places: dict[Precision, dict[str, Place]] = {}
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if not is_of_model:  # it names no files of two models, should this process end before it is written
                index.unlink(missing_ok=True)
            for precision in (row for row in PRECISIONS if row in (Precision.FP32, *precisions)):
                rounded_to, end, placed = None if precision is Precision.FP32 else precision, 0, dict[str, Place]()
                wanted = [constant for constant in large if rounded_to is None or constant.dtype == "float"]
                for constant in wanted:
                    start, nbytes = -(-end // _ALIGN) * _ALIGN, _nbytes(constant, rounded_to)
                    placed[constant.name], end = Place(start, nbytes), start + nbytes
                places[precision], path = placed, directory / bank_file(precision)
                if is_of_model and path.is_file() and path.stat().st_size == end:
                    continue  # files are written whole, and their names before that of the index
                with whole_file(path) as part, part.open("wb") as file:
                    for constant in wanted:
                        _append_values(file, constant, rounded_to)
            if not is_of_model:
                with whole_file(index) as part:
                    part.write_text(json.dumps({"model_sha256": model.sha256}))
        return cls(directory, places)

    def tensor_or_inline(
        self, constant: Initializer, name: str, rounded_to: Precision | None = None
    ) -> onnx.TensorProto:
        """A reference to a banked constant under ``name``; a self-contained one where the bank does not hold it."""
        precision = rounded_to or Precision.FP32
        place = self.places.get(precision, {}).get(constant.name)
        if place is None:
            return inline_tensor(constant, name, rounded_to)
        return _reference(constant, name, rounded_to, bank_file(precision), place)
