"""Outputs as rows: those of the samples of a run, and what a deployment recorded, in the same order and layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mptune.data.archive import read_archive, read_array
from mptune.errors import DataError

_UNNAMED = "arr_0"  # what NumPy calls an array that is saved without a name


@dataclass(frozen=True)
class Layout:
    """How the arrays of one output, one for each sample, lie in one array."""

    shapes: tuple[tuple[int, ...], ...]  # of each sample
    stacked: bool  # samples have no axis of rows: one is added

    @classmethod
    def of_arrays(cls, arrays: Sequence[np.ndarray], feeds: Sequence[Mapping[str, np.ndarray]]) -> Layout:
        """The layout of an output: rows along axis 0 where it has as many as the inputs of each sample."""
        shapes = tuple(array.shape for array in arrays)
        rows = [{value.shape[0] for value in feed.values() if value.ndim} for feed in feeds]
        along = all(shape and shape[0] in sizes for shape, sizes in zip(shapes, rows, strict=True))
        return cls(shapes, not along and len(set(shapes)) == 1)

    @property
    def is_regular(self) -> bool:
        """Whether rows have one shape."""
        return len({shape if self.stacked else shape[1:] for shape in self.shapes}) == 1

    @property
    def ends(self) -> np.ndarray:
        """Number of rows up to and with each sample."""
        return np.cumsum([1 if self.stacked else shape[0] for shape in self.shapes])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what ``rows`` gives."""
        return (int(self.ends[-1]), *(self.shapes[0] if self.stacked else self.shapes[0][1:]))

    def rows(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """All samples in one array, rows first."""
        return np.stack(arrays) if self.stacked else np.concatenate(arrays)

    def cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """Inverse of ``rows``."""
        return list(rows) if self.stacked else np.split(rows, self.ends[:-1])

    def fit(self, array: np.ndarray) -> np.ndarray | None:
        """A recorded array in this layout; None where it has another shape, apart from axes of size 1 and flat rows."""
        if not self.is_regular:
            return None
        wanted = self.shape
        is_flat = array.shape[:1] == wanted[:1] and array.ndim == 2 and array.size == math.prod(wanted)
        is_same = [size for size in array.shape if size != 1] == [size for size in wanted if size != 1]
        return array.reshape(wanted) if is_flat or is_same else None


def read_recording(
    path: Path, layouts: Mapping[str, Layout], inputs: Collection[str] = ()
) -> tuple[Mapping[str, np.ndarray], ...]:
    """Read ``.npz`` with one array per output, or ``.npy`` where there is one output; rows in the order of the data.

    Raises DataError where an output is missing, or has a shape that fits no output.
    """
    is_single = path.suffix.lower() == ".npy"
    arrays = {_UNNAMED: read_array(path)} if is_single else dict(read_archive(path))
    if list(arrays) == [_UNNAMED] and len(layouts) == 1:
        arrays = {next(iter(layouts)): arrays[_UNNAMED]}
    cut: dict[str, list[np.ndarray]] = {}
    for name, layout in layouts.items():
        if name not in arrays:
            hint = f"write one array per output by its name: np.savez('outputs.npz', **{{{name!r}: ...}})"
            if arrays.keys() <= set(inputs):
                hint = "these are inputs of the model: give what it, or the deployment, computed of them"
            elif not arrays.keys().isdisjoint(layouts):
                hint += f", or leave it out of the comparison: --ignore {name}"
            raise DataError(f"{path} has no output {name!r}: it holds {', '.join(map(repr, arrays)) or 'none'}", hint)
        if arrays[name].dtype.kind not in "fiub":
            raise DataError(f"{path}: {name!r} is of type {arrays[name].dtype}, not numeric", "save numbers")
        fitted = layout.fit(arrays[name])
        if fitted is None:
            shape, wanted = arrays[name].shape, layout.shape
            if shape[1:] == wanted[1:] and shape:
                text = f"{path} holds {shape[0]} rows of output {name!r}, the data give {wanted[0]}"
                raise DataError(text, "record all rows, in the order of the data, without any added")
            text = f"{path}: output {name!r} has shape {list(shape)}, the data give {list(wanted)}"
            hint = "record the output itself by its name, as the model gives it: axes in its order, rows along axis 0"
            raise DataError(text, hint)
        cut[name] = layout.cut(fitted)
    count = len(next(iter(layouts.values())).shapes)
    return tuple({name: parts[k] for name, parts in cut.items()} for k in range(count))
