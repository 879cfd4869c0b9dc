"""The parts of the outputs: what the metric ``worst_part`` is the worst over.

A part is an output, or a column (channel) of it where the columns' scales differ, as where a detector gives boxes in
pixels beside scores from 0 to 1. Its error is the root mean square of ``y - y_ref`` over a sample, divided by the
part's standard deviation over all search samples; where that is 0, by its root mean square; where both are, by 1.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mptune.files import READ_ERRORS, read_json, write_json
from mptune.json_form import JsonForm, encode

Arrays = Mapping[str, np.ndarray]  # one sample: an array for each input, output or kind of label
Floats = NDArray[np.float64]

# The metric, and the statistic of an output that is one part; ``worst_part[4]`` is that of its column 4.
WORST_PART = "worst_part"
# Metrics of which the law of squares holds, for each output or part; errors of them above 3e-2 are worth nothing.
ADD_IN_SQUARES = ("relative_l2", WORST_PART)

SCALES_DIFFER = 10.0  # largest over smallest standard deviation of the columns from which each column is a part
MOST_PARTS = 256  # more columns share this many parts, consecutive ones together, each divided by its own scale
MOST_COLUMNS = 1024  # of an output whose columns' errors are stored one by one
LEAST_SHARE = 0.01  # of the scale of all probabilities: no column of them is divided by less

PARTS_JSON = "parts.json"  # in the run's data directory, beside the reference that the parts were found from

_STEP = math.sqrt(SCALES_DIFFER)  # ratio of neighbours' scales from which they are of two kinds: along height it glides
_CONSTANT = 1e-6  # a standard deviation below this share of the root mean square is rounding of a constant
# FP16's smallest positive number, and what a column's scale is at least, beside a column a million times larger: what a
# softmax gives a class that no sample has, such as 1e-30, is 0 for all that counts.
_LEAST_SCALE = 2.0**-24
_CHUNK = 1 << 16  # elements that are widened to float64 at a time, about: what stays in a core's cache

_KEY = re.compile(rf"{WORST_PART}\[(\d+)(?::(\d+))?\]")


@dataclass(frozen=True)
class OutputParts(JsonForm):
    """The parts of one output: the whole of it, or its columns."""

    axis: int | None  # of the columns; None where it has none
    whole: float  # scale of the whole output; 0 where all its values are 0, whose error is divided by 1
    scales: tuple[float, ...] = ()  # of each column; 0 where all its values are 0
    is_split: bool = False  # whether columns are parts

    @cached_property
    def divisors(self) -> Floats:
        """What the error of each column is divided by, shape (columns,): its scale, 1 where that is 0."""
        return np.array([scale or 1.0 for scale in self.scales])

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The columns of each part; empty where the output is one part."""
        count = len(self.scales)
        parts = min(count, MOST_PARTS) if self.is_split else 0
        return tuple(range(round(count * k / parts), round(count * (k + 1) / parts)) for k in range(parts))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape has these columns."""
        return self.axis is not None and self.axis < len(shape) and shape[self.axis] == len(self.scales)


def part_statistic(columns: range) -> str:
    """The name of the statistic of a part: ``worst_part[4]``, ``worst_part[0:8]``."""
    return f"{WORST_PART}[{columns.start}]" if len(columns) == 1 else f"{WORST_PART}[{columns.start}:{columns.stop}]"


@cache
def columns_of_part(statistic: str) -> tuple[int, ...] | None:
    """The columns that the statistic of a part is about; None where it is about the whole output."""
    match = _KEY.fullmatch(statistic)
    return match and tuple(range(int(match[1]), int(match[2] or int(match[1]) + 1)))


def belongs_to(statistic: str, metric: str) -> bool:
    """Whether a statistic is one of those that a metric is the worst of: its own, or that of a part."""
    return statistic == metric or (metric == WORST_PART and statistic.startswith(WORST_PART + "["))


def find_parts(
    reference: Sequence[Arrays],
    batches: Sequence[frozenset[int]] | None = None,
    row_axes: Mapping[str, int] | None = None,
) -> dict[str, OutputParts]:
    """The parts of every output, from the reference over all samples.

    Columns lie on axis 1 of outputs of rank 4 and up, else on the shorter of the axes that are not the batch (the last
    on a tie). They are parts where the largest of their standard deviations is more than ``SCALES_DIFFER`` times the
    smallest. Else columns may lie on the last axis, as those of a head that gives (batch, height, width, channels):
    where the scales along it differ so, neighbouring ones by a step, and those along no other axis do.

    ``batches`` are the first dimensions of the inputs of each sample: axis 0 of an output is the batch where it is one
    of them; without it axis 0 is the batch. ``row_axes`` are the axes of rows that were selected: columns lie behind.
    """
    parts: dict[str, OutputParts] = {}
    for name in dict.fromkeys(name for sample in reference for name in sample):
        numbers = [k for k, sample in enumerate(reference) if name in sample]
        arrays = [np.asarray(reference[k][name]) for k in numbers]
        rank = arrays[0].ndim
        if any(array.dtype.kind not in "fiub" for array in arrays):
            continue
        if any(array.ndim != rank for array in arrays):
            parts[name], _ = _parts_along(arrays, None)
            continue
        has_batch = rank > 0 and (
            batches is None or all(array.shape[0] in batches[k] for k, array in zip(numbers, arrays, strict=True))
        )
        shape = [sizes[0] if len(set(sizes)) == 1 else 0 for sizes in zip(*(a.shape for a in arrays), strict=True)]
        first = max(int(has_batch), (row_axes or {}).get(name, -1) + 1)
        axes = [axis for axis in range(first, rank) if shape[axis] > 0]
        usual = [axis for axis in axes if axis == 1] if rank >= 4 else axes
        axis, last = min(usual, key=lambda axis: (shape[axis], -axis), default=None), rank - 1
        parts[name], _ = _parts_along(arrays, axis)
        if parts[name].is_split or axis == last or last not in axes or shape[last] > MOST_COLUMNS:
            continue
        # One sample says cheaply that an axis is height, width or time, as most are.
        others = [other for other in axes if other != axis and _parts_along(arrays[:1], other)[1]]
        stepped = [columns for columns, has_step in (_parts_along(arrays, other) for other in others) if has_step]
        if len(stepped) == 1 and stepped[0].axis == last:
            parts[name] = stepped[0]
    return parts


def cover_held_out(parts: Mapping[str, OutputParts], reference: Sequence[Arrays]) -> dict[str, OutputParts]:
    """The same parts for held-out samples: each scale is the larger one of the search samples' and theirs.

    So a class that the search samples do not have is measured by the samples that have it.
    """
    covering = dict(parts)
    for name, part in parts.items():
        arrays = [np.asarray(sample[name]) for sample in reference if name in sample]
        if arrays:
            fits = all(part.fits(array.shape) for array in arrays)
            other, _ = _parts_along(arrays, part.axis if fits else None)
            scales = tuple(map(max, part.scales, other.scales)) if fits else part.scales
            covering[name] = replace(part, whole=max(part.whole, other.whole), scales=scales)
    return covering


def _parts_along(arrays: Sequence[np.ndarray], axis: int | None) -> tuple[OutputParts, bool]:
    """The parts of one axis, and whether neighbouring columns are of two kinds; constant ones are of none."""
    columns = 1 if axis is None else arrays[0].shape[axis]
    count, total, squares, deviations, low, high = (np.zeros(columns) for _ in range(6))  # of finite values
    for array in arrays:
        for (values,) in chunks(as_columns(array, axis)):
            finite = np.isfinite(values)
            values = np.where(finite, values, 0.0).astype(np.float64)
            n = finite.sum(axis=(0, 2)).astype(np.float64)
            mean = values.sum(axis=(0, 2)) / np.maximum(n, 1)
            apart = np.where(finite, values - mean[:, None], 0.0)
            # Squared deviations from the mean add up so (Chan et al., 1983).
            shift = (mean - total / np.maximum(count, 1)) ** 2 * count * n / np.maximum(count + n, 1)
            deviations += (apart**2).sum(axis=(0, 2)) + shift
            squares += (values**2).sum(axis=(0, 2))
            total += mean * n
            count += n
            low = np.minimum(low, values.min(axis=(0, 2), initial=0.0))
            high = np.maximum(high, values.max(axis=(0, 2), initial=0.0))

    def together(members: NDArray[np.bool_]) -> float:
        """The scale of several columns as if they were one."""
        n = count[members]
        apart = total[members] / np.maximum(n, 1) - total[members].sum() / max(n.sum(), 1)
        _, scale = _scales(n.sum(), squares[members].sum(), (deviations[members] + n * apart**2).sum())
        return float(scale)

    whole = together(np.ones(columns, bool))
    if axis is None:
        return OutputParts(None, whole), False
    spread, scales = _scales(count, squares, deviations)
    least = min(_LEAST_SCALE, _CONSTANT * scales.max(initial=0.0))
    scales[scales > 0] = np.maximum(scales[scales > 0], least)
    # A class that is as good as never there has probabilities near 1e-7: half of that is wrong, and nothing for a user.
    is_probability = (low == 0) & (high <= 1)
    for figures in (spread, scales):
        least = LEAST_SHARE * together(is_probability)
        figures[is_probability] = np.maximum(figures[is_probability], least)
    is_split = columns > 1 and bool(spread.max() > SCALES_DIFFER * spread.min())
    if columns > MOST_COLUMNS and not is_split:
        return OutputParts(None, whole), False
    moving = spread[spread > 0]
    steps = np.abs(np.diff(np.log(moving)))
    has_step = moving.size > 1 and moving.max() > SCALES_DIFFER * moving.min() and steps.max() > math.log(_STEP)
    return OutputParts(axis, whole, tuple(map(float, scales)), is_split), bool(has_step)


def _scales(count: Floats, squares: Floats, deviations: Floats) -> tuple[Floats, Floats]:
    """Standard deviations, 0 of constants; and scales, which are root mean squares of those, 0 of zeros."""
    deviation, rms = np.sqrt(deviations / np.maximum(count, 1)), np.sqrt(squares / np.maximum(count, 1))
    spread = np.where(deviation > _CONSTANT * rms, deviation, 0.0)
    scales = np.where(spread > 0, spread, rms)
    return spread, np.where(np.isfinite(scales), scales, 1.0)


def as_columns(array: np.ndarray, axis: int | None) -> np.ndarray:
    """The array in the shape (before, columns, behind); all of it is one column where it has no axis of columns."""
    if axis is None:
        return array.reshape(1, 1, array.size)
    return array.reshape(math.prod(array.shape[:axis]), array.shape[axis], math.prod(array.shape[axis + 1 :]))


def chunks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Views of arrays of one shape (before, columns, behind), of all columns and about ``_CHUNK`` elements each."""
    before, columns, behind = arrays[0].shape
    long = max(1, min(behind, _CHUNK // max(1, columns)))
    wide = max(1, _CHUNK // (max(1, columns) * long))
    for first, start in itertools.product(range(0, before, wide), range(0, behind, long)):
        yield tuple(array[first : first + wide, :, start : start + long] for array in arrays)


def parts_path(reference: Path) -> Path:
    """Where the parts of the outputs in a reference file are: beside it; held-out samples count in scales of theirs."""
    return reference.with_name(f"held_out_{PARTS_JSON}" if reference.name.startswith("held_out") else PARTS_JSON)


def save_parts(path: Path, parts: Mapping[str, OutputParts]) -> None:
    """Write the JSON file that ``load_parts`` reads."""
    write_json(path, {"outputs": encode(parts)})


def load_parts(path: Path) -> dict[str, OutputParts] | None:
    """What ``save_parts`` wrote; None where there is nothing that can be read."""
    try:
        return {name: OutputParts.from_json(part) for name, part in read_json(path)["outputs"].items()}
    except READ_ERRORS:
        return None
