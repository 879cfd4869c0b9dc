"""Arrays that callers give: brought into one form, checked against a model's inputs, cut into samples."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mptune.errors import DataError

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

Dims = Sequence[int | str | None]
Arrays = dict[str, np.ndarray]
Inputs: TypeAlias = "Sequence[TensorInfo]"  # of a model

_IN_MEMORY = "give a path, a dict of arrays, an array (for one input), or an iterable with a dict per sample"


def shape_text(shape: Iterable[int | str | None]) -> str:
    """Dimensions as people write them, ``?`` for unknown ones: ``(batch, 3, ?)``."""
    return str(tuple("?" if d is None else d for d in shape)).replace("'", "")


def copied_samples(content: Iterable[Any]) -> tuple[Any, ...]:
    """The samples of an iterable, copied as they arrive: a loader may fill the same buffer for each of them.

    What cannot be copied stays as it is: ``arrays_of`` refuses it. Those of a list are all there already.
    """
    samples = []
    for sample in content:
        with contextlib.suppress(Exception):  # each library raises its own
            sample = sample if isinstance(content, list | tuple) else copy.deepcopy(sample)
        samples.append(sample)
    return tuple(samples)


def arrays_of(content: Any, inputs: Inputs, where: str = "arrays") -> Arrays | tuple[Arrays, ...]:
    """Bring data in memory into one of two forms: one dictionary of concatenated arrays, or one per sample.

    ``content`` is an array or a mapping of arrays, samples concatenated along axis 0; or an iterable of mappings (of
    arrays, for a model with one input), each of them one sample. An array is anything that NumPy converts without
    copying element by element, such as a CPU tensor of PyTorch. ``where`` names the data in errors.
    """

    def is_array(value: Any) -> bool:
        return hasattr(value, "__array__") or hasattr(value, "__array_interface__")

    def by_name(value: Any, where: str) -> Arrays:
        if is_array(value) and len(inputs) != 1:
            names = ", ".join(f"{info.name}=..." for info in inputs)
            hint = f"give all inputs by name, in a file: np.savez('data.npz', {names})"
            raise DataError(f"{where} is one array, the model has {len(inputs)} inputs", hint)
        named = {inputs[0].name: value} if is_array(value) else value
        if not isinstance(named, Mapping):
            raise DataError(f"{where} is a {type(value).__name__}, not a dict of arrays", _IN_MEMORY)
        arrays = {}
        for name, given in named.items():
            place = f"{where}: input {str(name)!r}"
            if np.ma.isMaskedArray(given):
                raise DataError(f"{place} is a masked array, and a model takes no masks", "give array.filled(0)")
            try:
                array = np.asarray(given) if is_array(given) or isinstance(given, bool | int | float) else None
            except Exception as error:  # a tensor on a GPU, or one that records gradients: each library raises its own
                text = " ".join(str(error).splitlines()[:1])
                hint = "give NumPy arrays; for a PyTorch tensor: tensor.detach().cpu().numpy()"
                raise DataError(f"{place} cannot be read as an array: {text}", hint) from None
            if array is None or array.dtype.hasobject:
                text = f"{place} is a {type(given).__name__}, not an array of numbers"
                raise DataError(text, "give np.asarray(values, dtype=np.float32)")
            arrays[str(name)] = array
        return arrays

    if isinstance(content, Mapping) or is_array(content):
        return by_name(content, where)
    given = copied_samples(content) if isinstance(content, Iterable) else ()
    if not given:
        text = f"data of type {type(content).__name__} hold no samples"
        raise DataError(text, f"{_IN_MEMORY}; a generator can be read only once")
    return tuple(by_name(sample, f"{where}, sample {number}") for number, sample in enumerate(given))


def cut_samples(
    arrays: Mapping[str, np.ndarray], inputs: Inputs, batch: int, where: str, *, is_whole: bool = False
) -> tuple[tuple[Arrays, ...], tuple[str, ...]]:
    """Check arrays, by input name, and cut them into samples along axis 0.

    A sample takes B rows of an input whose batch is fixed at B, and ``batch`` rows of one with a dynamic batch, or all
    of them where the arrays are one whole sample (``is_whole``). An array that is exactly one sample repeats for all;
    a scalar input also takes a vector of one value per sample. Nothing is ever cast, cropped or padded: a DataError
    says what does not fit, and ``where`` names the arrays. Beside the samples are warnings of what may not be meant.
    """
    warnings: list[str] = []
    names = [info.name for info in inputs]
    if len(names) == len(arrays) == 1 and names[0] not in arrays:
        ((name, array),) = arrays.items()
        arrays = {names[0]: array}
        warnings.append(f"{where}: array {name!r} is used as the model's only input {names[0]!r}")
    wrong = [f"has no array for input {name!r}" for name in names if name not in arrays]
    wrong += [f"has an array {name!r} that is no input of the model" for name in arrays if name not in names]
    if wrong:
        holds, wanted = (", ".join(map(repr, each)) or "nothing" for each in (arrays, names))
        raise DataError(f"{where} {wrong[0]}", f"it holds {holds}; the inputs are {wanted}")
    parts = {}
    for info in inputs:
        place = f"{where}: input {info.name!r}"
        _check_values(info, arrays[info.name], place)
        # In native byte order and C order, otherwise untouched.
        array = np.asarray(arrays[info.name], dtype=info.numpy_dtype, order="C")
        parts[info.name] = _split_rows(info.shape, array, batch, place, is_whole=is_whole)
    several = {name: len(rows) for name, rows in parts.items() if len(rows) > 1}
    total = max(several.values(), default=1)
    if len(set(several.values())) > 1:
        counts = ", ".join(f"{name!r} has {count}" for name, count in several.items())
        hint = "give every input the same number of samples, or a folder with one .npz per sample"
        raise DataError(f"{where}: the inputs have different numbers of samples: {counts}", hint)
    batches = {parts[name][0].shape[:1] for name in several}
    for name, rows in parts.items():
        if name not in several and rows[0].ndim and rows[0].shape[:1] in batches:
            warnings.append(f"{where}: input {name!r} has one sample, which is repeated for all {total}")
    return tuple({name: rows[k % len(rows)] for name, rows in parts.items()} for k in range(total)), tuple(warnings)


def _check_values(info: TensorInfo, array: np.ndarray, where: str) -> None:
    """Refuse another type, an empty array where the model has none, and values that are not finite."""
    expected, native = info.numpy_dtype, array.dtype.newbyteorder("=")
    if native != expected:
        hint = f"nothing is cast silently; save it as array.astype(np.{expected.name}) if that is what you mean"
        raise DataError(f"{where}: expected {expected}, got {native}", hint)
    # The model may say 0 itself, and a cache is empty at its start along a dynamic axis other than the first.
    dims = info.shape or ()
    may_be_empty = len(dims) == array.ndim and all(
        size or dims[axis] == 0 or (axis and not isinstance(dims[axis], int)) for axis, size in enumerate(array.shape)
    )
    if array.size == 0 and not may_be_empty:
        raise DataError(f"{where} is empty, its shape is {shape_text(array.shape)}", "give at least one sample")
    if expected.kind == "f" and not (finite := np.isfinite(array)).all():
        place = tuple(np.argwhere(~finite)[0].tolist())
        text = f"{where} holds {np.sum(~finite)} NaN or infinite values, the first at {place}"
        raise DataError(text, "a reference computed from them is useless; clean the data")


def _split_rows(shape: Dims | None, array: np.ndarray, batch: int, where: str, *, is_whole: bool) -> list[np.ndarray]:
    """The samples of one input, whose shape is checked: rank and fixed dimensions. ``shape`` None fits any."""
    if shape == () and array.ndim == 1 and not is_whole:
        return [np.asarray(value) for value in array]
    static = shape[0] if shape and isinstance(shape[0], int) else None
    is_one = (static is None and is_whole) or (not shape and array.ndim == 0)
    rows = batch if static is None else static
    expected = shape if is_one or not shape else (f"N x {rows}", *shape[1:])
    if expected is not None and (
        len(expected) != array.ndim
        or any(isinstance(dim, int) and dim != size for dim, size in zip(expected, array.shape, strict=True))
    ):
        hint = "axis 0 counts the samples, also of one (array[None]); preprocess as for deployment, check the layout"
        raise DataError(f"{where}: expected shape {shape_text(expected)}, got {shape_text(array.shape)}", hint)
    if is_one and shape and batch not in (1, len(array)):
        hint = f"each is one whole sample: leave --batch out, or give {batch} rows in every one"
        raise DataError(f"{where} has {len(array)} rows, --batch is {batch}", hint)
    if is_one or rows == 0:
        return [array]
    count, rest = divmod(len(array), rows)
    if rest:
        fitting = ", ".join(str(n) for n in range(1, len(array) + 1) if len(array) % n == 0)
        hint = f"give --batch {fitting}, or other data" if static is None else f"give a multiple of {rows} rows"
        raise DataError(f"{where} has {len(array)} rows, and a sample takes {rows}", hint)
    return [array[k * rows : (k + 1) * rows] for k in range(count)]
