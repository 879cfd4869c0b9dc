"""Whether arrays fit a model's inputs: names, types, ranks, dimensions, values. Each error names its cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from mptune.errors import DataError

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

Dims = tuple[int | str | None, ...]


def shape_text(shape: Iterable[int | str | None]) -> str:
    """Dimensions as people write them, ``?`` for unknown ones: ``(batch, 3, ?)``."""
    dims = ["?" if d is None else str(d) for d in shape]
    return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"


def check_names(arrays: Mapping[str, np.ndarray], inputs: Sequence[TensorInfo], where: str) -> None:
    """Every input has its array, and every array its input."""
    wanted = [i.name for i in inputs]
    extra = [name for name in arrays if name not in wanted]
    for name in wanted:
        if name not in arrays:
            close = difflib.get_close_matches(name, extra, 1)
            holds = ", ".join(repr(a) for a in arrays) or "nothing"
            hint = (
                f"rename {close[0]!r}"
                if close
                else f"it holds {holds}; write np.savez(path, **{{{name!r}: array, ...}})"
            )
            raise DataError(f"{where} has no array for input {name!r}", hint)
    if extra:
        raise DataError(
            f"{where} has an array {extra[0]!r} that is no input of the model",
            f"leave it out; the inputs are {', '.join(map(repr, wanted))}",
        )


def check_values(info: TensorInfo, array: np.ndarray, where: str) -> np.ndarray:
    """Check type and values; returns the array in native byte order and C order, otherwise untouched."""
    expected = info.numpy_dtype
    native = array.dtype.newbyteorder("=")
    if native != expected:
        raise DataError(
            f"{where}: input {info.name!r}: expected {expected}, got {native}",
            f"nothing is cast silently; save it as array.astype(np.{expected.name}) if that is what you mean",
        )
    if array.size == 0 and not _may_be_empty(info.shape, array.shape):
        raise DataError(
            f"{where}: input {info.name!r} is empty, its shape is {shape_text(array.shape)}", "give at least one sample"
        )
    if expected.kind == "f":
        finite = np.isfinite(array)
        if not finite.all():
            first = shape_text(int(k) for k in np.argwhere(~finite)[0]) if array.ndim else "the scalar"
            count = int(array.size - np.count_nonzero(finite))
            raise DataError(
                f"{where}: input {info.name!r} holds {count} NaN or infinite values, the first at {first}",
                "a reference computed from them says nothing; clean the data",
            )
    return np.asarray(array, dtype=expected, order="C")


def _may_be_empty(expected: Dims | None, got: tuple[int, ...]) -> bool:
    """Whether the model says 0 itself, or only dynamic axes besides the first are 0, as of a cache at its start."""
    return (
        expected is not None
        and len(expected) == len(got)
        and all(
            size > 0 or want == 0 or (axis > 0 and not isinstance(want, int))
            for axis, (want, size) in enumerate(zip(expected, got, strict=True))
        )
    )


def split_rows(info: TensorInfo, array: np.ndarray, batch: int, where: str) -> list[np.ndarray]:
    """Cut samples that are concatenated along axis 0; one part where the array is one sample."""
    shape = info.shape
    if shape == () and array.ndim == 1:
        return [np.asarray(value) for value in array]
    if array.ndim == 0 and not shape:
        return [array]
    first = shape[0] if shape else None
    rows = first if isinstance(first, int) else batch
    if shape is not None:
        _check_dims(info.name, array, (f"N x {rows}", *shape[1:]), where)
    if rows == 0:
        return [array]
    count, rest = divmod(len(array), rows)
    if rest:
        if isinstance(first, int):
            hint = f"a sample is {rows} rows: give {max(count, 1) * rows} or {(max(count, 1) + 1) * rows} rows"
            raise DataError(f"{where}: input {info.name!r} has {len(array)} rows, the model's batch is {rows}", hint)
        fits = ", ".join(str(n) for n in range(1, len(array) + 1) if len(array) % n == 0)
        raise DataError(
            f"{where}: input {info.name!r} has {len(array)} rows, which --batch {rows} does not divide",
            f"give --batch {fits}, or other data",
        )
    return [array[k * rows : (k + 1) * rows] for k in range(count)]


def check_sample_shape(info: TensorInfo, array: np.ndarray, batch: int, where: str) -> None:
    """Check one whole feed's array, as it stands in a folder."""
    if info.shape is None:
        return
    _check_dims(info.name, array, info.shape, where)
    if info.shape and not isinstance(info.shape[0], int) and batch not in (1, len(array)):
        raise DataError(
            f"{where}: input {info.name!r} has {len(array)} rows, --batch is {batch}",
            f"a file in a folder is one sample: leave --batch out, or put {batch} rows into every file",
        )


def _check_dims(name: str, array: np.ndarray, expected: Dims, where: str) -> None:
    """Rank and fixed dimensions; an entry that is no int fits anything."""
    fits = array.ndim == len(expected) and all(
        not isinstance(want, int) or want == got for want, got in zip(expected, array.shape, strict=True)
    )
    if not fits:
        raise DataError(
            f"{where}: input {name!r}: expected shape {shape_text(expected)}, got {shape_text(array.shape)}",
            _shape_hint(array.shape, expected),
        )


def _shape_hint(got: tuple[int, ...], expected: Dims) -> str:
    if len(got) == len(expected) - 1:
        return "add the missing axis, for one sample: array[None]"
    if len(got) == len(expected) + 1:
        return "samples are concatenated along axis 0, not stacked: array.reshape(-1, *array.shape[2:])"
    if 2 < len(got) == len(expected) <= 5:
        for order in permutations(range(1, len(got))):
            if all(not isinstance(want, int) or want == got[k] for k, want in zip(order, expected[1:], strict=True)):
                return f"array.transpose{(0, *order)} would have the right shape: check the layout"
    return "preprocess the data as for deployment; axis 0 counts the samples"


def check_agreement(feed: Mapping[str, np.ndarray], inputs: Sequence[TensorInfo], where: str) -> None:
    """A symbolic dimension has one size throughout a feed."""
    sizes: dict[str, tuple[int, str]] = {}
    for info in inputs:
        for dim, size in zip(info.shape or (), feed[info.name].shape, strict=False):
            if not isinstance(dim, str):
                continue
            first, other = sizes.setdefault(dim, (size, info.name))
            if first != size:
                raise DataError(
                    f"{where}: dimension {dim!r} is {first} in input {other!r} and {size} in input {info.name!r}",
                    "inputs that share a symbolic dimension need the same size there",
                )
