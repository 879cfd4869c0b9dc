"""The weight bank: every large constant written once per run, in FP32 and rounded once to FP16.

Typed models refer into it as ONNX external data, so a rewrite copies no weights and a trial costs kilobytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import ModelError
from mptune.files import whole_file, writing
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import EXTERNAL_HINT, Initializer, external_location, is_external

FP32_FILE = "fp32.bin"
FP16_FILE = "fp16.bin"
INDEX_FILE = "weights.json"
_FORMAT = 1
_BANK_FROM_BYTES = 1024
_ALIGN = 4096
"""Page size: lets a runtime map a tensor instead of copying it (onnx/docs/ExternalData.md)."""
_CHUNK = 1 << 22
"""Values that are read at once."""
UNBANKABLE = frozenset({"string", "int4", "uint4", "int2", "uint2", "float4e2m1"})
"""Element types whose values do not lie one after the other in whole bytes."""
_FP16_OVERFLOW = 65520.0
"""From here on FP32 rounds to infinity: half a unit in the last place above 65504, ties to even."""


@dataclass(frozen=True)
class Rounding:
    """What rounding one constant to FP16 did to it.

    Attributes:
        tensor: its name.
        absmax: largest finite magnitude before.
        overflowed: finite values that became infinite.
        vanished: values other than zero that became zero.
        size: number of values.
    """

    tensor: str
    absmax: float
    overflowed: int
    vanished: int
    size: int


def round_to_fp16(values: np.ndarray) -> np.ndarray:
    """Round FP32 to the nearest FP16, ties to even. Signs and infinities are kept; what overflows becomes infinite."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float16)


def measure_rounding(tensor: str, values: np.ndarray, rounded: np.ndarray) -> Rounding:
    """Compare a constant with its rounded copy."""
    absmax = float(max(np.max(values, initial=0.0), -np.min(values, initial=0.0)))
    overflowed = 0
    if not absmax < _FP16_OVERFLOW:  # also where it is NaN
        finite = np.isfinite(values)
        absmax = float(np.max(np.abs(values), where=finite, initial=0.0))
        overflowed = int(np.count_nonzero(finite & ~np.isfinite(rounded)))
    vanished = np.count_nonzero(values != 0) - np.count_nonzero(rounded != 0)
    return Rounding(tensor, absmax, overflowed, int(vanished), int(values.size))


def chunks(constant: Initializer) -> Iterator[np.ndarray]:
    """The values, flat, a few megabytes at a time, at least one chunk: reading a huge constant never holds all of it.

    Raises:
        ModelError: the external data cannot be read.
    """
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
    """The two files of one model's large constants.

    Attributes:
        directory: where they lie; typed models are written beside them.
        fp32: constant -> place in ``fp32.bin`` (any element type; only FP32 ones have a twin).
        fp16: constant -> place in ``fp16.bin``.
        roundings: of every constant that the bank rounded.
    """

    directory: Path
    fp32: Mapping[str, Place]
    fp16: Mapping[str, Place]
    roundings: tuple[Rounding, ...]

    @classmethod
    def write(cls, model: Model, directory: Path, convertible: Collection[str] | None = None) -> WeightBank:
        """Write the bank, or take the one that is there when it is this model's.

        Args:
            model: whose constants.
            directory: is made where it is missing.
            convertible: FP32 constants that some plan reads in FP16; None takes all FP32 ones.

        Raises:
            RunError: the directory cannot be written, or the disk is full.
        """
        wanted = {
            n for n, c in model.initializers.items() if c.nbytes >= _BANK_FROM_BYTES and c.dtype not in UNBANKABLE
        }
        halves = {
            n for n in wanted if model.initializers[n].dtype == "float" and (convertible is None or n in convertible)
        }
        found = cls._read(model, directory, wanted, halves)
        if found is not None:
            return found
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            return cls._write(model, directory, wanted, halves)

    @classmethod
    def _write(cls, model: Model, directory: Path, wanted: Collection[str], halves: Collection[str]) -> WeightBank:
        fp32: dict[str, Place] = {}
        fp16: dict[str, Place] = {}
        roundings = []
        with (
            whole_file(directory / FP32_FILE) as part32,
            whole_file(directory / FP16_FILE) as part16,
            part32.open("wb") as file32,
            part16.open("wb") as file16,
        ):
            for name in sorted(wanted):
                start32, start16 = align(file32), align(file16)
                seen: list[Rounding] = []
                for chunk in chunks(model.initializers[name]):
                    file32.write(chunk.tobytes())
                    if name in halves:
                        half = round_to_fp16(chunk)
                        file16.write(half.tobytes())
                        seen.append(measure_rounding(name, chunk, half))
                fp32[name] = Place(start32, file32.tell() - start32)
                if name in halves:
                    fp16[name] = Place(start16, file16.tell() - start16)
                    roundings.append(_join(seen))
        bank = cls(directory, fp32, fp16, tuple(roundings))
        document = {
            "format": _FORMAT,
            "model_sha256": model.sha256,
            "fp32": {n: [p.offset, p.length] for n, p in fp32.items()},
            "fp16": {n: [p.offset, p.length] for n, p in fp16.items()},
            "roundings": [asdict(r) for r in roundings],
        }
        with whole_file(directory / INDEX_FILE) as part:
            part.write_text(json.dumps(document))
        return bank

    @classmethod
    def _read(
        cls, model: Model, directory: Path, wanted: Collection[str], halves: Collection[str]
    ) -> WeightBank | None:
        """The bank that is there, if it is whole and this model's."""
        try:
            document = json.loads((directory / INDEX_FILE).read_text())
            if document["format"] != _FORMAT or document["model_sha256"] != model.sha256:
                return None
            fp32 = {n: Place(*p) for n, p in document["fp32"].items()}
            fp16 = {n: Place(*p) for n, p in document["fp16"].items()}
            whole = all(
                max((p.offset + p.length for p in places.values()), default=0) <= (directory / file).stat().st_size
                for places, file in ((fp32, FP32_FILE), (fp16, FP16_FILE))
            )
            if not whole or set(fp32) != set(wanted) or not set(fp16) >= set(halves):
                return None
            return cls(directory, fp32, fp16, tuple(Rounding(**r) for r in document["roundings"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def tensor(self, constant: Initializer, name: str, half: bool) -> onnx.TensorProto | None:
        """A reference to a banked constant under ``name``, or None where the bank does not hold it."""
        place = (self.fp16 if half else self.fp32).get(constant.name)
        if place is None:
            return None
        code = onnx.TensorProto.FLOAT16 if half else constant.proto.data_type
        return external_tensor(name, code, constant.shape, FP16_FILE if half else FP32_FILE, place)


def external_tensor(name: str, data_type: int, shape: tuple[int, ...], location: str, place: Place) -> onnx.TensorProto:
    """A TensorProto whose data lie in a file beside the model."""
    proto = onnx.TensorProto(name=name, data_type=data_type, dims=shape, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", place.offset), ("length", place.length)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def inline_tensor(constant: Initializer, name: str, half: bool) -> onnx.TensorProto:
    """A self-contained TensorProto of a constant, rounded to FP16 if ``half``."""
    if half:
        return onnx.numpy_helper.from_array(round_to_fp16(constant.numpy()), name)
    proto = onnx.TensorProto()
    if constant.proto.data_location == onnx.TensorProto.EXTERNAL:
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


def _join(parts: list[Rounding]) -> Rounding:
    return Rounding(
        parts[0].tensor,
        max(p.absmax for p in parts),
        sum(p.overflowed for p in parts),
        sum(p.vanished for p in parts),
        sum(p.size for p in parts),
    )
