"""What calibration samples can hardly be meant to be, and what they leave untried."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mptune.data.forms.samples import LazySamples, feed_digest
from mptune.finding import Finding, Where
from mptune.settings import ShapeRange

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

_MIN_VALUES = 1024
_MIN_RANK = 3
"""A vector may well hold one number; images, sounds, sequences and feature maps do not."""
_MOST_READ = 64
"""Samples that are looked at, evenly spaced, where they are read from files when they are needed."""


def data_findings(samples: Sequence[Mapping[str, np.ndarray]], states: Collection[str] = ()) -> tuple[Finding, ...]:
    """What is wrong with samples as calibration data: constants, duplicates.

    ``states`` are inputs that hold a recurrent state, which may well start as one number in every sample.
    """
    few = samples.spread(_MOST_READ) if isinstance(samples, LazySamples) else samples
    feature_maps = {
        name: [sample[name] for sample in few]
        for name, first in (few[0].items() if few else ())
        if first.dtype.kind == "f" and first.ndim >= _MIN_RANK
    }
    return (*_constant(feature_maps, states), *_duplicates(samples))


def size_findings(
    samples: Sequence[Mapping[str, np.ndarray]], inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange] = ()
) -> tuple[Finding, ...]:
    """Whether all samples have one size, though inputs have dynamic axes beside the batch.

    ``shapes`` are those that an engine is built for: an input of which they allow one is never fed another.
    """
    settled = {shape.name for shape in shapes if shape.smallest == shape.largest}
    # Axes that share a name have one size: that of the batch, or of an input that is settled.
    bound = {info.shape[0] for info in inputs if info.shape}
    bound |= {dim for info in inputs if info.name in settled for dim in info.shape or ()}
    axes = [
        (info.name, k)
        for info in inputs
        if info.shape and info.name not in settled
        for k, dim in enumerate(info.shape)
        if k and not isinstance(dim, int) and (not dim or dim not in bound)
    ]
    few = samples.spread(_MOST_READ) if isinstance(samples, LazySamples) else samples
    if not axes or len({tuple(sample[name].shape[k] for name, k in axes) for sample in few}) > 1:
        return ()
    names = tuple(dict.fromkeys(name for name, _ in axes))
    size = ", ".join(f"{name} {'x'.join(map(str, few[0][name].shape))}" for name in names)
    return (Finding.of("one-size-tried", "search", Where(inputs=names), {"size": size}),)


def _constant(inputs: Mapping[str, Sequence[np.ndarray]], states: Collection[str]) -> list[Finding]:
    """Inputs but states with one value everywhere, unless another one varies."""
    findings = []
    for name, arrays in inputs.items():
        if sum(array.size for array in arrays) < _MIN_VALUES:
            continue
        value = next(array for array in arrays if array.size).reshape(-1)[:1]
        if not all((array == value).all() for array in arrays):
            return []
        if name not in states:
            evidence: dict[str, float | str] = {"value": float(value[0]), "samples": len(arrays)}
            findings.append(Finding.of("constant-data", "search", Where(inputs=(name,)), evidence))
    return findings


def _duplicates(samples: Sequence[Mapping[str, np.ndarray]]) -> list[Finding]:
    """Samples that equal an earlier one in every input."""
    first: dict[bytes, int] = {}
    repeated = []
    digests = samples.digests() if isinstance(samples, LazySamples) else map(feed_digest, samples)
    for number, digest in enumerate(digests):
        if first.setdefault(digest, number) != number:
            repeated.append(number)
    if not repeated:
        return []
    evidence = {"samples": len(samples), "duplicates": len(repeated)}
    return [Finding.of("duplicate-samples", "search", Where(samples=tuple(repeated)), evidence)]
