"""Samples that a Python program holds, or that are read when they are needed: any total size, the memory of a few."""

from __future__ import annotations

import contextlib
import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from mptune.data.archive import save_samples
from mptune.errors import DataError
from mptune.finding import Finding, Where

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

Feed = Mapping[str, np.ndarray]


def feed_digest(feed: Feed) -> bytes:
    """SHA-256 of one sample: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(feed):
        array = np.ascontiguousarray(feed[name])
        digest.update(f"{name}\n{array.dtype.str}\n{feed[name].shape}\n".encode())
        digest.update(array.tobytes())
    return digest.digest()


class LazySamples(Sequence[Feed]):
    """A sequence of samples; each is read and checked anew when it is asked for.

    Slices and iterations give what they read; only ``digests`` and ``__iter__`` go over all.
    """

    @abstractmethod
    def read(self, index: int) -> Feed:
        """One sample, checked."""

    @abstractmethod
    def digests(self) -> Sequence[bytes]:
        """A hash of each sample: equal for equal samples. May stand for the files that they are made from."""

    @overload
    def __getitem__(self, index: int) -> Feed: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Feed]: ...
    def __getitem__(self, index: int | slice) -> Feed | Sequence[Feed]:
        if isinstance(index, slice):
            return tuple(self.read(k) for k in range(len(self))[index])
        return self.read(range(len(self))[index])

    def spread(self, count: int) -> tuple[Feed, ...]:
        """So many of them at most, from the first to the last at even distances."""
        chosen = np.linspace(0, len(self) - 1, min(count, len(self))).astype(int)
        return tuple(self.read(int(k)) for k in dict.fromkeys(chosen))


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

    samples: Sequence[Feed]
    source: str
    is_random: bool = False
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


SOURCE = "arrays"
"""What such data are called, where a file's name stands otherwise."""

_HINT = "give a path, an array (for a model with one input), a dict of arrays, or an iterable with a dict per sample"

Arrays = dict[str, np.ndarray]


def arrays_of(content: Any, inputs: Sequence[TensorInfo]) -> Arrays | tuple[Arrays, ...]:
    """Bring data in memory into one of two forms: one dictionary of concatenated arrays, or one per sample.

    ``content`` is an array or a mapping of arrays, samples concatenated along axis 0; or an iterable of mappings (of
    arrays, for a model with one input), each of them one sample. An array is anything that NumPy converts without
    copying element by element, such as a CPU tensor of PyTorch.
    """
    if isinstance(content, Mapping) or _is_array(content):
        return _feed(content, inputs, SOURCE)
    if not isinstance(content, Iterable):
        raise DataError(f"data cannot be a {type(content).__name__}", _HINT)
    given = enumerate(copied_samples(content))
    samples = tuple(_feed(sample, inputs, f"{SOURCE}, sample {number}") for number, sample in given)
    if not samples:
        raise DataError("data is an empty iterable", "give at least one sample; a generator can be read only once")
    return samples


def copied_samples(content: Iterable[Any]) -> tuple[Any, ...]:
    """The samples of an iterable, copied as they arrive: a loader may fill the same buffer for each of them.

    What is no array, or cannot be copied, stays as it is: ``arrays_of`` refuses it.
    """
    if isinstance(content, (list, tuple)):
        return tuple(content)  # Each of them is there already.
    return tuple(map(_copied, content))


def _copied(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {name: _copied(array) for name, array in sample.items()}
    if _is_array(sample) and not np.ma.isMaskedArray(sample):
        with contextlib.suppress(Exception):  # each library raises its own
            return np.asarray(sample).copy()  # NumPy trusts an object with the copy that it asks for
    return sample


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "__array_interface__")


def _feed(value: Any, inputs: Sequence[TensorInfo], where: str) -> Arrays:
    if isinstance(value, Mapping):
        arrays = {str(name): _array(array, f"{where}: input {str(name)!r}") for name, array in value.items()}
        return under_only_input(arrays, inputs)
    if not _is_array(value):
        raise DataError(f"{where} is a {type(value).__name__}, not a dict of arrays", _HINT)
    if len(inputs) != 1:
        names = ", ".join(f"{info.name!r}: ..." for info in inputs)
        raise DataError(f"{where} is one array, the model has {len(inputs)} inputs", f"give a dict: {{{names}}}")
    return {inputs[0].name: _array(value, where)}


def under_only_input(arrays: Arrays, inputs: Sequence[TensorInfo]) -> Arrays:
    """A single array of another name, under the name of a model's only input."""
    is_other = len(inputs) == 1 and len(arrays) == 1 and inputs[0].name not in arrays
    return {inputs[0].name: next(iter(arrays.values()))} if is_other else arrays


def _array(value: Any, where: str) -> np.ndarray:
    if not _is_array(value) and not isinstance(value, (bool, int, float)):
        raise DataError(f"{where} is a {type(value).__name__}, not an array", "give np.asarray(values, dtype=...)")
    if np.ma.isMaskedArray(value):
        raise DataError(
            f"{where} is a masked array, and a model takes no masks",
            "give plain values, with what the deployment has in place of the masked ones: array.filled(0)",
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # a tensor on a GPU, or one that records gradients: each library raises its own
        line = (str(error).splitlines() or [""])[0]
        hint = "give NumPy arrays; for a PyTorch tensor: tensor.detach().cpu().numpy()"
        raise DataError(f"{where} cannot be read as an array: {line}", hint) from None
    if array.dtype.hasobject:
        raise DataError(f"{where} is an array of objects", "give a numeric dtype: np.asarray(values, dtype=np.float32)")
    return array
