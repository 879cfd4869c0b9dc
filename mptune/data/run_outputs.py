"""``RUN/outputs.json``: what the outputs of the front's plans look like beside the reference, on held-out samples.

The file, every key always there::

    {"format": 1, "metric": NAME, "unit": "sample" | "sequence", "count": held-out samples,
     "indices": [which of the user's samples these are], "names": [their file names] or null,
     "plans": {fingerprint: {"source": "measured" | "emulated", "outputs": {name: SKETCH, the worst first}}},
     "left_out": [fingerprints whose sketches did not fit into the file]}

``SKETCH`` is that of ``mptune.data.run_outputs``. The chosen plan comes first. A plan is there if it was run on the
held-out samples, and this is its front. The file holds at most ``MOST_BYTES``.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.data.metrics.parts import WORST_PART, OutputParts, belongs_to, columns_of_part
from mptune.data.metrics.row_sets import RowSet, aligned_rows
from mptune.files import READ_ERRORS, read_json, write_text
from mptune.json_form import encode_float

Outputs = Mapping[str, np.ndarray]

Floats = NDArray[np.float64]

Sketch: TypeAlias = dict[str, Any]
"""JSON; see the module."""


HIGHEST_LEVEL = 255
"""An error map holds this many steps above 0."""

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
) -> dict[str, Sketch]:
    """The sketches of the outputs with the largest errors under the run's metric, the worst first."""
    ranked = []
    for name in reference[0] if reference else ():
        statistics = _part_errors(error, name, metric)
        if statistics and all(name in got and name in wanted for got, wanted in zip(outputs, reference, strict=True)):
            ranked.append((_badness(*statistics[0][1]), name, statistics))
    ranked.sort(key=lambda entry: -entry[0])
    sketches: dict[str, Sketch] = {}
    maps = 0
    for _, name, statistics in ranked[:MOST_OUTPUTS]:
        rows = [each for each in row_sets if name in each.names]
        pairs = _pairs(name, outputs, reference, rows)
        if pairs is None:
            continue
        columns = None if rows else parts.get(name)
        error_map = None if rows or maps == MOST_MAPS else _error_map(pairs, statistics[0][1])
        maps += error_map is not None
        sketches[name] = {
            "shape": list(np.shape(reference[0][name])),
            "as_rows": bool(rows),
            "parts": [_part_sketch(pairs, columns, bool(rows), *each) for each in statistics[:MOST_PARTS]],
            "part_count": len(statistics),
            "error_map": error_map,
        }
    return sketches


def _pairs(
    name: str, outputs: Sequence[Outputs], reference: Sequence[Outputs], rows: Sequence[RowSet]
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """The plan's values and the reference's on each sample; None where they cannot be compared value by value."""
    pairs = []
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
        pairs.append((got, wanted))
    return pairs


def save_sketches(path: Path, metric: str, samples: int, outputs: Mapping[str, Sketch]) -> None:
    """Write the JSON file that ``load_sketches`` reads, and the directory above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"metric": metric, "samples": samples, "outputs": outputs}
    write_text(path, json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")


def load_sketches(path: Path, metric: str) -> tuple[int, dict[str, Sketch]] | None:
    """How many samples there were, and the sketches; None where there are none of this metric, or none readable."""
    try:
        document: Any = read_json(path)
        return (int(document["samples"]), dict(document["outputs"])) if document["metric"] == metric else None
    except READ_ERRORS:
        return None


def _part_errors(error: OutputError, name: str, metric: str) -> list[tuple[str, tuple[float, ...]]]:
    """Statistic, and error on each sample, of the parts of an output, the worst first."""
    statistics = {} if name == ALL_OUTPUTS else error.per_output.get(name, {})
    wanted = metric if any(belongs_to(each, metric) for each in statistics) else WORST_PART
    errors = [(each, values) for each, values in statistics.items() if belongs_to(each, wanted)]
    return sorted(errors, key=lambda entry: -_badness(*entry[1]))


def _badness(*values: float) -> float:
    """For sorting: NaN is worst."""
    total = float(sum(values))
    return math.inf if math.isnan(total) else total


def _part_sketch(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    parts: OutputParts | None,
    as_rows: bool,
    statistic: str,
    errors: Sequence[float],
) -> dict[str, Any]:
    """``pairs`` are the plan's values and the reference's on each sample, of the same shape."""
    columns = columns_of_part(statistic)
    views = [(_columns(got, columns, parts), _columns(wanted, columns, parts)) for got, wanted in pairs]
    got, wanted, every = _values(views)
    worst = sorted(range(len(errors)), key=lambda k: -_badness(errors[k]))[:WORST_SAMPLES]
    largest = _largest(views)
    if largest is not None and as_rows:
        largest["index"] = None
    elif largest is not None and columns and parts and parts.axis is not None and views[0][1] is not pairs[0][1]:
        largest["index"][parts.axis] += columns[0]
    with np.errstate(all="ignore"):
        apart = np.subtract(got, wanted)[np.isfinite(wanted)]
    edges = _range_of(wanted, is_whole=all(array.dtype.kind in "iub" for array in pairs[0]))
    return {
        "statistic": statistic,
        "columns": None if columns is None else list(columns),
        "error": encode_float(float(sum(errors)) / len(errors)),
        "worst_samples": [[k, encode_float(errors[k])] for k in worst],
        "reference": _histogram(wanted, *edges),
        "plan": _histogram(got, *edges),
        "difference": _histogram(apart, *_range_around_zero(apart)),
        "every": every,
        "largest": largest,
    }


def _columns(array: np.ndarray, columns: Sequence[int] | None, parts: OutputParts | None) -> np.ndarray:
    """A view of the part of an array; all of it where it has no such columns."""
    if columns is None or parts is None or parts.axis is None or not parts.fits(array.shape):
        return array
    return array[(slice(None),) * parts.axis + (slice(columns[0], columns[-1] + 1),)]


def _largest(views: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any] | None:
    """The largest absolute difference on any sample, one of which is widened to float64 at a time."""
    largest, most = None, -1.0
    for number, (got, wanted) in enumerate(views):
        apart = _apart(got, wanted)
        if apart.size and apart.max() > most:
            place = np.unravel_index(int(apart.argmax()), apart.shape)
            most = float(apart[place])
            value, reference = encode_float(most), encode_float(float(wanted[place]))
            largest = {"value": value, "reference": reference, "sample": number, "index": [int(k) for k in place]}
    return largest


def _values(views: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[Floats, Floats, int]:
    """Every so many-th value on all samples, as float64: of the plan and of the reference."""
    every = max(1, math.ceil(sum(wanted.size for _, wanted in views) / MOST_VALUES))
    while every > 1 and any(math.gcd(every, length) > 1 for length in views[0][1].shape if length > 1):
        every += 1  # a step that divides a dimension would see some columns only
    # ``flat`` copies no column of a large output whole.
    values = [[np.asarray(array.flat[::every]).astype(np.float64) for array in pair] for pair in views]
    got, wanted = (np.concatenate([np.zeros(0), *arrays]) for arrays in zip(*values, strict=True))
    return got, wanted, every


def _error_map(pairs: Sequence[tuple[np.ndarray, np.ndarray]], errors: Sequence[float]) -> dict[str, Any] | None:
    sample = max(range(len(errors)), key=lambda k: _badness(errors[k]))
    apart = _image(_apart(*pairs[sample]))
    if apart is None:
        return None
    scale = float(np.where(np.isfinite(apart), apart, 0.0).max())
    cells = apart
    for axis, length in enumerate(apart.shape):
        starts = np.arange(min(GRID, length)) * length // min(GRID, length)
        cells = np.maximum.reduceat(cells, starts, axis=axis)
    shares = np.where(np.isfinite(cells), cells / scale if scale else 0.0, 1.0)
    levels = np.ceil(np.minimum(shares, 1.0) * HIGHEST_LEVEL).astype(np.uint8)
    text = base64.b64encode(levels.tobytes()).decode("ascii")
    return {"sample": sample, "size": list(apart.shape), "scale": scale, "grid": list(levels.shape), "levels": text}


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


def _range_of(values: Floats, *, is_whole: bool) -> tuple[float, float, int]:
    """Edges and number of bins for values, far ones left outside; whole numbers have a bin each where they are few."""
    low, high = _ends(values)
    if is_whole and high - low < BINS and max(abs(low), abs(high)) < 2**52:
        return low - 0.5, high + 0.5, int(high - low) + 1
    if high - low <= BINS * np.finfo(np.float64).eps * max(abs(low), abs(high)):
        margin = 0.5 * abs(low) or 0.5
        return low - margin, high + margin, BINS
    return low, high, BINS


def _range_around_zero(values: Floats) -> tuple[float, float, int]:
    """As ``_range_of``, with 0 in the middle of a bin; one bin where all values are 0."""
    low, high = _ends(values)
    largest = max(abs(low), abs(high))
    return (-largest, largest, BINS - 1) if largest > 0 else (0.0, 0.0, 1)


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


def _histogram(values: Floats, low: float, high: float, bins: int) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    counts, _ = np.histogram(finite, bins, (low, high))
    return {
        "range": [low, high],
        "counts": counts.tolist(),
        "below": int(np.count_nonzero(finite < low)),
        "above": int(np.count_nonzero(finite > high)),
        "non_finite": int(values.size - finite.size),
    }


Source = Literal["measured", "emulated"]

FORMAT = 1

HELD_OUT_NAMES_JSON = "held_out_names.json"
"""In the run's data directory: the file names of the held-out samples, where each was a file."""

MOST_BYTES = 1_000_000
"""Of the file."""


@dataclass(frozen=True)
class RunOutputs:
    """The content of ``outputs.json``.

    Attributes:
        plans: fingerprint -> source of its error, and sketch of each output; the most important plan first.
        indices: which of the user's samples the held-out ones are, 0-based; of sequences where each begins. Empty
            where not known.
        names: their file names, where the user gave a folder that is still there; else empty.
    """

    metric: str
    count: int
    plans: Mapping[str, tuple[Source, Mapping[str, Sketch]]] = field(default_factory=dict)
    indices: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    unit: Literal["sample", "sequence"] = "sample"

    def sample(self, number: int) -> str:
        """What a held-out sample is called: its file's name, else by its index in the user's data."""
        if number < len(self.names):
            return self.names[number]
        if number >= len(self.indices):
            return f"held-out {self.unit} {number}"
        return f"{'sequence from ' if self.unit == 'sequence' else ''}sample {self.indices[number]}"

    @classmethod
    def of_plans(cls, plans: Iterable[tuple[str, Source]], folder: Path, metric: str) -> RunOutputs:
        """The sketches that jobs have left in ``FINGERPRINT.json``, of fingerprints and the sources of their errors.

        What is not there, damaged or of another metric is passed over.
        """
        by_plan: dict[str, tuple[Source, Mapping[str, Sketch]]] = {}
        count = 0
        for fingerprint, source in plans:
            kept = None if fingerprint in by_plan else load_sketches(folder / f"{fingerprint}.json", metric)
            if kept is not None and kept[1]:
                count = kept[0]
                by_plan[fingerprint] = source, kept[1]
        return cls(metric, count, by_plan)

    def to_json(self) -> dict[str, Any]:
        """The document, as long as it may be: of plans that do not fit the maps are left out, then all."""
        left_out: list[str] = []
        plans: dict[str, Any] = {}
        document = {
            "format": FORMAT,
            "metric": self.metric,
            "unit": self.unit,
            "count": self.count,
            "indices": list(self.indices),
            "names": list(self.names) or None,
            "plans": plans,
            "left_out": left_out,
        }
        room = MOST_BYTES - len(_text(document)) - sum(len(name) + 4 for name in self.plans)
        for fingerprint, (source, sketches) in self.plans.items():
            without_maps = {name: {**sketch, "error_map": None} for name, sketch in sketches.items()}
            for outputs in (sketches, without_maps):
                entry = {"source": source, "outputs": outputs}
                size = len(_text({fingerprint: entry}))
                if size <= room:
                    room -= size
                    plans[fingerprint] = entry
                    break
            else:
                left_out.append(fingerprint)
        return document


def write_run_outputs(path: Path, outputs: RunOutputs) -> None:
    """Write ``outputs.json``, whole or not at all."""
    write_text(path, _text(outputs.to_json()).decode("utf-8") + "\n")


def read_names(path: Path) -> tuple[str, ...]:
    """The names in ``HELD_OUT_NAMES_JSON``; empty where there are none."""
    try:
        names: Any = read_json(path)
    except (OSError, ValueError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode("utf-8")
