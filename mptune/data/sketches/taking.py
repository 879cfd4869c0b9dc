"""Takes the sketches of one plan's outputs (``mptune.data.sketches.sketch``), sample by sample."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import ALL_OUTPUTS, METRICS, OutputError
from mptune.data.metrics.parts import WORST_PART, OutputParts, belongs_to, columns_of_part
from mptune.data.metrics.row_sets import RowSet, aligned_rows
from mptune.data.sketches.sketch import (
    HIGHEST_LEVEL,
    ErrorMap,
    Histogram,
    LargestDifference,
    OutputSketch,
    PartSketch,
    sketches_from_json,
    sketches_to_json,
)
from mptune.files import write_text

Outputs = Mapping[str, np.ndarray]
Floats = NDArray[np.float64]
PartErrors = tuple[str, tuple[float, ...]]
"""The statistic of a part, and its value on each sample."""

FORMAT = 1

BINS = 64
"""Of histograms; the differences' have one less, so that 0 lies in the middle of one."""

WORST_SAMPLES = 3
MOST_PARTS = 8
"""Of an output that are sketched."""

MOST_OUTPUTS, MOST_MAPS = 12, 4
"""Of a plan that are sketched: those with the largest errors."""

MOST_VALUES = 1 << 17
"""Of a part that a histogram counts."""

GRID = 64
"""Rows and columns of an error map, at most."""

SMALLEST_IMAGE = 8
"""Height and width from which an output is like an image."""

_TAIL, _FAR = 1e-3, 8.0
"""Where the values beyond these tails stretch the range more than so many times, they are counted outside of it."""

_LARGEST = 1e300
"""Ranges end here, so that their width is finite."""


def sketch_outputs(
    outputs: Sequence[Outputs],
    reference: Sequence[Outputs],
    error: OutputError,
    metric: str,
    parts: Mapping[str, OutputParts],
    row_sets: Sequence[RowSet] = (),
) -> dict[str, OutputSketch]:
    """The sketches of the outputs with the largest errors, the worst first.

    One sample of one output is widened to float64 at a time.

    Args:
        outputs: of each sample.
        reference: of the same samples.
        error: of these outputs.
        metric: the run's.
        parts: of the outputs.
        row_sets: outputs that are compared as sets of rows.
    """
    ranked = []
    for name in reference[0] if reference else ():
        statistics = _part_errors(error, name, metric)
        if statistics and all(name in got and name in wanted for got, wanted in zip(outputs, reference, strict=True)):
            ranked.append((_badness(statistics[0][1]), name, statistics))
    ranked.sort(key=lambda entry: -entry[0])
    found: dict[str, OutputSketch] = {}
    maps = 0
    for _, name, statistics in ranked[:MOST_OUTPUTS]:
        rows = [each for each in row_sets if name in each.names]
        pairs = _pairs(name, outputs, reference, rows)
        if pairs is None:
            continue
        sketcher = _OutputSketcher(name, pairs, None if rows else parts.get(name))
        shape = np.shape(reference[0][name])
        found[name] = sketcher.sketch(statistics, shape, as_rows=bool(rows), with_map=maps < MOST_MAPS)
        maps += found[name].error_map is not None
    return found


def _pairs(
    name: str, outputs: Sequence[Outputs], reference: Sequence[Outputs], rows: Sequence[RowSet]
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """The plan's values and the reference's on each sample; None where they cannot be compared value by value."""
    found = []
    for all_got, all_wanted in zip(outputs, reference, strict=True):
        got, wanted = np.asarray(all_got[name]), np.asarray(all_wanted[name])
        if got.dtype.kind not in "fiub" or wanted.dtype.kind not in "fiub":
            return None
        if rows:
            aligned = aligned_rows(rows, all_got, all_wanted)
            if name not in aligned:
                return None
            got, wanted = aligned[name].output, aligned[name].reference
        if got.shape != wanted.shape:
            return None
        found.append((got, wanted))
    return found


def save_sketches(path: Path, metric: str, samples: int, outputs: Mapping[str, OutputSketch]) -> None:
    """Write the JSON file that ``load_sketches`` reads, and the directory above it.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, "metric": metric, "samples": samples, "outputs": sketches_to_json(outputs)}
    write_text(path, json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")


def load_sketches(path: Path, metric: str) -> tuple[int, dict[str, OutputSketch]] | None:
    """How many samples there were, and the sketches; None where there are none of this metric, or none readable."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT or document["metric"] != metric:
            return None
        return int(document["samples"]), sketches_from_json(document["outputs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _part_errors(error: OutputError, name: str, metric: str) -> list[PartErrors]:
    """Statistic and error on each sample of the parts of an output, the worst first."""
    statistics = error.per_output.get(name, {})
    if name == ALL_OUTPUTS:
        return []
    is_error = metric in METRICS and METRICS[metric].higher_is_worse
    wanted = metric if is_error and any(belongs_to(each, metric) for each in statistics) else WORST_PART
    found = [(each, values) for each, values in statistics.items() if belongs_to(each, wanted)]
    return sorted(found, key=lambda entry: -_badness(entry[1]))


def _badness(values: Sequence[float]) -> float:
    total = float(sum(values))
    return math.inf if math.isnan(total) else total


class _OutputSketcher:
    """Sketches one output."""

    def __init__(self, name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]], parts: OutputParts | None) -> None:
        """Take what is compared.

        Args:
            name: of the output.
            pairs: the plan's values and the reference's on each sample, of the same shape.
            parts: of the output; None where it is rows that were paired.
        """
        self._name = name
        self._pairs = pairs
        self._parts = parts

    def sketch(
        self,
        statistics: Sequence[PartErrors],
        shape: Sequence[int],
        *,
        as_rows: bool,
        with_map: bool,
    ) -> OutputSketch:
        """The sketch, of the worst parts."""
        chosen = statistics[:MOST_PARTS]
        largest: list[LargestDifference | None] = [None] * len(chosen)
        for number, (got, wanted) in enumerate(self._pairs):
            apart = _apart(got, wanted)
            for k, (statistic, _) in enumerate(chosen):
                largest[k] = self._larger(largest[k], apart, wanted, statistic, number)
        if as_rows:
            largest = [None if far is None else replace(far, index=None) for far in largest]
        sketches = tuple(
            self._part(statistic, errors, far) for (statistic, errors), far in zip(chosen, largest, strict=True)
        )
        error_map = self._map(statistics[0][1]) if with_map and not as_rows else None
        return OutputSketch(tuple(map(int, shape)), as_rows, sketches, len(statistics), error_map)

    def _columns(self, array: np.ndarray, statistic: str) -> tuple[np.ndarray, int | None, int]:
        """A view of the part of an array; its axis of columns, None where it is whole, and its first column."""
        columns, parts = columns_of_part(statistic), self._parts
        if columns is None or parts is None or parts.axis is None or not parts.fits(array.shape):
            return array, None, 0
        place = [slice(None)] * array.ndim
        place[parts.axis] = slice(columns[0], columns[-1] + 1)
        return array[tuple(place)], parts.axis, columns[0]

    def _larger(
        self, known: LargestDifference | None, apart: Floats, wanted: np.ndarray, statistic: str, number: int
    ) -> LargestDifference | None:
        view, axis, start = self._columns(apart, statistic)
        if not view.size:
            return known
        place = np.unravel_index(int(view.argmax()), view.shape)
        value = float(view[place])
        if known is not None and value <= known.value:
            return known
        index = tuple(int(k) + (start if at == axis else 0) for at, k in enumerate(place))
        return LargestDifference(value, float(wanted[index]), number, index)

    def _part(self, statistic: str, errors: Sequence[float], largest: LargestDifference | None) -> PartSketch:
        got, wanted, every = self._values(statistic)
        is_whole = all(array.dtype.kind in "iub" for array in self._pairs[0])
        order = sorted(range(len(errors)), key=lambda k: -_badness(errors[k : k + 1]))
        with np.errstate(all="ignore"):
            apart = np.subtract(got, wanted)[np.isfinite(wanted)]
        edges = _range_of(wanted, is_whole=is_whole)
        return PartSketch(
            statistic=statistic,
            error=float(sum(errors)) / len(errors),
            worst_samples=tuple((k, float(errors[k])) for k in order[:WORST_SAMPLES]),
            reference=_histogram(wanted, *edges),
            plan=_histogram(got, *edges),
            difference=_histogram(apart, *_range_around_zero(apart)),
            every=every,
            largest=largest,
        )

    def _values(self, statistic: str) -> tuple[Floats, Floats, int]:
        """Every so many-th value of the part on all samples, as float64: of the plan and of the reference."""
        views = [tuple(self._columns(array, statistic)[0] for array in pair) for pair in self._pairs]
        sizes = [wanted.size for _, wanted in views]
        every = max(1, math.ceil(sum(sizes) / MOST_VALUES))
        while every > 1 and any(math.gcd(every, length) > 1 for length in views[0][1].shape if length > 1):
            every += 1  # a step that divides a dimension would see some columns only
        taken = [[_every(array, every) for array in pair] for pair in views]
        empty = np.zeros(0)
        got, wanted = (np.concatenate([empty, *arrays]) for arrays in zip(*taken, strict=True))
        return got, wanted, every

    def _map(self, errors: Sequence[float]) -> ErrorMap | None:
        sample = max(range(len(errors)), key=lambda k: _badness(errors[k : k + 1]))
        apart = _image(_apart(*self._pairs[sample]))
        if apart is None:
            return None
        finite = np.where(np.isfinite(apart), apart, 0.0)
        scale = float(finite.max())
        cells = apart
        for axis in (0, 1):
            length = cells.shape[axis]
            starts = np.arange(min(GRID, length)) * length // min(GRID, length)
            cells = np.maximum.reduceat(cells, starts, axis=axis)
        shares = np.where(np.isfinite(cells), cells / scale if scale else 0.0, 1.0)
        levels = np.ceil(np.minimum(shares, 1.0) * HIGHEST_LEVEL).astype(np.uint8)
        return ErrorMap(sample, (apart.shape[0], apart.shape[1]), scale, levels)


def _apart(got: np.ndarray, wanted: np.ndarray) -> Floats:
    """Absolute differences; 0 where the reference is not finite, inf where only the output is not."""
    with np.errstate(all="ignore"):
        apart: Floats = np.empty(wanted.shape)
        np.subtract(got, wanted, out=apart, dtype=np.float64)
        np.abs(apart, out=apart)
    apart[np.isnan(apart)] = np.inf
    apart[~np.isfinite(wanted)] = 0.0
    return apart


def _image(array: Floats) -> Floats | None:
    """The largest value over all but height and width; None where the array is not like an image."""
    if array.ndim < 3 or not array.size:
        return None
    *_, height, width, channels = array.shape
    if array.ndim == 4 and channels <= 4 and min(height, width) >= SMALLEST_IMAGE:
        return np.asarray(array.max(axis=(0, 3)))
    if min(width, channels) < SMALLEST_IMAGE:
        return None
    return np.asarray(array.reshape(-1, width, channels).max(axis=0))


def _every(array: np.ndarray, step: int) -> Floats:
    """Every so many-th value, as float64; a column of a large output is not copied whole."""
    if step == 1:
        return array.astype(np.float64).ravel()
    return np.asarray(array.flat[::step]).astype(np.float64)


def _range_of(values: Floats, *, is_whole: bool) -> tuple[float, float, int]:
    """Edges and number of bins for values, far ones left outside; whole numbers have a bin each where they are few."""
    low, high = _ends(values)
    bins = _bins(values.size)
    if is_whole and high - low < BINS and max(abs(low), abs(high)) < 2**52:
        return low - 0.5, high + 0.5, int(high - low) + 1
    if high - low <= BINS * np.finfo(np.float64).eps * max(abs(low), abs(high)):
        margin = 0.5 * abs(low) or 0.5
        return low - margin, high + margin, bins
    return low, high, bins


def _bins(count: int) -> int:
    """Fewer than ``BINS``, an even number, where so few values would leave most of them empty."""
    return min(BINS, max(8, 2 * math.isqrt(count)))


def _range_around_zero(values: Floats) -> tuple[float, float, int]:
    """As ``_range_of``, with 0 in the middle of a bin; one bin where all values are 0."""
    low, high = _ends(values)
    largest = max(abs(low), abs(high))
    return (-largest, largest, _bins(values.size) - 1) if largest > 0 else (0.0, 0.0, 1)


def _ends(values: Floats) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 0.0
    finite = np.clip(finite, -_LARGEST, _LARGEST)
    low, high = float(finite.min()), float(finite.max())
    cut = int(finite.size * _TAIL)
    if cut:
        inner = np.partition(finite, (cut, finite.size - 1 - cut))
        near, far = float(inner[cut]), float(inner[-1 - cut])
        if far > near and high - low > _FAR * (far - near):
            margin = (far - near) / 2
            return max(low, near - margin), min(high, far + margin)
    return low, high


def _histogram(values: Floats, low: float, high: float, bins: int) -> Histogram:
    finite = values[np.isfinite(values)]
    inside = finite[(finite >= low) & (finite <= high)]
    width = high - low
    places = ((inside - low) / width * bins).astype(np.intp) if width > 0 else np.zeros(inside.size, np.intp)
    counts = np.bincount(np.minimum(places, bins - 1), minlength=bins)
    below, above = int(np.count_nonzero(finite < low)), int(np.count_nonzero(finite > high))
    return Histogram(low, high, tuple(map(int, counts)), below, above, int(values.size - finite.size))
