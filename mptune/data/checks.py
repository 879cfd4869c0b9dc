"""Whether arrays fit a model's inputs, and how they are cut into samples. Each error names its cure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mptune.errors import DataError

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

Dims = Sequence[int | str | None]
Samples = tuple[dict[str, np.ndarray], ...]


def shape_text(shape: Iterable[int | str | None]) -> str:
    """Dimensions as people write them, ``?`` for unknown ones: ``(batch, 3, ?)``."""
    dims = ["?" if d is None else str(d) for d in shape]
    return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"


def cut_samples(
    arrays: Mapping[str, np.ndarray], inputs: Sequence[TensorInfo], batch: int, where: str, *, is_whole: bool = False
) -> tuple[Samples, tuple[str, ...]]:
    """Check arrays, by input name, and cut them into samples along axis 0.

    A sample takes B rows of an input whose batch is fixed at B, and ``batch`` rows of one with a dynamic batch, or all
    of them where the arrays are one whole sample (``is_whole``). An array that is exactly one sample repeats for all;
    a scalar input also takes a vector of one value per sample. Nothing is ever cast, cropped or padded.

    Returns:
        The samples, and warnings about what may not be meant.

    Raises:
        DataError: The arrays do not fit; ``where`` names them.
    """
    warnings: list[str] = []
    if len(inputs) == len(arrays) == 1 and inputs[0].name not in arrays:
        (name, array), only = next(iter(arrays.items())), inputs[0].name
        arrays = {only: array}
        warnings.append(f"{where}: array {name!r} is taken for the model's only input {only!r}")
    names = [info.name for info in inputs]
    wrong = [f"has no array for input {name!r}" for name in names if name not in arrays]
    wrong += [f"has an array {name!r} that is no input of the model" for name in arrays if name not in names]
    if wrong:
        holds, wanted = (", ".join(map(repr, each)) or "nothing" for each in (arrays, names))
        raise DataError(f"{where} {wrong[0]}", f"it holds {holds}; the inputs are {wanted}")
    parts: dict[str, list[np.ndarray]] = {}
    for info in inputs:
        place = f"{where}: input {info.name!r}"
        array = _checked_values(info, arrays[info.name], place)
        parts[info.name] = _split_rows(info, array, batch, place, is_whole=is_whole)
    counts = {name: len(rows) for name, rows in parts.items()}
    total = max(counts.values(), default=1)
    several = [name for name, count in counts.items() if count > 1]
    odd = next((name for name in several if counts[name] != total), None)
    if odd is not None:
        longest = next(name for name in several if counts[name] == total)
        raise DataError(
            f"{where}: input {odd!r} has {counts[odd]} samples, input {longest!r} has {total}",
            "give every input the same number of samples, or a folder with one .npz per sample",
        )
    batches = {parts[name][0].shape[:1] for name in several}
    for name, rows in parts.items():
        if name not in several and rows[0].ndim and rows[0].shape[:1] in batches:
            warnings.append(f"{where}: input {name!r} has one sample, which is repeated for all {total}")
    samples = tuple({name: rows[k % len(rows)] for name, rows in parts.items()} for k in range(total))
    for number, sample in enumerate(samples):
        _check_agreement(sample, inputs, where if total == 1 else f"{where}, sample {number}")
    return samples, tuple(warnings)


def _checked_values(info: TensorInfo, array: np.ndarray, where: str) -> np.ndarray:
    """The array in native byte order and C order, otherwise untouched; type and values are checked."""
    expected, native = info.numpy_dtype, array.dtype.newbyteorder("=")
    if native != expected:
        raise DataError(
            f"{where}: expected {expected}, got {native}",
            f"nothing is cast silently; save it as array.astype(np.{expected.name}) if that is what you mean",
        )
    # The model may say 0 itself, and a cache is empty at its start along a dynamic axis other than the first.
    dims = info.shape or ()
    may_be_empty = len(dims) == array.ndim and all(
        size or dims[axis] == 0 or (axis and not isinstance(dims[axis], int)) for axis, size in enumerate(array.shape)
    )
    if array.size == 0 and not may_be_empty:
        raise DataError(f"{where} is empty, its shape is {shape_text(array.shape)}", "give at least one sample")
    if expected.kind == "f" and not (finite := np.isfinite(array)).all():
        text = f"{where} holds {np.sum(~finite)} NaN or infinite values, the first at {np.argwhere(~finite)[0]}"
        raise DataError(text, "a reference computed from them says nothing; clean the data")
    return np.asarray(array, dtype=expected, order="C")


def _split_rows(info: TensorInfo, array: np.ndarray, batch: int, where: str, *, is_whole: bool) -> list[np.ndarray]:
    """The samples of one input."""
    shape = info.shape
    static = shape[0] if shape and isinstance(shape[0], int) else None
    if shape == () and array.ndim == 1 and not is_whole:
        return [np.asarray(value) for value in array]
    if (static is None and is_whole) or (not shape and array.ndim == 0):
        _check_shape(array.shape, shape, where)
        if shape and batch not in (1, len(array)):
            hint = f"a file in a folder is one sample: leave --batch out, or put {batch} rows into every file"
            raise DataError(f"{where} has {len(array)} rows, --batch is {batch}", hint)
        return [array]
    rows = batch if static is None else static
    _check_shape(array.shape, shape and (f"N x {rows}", *shape[1:]), where)
    if rows == 0:
        return [array]
    count, rest = divmod(len(array), rows)
    if rest and static is None:
        fitting = ", ".join(str(n) for n in range(1, len(array) + 1) if len(array) % n == 0)
        hint = f"give --batch {fitting}, or other data"
        raise DataError(f"{where} has {len(array)} rows, which --batch {rows} does not divide", hint)
    if rest:
        hint = f"a sample is {rows} rows: give {max(count, 1) * rows} or {(max(count, 1) + 1) * rows} rows"
        raise DataError(f"{where} has {len(array)} rows, the model's batch is {rows}", hint)
    return [array[k * rows : (k + 1) * rows] for k in range(count)]


def _check_shape(shape: tuple[int, ...], expected: Dims | None, where: str) -> None:
    """Rank and fixed dimensions; an entry that is no int fits any size, and None any shape."""
    fixed = [] if expected is None else [(axis, dim) for axis, dim in enumerate(expected) if isinstance(dim, int)]
    if expected is None or (len(shape) == len(expected) and all(shape[axis] == dim for axis, dim in fixed)):
        return
    hint = "preprocess the data as for deployment; axis 0 counts the samples"
    if len(shape) == len(expected) - 1:
        hint = "add the missing axis, for one sample: array[None]"
    elif len(shape) == len(expected) + 1:
        hint = "samples are concatenated along axis 0, not stacked: array.reshape(-1, *array.shape[2:])"
    elif len(shape) == len(expected) and all(dim in shape for _, dim in fixed):
        hint = "its axes may be in another order: check the layout, and transpose it"
    raise DataError(f"{where}: expected shape {shape_text(expected)}, got {shape_text(shape)}", hint)


def _check_agreement(sample: Mapping[str, np.ndarray], inputs: Sequence[TensorInfo], where: str) -> None:
    """A symbolic dimension has one size throughout a sample."""
    sizes: dict[str, tuple[int, str]] = {}
    for info in inputs:
        for dim, size in zip(info.shape or (), sample[info.name].shape, strict=False):
            other_size, other = sizes.setdefault(dim, (size, info.name)) if isinstance(dim, str) else (size, "")
            if other_size != size:
                raise DataError(
                    f"{where}: dimension {dim!r} is {other_size} in input {other!r} and {size} in input {info.name!r}",
                    "inputs that share a symbolic dimension need the same size there",
                )
