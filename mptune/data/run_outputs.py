"""What a run keeps of its outputs: sketches for the page, and the arrays that ``infer.py --check`` reads.

``RUN/outputs.json`` says what the outputs of the front's plans look like beside the reference, on held-out samples.
``collect_outputs`` makes it, every key always there; the functions above it make its parts. A plan is there if it
was run on the held-out samples, and this is its front; the chosen one comes first.

``chosen/check.npz`` holds samples, reference outputs, and the error that the check must find. Its member ``header`` is
JSON in UTF-8 bytes (``collect_check`` has its keys, which are always there), non-finite numbers as in
``mptune.json_form``. ``input_RUN_K`` is input K of a run, ``reference_SAMPLE_K`` output K of a sample; a sample has
``steps`` runs.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from mptune.data.archive import read_samples
from mptune.data.metrics.accuracy import UNMATCHED, OutputError
from mptune.data.metrics.parts import WORST_PART, OutputParts, belongs_to, columns_of_part, load_parts, parts_path
from mptune.data.metrics.row_sets import Dependent, RowSet, aligned_rows, find_row_sets
from mptune.data.samples import Rollout
from mptune.errors import DataError
from mptune.files import READ_ERRORS, read_json, write_text
from mptune.json_form import encode, encode_float

Outputs = Mapping[str, np.ndarray]
Source = Literal["measured", "emulated"]
Sketch: TypeAlias = dict[str, Any]  # JSON; see the module

FORMAT = 1  # of either file
MOST_BYTES = 1_000_000  # of outputs.json
MOST_OUTPUTS, MOST_MAPS = 12, 4  # of a plan, those with the largest errors
MOST_PARTS, WORST_SAMPLES = 8, 3  # of an output; of a part
MOST_VALUES = 1 << 17  # of a part that a histogram counts
BINS = 64  # of histograms; the differences' have one less, so that 0 lies in the middle of one
GRID = 64  # rows and columns of an error map and of a picture, at most
SMALLEST_IMAGE = 8  # height and width from which an output is like an image
_LARGEST = 1e300  # ranges end here, so that their width is finite

MOST_SAMPLES = 8  # of check.npz
MOST_CHECK_BYTES, LARGEST_SAMPLE = 16 << 20, 64 << 20  # of inputs and references together; of a single sample
_PLAIN = ("relative_l2", "max_abs")  # statistics that are checked beside ``worst_part``


def sketch_outputs(
    outputs: Sequence[Outputs],
    reference: Sequence[Outputs],
    error: OutputError,
    metric: str,
    parts: Mapping[str, OutputParts],
    row_sets: Sequence[RowSet] = (),
) -> dict[str, Sketch]:
    """The sketches of the outputs with the largest errors under the run's metric, the worst first."""
    errors: dict[str, list[tuple[str, tuple[float, ...]]]] = {}  # of the parts of each output, the worst first
    for name in reference[0] if reference else ():
        statistics = error.per_output.get(name, {})
        shown = metric if any(belongs_to(each, metric) for each in statistics) else WORST_PART
        of_parts = [(each, values) for each, values in statistics.items() if belongs_to(each, shown)]
        if of_parts and all(name in sample for sample in (*outputs, *reference)):
            errors[name] = sorted(of_parts, key=lambda part: -_badness(*part[1]))
    samples = list(zip(outputs, reference, strict=True))
    aligned = [aligned_rows(row_sets, *sample, parts) for sample in samples]
    sketches: dict[str, Sketch] = {}
    maps = 0
    for name in sorted(errors, key=lambda name: -_badness(*errors[name][0][1]))[:MOST_OUTPUTS]:
        # The plan's values and the reference's on each sample, where they can be compared value by value.
        rows_of = [rows[name] for rows in aligned if name in rows]
        pairs = [(rows.output, rows.reference) for rows in rows_of]
        pairs = pairs or [(np.asarray(got[name]), np.asarray(wanted[name])) for got, wanted in samples]
        is_comparable = all(a.shape == b.shape and {a.dtype.kind, b.dtype.kind} <= {*"fiub"} for a, b in pairs)
        if len(pairs) < len(samples) or not is_comparable:
            continue
        as_rows = any(rows.pairs is not None for rows in rows_of)
        error_map = None if as_rows or maps == MOST_MAPS else _error_map(pairs, errors[name][0][1])
        maps += error_map is not None
        columns = None if as_rows else parts.get(name)
        sketches[name] = {
            "shape": list(np.shape(reference[0][name])),
            "as_rows": as_rows,
            "parts": [_part(pairs, columns, *each) for each in errors[name][:MOST_PARTS]],
            "part_count": len(errors[name]),
            "error_map": error_map,
            "picture": None if error_map is None else _picture(*pairs[0]),
        }
    return sketches


def _badness(*values: float) -> float:
    """For sorting: NaN is worst."""
    total = float(sum(values))
    return math.inf if math.isnan(total) else total


def _part(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], parts: OutputParts | None, statistic: str, errors: Sequence[float]
) -> dict[str, Any]:
    """One part of an output, from its statistic and its error on each sample; every ``every``-th value is counted."""
    columns = columns_of_part(statistic)
    if columns and parts and parts.axis is not None and all(parts.fits(wanted.shape) for _, wanted in pairs):
        place = (slice(None),) * parts.axis + (slice(columns[0], columns[-1] + 1),)
        pairs = [(got[place], wanted[place]) for got, wanted in pairs]
    every = max(1, math.ceil(sum(wanted.size for _, wanted in pairs) / MOST_VALUES))
    while every > 1 and any(math.gcd(every, length) > 1 for length in pairs[0][1].shape if length > 1):
        every += 1  # a step that divides a dimension would see some columns only
    # ``flat`` copies no column of a large output whole.
    got, wanted = (np.concatenate([pair[k].flat[::every].astype(np.float64) for pair in pairs]) for k in (0, 1))
    with np.errstate(all="ignore"):
        differences = np.subtract(got, wanted)[np.isfinite(wanted)]
    low, high = _ends(wanted)
    if high - low <= BINS * np.finfo(np.float64).eps * max(abs(low), abs(high)):  # a constant
        margin = 0.5 * abs(low) or 0.5
        low, high = low - margin, high + margin
    around = max(map(abs, _ends(differences)))
    worst = sorted(range(len(errors)), key=lambda k: -_badness(errors[k]))[:WORST_SAMPLES]
    return {
        "statistic": statistic,
        "columns": None if columns is None else list(columns),
        "error": encode_float(float(sum(errors)) / len(errors)),
        "worst_samples": [[k, encode_float(errors[k])] for k in worst],
        "reference": _histogram(wanted, low, high, BINS),
        "plan": _histogram(got, low, high, BINS),
        "difference": _histogram(differences, -around, around, BINS - 1 if around else 1),
        "every": every,
    }


def _ends(values: np.ndarray) -> tuple[float, float]:
    finite = np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST)
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _histogram(values: np.ndarray, low: float, high: float, bins: int) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    return {
        "range": [low, high],
        "counts": np.histogram(finite, bins, (low, high))[0].tolist(),
        "below": int(np.count_nonzero(finite < low)),
        "above": int(np.count_nonzero(finite > high)),
        "non_finite": int(values.size - finite.size),
    }


def _error_map(pairs: Sequence[tuple[np.ndarray, np.ndarray]], errors: Sequence[float]) -> dict[str, Any] | None:
    """The largest difference in each cell of a grid, on the worst sample; None where an output is not like an image.

    ``scale`` is the difference of the highest level; ``levels`` are bytes of the grid, as Base64.
    """
    sample = max(range(len(errors)), key=lambda k: _badness(errors[k]))
    got, wanted = pairs[sample]
    # 0 where the reference is not finite, inf where only the output is not.
    with np.errstate(all="ignore"):
        apart = np.asarray(np.abs(np.subtract(got, wanted, dtype=np.float64)))
    apart[np.isnan(apart)] = np.inf
    apart[~np.isfinite(wanted)] = 0.0
    if apart.ndim == 4 and apart.shape[3] <= 4:
        apart = np.moveaxis(apart, 3, 1)  # channels last
    if apart.ndim < 3 or min(apart.shape[-2:]) < SMALLEST_IMAGE or not apart.size:
        return None
    apart = apart.max(axis=tuple(range(apart.ndim - 2)))
    scale = float(np.where(np.isfinite(apart), apart, 0.0).max())
    cells = apart
    for axis, length in enumerate(apart.shape):
        starts = np.arange(min(GRID, length)) * length // min(GRID, length)
        cells = np.maximum.reduceat(cells, starts, axis=axis)
    shares = np.where(np.isfinite(cells), cells / scale if scale else 0.0, 1.0)
    levels = np.ceil(np.minimum(shares, 1.0) * 255).astype(np.uint8)
    text = base64.b64encode(levels.tobytes()).decode("ascii")
    return {"sample": sample, "size": list(apart.shape), "scale": scale, "grid": list(levels.shape), "levels": text}


def _picture(got: np.ndarray, wanted: np.ndarray) -> dict[str, str] | None:
    """The first row of an output and its reference as PNG files in Base64; None where they have not 1 or 3 channels.

    Black to white is the range of the reference, and red is what is not finite. Large pictures keep every n-th pixel.
    """
    channels = next((axis for axis in (1, 3) if wanted.ndim == 4 and wanted.shape[axis] in (1, 3)), None)
    if channels is None:
        return None
    low, high = _ends(wanted.astype(np.float64))
    files = {}
    for name, array in (("reference", wanted), ("plan", got)):
        values = np.moveaxis(array, channels, 3)[0].astype(np.float64)
        values = values[:: math.ceil(values.shape[0] / GRID), :: math.ceil(values.shape[1] / GRID)]
        finite = np.isfinite(values)
        shares = (np.where(finite, values, low).clip(low, high) - low) / ((high - low) or 1.0)
        pixels = np.repeat(255 * shares, 3 // values.shape[2], axis=2).astype(np.uint8)
        pixels[~finite.all(axis=2)] = (214, 40, 30)
        # Each line of a PNG begins with its filter: none.
        lines = np.pad(pixels.reshape(len(pixels), -1), ((0, 0), (1, 0))).tobytes()
        header = struct.pack(">IIBBBBB", pixels.shape[1], len(pixels), 8, 2, 0, 0, 0)  # 8 bits, RGB
        file = b"\x89PNG\r\n\x1a\n"
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
            file += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        files[name] = base64.b64encode(file).decode("ascii")
    return files


def write_outputs(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``outputs.json``, or the sketches of one plan for it, whole or not at all, and the directory above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _text(document) + "\n")


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def collect_outputs(
    plans: Iterable[tuple[str, Source]],
    folder: Path,
    metric: str,
    indices: Sequence[int] = (),
    unit: Literal["sample", "sequence"] = "sample",
) -> dict[str, Any]:
    """The document of ``outputs.json``, from the sketches that jobs have left in ``FINGERPRINT.json``.

    A job leaves ``{"metric": NAME, "samples": COUNT, "outputs": {OUTPUT: SKETCH}}``. ``plans`` are fingerprints with
    the source of the error, the most important first. What is not there or damaged is passed over, and plans that do
    not fit are left out. ``indices`` are those of the held-out samples in the user's data, where known, or of the
    samples with which sequences begin.
    """
    entries: dict[str, dict[str, Any]] = {}
    count = 0
    for fingerprint, source in plans:
        try:
            sketched: Any = read_json(folder / f"{fingerprint}.json")
            samples, outputs = int(sketched["samples"]), dict(sketched["outputs"])
            is_same = sketched["metric"] == metric
        except READ_ERRORS:
            continue
        if is_same and outputs and fingerprint not in entries:
            count, entries[fingerprint] = samples, {"source": source, "outputs": outputs}
    document: dict[str, Any] = {"format": FORMAT, "metric": metric, "unit": unit, "count": count}
    # What the samples are called: by their indices in the user's data, where known.
    names = [f"sequence from sample {index}" if unit == "sequence" else f"sample {index}" for index in indices]
    names += [f"held-out {unit} {number}" for number in range(len(names), count)]
    document |= {"indices": list(indices), "samples": names, "plans": {}, "left_out": list(entries)}
    room = MOST_BYTES - len(_text(document).encode())
    for fingerprint, entry in entries.items():
        size = len(_text({fingerprint: entry}).encode())
        if size <= room:
            room -= size
            document["plans"][fingerprint] = entry
            document["left_out"].remove(fingerprint)
    return document


def collect_check(
    data: Path,
    error: OutputError,
    which: Literal["search", "held_out"],
    report: Mapping[str, str | None],
    ignored: Sequence[str] = (),
    rollout: Rollout | None = None,
    selected: Dependent = (),
) -> dict[str, np.ndarray] | None:
    """The arrays of ``check.npz``: the first few samples of a set, with the error of one plan on them.

    ``report`` goes into the header as it is: ``plan``, ``metric``, ``source`` ("measured" or "emulated"), ``engine``,
    and ``provider`` ("cpu" or "cuda" where ONNX Runtime measured). None where the samples are gone or too large, or no
    output can be compared value by value.
    """
    reference = data / f"{which}_reference.npz"
    steps, most = 1 if rollout is None else rollout.steps, min(MOST_SAMPLES, error.sample_count)
    try:
        inputs, references = read_samples(data / f"{which}.npz", most * steps), read_samples(reference, most)
    except DataError:
        return None
    feeds = ((outputs, *inputs[k * steps : (k + 1) * steps]) for k, outputs in enumerate(references))
    total_bytes = itertools.accumulate(sum(a.nbytes for feed in sample for a in feed.values()) for sample in feeds)
    count = sum(size <= (MOST_CHECK_BYTES if k else LARGEST_SAMPLE) for k, size in enumerate(total_bytes))
    inputs, references = inputs[: count * steps], references[:count]
    compared = [name for name in references[0] if name not in ignored] if inputs else []
    # Value by value: no sets of rows, and numbers on every sample.
    names = [n for n in compared if "relative_l2" in (by := error.per_output.get(n, {})) and UNMATCHED not in by]
    row_sets = find_row_sets(selected, read_samples(reference)) if selected else ()
    for rows in row_sets:  # paired by all outputs of one selection together
        names = [name for name in names if name not in rows.names or {*rows.names} <= {*names}]
    if not names:
        return None
    parts, first = load_parts(parts_path(reference)) or {}, error.of_first(count)
    counted, overall = OutputError({name: first.per_output[name] for name in names}), error.without(ignored)

    def output(name: str) -> dict[str, Any]:
        """The mean of each statistic that is checked, and where its part lies."""
        places, errors, part = dict[str, Any](), first.per_output[name], parts.get(name)
        for statistic in errors:
            if part is not None and belongs_to(statistic, WORST_PART):
                axis, start, stop, scales = None, 0, 0, [part.whole or 1.0]
                if columns := columns_of_part(statistic):
                    axis, start, stop = part.axis, columns[0], columns[-1] + 1
                    scales = part.divisors[start:stop].tolist()
                places[statistic] = encode({"axis": axis, "start": start, "stop": stop, "scales": scales})
        checked = {statistic: values for statistic, values in errors.items() if statistic in (*_PLAIN, *places)}
        figures = {statistic: encode_float(sum(values) / len(values)) for statistic, values in checked.items()}
        return {"name": name, "figures": figures, "parts": places}

    metric = str(report["metric"])
    is_own = metric in _PLAIN or (metric == WORST_PART and all(name in parts for name in names))
    header = {
        "format": FORMAT,
        **report,
        "set": which.replace("_", "-"),
        "samples": count,
        "of": error.sample_count,
        "figure": encode_float(counted.value(metric)) if is_own and counted.has(metric) else None,  # on these samples
        "reported": encode_float(overall.value(metric)) if overall.has(metric) else None,  # on the whole set
        "unchecked": [name for name in compared if name not in names],
        "inputs": list(inputs[0]),
        "feedback": [] if rollout is None else [list(pair) for pair in rollout.pairs],
        "steps": steps,
        "checkpoints": [] if rollout is None else list(rollout.checkpoints),
        "outputs": [output(name) for name in names],
        "selections": [rows.form(references[0], parts) for rows in row_sets if {*rows.names} <= {*names}],
    }
    arrays = {"header": np.frombuffer(json.dumps(header, allow_nan=False).encode(), np.uint8)}
    arrays |= {f"input_{n}_{k}": feed[name] for n, feed in enumerate(inputs) for k, name in enumerate(inputs[0])}
    arrays |= {f"reference_{n}_{k}": each[name] for n, each in enumerate(references) for k, name in enumerate(names)}
    return arrays
