"""Calibration samples: what users give, checked against the model's inputs and cut into one feed per sample.

Three forms of data in files (``mptune.data.in_memory`` has those in memory):

* ``.npz``: one array per input, by name, samples concatenated along axis 0. A sample takes B rows of an input whose
  first dimension is fixed at B, and ``--batch`` rows of one whose first dimension is symbolic or unknown.
* ``.npy``: the same for a model with one input.
* a folder: one ``.npz`` per sample (or one ``.npy``, for a model with one input), in natural order of the file names;
  each file is one whole feed and its shapes may differ from file to file.

An input repeats for every sample where its array is exactly one sample: a scalar for a scalar input, or as many rows
as one sample takes while other inputs have more. A scalar input also takes a vector of one value per sample.
Nothing is ever cast, cropped or padded: what does not fit is an error that names the cure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mptune.data.archive import (
    read_archive,
    read_array,
    read_outputs,
    read_samples,
    save_outputs,
    save_samples,
)
from mptune.data.checks import (
    check_agreement,
    check_names,
    check_sample_shape,
    check_values,
    shape_text,
    split_rows,
)
from mptune.data.in_memory import SOURCE as ARRAYS_SOURCE
from mptune.data.in_memory import arrays_of
from mptune.data.plausibility import data_findings
from mptune.errors import DataError
from mptune.finding import CODES, Finding, Where
from mptune.settings import DataSettings, InMemory

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

__all__ = ["CalibrationSet", "load_calibration", "read_outputs", "read_samples", "save_outputs", "save_samples"]

RANDOM_SOURCE = "random inputs"
_FORMS = "mptune reads .npz, .npy, or a folder with one .npz or .npy per sample"


@dataclass(frozen=True)
class CalibrationSet:
    """Checked samples.

    Attributes:
        samples: one feed per sample: every graph input by name, in the model's types and shapes.
        source: what to call it: the file's name, or ``random inputs``.
        is_random: drawn, not given.
        warnings: that have no code, one line each; they stay with the run.
        findings: about the samples; they stay with the run, too.
        indices: index in the data of each sample, 0-based, where these are a part of them; empty where they are all.
    """

    samples: tuple[Mapping[str, np.ndarray], ...]
    source: str
    is_random: bool
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    indices: tuple[int, ...] = ()

    def split(
        self, seed: int, held_out_fraction: float, max_search: int | None
    ) -> tuple[CalibrationSet, CalibrationSet]:
        """Split the samples by seed into search samples and held-out samples.

        With two or more samples the two parts are disjoint and neither is empty. A single sample is both.

        Args:
            seed: the same seed splits the same samples the same way.
            held_out_fraction: share of the samples that is held out.
            max_search: no part holds more samples than this; None takes all.

        Returns:
            The search samples and the held-out samples, both in the order of this set.

        Raises:
            DataError: ``max_search`` is below 1.
        """
        if max_search is not None and max_search < 1:
            raise DataError(f"at most {max_search} search samples were asked for", "give at least 1")
        count = len(self.samples)
        if count < 2:
            both = replace(self, findings=(*self.findings, _too_few(count)))
            return both, both
        search, held_out = (
            replace(self, samples=tuple(self.samples[i] for i in part), indices=part)
            for part in split_indices(count, seed, held_out_fraction, max_search)
        )
        return search, held_out

    def save(self, path: Path) -> None:
        """Write the samples as the ``.npz`` that ``read_samples`` reads.

        Raises:
            RunError: the file cannot be written.
        """
        save_samples(path, self.samples)


def split_indices(
    count: int, seed: int, held_out_fraction: float, max_search: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which of so many samples are search samples, and which are held out: as ``CalibrationSet.split`` takes them."""
    if count < 2:
        every = tuple(range(count))
        return every, every
    held = min(max(round(count * held_out_fraction), 1), count - 1)
    order = np.random.default_rng(seed).permutation(count)
    parts = order[held:][:max_search], order[:held][:max_search]
    search, held_out = (tuple(sorted(map(int, part))) for part in parts)
    return search, held_out


def load_calibration(
    source: Path | InMemory | None, inputs: Sequence[TensorInfo], settings: DataSettings, seed: int
) -> CalibrationSet:
    """Load and check calibration data, or draw random inputs.

    Args:
        source: ``.npz``, ``.npy`` or folder, or arrays in memory; None draws ``settings.random_samples`` samples of
            random inputs.
        inputs: the model's inputs (``mptune.graph.loading.model.TensorInfo``).
        settings: batch, and how random inputs are drawn.
        seed: of random inputs.

    Raises:
        DataError: no such file, unreadable, or it does not fit the model's inputs.
    """
    for info in inputs:
        if info.numpy_dtype.hasobject:
            raise DataError(f"input {info.name!r} is of type {info.dtype}", "mptune feeds numeric tensors only")
    if source is None:
        return _random(inputs, settings, seed)
    if isinstance(source, InMemory):
        loaded = _from_memory(source.content, inputs, settings)
    else:
        loaded = _load(source, inputs, settings)
    return replace(loaded, findings=data_findings(loaded.samples))


def _load(path: Path, inputs: Sequence[TensorInfo], settings: DataSettings) -> CalibrationSet:
    if path.is_dir():
        return _load_folder(path, inputs, settings)
    suffix = path.suffix.lower()
    if suffix not in (".npz", ".npy"):
        raise DataError(f"{path} is no calibration data" if path.exists() else f"no such file: {path}", _FORMS)
    arrays, warnings = _read_feed(path, inputs)
    return CalibrationSet(_cut(arrays, inputs, settings, path.name, warnings), path.name, False, tuple(warnings))


def _from_memory(content: Any, inputs: Sequence[TensorInfo], settings: DataSettings) -> CalibrationSet:
    given = arrays_of(content, inputs)
    warnings: list[str] = []
    if isinstance(given, dict):
        samples = _cut(_checked(given, inputs, ARRAYS_SOURCE), inputs, settings, ARRAYS_SOURCE, warnings)
    else:
        places = [f"{ARRAYS_SOURCE}, sample {number}" for number in range(len(given))]
        feeds = [(_checked(arrays, inputs, where), where) for arrays, where in zip(given, places, strict=True)]
        samples = tuple(_whole_feed(feed, inputs, settings, where) for feed, where in feeds)
    return CalibrationSet(samples, ARRAYS_SOURCE, False, tuple(warnings))


def _checked(arrays: Mapping[str, np.ndarray], inputs: Sequence[TensorInfo], where: str) -> dict[str, np.ndarray]:
    """The arrays in the order of the inputs, with names, types and values checked."""
    check_names(arrays, inputs, where)
    return {i.name: check_values(i, arrays[i.name], where) for i in inputs}


def _whole_feed(
    feed: Mapping[str, np.ndarray], inputs: Sequence[TensorInfo], settings: DataSettings, where: str
) -> Mapping[str, np.ndarray]:
    """Arrays that are one sample, with their shapes checked."""
    for info in inputs:
        check_sample_shape(info, feed[info.name], settings.batch, where)
    check_agreement(feed, inputs, where)
    return feed


def _read_feed(path: Path, inputs: Sequence[TensorInfo]) -> tuple[dict[str, np.ndarray], list[str]]:
    """One file's arrays by input name, with types and values checked, and warnings."""
    warnings: list[str] = []
    if path.suffix.lower() == ".npy":
        if len(inputs) != 1:
            names = ", ".join(f"{i.name}=..." for i in inputs)
            raise DataError(
                f"{path.name} is one array, the model has {len(inputs)} inputs",
                f"write all inputs by name into one file: np.savez('data.npz', {names})",
            )
        arrays = {inputs[0].name: read_array(path)}
    else:
        arrays = read_archive(path)
        if len(inputs) == 1 and len(arrays) == 1 and inputs[0].name not in arrays:
            ((found, array),) = arrays.items()
            arrays = {inputs[0].name: array}
            warnings.append(f"{path.name}: array {found!r} is taken for the model's only input {inputs[0].name!r}")
    return _checked(arrays, inputs, path.name), warnings


def _cut(
    arrays: Mapping[str, np.ndarray],
    inputs: Sequence[TensorInfo],
    settings: DataSettings,
    where: str,
    warnings: list[str],
) -> tuple[Mapping[str, np.ndarray], ...]:
    """Cut concatenated arrays into samples; adds a warning for a repeated input that looks like a forgotten one."""
    rows = {i.name: split_rows(i, arrays[i.name], settings.batch, where) for i in inputs}
    counts = {name: len(parts) for name, parts in rows.items()}
    several = {name: count for name, count in counts.items() if count > 1}
    total = max(counts.values(), default=1)
    odd = next((name for name, count in several.items() if count != total), None)
    if odd is not None:
        other = next(name for name, count in counts.items() if count == total)
        raise DataError(
            f"{where}: input {odd!r} has {counts[odd]} samples, input {other!r} has {total}",
            "give every input the same number of samples, or a folder with one .npz per sample",
        )
    batches = {rows[name][0].shape[:1] for name in several}
    for name in counts:
        if total > 1 and counts[name] == 1 and rows[name][0].ndim and rows[name][0].shape[:1] in batches:
            warnings.append(f"{where}: input {name!r} has one sample, which is repeated for all {total}")
    samples = tuple({name: parts[k if len(parts) > 1 else 0] for name, parts in rows.items()} for k in range(total))
    for number, sample in enumerate(samples):
        check_agreement(sample, inputs, f"{where}, sample {number}")
    return samples


def _load_folder(path: Path, inputs: Sequence[TensorInfo], settings: DataSettings) -> CalibrationSet:
    files = [f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")]
    chosen = sorted((f for f in files if f.suffix.lower() in (".npz", ".npy")), key=lambda f: _natural(f.name))
    kinds = {f.suffix.lower() for f in chosen}
    if not chosen:
        seen = sorted({f.suffix.lower() or f.name for f in files})
        raise DataError(
            f"{path} holds no .npz or .npy files", f"it holds {', '.join(seen[:5])}; {_FORMS}" if seen else _FORMS
        )
    if len(kinds) > 1:
        raise DataError(f"{path} holds both .npz and .npy files", "keep one kind in the folder, one file per sample")
    samples: list[Mapping[str, np.ndarray]] = []
    warnings: list[str] = []
    for file in chosen:
        feed, feed_warnings = _read_feed(file, inputs)
        samples.append(_whole_feed(feed, inputs, settings, file.name))
        warnings += feed_warnings[: 1 - len(warnings)]  # the same for every file: once is enough
    return CalibrationSet(tuple(samples), path.resolve().name, False, tuple(warnings))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which ``sample_2`` comes before ``sample_10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _random(inputs: Sequence[TensorInfo], settings: DataSettings, seed: int) -> CalibrationSet:
    """Standard normal floats, integers 0 or 1, which every embedding has, fair booleans."""
    if settings.random_samples < 1:
        raise DataError(f"{settings.random_samples} random samples were asked for", "draw at least 1, or give --data")
    shapes = {info.name: _random_shape(info, inputs, settings.batch) for info in inputs}
    generator = np.random.default_rng(seed)
    samples = tuple(
        {info.name: _draw(info, shapes[info.name], generator) for info in inputs}
        for _ in range(settings.random_samples)
    )
    return CalibrationSet(samples, RANDOM_SOURCE, True, findings=(_drawn(tuple(shapes), len(samples)),))


def _drawn(inputs: tuple[str, ...], samples: int) -> Finding:
    return Finding(
        code="random-data",
        severity=CODES["random-data"].severity,
        origin="search",
        where=Where(inputs=inputs),
        evidence={"samples": samples},
        text="random inputs: no calibration data was given, so every error here is the error on noise, and real inputs"
        " can differ by far",
        cure="give --data",
    )


def _too_few(samples: int) -> Finding:
    return Finding(
        code="too-few-samples",
        severity=CODES["too-few-samples"].severity,
        origin="search",
        where=Where(),
        evidence={"samples": samples},
        text="one sample only: the held-out error is taken on the sample that the search saw",
        cure="give 2 or more samples",
    )


def _random_shape(info: TensorInfo, inputs: Sequence[TensorInfo], batch: int) -> tuple[int, ...]:
    """Concrete shape: the batch where dimension 0 (or a name that stands there) is symbolic; the rest must be fixed."""
    if info.shape is None:
        raise DataError(
            f"random inputs cannot be drawn for input {info.name!r}: its rank is unknown",
            "give real inputs with --data",
        )
    batch_names = {i.shape[0] for i in inputs if i.shape and isinstance(i.shape[0], str)}
    shape: list[int] = []
    for axis, dim in enumerate(info.shape):
        if isinstance(dim, int):
            shape.append(dim)
        elif axis == 0 or dim in batch_names:
            shape.append(batch)
        else:
            unknown = ", ".join(
                f"{d or '?'} (axis {k})" for k, d in enumerate(info.shape) if k and not isinstance(d, int)
            )
            raise DataError(
                f"random inputs cannot be drawn for input {info.name!r} of shape {shape_text(info.shape)}: "
                f"no size is known for {unknown}",
                "give inputs of the sizes that you will deploy with --data, or fix the dimensions when exporting",
            )
    return tuple(shape)


def _draw(info: TensorInfo, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    if info.dtype == "bool":
        return np.asarray(generator.integers(0, 2, shape), dtype=np.bool_)
    if info.dtype in ("float", "float16", "double", "bfloat16"):
        return np.asarray(generator.standard_normal(shape), dtype=info.numpy_dtype)
    if info.dtype.startswith(("int", "uint")):
        with contextlib.suppress(TypeError):  # NumPy draws no integers of 4 bits.
            return np.asarray(generator.integers(0, 2, shape, dtype=info.numpy_dtype))
    raise DataError(f"random inputs cannot be drawn for input {info.name!r} of type {info.dtype}", "give --data")
