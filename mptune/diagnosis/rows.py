"""Outputs as rows: those of the samples of a run, and what a deployment recorded, in the same order and layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mptune.data.archive import read_archive, read_array
from mptune.errors import DataError

_MAX_TRANSPOSED = 5
"""Axes of an output up to which other orders of its axes are tried."""


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


@dataclass(frozen=True)
class Recording:
    """What a deployment recorded, in the layout of the model's outputs."""

    outputs: tuple[Mapping[str, np.ndarray], ...]
    moved: Mapping[str, tuple[int, ...]]
    """Output -> axes: its axes are in this order in the file (those of the layout of rows)."""
    exchanged: Mapping[str, str]
    """Output -> the recorded array whose values stand for it, where its own has the shape of another output."""


def read_recording(path: Path, layouts: Mapping[str, Layout], option: str, inputs: Collection[str] = ()) -> Recording:
    """Read ``.npz`` with one array per output, or ``.npy`` where there is one output; rows in the order of the data.

    Raises DataError where an output is missing, or has a shape that fits no output; ``option`` is for its message.
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
        raise DataError(f"{option} {path} has no output {missing[0]!r}: it holds {_listed(arrays)}", hint)
    for name in layouts:
        if arrays[name].dtype.kind not in "fiub":
            raise DataError(f"{option} {path}: {name!r} is of type {arrays[name].dtype}, not numeric", "save numbers")
        if arrays[name].dtype.kind == "f" and np.isnan(arrays[name]).any():  # signalling ones warn where they are cast
            arrays[name] = np.where(np.isnan(arrays[name]), np.array(np.nan, arrays[name].dtype), arrays[name])
    fitted: dict[str, np.ndarray] = {}
    moved: dict[str, tuple[int, ...]] = {}
    exchanged: dict[str, str] = {}
    for name, layout in layouts.items():
        fitting = layout.fit(arrays[name])
        if fitting is None and (other := _exchanged(name, arrays, layouts)) is not None:
            fitting, exchanged[name] = layout.fit(arrays[other]), other
        if fitting is None and (axes := _transposed(arrays[name].shape, layout.shape)) is not None:
            fitting, moved[name] = arrays[name].transpose(axes), axes
        if fitting is None:
            raise DataError(_misfit(path, option, name, arrays[name], layout), _misfit_hint(arrays[name], layout))
        fitted[name] = fitting
    cut = {name: layouts[name].cut(array) for name, array in fitted.items()}
    count = len(next(iter(layouts.values())).shapes)
    return Recording(tuple({name: parts[k] for name, parts in cut.items()} for k in range(count)), moved, exchanged)


def _exchanged(name: str, arrays: Mapping[str, np.ndarray], layouts: Mapping[str, Layout]) -> str | None:
    """Another output whose recorded array has this one's shape, while this one's array has the shape of another."""
    if not any(layouts[other].fit(arrays[name]) is not None for other in layouts):
        return None
    return next((other for other in layouts if layouts[name].fit(arrays[other]) is not None), None)


_UNNAMED = "arr_0"
"""What NumPy calls an array that is saved without a name."""

_ROWS_HINT = "record all rows, in the order of the data, without any added"


def _misfit(path: Path, option: str, name: str, array: np.ndarray, layout: Layout) -> str:
    shape, wanted = list(array.shape), list(layout.shape)
    if array.ndim and array.shape[1:] == layout.shape[1:]:
        return f"{option} {path} holds {array.shape[0]} rows of output {name!r}, the data give {layout.shape[0]}"
    return f"{option} {path}: output {name!r} has shape {shape}, the data give {wanted}"


def _misfit_hint(array: np.ndarray, layout: Layout) -> str:
    """What to do about an array of another shape, with what its shape looks like."""
    shape, wanted = array.shape, layout.shape
    lost = [axis for axis in range(1, len(wanted)) if shape == wanted[:axis] + wanted[axis + 1 :]]
    if lost:
        size = wanted[lost[-1]]
        what = "an index among them" if array.dtype.kind in "iu" else "one value of them"
        return f"it lacks the axis {lost[-1]} of {size}, as where an application keeps {what}: record the output itself"
    if shape[1:] == wanted[1:] and shape:
        return _ROWS_HINT
    if array.size == math.prod(wanted):
        return f"it holds as many values in another order or shape: record it as the model gives it, {list(wanted)}"
    if len(shape) == len(wanted):
        axes = [axis for axis in range(len(wanted)) if shape[axis] != wanted[axis]]
        return f"other sizes along axis {', '.join(map(str, axes))}: record the output at the size of these data"
    return f"it has {len(shape)} axes, not {len(wanted)}: record the output itself, with its rows along axis 0"


def _transposed(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of axes in which an array of one shape has the other, rows staying first."""
    if len(shape) != len(wanted) or not 3 <= len(shape) <= _MAX_TRANSPOSED or shape[0] != wanted[0]:
        return None
    for axes in itertools.permutations(range(1, len(shape))):
        if tuple(shape[axis] for axis in axes) == wanted[1:]:
            return (0, *axes)
    return None


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "none"
