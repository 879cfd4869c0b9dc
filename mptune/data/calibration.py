"""Calibration samples: what users give, checked against the model's inputs and cut into one feed per sample.

Forms of data in files (``mptune.data.forms.samples`` has those in memory):

* ``.npz``: one array per input, by name, samples concatenated along axis 0. A sample takes B rows of an input whose
  first dimension is fixed at B, and ``--batch`` rows of one whose first dimension is symbolic or unknown.
* ``.npy``: the same for a model with one input.
* a folder: one ``.npz`` per sample (or one ``.npy``, for a model with one input), in natural order of the file names;
  each file is one whole feed and its shapes may differ from file to file. Files with more rows than the fixed first
  dimension takes, and files called ``shard*``, are shards: each holds several samples. A folder may be of any size: its
  files are read one at a time, when their samples are needed.
* images in a folder, with ``preprocess.toml`` (``mptune.data.forms.images``).
* ``.json``, which Polygraphy writes, and ``script.py:function`` (``mptune.data.forms.polygraphy``).

An input repeats for every sample where its array is exactly one sample: a scalar for a scalar input, or as many rows
as one sample takes while other inputs have more. A scalar input also takes a vector of one value per sample.
Nothing is ever cast, cropped or padded: what does not fit is an error that names the cure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mptune.data.archive import save_samples
from mptune.data.checks import shape_text
from mptune.data.forms.files import checked, cut, load_file, load_folder, whole_feed
from mptune.data.forms.samples import SOURCE, Loaded, arrays_of
from mptune.data.plausibility import data_findings
from mptune.errors import DataError
from mptune.finding import Finding, Where
from mptune.settings import DataSettings, InMemory

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

RANDOM_SOURCE = "random inputs"


@dataclass(frozen=True)
class CalibrationSet:
    """Checked samples.

    Attributes:
        samples: one feed per sample: every graph input by name, in the model's types and shapes.
        warnings: that have no code, one line each; they stay with the run.
        indices: index in the data of each sample, 0-based, where these are a part of them; empty where they are all.
        preprocessing: how images became inputs (``mptune.data.forms.images``); None for other data.
        names: of the file of each sample; empty where they are no files.
    """

    samples: Sequence[Mapping[str, np.ndarray]]
    source: str
    is_random: bool
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    indices: tuple[int, ...] = ()
    preprocessing: Mapping[str, Any] | None = None
    names: tuple[str, ...] = ()

    def split(
        self, seed: int, held_out_fraction: float, max_search: int | None
    ) -> tuple[CalibrationSet, CalibrationSet]:
        """Split the samples by seed into search samples and held-out samples.

        With two or more samples the two parts are disjoint and neither is empty, in the order of this set, and of at
        most ``max_search`` samples each. A single sample is both.
        """
        if max_search is not None and max_search < 1:
            raise DataError(f"at most {max_search} search samples were asked for", "give at least 1")
        count = len(self.samples)
        if count < 2:
            too_few = Finding.of("too-few-samples", "search", Where(), {"samples": count})
            single = replace(self, findings=(*self.findings, too_few))
            return single, single
        search, held_out = (
            replace(self, samples=tuple(self.samples[i] for i in part), indices=part, names=self._names_of(part))
            for part in split_indices(count, seed, held_out_fraction, max_search)
        )
        return search, held_out

    def _names_of(self, part: Sequence[int]) -> tuple[str, ...]:
        """Where samples were put together, as in sequences, files are not theirs."""
        return tuple(self.names[i] for i in part) if len(self.names) == len(self.samples) else ()

    def save(self, path: Path) -> None:
        """Write the samples as the ``.npz`` that ``read_samples`` reads."""
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
    source: Path | InMemory | None,
    inputs: Sequence[TensorInfo],
    settings: DataSettings,
    seed: int,
    states: Collection[str] = (),
) -> CalibrationSet:
    """Load and check calibration data, or draw random inputs.

    Args:
        source: a path of one of the forms of this module, or arrays in memory; None draws
            ``settings.random_samples`` samples of random inputs. A script is run, so the user must have named it.
    """
    for info in inputs:
        if info.numpy_dtype.hasobject:
            raise DataError(f"input {info.name!r} is of type {info.dtype}", "mptune feeds numeric tensors only")
    if source is None:
        return _random(inputs, settings, seed)
    if isinstance(source, InMemory):
        given = _from_memory(source.content, inputs, settings, SOURCE)
    else:
        given = _load(source, inputs, settings)
    findings = data_findings(given.samples, states)
    return CalibrationSet(
        given.samples, given.source, False, given.warnings, findings, (), given.preprocessing, given.names
    )


def _load(path: Path, inputs: Sequence[TensorInfo], settings: DataSettings) -> Loaded:
    # Slow to import, and a run is read without data.
    from mptune.data.forms.images import declaration_of, load_images
    from mptune.data.forms.polygraphy import read_json_inputs, run_loader, script_and_function

    script = script_and_function(path)
    if script is not None:
        return _from_memory(tuple(run_loader(*script)), inputs, settings, path.name)
    declaration = declaration_of(path)
    if declaration is not None:
        return load_images(declaration, inputs, settings.batch)
    if path.is_dir():
        return load_folder(path, inputs, settings)
    if path.suffix.lower() == ".json":
        return _from_memory(read_json_inputs(path), inputs, settings, path.name)
    return load_file(path, inputs, settings)


def _from_memory(content: Any, inputs: Sequence[TensorInfo], settings: DataSettings, source: str) -> Loaded:
    given = arrays_of(content, inputs)
    if isinstance(given, dict):
        warnings: list[str] = []
        return Loaded(cut(checked(given, inputs, source), inputs, settings, source, warnings), source, tuple(warnings))
    places = [f"{source}, sample {number}" for number in range(len(given))]
    feeds = [(checked(arrays, inputs, where), where) for arrays, where in zip(given, places, strict=True)]
    return Loaded(tuple(whole_feed(feed, inputs, settings, where) for feed, where in feeds), source)


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
    evidence = {"samples": len(samples)}
    drawn = Finding.of("random-data", "search", Where(inputs=tuple(shapes)), evidence, kind="drawn")
    return CalibrationSet(samples, RANDOM_SOURCE, True, findings=(drawn,))


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
