"""The ways in which a deployment may feed the same samples otherwise, as one table: ``ways``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Feed = Mapping[str, np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]

_RANGES = (
    ("divided by 255", 1 / 255, 0.0),
    ("as x / 127.5 - 1", 2 / 255, -1.0),
    ("times 255", 255.0, 0.0),
    ("as 2 x - 1", 2.0, -1.0),
    ("as (x + 1) / 2", 0.5, 0.5),
    ("as 127.5 (x + 1)", 127.5, 127.5),
)
"""Words, factor and offset."""
_NORMALISATIONS = (
    ("ImageNet's", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ("CLIP's", (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ("0.5 as", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
)
"""Mean and deviation of images in 0..1 (torchvision.models, openai/CLIP, transformers' ViT)."""
_REVERSED = "with its channels in reverse order (RGB, BGR)"
_MOST_INPUTS = 6
"""With more inputs than this, no two are exchanged."""

_PREPARED = (
    "the samples are prepared in another way there",
    "prepare the samples as in training on both sides: channels, range, layout",
)
_MIXED_UP = ("the inputs are mixed up there", "give each input by its name, and a buffer of its own")
_NOT_WRITTEN = (
    "as if that input were not written before each run there",
    "write it before each run, on the stream of the run, into a buffer that no other run uses",
)


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    words: str
    """What follows "the model gives what was recorded"."""
    inputs: tuple[str, ...]
    feed: Callable[[int], Feed | None]
    """Index of a sample -> what is fed in its place; None where the way does not apply to it."""
    meaning: str
    cure: str


def ways(feeds: Sequence[Feed]) -> Iterator[Way]:
    """All ways that the inputs allow."""
    for name in feeds[0]:
        for words, change in _changes([feed[name] for feed in feeds]):
            yield Way(f"for input {name!r} {words}", (name,), _changed(feeds, name, change), *_PREPARED)
    for first, second in itertools.combinations(feeds[0], 2) if len(feeds[0]) <= _MOST_INPUTS else ():
        if all(feed[first].shape == feed[second].shape and feed[first].dtype == feed[second].dtype for feed in feeds):
            yield Way(
                f"with the inputs {first!r} and {second!r} exchanged",
                (first, second),
                _exchanged(feeds, first, second),
                *_MIXED_UP,
            )
    for name in feeds[0]:
        yield Way(f"with zeros in the input {name!r}", (name,), _changed(feeds, name, np.zeros_like), *_NOT_WRITTEN)
        if len(feeds[0]) > 1:  # with one input, the outputs are those of another sample: stale rows
            words = f"with the sample before's values in the input {name!r}"
            yield Way(words, (name,), _of_sample_before(feeds, name), *_NOT_WRITTEN)


def _changed(feeds: Sequence[Feed], name: str, change: Change) -> Callable[[int], Feed]:
    return lambda k: {**feeds[k], name: change(feeds[k][name])}


def _exchanged(feeds: Sequence[Feed], first: str, second: str) -> Callable[[int], Feed]:
    return lambda k: {**feeds[k], first: feeds[k][second], second: feeds[k][first]}


def _of_sample_before(feeds: Sequence[Feed], name: str) -> Callable[[int], Feed | None]:
    def feed(k: int) -> Feed | None:
        has_shape = k > 0 and feeds[k - 1][name].shape == feeds[k][name].shape
        return {**feeds[k], name: feeds[k - 1][name]} if has_shape else None

    return feed


def _changes(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    """Range, channels and layout of one input, in words and as a function."""
    first = arrays[0]
    if first.dtype.kind not in "fu" or first.ndim < 2:
        return
    channels = next((axis for axis in (1, 3) if first.ndim == 4 and first.shape[axis] in (1, 3, 4)), None)
    values = [(words, _line(factor, offset)) for words, factor, offset in _RANGES if first.dtype.kind == "f"]
    if channels is not None and first.shape[channels] == 3:
        flip = _reversed_along(channels)
        yield _REVERSED, flip
        values += _normalised(arrays, channels) if first.dtype.kind == "f" else ()
        for words, change in values:
            # A mean belongs to a colour: it is taken off after the colours are exchanged, and given back before.
            steps = (change, flip) if words.startswith("without") else (flip, change)
            yield f"{words}, {_REVERSED}", _after(*steps)
    yield from values
    if channels is not None:
        height, width = (2, 3) if channels == 1 else (1, 2)
        yield "mirrored", _reversed_along(width)
        if first.shape[height] == first.shape[width]:
            yield "with height and width exchanged", lambda x: np.ascontiguousarray(np.swapaxes(x, height, width))
        if first.shape[channels] > 1:
            axes, layout = ((0, 2, 3, 1), "NHWC") if channels == 1 else ((0, 3, 1, 2), "NCHW")
            words = f"in the layout {layout}, reshaped where it should be transposed"
            yield words, lambda x: np.ascontiguousarray(x.transpose(axes)).reshape(x.shape)


def _normalised(arrays: Sequence[np.ndarray], axis: int) -> Iterator[tuple[str, Change]]:
    low, high = min(float(a.min(initial=0)) for a in arrays), max(float(a.max(initial=0)) for a in arrays)
    unit = 255.0 if low >= 0 and high > 1 else 1.0
    for whose, *numbers in _NORMALISATIONS:
        mean, deviation = (np.reshape(each, (3, 1, 1) if axis == 1 else (3,)) for each in numbers)
        what = f"{whose} mean and deviation"
        times = "normalised twice with" if low < 0 else "normalised with"
        yield f"{times} {what}", _line(1 / (unit * deviation), -mean / deviation)
        yield f"without {what}", _line(deviation, mean)
        yield f"without {what}, in 0 to 255", _line(255 * deviation, 255 * mean)


def _line(factor: float | np.ndarray, offset: float | np.ndarray) -> Change:
    return lambda x: (x * factor + offset).astype(x.dtype)


def _reversed_along(axis: int) -> Change:
    return lambda x: np.ascontiguousarray(np.flip(x, axis))


def _after(first: Change, then: Change) -> Change:
    return lambda x: then(first(x))
