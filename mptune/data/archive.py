"""NumPy files in and out, never pickled: samples, labels, and what mptune keeps in the run directory."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from mptune.errors import DataError
from mptune.files import open_file, parse_json, whole_file, writing

_FORMAT = 1

_MOST_EMPTY = 1 << 20
"""Samples of a model without inputs, of which none holds an array."""


def read_array(path: Path) -> np.ndarray:
    """Read one ``.npy`` file."""
    content = _read(path, "array")
    if not isinstance(content, np.ndarray):
        raise DataError(f"{path} holds several arrays, not one", "rename it: an archive of arrays ends in .npz")
    return content


def read_archive(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    """Read the arrays of one ``.npz`` file, or some of them by name."""
    content = _read(path, "archive of arrays", wanted)
    if isinstance(content, np.ndarray):
        raise DataError(f"{path} holds one array without a name", "rename it: a single array ends in .npy")
    for name, array in content.items():
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path}: {name!r} is not an array", "write the file with np.savez")
    return content


def _read(
    path: Path, what: str, wanted: Callable[[str], bool] = lambda name: True
) -> np.ndarray | dict[str, np.ndarray]:
    try:
        # Opened here, because NumPy leaves a damaged archive open where it opened it itself.
        with open_file(path) as stream:
            content = np.load(stream, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return content
            with content:
                return {name: content[name] for name in content.files if wanted(name)}
    except Exception as error:  # NumPy and zipfile raise nearly anything for a damaged file, tokenizer errors included
        raise _unreadable(path, error, what) from None


def _unreadable(path: Path, error: Exception, what: str) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"no such file: {path}", "check the path")
    if isinstance(error, PermissionError):
        return DataError(f"{path} cannot be read: permission denied", "check its permissions")
    if isinstance(error, MemoryError):
        return DataError(f"{path} does not fit into memory", "give fewer samples, or check that the file is intact")
    words = str(error).strip()
    if "pickle" in words or "Object arrays" in words:  # NumPy takes a file without its magic bytes for a pickle, too
        return DataError(
            f"{path} is not a NumPy {what}, or it holds pickled objects: mptune loads none, as that can run code",
            "save plain arrays: np.savez(path, name=np.asarray(values, dtype=np.float32))",
        )
    return DataError(
        f"{path} is not a NumPy {what}, or it is truncated: {words.splitlines()[0] if words else type(error).__name__}",
        "write it again with np.savez or np.save, and check that the copy is complete",
    )


def save_samples(path: Path, samples: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Write one dictionary of arrays per sample; the file is there whole or not at all."""
    names: dict[str, int] = {}
    members: list[tuple[str, np.ndarray]] = []
    for number, sample in enumerate(samples):
        for name, array in sample.items():
            if array.dtype.hasobject or array.dtype.kind == "V":
                raise DataError(f"{name!r} has type {array.dtype}, which .npz cannot hold", "use numeric tensors only")
            members.append((f"{number}_{names.setdefault(name, len(names))}", array))
    header = {"format": _FORMAT, "samples": len(samples), "names": list(names)}
    members.insert(0, ("header", np.frombuffer(json.dumps(header).encode(), np.uint8)))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, members, zipfile.ZIP_STORED)


def write_arrays(path: Path, members: Iterable[tuple[str, np.ndarray]], compression: int) -> None:
    """Write an ``.npz``, whole or not at all; the same arrays give the same bytes."""
    with writing(path), whole_file(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, array in members:
            entry = zipfile.ZipInfo(f"{name}.npy")  # without a time
            entry.compress_type = compression
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def read_samples(path: Path, first: int | None = None) -> tuple[dict[str, np.ndarray], ...]:
    """Read what ``save_samples`` wrote: the ``first`` so many samples, or all."""

    def is_wanted(key: str) -> bool:
        number = key.partition("_")[0]
        return first is None or not number.isdigit() or int(number) < first

    arrays = read_archive(path, is_wanted)
    foreign = DataError(f"{path} was not written by this mptune", "start the run again with --fresh")
    try:
        samples: list[dict[str, np.ndarray]]
        names, samples = _empty_samples(arrays.pop("header"), len(arrays), first)
        for key, array in arrays.items():
            number, _, index = key.partition("_")
            samples[int(number)][names[int(index)]] = array
    except (KeyError, ValueError, IndexError, TypeError, AttributeError):
        raise foreign from None
    return tuple(samples)


def _empty_samples(header: np.ndarray, arrays: int, first: int | None = None) -> tuple[list[str], list[Any]]:
    """The names in a header, and a dictionary for each sample that it declares, of which each holds an array."""
    declared = parse_json(header.tobytes())
    names, count = declared["names"], declared["samples"]
    count = count if first is None else min(first, count)
    if declared["format"] != _FORMAT or count > (arrays if names else _MOST_EMPTY):
        raise ValueError("it declares more samples than it holds")
    return names, [{} for _ in range(count)]


def read_sample_shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The shape of every array that ``save_samples`` wrote, by sample and name; only headers are read."""
    try:
        with open_file(path) as stream, zipfile.ZipFile(stream) as archive:
            with archive.open("header.npy") as member:
                header = np.lib.format.read_array(member, allow_pickle=False)
            samples: list[dict[str, tuple[int, ...]]]
            names, samples = _empty_samples(header, len(archive.namelist()) - 1)
            for entry in archive.namelist():
                number, _, index = entry.removesuffix(".npy").partition("_")
                if entry != "header.npy":
                    with archive.open(entry) as member:
                        samples[int(number)][names[int(index)]] = _shape(member)
    except Exception as error:  # as in ``_read``
        raise _unreadable(path, error, "archive of arrays") from None
    return tuple(samples)


def _shape(member: IO[bytes]) -> tuple[int, ...]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return tuple(read(member)[0])


def save_outputs(path: Path, outputs: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Write the outputs of every sample, in the same form and with the same errors as ``save_samples``."""
    save_samples(path, outputs)


def read_outputs(path: Path) -> tuple[dict[str, np.ndarray], ...]:
    """Read what ``save_outputs`` wrote, with the same errors as ``read_samples``."""
    return read_samples(path)


def load_labels(path: Path, samples: int) -> tuple[dict[str, np.ndarray], ...]:
    """Read an ``.npz`` with one array per kind of label, rows in the order of the data, and cut it into samples."""
    if not path.is_file():
        raise DataError(f"no such file: {path}", "check the path given to --labels")
    arrays = read_archive(path)
    if not arrays:
        raise DataError(f"{path} holds no labels", "write the file with np.savez(path, NAME=labels)")
    for name, array in arrays.items():
        if array.ndim == 0 or not len(array) or len(array) % samples:
            rows = "no rows" if array.ndim == 0 else f"{len(array)} rows"
            raise DataError(
                f"{path}: {name!r} has {rows}, the data have {samples} samples",
                "give as many rows as the data have, in the same order",
            )
    each = {name: np.split(array, samples) for name, array in arrays.items()}
    return tuple({name: parts[number] for name, parts in each.items()} for number in range(samples))


def labels_beside(samples: Path) -> Path:
    """Where the labels of a file of samples lie in a run directory."""
    return samples.with_name(f"{samples.stem}_labels.npz")


def save_labels(samples: Path, labels: Sequence[dict[str, np.ndarray]]) -> None:
    """Write labels beside a file of samples; none deletes what was there."""
    if labels:
        save_samples(labels_beside(samples), labels)
    else:
        labels_beside(samples).unlink(missing_ok=True)
