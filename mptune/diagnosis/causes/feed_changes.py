"""Ways in which a deployment may feed the same samples otherwise: channels, range, layout, inputs, leftovers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

Feed = Mapping[str, np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]

_LARGEST_BYTE = 255.0
_GAMMA = 2.2
_BRIGHTNESS = (0.299, 0.587, 0.114)
_MOST_INPUTS = 6
"""Of more inputs, no two are exchanged."""
_NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "0.5 as": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and deviation of images in 0..1 (torchvision.models, openai/CLIP, transformers' ViT)."""

_PREPARED = (
    "the samples are prepared in another way there",
    "prepare the samples as in training on both sides: channels, range, layout",
)
_MIXED_UP = ("the inputs are mixed up there", "give each input by its name, and a buffer of its own")
_NOT_MASKED = ("as if nothing were masked there", "give this input there as the samples have it")
_NOT_WRITTEN = (
    "as if that input were not written before each run there",
    "write it before each run, on the stream of the run, into a buffer that no other run uses",
)


@dataclass(frozen=True)
class FeedChange:
    """One way.

    Attributes:
        words: what follows ``the model gives what was recorded``.
        inputs: whose values change.
        feed: index of a sample -> what is fed in its place; None where the way says nothing of it.
        meaning: what that shows.
        cure: what to do.
    """

    words: str
    inputs: tuple[str, ...]
    feed: Callable[[int], Feed | None]
    meaning: str
    cure: str


def feed_changes(feeds: Sequence[Feed]) -> Iterator[FeedChange]:
    """All ways that the inputs allow, the most frequent first.

    Args:
        feeds: the samples, in their order.
    """
    for name, first in feeds[0].items():
        for words, change in _of_values([feed[name] for feed in feeds]) if first.ndim >= 2 else ():
            yield _each(feeds, name, f"for input {name!r} {words}", change, _PREPARED)
    names = list(feeds[0])
    if len(names) <= _MOST_INPUTS:
        for one, other in itertools.combinations(names, 2):
            yield from _of_two(feeds, one, other)
    for name in names:
        yield from _left_over(feeds, name)


def _each(feeds: Sequence[Feed], name: str, words: str, change: Change, said: tuple[str, str]) -> FeedChange:
    return FeedChange(words, (name,), lambda k: {**feeds[k], name: change(feeds[k][name])}, *said)


def _of_values(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    """Channels, range and layout of one input."""
    first = arrays[0]
    if first.dtype.kind not in "fu":
        return
    ranges = list(_ranges(arrays)) if first.dtype.kind == "f" else []
    axes = [axis for axis in (1, 3) if first.ndim == 4 and first.shape[axis] == 3]
    for axis in axes:
        yield "with its channels in reverse order (RGB, BGR)", _reversed(axis)
    yield from ranges
    if ranges:
        yield from _curves(arrays)
    for axis in axes:
        yield "in grey, the same in all channels", _grey(axis)
        if first.dtype.kind == "f":
            normalised = list(_normalised(arrays, axis))
            yield from normalised
            for words, change in (*ranges, *normalised):
                # A mean belongs to a colour: it is taken off after the colours are exchanged, and given back before.
                flip, is_undone = _reversed(axis), words.startswith("without")
                both = _after(change, flip) if is_undone else _after(flip, change)
                yield f"{words}, with its channels in reverse order (RGB, BGR)", both
    if first.ndim == 4 and (channels := next((axis for axis in (1, 3) if first.shape[axis] in (1, 3, 4)), None)):
        yield from _turned(first.shape, channels)


def _turned(shape: tuple[int, ...], channels: int) -> Iterator[tuple[str, Change]]:
    """An image mirrored, turned, or its values in the other layout."""
    height, width = (2, 3) if channels == 1 else (1, 2)
    yield "mirrored", _reversed(width)
    yield "upside down", _reversed(height)
    for axis, way in ((height, ("down", "up")), (width, ("to the right", "to the left"))):
        for by, where in zip((1, -1), way, strict=True):
            yield f"moved by one pixel {where}", partial(np.roll, shift=by, axis=axis)
    if shape[height] == shape[width]:
        yield "with height and width exchanged", _swapped(height, width)
    if shape[channels] > 1:
        moved, said = ((0, 2, 3, 1), "NHWC") if channels == 1 else ((0, 3, 1, 2), "NCHW")
        yield f"in the layout {said}, reshaped where it should be transposed", _reshaped(moved)


def _ranges(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    low = min(float(array.min(initial=0.0)) for array in arrays)
    high = max(float(array.max(initial=0.0)) for array in arrays)
    if low >= 0 and 1 < high <= _LARGEST_BYTE:
        yield "divided by 255", _line(1 / _LARGEST_BYTE, 0.0)
        yield "as x / 127.5 - 1", _line(2 / _LARGEST_BYTE, -1.0)
        yield "as 255 - x", _line(-1.0, _LARGEST_BYTE)
    elif low >= 0 and high <= 1:
        yield "times 255", _line(_LARGEST_BYTE, 0.0)
        yield "as 2 x - 1", _line(2.0, -1.0)
        yield "as 1 - x", _line(-1.0, 1.0)
    elif low >= -1 and high <= 1:
        yield "as (x + 1) / 2", _line(0.5, 0.5)
        yield "as 127.5 (x + 1)", _line(_LARGEST_BYTE / 2, _LARGEST_BYTE / 2)


def _curves(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    """Values from 0 on as light or as what a screen is given, and as whole numbers."""
    high = max(float(array.max(initial=0.0)) for array in arrays)
    low = min(float(array.min(initial=0.0)) for array in arrays)
    if low < 0:
        return
    unit = 1.0 if high <= 1 else _LARGEST_BYTE
    for power, words in (
        (_GAMMA, "to the power of 2.2 (linear light)"),
        (1 / _GAMMA, "to the power of 1 / 2.2 (gamma)"),
    ):
        yield words, partial(_power, power, unit)
    if high <= 1:
        yield "as whole numbers, with the fractions cut off", np.floor


def _power(power: float, unit: float, x: np.ndarray) -> np.ndarray:
    found: np.ndarray = (unit * (x / unit) ** power).astype(x.dtype)
    return found


def _grey(axis: int) -> Change:
    """All three channels with the brightness of ITU-R BT.601."""

    def change(x: np.ndarray) -> np.ndarray:
        weights = np.reshape(_BRIGHTNESS, (3,) + (1,) * (x.ndim - 1 - axis))
        grey = (x * weights).sum(axis=axis, keepdims=True)
        return np.ascontiguousarray(np.broadcast_to(grey, x.shape)).astype(x.dtype)

    return change


def _normalised(arrays: Sequence[np.ndarray], axis: int) -> Iterator[tuple[str, Change]]:
    """Images to which a usual mean and deviation were applied, or not, or twice."""
    low = min(float(array.min(initial=0.0)) for array in arrays)
    high = max(float(array.max(initial=0.0)) for array in arrays)
    for whose, (mean, deviation) in _NORMALISATIONS.items():
        m, s = (np.reshape(each, (3, 1, 1) if axis == 1 else (3,)) for each in (mean, deviation))
        what = f"{whose} mean and deviation"
        if low >= 0 and high <= _LARGEST_BYTE:
            unit = 1.0 if high <= 1 else _LARGEST_BYTE
            yield f"normalised with {what}", _line(1 / (unit * s), -m / s)
        elif low < 0:
            yield f"without {what}", _line(s, m)
            yield f"without {what}, in 0 to 255", _line(_LARGEST_BYTE * s, _LARGEST_BYTE * m)
            yield f"normalised twice with {what}", _line(1 / s, -m / s)
            for others, (mean, deviation) in _NORMALISATIONS.items():
                if others != whose:
                    n, t = (np.reshape(each, m.shape) for each in (mean, deviation))
                    yield f"with {others} mean and deviation in place of {what}", _line(s / t, (m - n) / t)
            swapped = _after(_after(_line(s, m), _reversed(axis)), _line(1 / s, -m / s))
            yield f"with its channels in reverse order (RGB, BGR) before {what} were applied", swapped


def _of_two(feeds: Sequence[Feed], one: str, other: str) -> Iterator[FeedChange]:
    """Two inputs exchanged, or both from one buffer."""
    if any(feed[one].shape != feed[other].shape or feed[one].dtype != feed[other].dtype for feed in feeds):
        return
    if all(np.array_equal(feed[one], feed[other]) for feed in feeds):
        return

    def swapped(k: int) -> Feed:
        return {**feeds[k], one: feeds[k][other], other: feeds[k][one]}

    yield FeedChange(f"with the inputs {one!r} and {other!r} exchanged", (one, other), swapped, *_MIXED_UP)
    for to, source in ((one, other), (other, one)):
        words = f"with what belongs to {source!r} in the input {to!r}, too"
        yield FeedChange(words, (to,), partial(_with_other, feeds, to, source), *_MIXED_UP)


def _with_other(feeds: Sequence[Feed], to: str, source: str, k: int) -> Feed:
    return {**feeds[k], to: feeds[k][source]}


def _left_over(feeds: Sequence[Feed], name: str) -> Iterator[FeedChange]:
    """An input that is not written before a run: it holds what it held before, or nothing."""
    arrays = [feed[name] for feed in feeds]
    is_one = len(feeds[0]) == 1  # all of the sample: the outputs are another sample's then (``patterns.stale``)
    varies = any(not np.array_equal(arrays[0], array) for array in arrays[1:])

    def before(k: int) -> Feed | None:
        fits = k > 0 and arrays[k - 1].shape == arrays[k].shape
        return {**feeds[k], name: arrays[k - 1]} if fits else None

    def first(k: int) -> Feed | None:
        fits = k > 0 and arrays[0].shape == arrays[k].shape
        return {**feeds[k], name: arrays[0]} if fits else None

    is_of_another = varies and not is_one
    if is_of_another:
        yield FeedChange(f"with the sample before's values in the input {name!r}", (name,), before, *_NOT_WRITTEN)
    if any(array.any() for array in arrays):
        yield _each(feeds, name, f"with zeros in the input {name!r}", np.zeros_like, _NOT_WRITTEN)
    if is_of_another:
        words = f"with the first sample's values in the input {name!r} all the time"
        yield FeedChange(words, (name,), first, *_NOT_WRITTEN)
    if _is_marks(arrays):
        yield _each(feeds, name, f"for input {name!r} as 1 - x", _line(-1.0, 1.0), _PREPARED)
        yield _each(feeds, name, f"with ones in the input {name!r}", np.ones_like, _NOT_MASKED)


def _is_marks(arrays: Sequence[np.ndarray]) -> bool:
    """Whether an input holds zeros and ones alone, and both: a mask."""
    return all(bool(np.isin(array, (0, 1)).all()) for array in arrays) and (
        any(array.any() for array in arrays) and not all(array.all() for array in arrays)
    )


def _reversed(axis: int) -> Change:
    return lambda x: np.ascontiguousarray(np.flip(x, axis))


def _swapped(one: int, other: int) -> Change:
    return lambda x: np.ascontiguousarray(np.swapaxes(x, one, other))


def _reshaped(axes: tuple[int, ...]) -> Change:
    return lambda x: np.ascontiguousarray(x.transpose(axes)).reshape(x.shape)


def _line(factor: float | np.ndarray, offset: float | np.ndarray) -> Change:
    return lambda x: (x * factor + offset).astype(x.dtype)


def _after(first: Change, then: Change) -> Change:
    return lambda x: then(first(x))
