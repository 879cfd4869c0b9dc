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
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mptune.data.checks import shape_text
from mptune.data.forms.files import checked, cut, load_file, load_folder, whole_feed
from mptune.data.forms.samples import SOURCE, CalibrationSet, arrays_of
from mptune.data.plausibility import data_findings
from mptune.errors import DataError
from mptune.finding import Finding, Where
from mptune.settings import DataSettings, InMemory

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

RANDOM_SOURCE = "random inputs"


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
    return replace(given, findings=data_findings(given.samples, states))


def _load(path: Path, inputs: Sequence[TensorInfo], settings: DataSettings) -> CalibrationSet:
    # Slow to import, and a run is read without data.
    from mptune.data.forms.images import declaration_of, load_images
    from mptune.data.forms.polygraphy import read_json_inputs, script_and_function
    from mptune.data.scripts import run_loader

    script = script_and_function(path)
    if script is not None:
        return _from_memory(run_loader(*script), inputs, settings, path.name)
    declaration = declaration_of(path)
    if declaration is not None:
        return load_images(declaration, inputs, settings.batch)
    if path.is_dir():
        return load_folder(path, inputs, settings)
    if path.suffix.lower() == ".json":
        return _from_memory(read_json_inputs(path), inputs, settings, path.name)
    return load_file(path, inputs, settings)


def _from_memory(content: Any, inputs: Sequence[TensorInfo], settings: DataSettings, source: str) -> CalibrationSet:
    given = arrays_of(content, inputs)
    if isinstance(given, dict):
        warnings: list[str] = []
        samples = cut(checked(given, inputs, source), inputs, settings, source, warnings)
        return CalibrationSet(samples, source, warnings=tuple(warnings))
    places = [f"{source}, sample {number}" for number in range(len(given))]
    feeds = [(checked(arrays, inputs, where), where) for arrays, where in zip(given, places, strict=True)]
    return CalibrationSet(tuple(whole_feed(feed, inputs, settings, where) for feed, where in feeds), source)


def _random(inputs: Sequence[TensorInfo], settings: DataSettings, seed: int) -> CalibrationSet:
    """Standard normal floats, integers 0 or 1, which every embedding has, fair booleans."""
    shapes = {info.name: _random_shape(info, inputs, settings.batch) for info in inputs}
    generator = np.random.default_rng(seed)
    samples = tuple(
        {info.name: _draw(info, shapes[info.name], generator) for info in inputs}
        for _ in range(settings.random_samples)
    )
    evidence = {"samples": len(samples)}
    drawn = Finding.of("random-data", "search", Where(inputs=tuple(shapes)), evidence)
    return CalibrationSet(samples, RANDOM_SOURCE, True, findings=(drawn,))


def _random_shape(info: TensorInfo, inputs: Sequence[TensorInfo], batch: int) -> tuple[int, ...]:
    """Concrete shape: the batch where dimension 0 (or a name that stands there) is symbolic; the rest must be fixed."""
    batch_names = {i.shape[0] for i in inputs if i.shape and isinstance(i.shape[0], str)}
    if info.shape is None or any(
        axis > 0 and not isinstance(dim, int) and dim not in batch_names for axis, dim in enumerate(info.shape)
    ):
        shape = "unknown rank" if info.shape is None else f"shape {shape_text(info.shape)}"
        raise DataError(
            f"random inputs cannot be drawn for input {info.name!r} of {shape}",
            "give inputs of the sizes that you will deploy with --data, or fix the dimensions when exporting",
        )
    return tuple(dim if isinstance(dim, int) else batch for dim in info.shape)


def _draw(info: TensorInfo, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    if info.dtype == "bool":
        return np.asarray(generator.integers(0, 2, shape), dtype=np.bool_)
    if info.dtype in ("float", "float16", "double", "bfloat16"):
        return np.asarray(generator.standard_normal(shape), dtype=info.numpy_dtype)
    if info.dtype.startswith(("int", "uint")):
        with contextlib.suppress(TypeError):  # NumPy draws no integers of 4 bits.
            return np.asarray(generator.integers(0, 2, shape, dtype=info.numpy_dtype))
    raise DataError(f"random inputs cannot be drawn for input {info.name!r} of type {info.dtype}", "give --data")
