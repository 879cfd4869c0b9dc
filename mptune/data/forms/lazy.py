"""Samples that are read when they are needed, so that data of any total size need the memory of a few samples."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

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
class Loaded:
    """What a form of data gives."""

    samples: Sequence[Feed]
    source: str
    warnings: tuple[str, ...] = ()
    preprocessing: Mapping[str, Any] | None = None
    names: tuple[str, ...] = ()
