"""Calibration samples in every form that users give them: docs/reference/files.md, *Calibration data*, has the list.

Each form is read as arrays by input name, which ``cut_samples`` checks against the model and cuts into samples. Arrays
of a file or in memory are samples concatenated along axis 0; each mapping of an iterable, and each file of a folder, is
one whole sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mptune.data.archive import read_numpy
from mptune.data.arrays import Arrays, Inputs, arrays_of, cut_samples, shape_text
from mptune.data.recorded import polygraphy_inputs
from mptune.data.samples import CalibrationSet, Feed, LazySamples, data_findings, digests_of
from mptune.errors import DataError
from mptune.files import files_in_order
from mptune.finding import Finding, Where
from mptune.settings import DataSettings, InMemory

_FORMS = (
    "mptune reads .npz, .npy, folders of them, images with a preprocess.toml, Polygraphy's .json, script.py:function"
)


def load_calibration(
    source: Path | InMemory | None, inputs: Inputs, settings: DataSettings, seed: int, states: Collection[str] = ()
) -> CalibrationSet:
    """Load and check calibration data, or draw random inputs where there is no ``source``.

    A script is run, so the user must have named it. ``states`` are inputs that hold a recurrent state. DataError: the
    data cannot be read, or do not fit the model.
    """
    for info in inputs:
        if info.numpy_dtype.hasobject:
            raise DataError(f"input {info.name!r} is of type {info.dtype}", "mptune feeds numeric tensors only")
    if source is None:
        return _random(inputs, settings, seed)
    path = Path("arrays") if isinstance(source, InMemory) else source
    script, _, function = str(path).rpartition(":") if path.suffix != ".py" else (str(path), "", "load_data")
    suffix, declaration = path.suffix.lower(), path / "preprocess.toml"
    if isinstance(source, InMemory):
        loaded = _from_memory(source.content, inputs, settings.batch, path.name)
    elif script.endswith(".py"):
        from mptune.data.scripts import run_loader  # slow to import, as images are, and a run is read without data

        loaded = _from_memory(run_loader(Path(script), function), inputs, settings.batch, path.name)
    elif suffix == ".toml" or declaration.is_file():
        from mptune.data.images import load_images

        loaded = load_images(path if suffix == ".toml" else declaration, inputs, settings.batch)
    elif path.is_dir():
        loaded = _from_folder(path, inputs, settings.batch)
    elif suffix in (".json", ".npz", ".npy"):
        content = polygraphy_inputs(path) if suffix == ".json" else read_numpy(path)
        loaded = _from_memory(content, inputs, settings.batch, path.name)
    else:
        raise DataError(f"{path} is no calibration data" if path.exists() else f"no such file: {path}", _FORMS)
    return replace(loaded, findings=data_findings(loaded.samples, states))


def _from_memory(content: Any, inputs: Inputs, batch: int, source: str) -> CalibrationSet:
    given = arrays_of(content, inputs, source)
    if isinstance(given, dict):
        samples, warnings = cut_samples(given, inputs, batch, source)
        return CalibrationSet(samples, source, warnings=warnings)
    parts = [cut_samples(each, inputs, batch, f"{source}, sample {k}", is_whole=True) for k, each in enumerate(given)]
    return CalibrationSet(tuple(sample for samples, _ in parts for sample in samples), source, warnings=parts[0][1])


def _from_folder(folder: Path, inputs: Inputs, batch: int) -> CalibrationSet:
    files = [file for file in files_in_order(folder) if file.suffix.lower() in (".npz", ".npy")]
    if not files:
        raise DataError(f"{folder} holds neither .npz or .npy files nor a preprocess.toml for images", _FORMS)
    if len({file.suffix.lower() for file in files}) > 1:
        raise DataError(f"{folder} holds both .npz and .npy files", "keep one kind in the folder, one file per sample")

    @lru_cache(maxsize=1)  # its neighbours are often asked for next
    def samples_in(file: Path) -> tuple[tuple[Arrays, ...], tuple[str, ...]]:
        is_shard = file.name.lower().startswith("shard")
        arrays: Any = arrays_of(read_numpy(file), inputs, file.name)  # a dictionary, as a file is no iterable
        return cut_samples(arrays, inputs, batch, file.name, is_whole=not is_shard)

    def read(index: int) -> Feed:
        file, k = places[index]
        samples, _ = samples_in(file)
        # A copy, where the file has more: a view would keep all of it in memory.
        return samples[0] if len(samples) == 1 else {name: array.copy() for name, array in samples[k].items()}

    # All files are read once, one at a time, to count and check their samples.
    places: list[tuple[Path, int]] = []
    digests: list[bytes] = []
    warnings: tuple[str, ...] = ()
    for file in files:
        samples, doubts = samples_in(file)
        warnings = warnings or doubts[:1]
        places += [(file, k) for k in range(len(samples))]
        digests += digests_of(samples)
    return CalibrationSet(LazySamples(read, digests), folder.resolve().name, warnings=warnings)


def _random(inputs: Inputs, settings: DataSettings, seed: int) -> CalibrationSet:
    """Standard normal floats, integers 0 or 1, which every embedding has, fair booleans."""
    # The batch stands where dimension 0 is dynamic, and where another has the name of one; the rest must be fixed.
    batch_names = {info.shape[0] for info in inputs if info.shape and isinstance(info.shape[0], str)}
    floats, shapes = ("float", "float16", "double", "bfloat16"), dict[str, tuple[int, ...]]()
    for info in inputs:
        dims, text = info.shape, f"random inputs cannot be drawn for input {info.name!r} of"
        if dims is None or not all(isinstance(dim, int) or dim in batch_names for dim in dims[1:]):
            shape = "unknown rank" if dims is None else f"shape {shape_text(dims)}"
            hint = "give inputs of the sizes that you will deploy with --data, or fix the dimensions when exporting"
            raise DataError(f"{text} {shape}", hint)
        if info.dtype not in floats and info.numpy_dtype.kind not in "biu":  # integers of 4 bits are none of NumPy's
            raise DataError(f"{text} type {info.dtype}", "give --data")
        shapes[info.name] = tuple(dim if isinstance(dim, int) else settings.batch for dim in dims)
    generator, samples = np.random.default_rng(seed), [dict[str, np.ndarray]() for _ in range(settings.random_samples)]
    for sample, info in itertools.product(samples, inputs):
        size = shapes[info.name]
        values = generator.standard_normal(size) if info.dtype in floats else generator.integers(0, 2, size)
        sample[info.name] = np.asarray(values, dtype=info.numpy_dtype)
    finding = Finding.from_code("random-data", "search", Where(inputs=tuple(shapes)), {"samples": len(samples)})
    return CalibrationSet(tuple(samples), "random inputs", is_random=True, findings=(finding,))
