"""The parts of the outputs: what the metric ``worst_part`` is the worst over.

A part is an output, or a column (channel) of it where the columns' scales differ, as where a detector gives boxes in
pixels beside scores from 0 to 1. Columns lie on axis 1 of outputs of rank 4 and up, else on the shorter of the axes
that are not the batch (the last on a tie). Where the largest of the columns' standard deviations over all search
samples is more than ``SCALES_DIFFER`` times the smallest, each column is a part. Where it is not, columns may lie on
the last axis, as those of a head that gives (batch, height, width, channels): where the scales along it differ so, some
of them from one column to the next, and those along no other axis do. The error of a part is the root mean square of
``y - y_ref`` over a sample, divided by the part's standard deviation over all search samples; where that is 0, by its
root mean square; where both are, it is the absolute error. Columns of one Softmax, LogSoftmax or Sigmoid share a unit
(``mptune.graph.loading.shapes``): none is divided by less than ``LEAST_SHARE`` of the standard deviation of all
of them. On held-out samples the scale is the larger of theirs and the search samples': a class that the search samples
do not have is measured by the samples that have it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.files import READ_ERRORS, read_json, write_json
from mptune.json_form import JsonForm, encode, encode_float

Floats = NDArray[np.float64]

WORST_PART = "worst_part"
"""The metric, and the statistic of an output that is one part; ``worst_part[4]`` is that of its column 4."""

ADD_IN_SQUARES = ("relative_l2", WORST_PART)
"""Metrics of which the law of squares holds, for each output or part; errors of them above 3e-2 are worth nothing."""

SCALES_DIFFER = 10.0
"""Largest over smallest standard deviation of the columns from which each column is a part."""

_STEP = math.sqrt(SCALES_DIFFER)
"""Ratio of neighbouring columns' scales from which they are of two kinds. Along height, width or time scales glide."""

MOST_PARTS = 256
"""Of an output: more columns share so many parts, consecutive ones together, each divided by its own scale."""

MOST_COLUMNS = 1024
"""Of an output whose columns' errors are kept one by one."""

_CONSTANT = 1e-6
"""A standard deviation below this share of the root mean square is what FP32 rounding makes of a constant."""

_LEAST_SCALE = 2.0**-24
"""The smallest positive FP16 number, and what a column's scale is at least, beside a column a million times larger.

What a softmax gives a class that no sample has, such as 1e-30, is 0 for all that counts.
"""

LEAST_SHARE = 0.01
"""Of the scale of columns that share a unit: no column of them is divided by less."""

_CHUNK = 1 << 20
"""Elements that are widened to float64 at a time, about."""

_KEY = re.compile(rf"{WORST_PART}\[(\d+)(?::(\d+))?\]")


@dataclass(frozen=True)
class OutputParts(JsonForm):
    """The parts of one output: the whole of it, or its columns."""

    axis: int | None
    """Of the columns; None where it has none."""
    whole: float
    """Scale of the whole output; 0 where all its values are 0."""
    scales: tuple[float, ...] = ()
    """Of each column; 0 where all its values are 0."""
    is_split: bool = False
    units: tuple[int, ...] = ()
    """Of each column, where any share one: those that do have the same number, 0 shares none."""

    @cached_property
    def divisors(self) -> Floats:
        """What the error of each column is divided by, shape (columns,): its scale, 1 where that is 0."""
        return np.array([scale or 1.0 for scale in self.scales])

    @property
    def divisor(self) -> float:
        """What the error of the whole output is divided by."""
        return self.whole or 1.0

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The columns of each part; empty where the output is one part."""
        count = len(self.scales)
        if not self.is_split:
            return ()
        ends = [round(count * k / min(count, MOST_PARTS)) for k in range(min(count, MOST_PARTS) + 1)]
        return tuple(range(a, b) for a, b in itertools.pairwise(ends))

    def covering(self, arrays: Sequence[np.ndarray]) -> OutputParts:
        """These parts, with scales that are no smaller than those of the same columns of other outputs."""
        if not arrays:
            return self
        if not all(self.fits(array.shape) for array in arrays):
            return replace(self, whole=max(self.whole, _parts_along(arrays, None)[0].whole))
        other = _parts_along(arrays, self.axis, self.units)[0]
        return replace(self, whole=max(self.whole, other.whole), scales=tuple(map(max, self.scales, other.scales)))

    def least_scale(self, columns: Sequence[int]) -> float:
        """What columns are divided by at least; 0 where none shares a unit with others."""
        return min((self.scales[k] for k in columns if self.units and self.units[k]), default=0.0)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape has these columns."""
        return self.axis is not None and self.axis < len(shape) and shape[self.axis] == len(self.scales)


@dataclass(frozen=True)
class ColumnErrors(JsonForm):
    """The error of each column of one output under one plan, over all samples: one value per column in each."""

    worst_part: tuple[float, ...]
    """Root mean square of the difference divided by the column's scale, the mean over the samples."""
    relative_l2: tuple[float, ...]
    """Of the column alone, the mean over the samples."""
    max_abs: tuple[float, ...]
    """The largest absolute difference on any sample."""

    def to_json(self) -> dict[str, Any]:
        """To four digits: non-finite numbers as strings."""
        return {name: [encode_float(float(f"{v:.4g}")) for v in values] for name, values in asdict(self).items()}


def part_statistic(columns: range) -> str:
    """The name of the statistic of a part: ``worst_part[4]``, ``worst_part[0:8]``."""
    return f"{WORST_PART}[{columns.start}]" if len(columns) == 1 else f"{WORST_PART}[{columns.start}:{columns.stop}]"


def columns_of_part(statistic: str) -> tuple[int, ...] | None:
    """The columns that the statistic of a part is about; None where it is about the whole output."""
    match = _KEY.fullmatch(statistic)
    if match is None:
        return None
    start = int(match[1])
    return tuple(range(start, start + 1 if match[2] is None else int(match[2])))


def belongs_to(statistic: str, metric: str) -> bool:
    """Whether a statistic is one of those that a metric is the worst of: its own, or that of a part."""
    return statistic == metric or (metric == WORST_PART and statistic.startswith(WORST_PART + "["))


def find_parts(
    reference: Sequence[Mapping[str, np.ndarray]],
    batches: Sequence[frozenset[int]] | None = None,
    units: Mapping[str, Mapping[int, tuple[int, ...]]] | None = None,
) -> dict[str, OutputParts]:
    """The parts of every output, from the reference over all samples, one sample at a time.

    ``batches`` are the first dimensions of the inputs of each sample: axis 0 of an output is the batch where it is one
    of them; without it axis 0 is the batch. ``units``: output -> axis -> the unit of each column
    (``mptune.graph.loading.shapes``).
    """
    sizes = [None] * len(reference) if batches is None else batches
    parts = {}
    for name in dict.fromkeys(name for sample in reference for name in sample):
        given = [
            (np.asarray(sample[name]), size) for sample, size in zip(reference, sizes, strict=True) if name in sample
        ]
        if any(array.dtype.kind not in "fiub" for array, _ in given):
            continue
        has_batch = all(array.ndim > 0 and (size is None or array.shape[0] in size) for array, size in given)
        parts[name] = _parts_of([array for array, _ in given], (units or {}).get(name, {}), has_batch=has_batch)
    return parts


def cover_held_out(
    parts: Mapping[str, OutputParts], reference: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, OutputParts]:
    """The same parts for held-out samples: each scale is the larger one of the search samples' and theirs."""
    return {
        name: part.covering([np.asarray(sample[name]) for sample in reference if name in sample])
        for name, part in parts.items()
    }


def _parts_of(arrays: Sequence[np.ndarray], units: Mapping[int, tuple[int, ...]], *, has_batch: bool) -> OutputParts:
    """The parts of one output, along the axis that its columns lie on."""
    rank = arrays[0].ndim
    if any(array.ndim != rank for array in arrays):
        return _parts_along(arrays, None)[0]
    same = [axis for axis in range(rank) if len({array.shape[axis] for array in arrays}) == 1]
    axes = [axis for axis in range(int(has_batch), rank) if axis in same and arrays[0].shape[axis] > 0]
    usual = [axis for axis in axes if axis == 1] if rank >= 4 else axes
    axis = min(usual, key=lambda axis: (arrays[0].shape[axis], -axis)) if usual else None
    parts = _parts_along(arrays, axis, units.get(axis, ()) if axis is not None else ())[0]
    last = rank - 1
    if parts.is_split or axis == last or last not in axes or arrays[0].shape[last] > MOST_COLUMNS:
        return parts
    # One sample says cheaply that an axis is height, width or time, as most are.
    others = [other for other in axes if other != axis and _parts_along(arrays[:1], other)[1]]
    along_others = (_parts_along(arrays, other, units.get(other, ())) for other in others)
    stepped = [columns for columns, has_step in along_others if has_step]
    return stepped[0] if len(stepped) == 1 and stepped[0].axis == last else parts


def _parts_along(
    arrays: Sequence[np.ndarray], axis: int | None, units: tuple[int, ...] = ()
) -> tuple[OutputParts, bool]:
    """The parts of one axis, and whether neighbouring columns are of two kinds; constant ones are of none."""
    columns = 1 if axis is None else arrays[0].shape[axis]
    count, total, squares = (np.zeros(columns) for _ in range(3))
    deviations = np.zeros(columns)  # sum of squared deviations from the mean (Chan et al., 1983)
    for array in arrays:
        for rows in _chunks(array, axis):
            values = rows.astype(np.float64)
            finite = np.isfinite(values)
            values = np.where(finite, values, 0.0)
            n = finite.sum(axis=1).astype(np.float64)
            mean = values.sum(axis=1) / np.maximum(n, 1)
            apart = np.where(finite, values - mean[:, None], 0.0)
            before = total / np.maximum(count, 1)
            deviations += (apart**2).sum(axis=1) + (mean - before) ** 2 * count * n / np.maximum(count + n, 1)
            squares += (values**2).sum(axis=1)
            total += mean * n
            count += n
    scales = [_scale(*column) for column in zip(count, squares, deviations, strict=True)]
    least = min(_LEAST_SCALE, _CONSTANT * max(scales, default=0.0))
    scales = [max(scale, least) if scale else 0.0 for scale in scales]
    spread = np.sqrt(deviations / np.maximum(count, 1))
    constant = spread <= _CONSTANT * np.sqrt(squares / np.maximum(count, 1))
    spread = np.where(constant, 0.0, spread)

    def together(members: NDArray[np.bool_]) -> float:
        n, own = count[members], total[members]
        mean = own.sum() / max(n.sum(), 1)
        within = deviations[members] + n * (own / np.maximum(n, 1) - mean) ** 2
        return _scale(n.sum(), squares[members].sum(), within.sum())

    whole = together(np.ones(columns, bool))
    units = units if len(units) == columns and any(units) else ()
    for unit in set(units) - {0}:
        members = np.array(units) == unit
        least = LEAST_SHARE * together(members)
        spread[members] = np.maximum(spread[members], least)
        scales = [max(scale, least) if member else scale for scale, member in zip(scales, members, strict=True)]
    if axis is None or columns < 2:
        return OutputParts(axis, whole, tuple(scales) if axis is not None else ()), False
    is_split = bool(spread.max() > SCALES_DIFFER * spread.min())
    if not is_split and columns > MOST_COLUMNS:
        return OutputParts(None, whole), False
    moving = spread[spread > 0]
    steps = np.abs(np.diff(np.log(moving)))
    has_step = moving.size > 1 and moving.max() > SCALES_DIFFER * moving.min() and steps.max() > math.log(_STEP)
    return OutputParts(axis, whole, tuple(scales), is_split, units), bool(has_step)


def _scale(count: float, squares: float, deviations: float) -> float:
    """Standard deviation, else root mean square; 0 where there is nothing but zeros, or no finite value."""
    deviation, rms = math.sqrt(deviations / max(count, 1)), math.sqrt(squares / max(count, 1))
    scale = deviation if deviation > _CONSTANT * rms else rms
    return scale if math.isfinite(scale) else 1.0


def _chunks(array: np.ndarray, axis: int | None) -> list[np.ndarray]:
    """Views of the array with the columns first, shape (columns, elements), about ``_CHUNK`` elements each."""
    if axis is None:
        rows = array.reshape(1, -1)
    else:
        rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    step = max(1, _CHUNK // max(1, rows.shape[0]))
    return [rows[:, start : start + step] for start in range(0, rows.shape[1], step)]


class ErrorsByPart:
    """Takes the error of each part of one output, and of each of its columns, sample by sample."""

    def __init__(self, parts: OutputParts) -> None:
        """Nothing is taken yet."""
        self._parts = parts
        self._samples = 0
        self._normalised: Floats = np.zeros(len(parts.scales))
        self._relative: Floats = np.zeros(len(parts.scales))
        self._largest: Floats = np.zeros(len(parts.scales))
        self._has_columns = parts.axis is not None

    def take(self, output: np.ndarray, reference: np.ndarray) -> dict[str, float]:
        """The statistics of the parts on one sample; both arrays have the same shape."""
        parts = self._parts
        has_columns = parts.fits(reference.shape)
        self._has_columns &= has_columns
        axis = parts.axis if has_columns else None
        columns = len(parts.scales) if has_columns else 1
        squares, wanted_squares, count, largest = (np.zeros(columns) for _ in range(4))
        with np.errstate(all="ignore"):  # NaN and Inf are results here
            for got, wanted in zip(_chunks(output, axis), _chunks(reference, axis), strict=True):
                values = wanted.astype(np.float64)
                finite = np.isfinite(values)
                apart = np.where(finite, np.abs(got.astype(np.float64) - values), 0.0)
                squares += (apart**2).sum(axis=1)
                wanted_squares += np.where(finite, values**2, 0.0).sum(axis=1)
                count += finite.sum(axis=1)
                largest = np.maximum(largest, apart.max(axis=1, initial=0.0))
            statistics = self._of_parts(squares, count, has_columns=has_columns)
            if has_columns:
                self._samples += 1
                self._normalised += np.sqrt(squares / np.maximum(count, 1)) / parts.divisors
                relative = np.sqrt(squares) / np.sqrt(wanted_squares)
                self._relative += np.where(squares == 0, 0.0, relative)
                self._largest = np.maximum(self._largest, largest)
        return statistics

    def _of_parts(self, squares: Floats, count: Floats, *, has_columns: bool) -> dict[str, float]:
        parts = self._parts
        if not (parts.is_split and has_columns):
            return {WORST_PART: math.sqrt(squares.sum() / max(count.sum(), 1)) / parts.divisor}
        scaled = squares / np.square(parts.divisors)
        return {
            part_statistic(columns): math.sqrt(
                scaled[columns.start : columns.stop].sum() / max(count[columns.start : columns.stop].sum(), 1)
            )
            for columns in parts.ranges
        }

    @property
    def columns(self) -> ColumnErrors | None:
        """Of all samples that were taken; None where the output has no columns, or too many."""
        if not self._has_columns or not self._samples or len(self._largest) > MOST_COLUMNS:
            return None
        means = (self._normalised / self._samples, self._relative / self._samples)
        return ColumnErrors(*(tuple(map(float, values)) for values in (*means, self._largest)))


PARTS_JSON = "parts.json"
"""Name of the file in the run's data directory, beside the reference that the parts were found from."""

HELD_OUT_PARTS_JSON = "held_out_parts.json"
"""The same for the held-out samples: the search's parts, with scales that count these samples in."""


def parts_path(reference: Path) -> Path:
    """Where the parts of the outputs in a reference file are: beside it."""
    return reference.with_name(HELD_OUT_PARTS_JSON if reference.name.startswith("held_out") else PARTS_JSON)


def save_parts(path: Path, parts: Mapping[str, OutputParts]) -> None:
    """Write the JSON file that ``load_parts`` reads."""
    write_json(path, {"outputs": encode(parts)})


def load_parts(path: Path) -> dict[str, OutputParts] | None:
    """What ``save_parts`` wrote; None where there is nothing that can be read."""
    try:
        outputs = read_json(path)["outputs"]
        return {name: OutputParts.from_json(part) for name, part in outputs.items()}
    except READ_ERRORS:
        return None
