"""NumPy files, never unpickled: arrays that users give, and the samples and outputs that a run keeps.

A run keeps samples in an ``.npz`` without compression: the member ``SAMPLE_K`` is array K of a sample, in the order of
its names. The member ``header`` is JSON in UTF-8 bytes, so that shapes are read without the arrays::

    {"format": 2, "samples": [{NAME: [shape]}]}
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mptune.errors import DataError
from mptune.files import READ_ERRORS, open_file, parse_json, whole_file, writing

_FORMAT = 2


def read_numpy(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """Read the array of a ``.npy`` file, or the arrays of a ``.npz`` file by name; the content says which it is."""
    with _opened(path) as content:
        if isinstance(content, np.ndarray):
            return content
        arrays = {name: content[name] for name in content.files}
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name!r} is not an array")
    return arrays


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The array or the archive in a file; whatever goes wrong in the block is a DataError about the file."""
    try:
        # Opened here, because NumPy leaves a damaged archive open where it opened it itself.
        with open_file(path) as stream:
            yield np.load(stream, allow_pickle=False)
    except DataError:
        raise
    except Exception as error:  # NumPy and zipfile raise nearly anything for a damaged file, tokenizer errors included
        text = getattr(error, "strerror", None) or " ".join(str(error).splitlines()[:1]) or type(error).__name__
        hint = "check its path; it has to be a whole file of np.savez or np.save with plain numbers, no pickled objects"
        raise DataError(f"{path} cannot be read as a NumPy file: {text}", hint) from None


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an ``.npz``, whole or not at all; the same arrays give the same bytes."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial, zipfile.ZipFile(partial, "w") as archive:
            for name, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:  # without a time
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def save_samples(path: Path, samples: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Write one dictionary of arrays per sample: inputs, outputs or labels. The file is there whole or not at all."""
    arrays: dict[str, np.ndarray] = {}
    for number, sample in enumerate(samples):
        for k, (name, array) in enumerate(sample.items()):
            if array.dtype.hasobject or array.dtype.kind == "V":
                raise DataError(f"{name!r} has type {array.dtype}, which .npz cannot hold", "use numeric tensors only")
            arrays[f"{number}_{k}"] = array
    shapes = [{name: array.shape for name, array in sample.items()} for sample in samples]
    header = json.dumps({"format": _FORMAT, "samples": shapes}).encode()
    write_arrays(path, {"header": np.frombuffer(header, np.uint8), **arrays})


def read_samples(path: Path, first: int | None = None) -> tuple[dict[str, np.ndarray], ...]:
    """Read what ``save_samples`` wrote: all samples, or at most the ``first`` ones."""
    samples = enumerate(read_sample_shapes(path)[:first])
    with _opened(path) as content:
        return tuple({name: content[f"{number}_{k}"] for k, name in enumerate(sample)} for number, sample in samples)


def read_sample_shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The shapes of what ``save_samples`` wrote, one dictionary per sample; only the header is read."""
    with _opened(path) as content:
        try:
            # Members are stored: none of a stranger's unfolds to more than its file.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in content.zip.infolist()):
                raise ValueError("compressed")
            header = parse_json(content["header"].tobytes())
            if header["format"] != _FORMAT:
                raise ValueError("another format")
            return tuple({str(k): tuple(map(int, shape)) for k, shape in each.items()} for each in header["samples"])
        except READ_ERRORS:
            raise DataError(f"{path} was not written by this mptune", "start the run again with --fresh") from None


def load_labels(path: Path, samples: int) -> tuple[dict[str, np.ndarray], ...]:
    """Read an ``.npz`` with one array per kind of label, rows in the order of the data, and cut it into samples."""
    labels = read_numpy(path)
    if isinstance(labels, np.ndarray) or not labels:
        raise DataError(f"{path} holds no labels by name", "write the file with np.savez(path, NAME=labels)")
    for name, array in labels.items():
        rows = array.shape[0] if array.ndim else 0
        if not rows or rows % samples:
            text = f"{path}: {name!r} has {rows} rows, the data have {samples} samples"
            raise DataError(text, "give as many rows as the data have, in the same order")
    parts = {name: np.split(array, samples) for name, array in labels.items()}
    return tuple({name: parts[name][number] for name in parts} for number in range(samples))


def labels_beside(samples: Path) -> Path:
    """Where the labels of a file of samples lie in a run directory."""
    return samples.with_name(f"{samples.stem}_labels.npz")
