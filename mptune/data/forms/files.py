"""Files of arrays as samples: one ``.npz`` or ``.npy``, or a folder of them. See ``mptune.data.calibration``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mptune.data.archive import read_archive, read_array
from mptune.data.checks import check_agreement, check_names, check_sample_shape, check_values, split_rows
from mptune.data.forms.samples import CalibrationSet, Feed, LazySamples, feed_digest, under_only_input
from mptune.errors import DataError
from mptune.settings import DataSettings

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

_FORMS = (
    "mptune reads .npz, .npy, a folder with one .npz or .npy per sample, images with a preprocess.toml, Polygraphy's "
    ".json and script.py:function"
)
_SHARD = "shard"
"""Files whose names begin so hold several samples each."""


def load_file(path: Path, inputs: Sequence[TensorInfo], settings: DataSettings) -> CalibrationSet:
    """The samples of one file."""
    if path.suffix.lower() not in (".npz", ".npy"):
        raise DataError(f"{path} is no calibration data" if path.exists() else f"no such file: {path}", _FORMS)
    arrays, warnings = _read_feed(path, inputs)
    samples = cut(arrays, inputs, settings, path.name, warnings)
    return CalibrationSet(samples, path.name, warnings=tuple(warnings))


def load_folder(path: Path, inputs: Sequence[TensorInfo], settings: DataSettings) -> CalibrationSet:
    """The samples of a folder, read when they are needed."""
    files = [f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")]
    chosen = sorted((f for f in files if f.suffix.lower() in (".npz", ".npy")), key=lambda f: _natural(f.name))
    if not chosen:
        from mptune.data.forms.images import PREPROCESS_TOML, has_images  # slow to import

        if has_images(path):
            raise DataError(
                f"{path} holds images, and no {PREPROCESS_TOML} says how they become inputs",
                'write one there, such as: size = [224, 224]; resize = "crop"; mean = [...]; std = [...] (one a line)',
            )
        seen = sorted({f.suffix.lower() or f.name for f in files})
        raise DataError(
            f"{path} holds no .npz or .npy files", f"it holds {', '.join(seen[:5])}; {_FORMS}" if seen else _FORMS
        )
    if len({f.suffix.lower() for f in chosen}) > 1:
        raise DataError(f"{path} holds both .npz and .npy files", "keep one kind in the folder, one file per sample")
    samples = _Folder(chosen, inputs, settings)
    names = tuple(file.name for file in chosen)
    return CalibrationSet(samples, path.resolve().name, warnings=samples.warnings, names=names)


class _Folder(LazySamples):
    """One file after another; the last one that was read is kept, as its neighbours are often asked for next."""

    def __init__(self, files: Sequence[Path], inputs: Sequence[TensorInfo], settings: DataSettings) -> None:
        """Read all files once, one at a time, to count and check their samples."""
        self._files, self._inputs, self._settings = files, inputs, settings
        self._last: tuple[int, Sequence[Feed]] | None = None
        self._places: list[tuple[int, int]] = []
        self._digests: list[bytes] = []
        self.warnings: tuple[str, ...] = ()
        for number in range(len(files)):
            feeds = self._feeds(number)
            self._places += [(number, k) for k in range(len(feeds))]
            self._digests += map(feed_digest, feeds)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Feed:
        number, within = self._places[index]
        feeds = self._feeds(number)
        # A copy, where the file has more: a view would keep all of it in memory.
        return feeds[0] if len(feeds) == 1 else {name: array.copy() for name, array in feeds[within].items()}

    def digests(self) -> Sequence[bytes]:
        return self._digests

    def _feeds(self, number: int) -> Sequence[Feed]:
        if self._last is None or self._last[0] != number:
            self._last = None  # two files never lie in memory at once
            self._last = number, self._samples_of(self._files[number])
        return self._last[1]

    def _samples_of(self, file: Path) -> Sequence[Feed]:
        feed, warnings = _read_feed(file, self._inputs)
        self.warnings = self.warnings or tuple(warnings[:1])
        if file.name.lower().startswith(_SHARD) or _holds_several(feed, self._inputs):
            return cut(feed, self._inputs, self._settings, file.name, [])
        return (whole_feed(feed, self._inputs, self._settings, file.name),)


def _holds_several(feed: Feed, inputs: Sequence[TensorInfo]) -> bool:
    """Whether an input whose first dimension is fixed has several times as many rows."""
    for info in inputs:
        shape, got = info.shape, feed[info.name].shape
        if shape and isinstance(shape[0], int) and len(got) == len(shape) and 0 < shape[0] < got[0]:
            return bool(got[0] % shape[0] == 0)
    return False


def checked(arrays: Mapping[str, np.ndarray], inputs: Sequence[TensorInfo], where: str) -> dict[str, np.ndarray]:
    """The arrays in the order of the inputs, with names, types and values checked."""
    check_names(arrays, inputs, where)
    return {i.name: check_values(i, arrays[i.name], where) for i in inputs}


def whole_feed(
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
        given = read_archive(path)
        arrays = under_only_input(given, inputs)
        if arrays is not given:
            name, only = next(iter(given)), inputs[0].name
            warnings.append(f"{path.name}: array {name!r} is taken for the model's only input {only!r}")
    return checked(arrays, inputs, path.name), warnings


def cut(
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


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which ``sample_2`` comes before ``sample_10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]
