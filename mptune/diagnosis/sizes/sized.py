"""The sizes at which a plan is looked at beside that of the search's samples, and samples of those sizes.

Samples that the user gave of a size come first. Of a size that ``--shapes`` declares without them, samples are resized:
the nearest value is taken along each axis, and rows of a batch come from one sample after another. Where neither says
anything of an axis, and the model takes any size there, half and twice the size of the samples are tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import ShapeRange

Feed = Mapping[str, np.ndarray]
Sizes = dict[str, tuple[int, ...]]
Origin = Literal["samples", "given", "declared", "possible"]

_SAMPLES, _POSSIBLE_SAMPLES = 4, 2
"""So many are taken at each size that somebody named, and at each that nobody did."""

_FACTORS = (0.5, 2.0)

_MOST_VALUES = 1 << 22
"""Of all inputs of a sample, at a size that nobody named: a picture of 1182 x 1182. Beyond, memory may not be there."""


@dataclass(frozen=True)
class SizedSamples:
    """Samples of one size.

    Attributes:
        sizes: input -> shape, of inputs that take several.
        feeds: the samples.
        origin: ``samples`` of the search; ``given`` by the user for this size; resized to a size that ``--shapes``
            ``declared``, or to one that the model takes, as far as its inputs say (``possible``).
    """

    sizes: Sizes
    feeds: tuple[Feed, ...]
    origin: Origin


def size_text(sizes: Sizes) -> str:
    """A size for a message: ``image 1x3x64x64, mask 1x64``."""
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in sizes.items())


def sized_samples(
    samples: Sequence[Feed], inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange], given: Sequence[Sequence[Feed]]
) -> list[SizedSamples]:
    """The first samples of the search, then those of each other size."""
    few = tuple(samples[:_SAMPLES])
    every = [SizedSamples(sizes_of(few[0], inputs), few, "samples")]
    every += [
        SizedSamples(sizes_of(samples_of_size[0], inputs), tuple(samples_of_size[:_SAMPLES]), "given")
        for samples_of_size in given
    ]
    dims = {info.name: tuple(info.shape or ()) for info in inputs}

    def add(sizes: Sizes, origin: Origin, count: int) -> None:
        feeds = tuple(resized(few[:count], k, sizes, dims) for k in range(min(count, len(few))))
        of_all = sizes_of(feeds[0], inputs)
        if all(samples_of_size.sizes != of_all for samples_of_size in every):
            every.append(SizedSamples(of_all, feeds, origin))

    for sizes in declared_sizes(shapes, few):
        add(sizes, "declared", _SAMPLES)
    if not given:
        for sizes in _possible_sizes(every[0].sizes, inputs, shapes):
            if sum(math.prod(shape) for shape in sizes.values()) <= _MOST_VALUES:
                add(sizes, "possible", _POSSIBLE_SAMPLES)
    return every


def has_sizes(inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange], given: Sequence[Sequence[Feed]]) -> bool:
    """Whether there may be another size than that of the samples."""
    declared = any(len({shape.smallest, shape.usual, shape.largest}) > 1 for shape in shapes)
    return bool(given) or declared or bool(_free_axes(inputs, shapes))


def sizes_of(feed: Feed, inputs: Sequence[TensorInfo]) -> Sizes:
    """The shapes of the inputs that take several."""
    dynamic = [info.name for info in inputs if info.shape is None or not all(isinstance(d, int) for d in info.shape)]
    return {name: tuple(np.shape(feed[name])) for name in dynamic if name in feed}


def declared_sizes(shapes: Sequence[ShapeRange], samples: Sequence[Feed]) -> tuple[Sizes, ...]:
    """The smallest, usual and largest sizes of all inputs together, without that of the samples."""
    ends = [{one.name: getattr(one, end) for one in shapes} for end in ("smallest", "usual", "largest")]
    known = [{one.name: samples[0][one.name].shape for one in shapes if one.name in samples[0]}]
    found: list[Sizes] = []
    for sizes in ends:
        if sizes not in known and sizes not in found and all(math.prod(shape) for shape in sizes.values()):
            found.append(sizes)
    return tuple(found)


def _free_axes(inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange]) -> dict[str, list[int]]:
    """Input -> axes of any size beside the batch that no range of shapes is about."""
    named = {one.name for one in shapes}
    every = {info.name: info.shape for info in inputs if info.shape}
    bound = {dim for name, shape in every.items() if name in named for dim in shape}
    bound |= {shape[0] for shape in every.values()}  # the batch: rows are compared with rows alone
    found = {
        name: [k for k, dim in enumerate(shape) if k and not isinstance(dim, int) and (not dim or dim not in bound)]
        for name, shape in every.items()
        if name not in named
    }
    return {name: axes for name, axes in found.items() if axes}


def _possible_sizes(own: Sizes, inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange]) -> list[Sizes]:
    axes = _free_axes(inputs, shapes)
    return [
        {
            name: tuple(
                max(1, int(size * factor)) if axis in axes[name] else size for axis, size in enumerate(own[name])
            )
            for name in axes
            if name in own and all(own[name])
        }
        for factor in _FACTORS
        if axes
    ]


def resized(samples: Sequence[Feed], number: int, sizes: Sizes, dims: Mapping[str, Sequence[object]]) -> Feed:
    """One sample at other sizes (input -> shape); rows of a larger batch come from the samples after it.

    Inputs that share the name of a dimension (``dims``) have its size, too.
    """
    named: dict[object, int] = {}
    for name, shape in sizes.items():
        named.update({dim: size for dim, size in zip(dims[name], shape, strict=True) if isinstance(dim, str)})
    feed = {}
    for name, array in samples[number].items():
        declared = list(dims.get(name, ()))
        if len(declared) != array.ndim:
            feed[name] = array
            continue
        wanted = sizes.get(name) or tuple(named.get(dim, size) for dim, size in zip(declared, array.shape, strict=True))
        feed[name] = _at(samples, number, name, wanted, has_batch=not isinstance(declared[0], int))
    return feed


def _at(samples: Sequence[Feed], number: int, name: str, shape: tuple[int, ...], *, has_batch: bool) -> np.ndarray:
    array = samples[number][name]
    if has_batch and shape[0] > array.shape[0]:
        others = [samples[(number + k) % len(samples)][name] for k in range(math.ceil(shape[0] / array.shape[0]))]
        same = [other for other in others if other.shape[1:] == array.shape[1:]]
        repeated = same * math.ceil(shape[0] / sum(other.shape[0] for other in same))
        array = np.concatenate(repeated)[: shape[0]]
    for axis, size in enumerate(shape):
        old = array.shape[axis]
        if old != size and old:
            nearest = np.arange(size) if axis == 0 and has_batch else ((np.arange(size) + 0.5) * old / size).astype(int)
            array = np.take(array, nearest, axis=axis)
    return np.ascontiguousarray(array)
