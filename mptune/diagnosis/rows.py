"""Outputs as rows: those of the samples of a run, and what a deployment recorded, in the same order and layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mptune.data.archive import read_archive, read_array
from mptune.errors import DataError


@dataclass(frozen=True)
class Layout:
    """How the arrays of one output, one for each sample, lie in one array."""

    shapes: tuple[tuple[int, ...], ...]
    """Of each sample."""
    stacked: bool
    """Samples have no axis of rows: one is added."""

    @classmethod
    def of_arrays(cls, arrays: Sequence[np.ndarray], feeds: Sequence[Mapping[str, np.ndarray]]) -> Layout:
        """The layout of an output: rows along axis 0 where it has as many as the inputs of each sample."""
        shapes = tuple(array.shape for array in arrays)
        rows = [{value.shape[0] for value in feed.values() if value.ndim} for feed in feeds]
        along = all(shape and shape[0] in sizes for shape, sizes in zip(shapes, rows, strict=True))
        ragged = len(set(shapes)) > 1
        return cls(shapes, not along and not ragged)

    @property
    def is_regular(self) -> bool:
        """Whether rows have one shape."""
        return len({shape if self.stacked else shape[1:] for shape in self.shapes}) == 1

    @property
    def rows_per_sample(self) -> int:
        """Of the first sample."""
        return 1 if self.stacked or not self.shapes[0] else self.shapes[0][0]

    def rows(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """All samples in one array, rows first."""
        return np.stack(arrays) if self.stacked else np.concatenate(arrays)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what ``rows`` gives."""
        if self.stacked:
            return (len(self.shapes), *self.shapes[0])
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    def fit(self, array: np.ndarray) -> np.ndarray | None:
        """A recorded array in this layout; None where it has another shape, apart from axes of size 1 and flat rows."""
        wanted = self.shape
        if not self.is_regular:
            return None
        is_flat = array.shape[:1] == wanted[:1] and array.ndim == 2 and array.size == math.prod(wanted)
        if is_flat or _without_ones(array.shape) == _without_ones(wanted):
            return array.reshape(wanted)
        return None

    def cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """Inverse of ``rows``."""
        if self.stacked:
            return list(rows)
        ends = np.cumsum([shape[0] for shape in self.shapes])
        return np.split(rows, ends[:-1])


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def read_recording(
    path: Path, layouts: Mapping[str, Layout], inputs: Collection[str] = ()
) -> tuple[Mapping[str, np.ndarray], ...]:
    """Read ``.npz`` with one array per output, or ``.npy`` where there is one output; rows in the order of the data.

    Raises DataError where an output is missing, or has a shape that fits no output.
    """
    if path.suffix.lower() == ".npy":
        if len(layouts) != 1:
            raise DataError(
                f"{path} is one array, the model has the outputs {_listed(layouts)}",
                "write one array per output: np.savez('outputs.npz', name=...)",
            )
        arrays = {next(iter(layouts)): read_array(path)}
    else:
        arrays = read_archive(path)
    if list(arrays) == [_UNNAMED] and len(layouts) == 1:
        arrays = {next(iter(layouts)): arrays[_UNNAMED]}
    missing = [name for name in layouts if name not in arrays]
    if missing:
        hint = f"write one array per output by its name: np.savez('outputs.npz', **{{{missing[0]!r}: ...}})"
        if arrays and arrays.keys() <= set(inputs):
            hint = "these are inputs of the model: give what it, or the deployment, computed of them"
        elif len(missing) < len(layouts):
            hint += f", or leave it out of the comparison: --ignore {missing[0]}"
        raise DataError(f"{path} has no output {missing[0]!r}: it holds {_listed(arrays)}", hint)
    for name in layouts:
        if arrays[name].dtype.kind not in "fiub":
            raise DataError(f"{path}: {name!r} is of type {arrays[name].dtype}, not numeric", "save numbers")
    cut: dict[str, list[np.ndarray]] = {}
    for name, layout in layouts.items():
        fitted = layout.fit(arrays[name])
        if fitted is None:
            raise _misfit(str(path), name, arrays[name], layouts)
        cut[name] = layout.cut(fitted)
    count = len(next(iter(layouts.values())).shapes)
    return tuple({name: parts[k] for name, parts in cut.items()} for k in range(count))


_UNNAMED = "arr_0"
"""What NumPy calls an array that is saved without a name."""


def _misfit(file: str, name: str, array: np.ndarray, layouts: Mapping[str, Layout]) -> DataError:
    """The error for an array of another shape, with what to do about it."""
    wanted = layouts[name].shape
    if array.ndim and array.shape[1:] == wanted[1:]:
        return DataError(
            f"{file} holds {array.shape[0]} rows of output {name!r}, the data give {wanted[0]}",
            "record all rows, in the order of the data, without any added",
        )
    hint = "record the output itself, as the model gives it, with its rows along axis 0"
    if other := next((other for other, layout in layouts.items() if layout.fit(array) is not None), None):
        hint = f"it has the shape of the output {other!r}: read outputs by name, or exchange the two"
    elif sorted(array.shape) == sorted(wanted):
        hint = "its axes are in another order: transpose it (numpy.transpose)"
    return DataError(f"{file}: output {name!r} has shape {list(array.shape)}, the data give {list(wanted)}", hint)


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "none"
