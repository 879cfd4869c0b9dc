"""Ways to prepare an image otherwise that change its values where they are: channels, range, colours, layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from mptune.diagnosis.causes.feeds.change import Change, after, line, reversed_along, swapped

LARGEST_BYTE = 255.0
_POWERS = ((2.2, "to the power of 2.2 (linear light)"), (1 / 2.2, "to the power of 1 / 2.2 (gamma)"))
_BRIGHTNESS = (0.299, 0.587, 0.114)
_YCBCR = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
"""ITU-R BT.601, full range; the last two from -0.5 to 0.5 of an image in 0..1."""
_LIMITED = (219 / LARGEST_BYTE, 16 / LARGEST_BYTE)
"""Factor and offset of video's limited range, 16 to 235, of an image in 0..1 (ITU-R BT.601)."""
NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "0.5 as": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and deviation of images in 0..1 (torchvision.models, openai/CLIP, transformers' ViT)."""


def channel_axis(shape: Sequence[int]) -> int | None:
    """The axis of an image's channels, 1 or 3; None of what is no image."""
    return next((axis for axis in (1, 3) if len(shape) == 4 and shape[axis] in (1, 3, 4)), None)


def image_changes(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    """Channels, range and layout of one input; none of what has no axis but the batch's."""
    first = arrays[0]
    if first.dtype.kind not in "fu" or first.ndim < 2:
        return
    ranges = list(_ranges(arrays)) if first.dtype.kind == "f" else []
    axes = [axis for axis in (1, 3) if first.ndim == 4 and first.shape[axis] == 3]
    for axis in axes:
        yield "with its channels in reverse order (RGB, BGR)", reversed_along(axis)
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
                flip, is_undone = reversed_along(axis), words.startswith("without")
                both = after(change, flip) if is_undone else after(flip, change)
                yield f"{words}, with its channels in reverse order (RGB, BGR)", both
    if channels := channel_axis(first.shape):
        yield from _turned(first.shape, channels)


def colour_changes(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    """Colours in another order or another space, limited, or read in another type: of an image, also normalised."""
    first, axis = arrays[0], channel_axis(arrays[0].shape)
    if axis is None or first.dtype.kind not in "fu":
        return
    low, high = _ends(arrays)
    if low < 0:
        yield "limited to 0..1", partial(np.clip, a_min=0.0, a_max=1.0)
    if first.shape[axis] != 3:
        return
    yield from _orders(axis)
    if first.dtype.kind != "f" or high > LARGEST_BYTE:
        return
    spaces: list[tuple[str, np.ndarray | float, np.ndarray | float]] = []
    if low >= 0:
        spaces.append(("", 1.0 if high <= 1 else LARGEST_BYTE, 0.0))
    else:
        for whose, m, s in _usual(axis):
            spaces.append((f", before {whose} mean and deviation", 1 / s, -m / s))
    for where, factor, offset in spaces:
        undone, done = line(1 / np.asarray(factor), -np.asarray(offset) / factor), line(factor, offset)
        for words, change in _of_light(axis):
            yield words + where, after(after(undone, change), done)


def _orders(axis: int) -> Iterator[tuple[str, Change]]:
    """Three channels in any order but their own and its reverse."""
    for order in itertools.permutations(range(3)):
        if order not in ((0, 1, 2), (2, 1, 0)):
            shown = ", ".join(map(str, order))
            yield f"with its channels in the order {shown}", partial(np.take, indices=order, axis=axis)


def _of_light(axis: int) -> Iterator[tuple[str, Change]]:
    """Changes of an image in 0..1 whose three channels lie along an axis."""
    yield "as YCbCr", partial(_mixed, matrix=np.asarray(_YCBCR), offset=np.asarray((0.0, 0.5, 0.5)), axis=axis)
    factor, offset = _LIMITED
    yield "in video's limited range (16 to 235)", line(factor, offset)
    yield "as if it were in video's limited range (16 to 235)", line(1 / factor, -offset / factor)
    yield "as bytes read with a sign (INT8)", lambda x: np.where(x >= 0.5, x - 256 / LARGEST_BYTE, x).astype(x.dtype)
    for power, words in _POWERS:
        yield words, partial(_power_of_positive, power)
    yield "in grey, the same in all channels", _grey(axis)
    yield from _orders(axis)


def _power_of_positive(power: float, x: np.ndarray) -> np.ndarray:
    return _power(power, 1.0, np.maximum(x, 0.0))


def _mixed(x: np.ndarray, matrix: np.ndarray, offset: np.ndarray, axis: int) -> np.ndarray:
    mixed: np.ndarray = np.moveaxis(np.moveaxis(x, axis, -1) @ matrix.T + offset, -1, axis).astype(x.dtype)
    return mixed


def _turned(shape: tuple[int, ...], channels: int) -> Iterator[tuple[str, Change]]:
    """An image mirrored, turned, or its values in the other layout."""
    height, width = (2, 3) if channels == 1 else (1, 2)
    yield "mirrored", reversed_along(width)
    yield "upside down", reversed_along(height)
    for axis, way in ((height, ("down", "up")), (width, ("to the right", "to the left"))):
        for by, where in zip((1, -1), way, strict=True):
            yield f"moved by one pixel {where}", partial(np.roll, shift=by, axis=axis)
    if shape[height] == shape[width]:
        yield "with height and width exchanged", swapped(height, width)
    if shape[channels] > 1:
        moved, said = ((0, 2, 3, 1), "NHWC") if channels == 1 else ((0, 3, 1, 2), "NCHW")
        yield f"in the layout {said}, reshaped where it should be transposed", _reshaped(moved)


def _ends(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
    """The least and the largest value, and 0."""
    low = min(float(array.min(initial=0.0)) for array in arrays)
    return low, max(float(array.max(initial=0.0)) for array in arrays)


def _usual(axis: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Whose mean and deviation, and these for three channels along an axis."""
    shape = (3, 1, 1) if axis == 1 else (3,)
    for whose, (mean, deviation) in NORMALISATIONS.items():
        yield whose, np.reshape(mean, shape), np.reshape(deviation, shape)


def _ranges(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    low, high = _ends(arrays)
    if low >= 0 and 1 < high <= LARGEST_BYTE:
        yield "divided by 255", line(1 / LARGEST_BYTE, 0.0)
        yield "as x / 127.5 - 1", line(2 / LARGEST_BYTE, -1.0)
        yield "as 255 - x", line(-1.0, LARGEST_BYTE)
    elif low >= 0 and high <= 1:
        yield "times 255", line(LARGEST_BYTE, 0.0)
        yield "as 2 x - 1", line(2.0, -1.0)
        yield "as 1 - x", line(-1.0, 1.0)
    elif low >= -1 and high <= 1:
        yield "as (x + 1) / 2", line(0.5, 0.5)
        yield "as 127.5 (x + 1)", line(LARGEST_BYTE / 2, LARGEST_BYTE / 2)


def _curves(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    """Values from 0 on as light or as what a screen is given, and as whole numbers."""
    low, high = _ends(arrays)
    if low < 0:
        return
    unit = 1.0 if high <= 1 else LARGEST_BYTE
    for power, words in _POWERS:
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
    low, high = _ends(arrays)
    for whose, m, s in _usual(axis):
        what = f"{whose} mean and deviation"
        if low >= 0 and high <= LARGEST_BYTE:
            unit = 1.0 if high <= 1 else LARGEST_BYTE
            yield f"normalised with {what}", line(1 / (unit * s), -m / s)
        elif low < 0:
            yield f"without {what}", line(s, m)
            yield f"without {what}, in 0 to 255", line(LARGEST_BYTE * s, LARGEST_BYTE * m)
            yield f"normalised twice with {what}", line(1 / s, -m / s)
            for others, n, t in _usual(axis):
                if others != whose:
                    yield f"with {others} mean and deviation in place of {what}", line(s / t, (m - n) / t)
            swapped = after(after(line(s, m), reversed_along(axis)), line(1 / s, -m / s))
            yield f"with its channels in reverse order (RGB, BGR) before {what} were applied", swapped


def _reshaped(axes: tuple[int, ...]) -> Change:
    return lambda x: np.ascontiguousarray(x.transpose(axes)).reshape(x.shape)
