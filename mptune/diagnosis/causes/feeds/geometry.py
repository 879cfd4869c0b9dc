"""Images that lie otherwise in their frame: scaled and padded (letterbox), cropped, moved, turned; and blurred ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mptune.diagnosis.causes.feeds.change import Change
from mptune.diagnosis.causes.feeds.images import LARGEST_BYTE, NORMALISATIONS, channel_axis

CLEAR_OF_IMAGES = 0.3
"""Share of the difference that a scaled or blurred image leaves at most: how values in between are found differs."""
_ASPECTS = (3 / 4, 9 / 16, 2 / 3)
_CROPS = (0.875, 0.9, 0.8, 0.75, 0.95)
_SHIFTS = (2, 4, 8)
_GREY = 114 / 255
"""What detectors' letterboxes are filled with (ultralytics)."""
_SAME = 1e-6


@dataclass(frozen=True)
class Placement:
    """Where the samples' image lies in the frame that is fed.

    Attributes:
        scale: of height and width; above 1 its edges are cut off.
        offset: of its centre, pixels, down and to the right.
        fill: name and values of what is around it, one for each channel; None repeats its edge.
    """

    scale: tuple[float, float]
    offset: tuple[float, float] = (0.0, 0.0)
    fill: tuple[str, tuple[float, ...]] | None = None

    def words(self, height: int, width: int) -> str:
        """In words, for an image of this size, pixels."""
        sizes = [round(size * scale) for size, scale in zip((height, width), self.scale, strict=True)]
        down, right = (
            round(offset + (size - scale * size) / 2)
            for size, scale, offset in zip((height, width), self.scale, self.offset, strict=True)
        )
        if (sizes[0], sizes[1]) == (height, width):
            scaled = "moved"
        elif sizes[0] <= height and sizes[1] <= width:
            scaled = f"scaled to {sizes[0]} x {sizes[1]} of {height} x {width} pixels (letterbox)"
        else:
            scaled = f"scaled to {sizes[0]} x {sizes[1]} pixels and cut to {height} x {width} (crop)"
        has_rim = self.fill is not None and (down or right or min(self.scale) < 1)
        around = f", {self.fill[0]} around it" if self.fill is not None and has_rim else ""
        return f"{scaled}, its corner at row {down}, column {right}{around}"

    def change(self, channels: int) -> Change:
        """Of an image whose channels lie along this axis."""
        return partial(_placed, self, channels)

    def with_numbers(self, numbers: Sequence[float]) -> Placement:
        """As this one, with other scales and offsets."""
        tall, wide, down, right = map(float, numbers)
        return replace(self, scale=(tall, wide), offset=(down, right))

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """Scale of height and width, offset down and to the right."""
        return (*self.scale, *self.offset)


def placements(arrays: Sequence[np.ndarray]) -> Iterator[Placement]:
    """The usual ones of an image, each with the usual fillings: letterbox, crop, moved."""
    channels = channel_axis(arrays[0].shape)
    if channels is None:
        return
    height, width = (arrays[0].shape[axis] for axis in _plane(channels))
    fills = list(_fills(arrays, channels))
    for aspect, is_tall in itertools.product(_ASPECTS, (True, False)):
        scale = (aspect, 1.0) if is_tall else (1.0, aspect)
        corner = (-(1 - scale[0]) * height / 2, -(1 - scale[1]) * width / 2)
        for offset, fill in itertools.product(((0.0, 0.0), corner), fills):
            yield Placement(scale, offset, fill)
        yield Placement((1 / aspect, 1.0) if is_tall else (1.0, 1 / aspect))
    for kept in _CROPS:
        larger = 1 / kept
        yield Placement((larger, larger))
        yield Placement((larger, larger), ((larger - 1) * height / 2, (larger - 1) * width / 2))
    for fill in fills:
        yield Placement((0.95, 0.95), fill=fill)
    for by, axis, sign in itertools.product(_SHIFTS, (0, 1), (1.0, -1.0)):
        if by < min(height, width) / 4:
            yield Placement((1.0, 1.0), (sign * by, 0.0) if axis == 0 else (0.0, sign * by), fills[0])


def turned_and_blurred(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change, float]]:
    """An image turned by quarters, blurred, or sharpened: words, change, and what it may leave."""
    channels = channel_axis(arrays[0].shape)
    if channels is None:
        return
    plane = _plane(channels)
    yield "turned by 180 degrees", lambda x: np.ascontiguousarray(np.rot90(x, 2, plane)), 0.1
    if arrays[0].shape[plane[0]] == arrays[0].shape[plane[1]]:
        yield "turned by 90 degrees to the left", lambda x: np.ascontiguousarray(np.rot90(x, 1, plane)), 0.1
        yield "turned by 90 degrees to the right", lambda x: np.ascontiguousarray(np.rot90(x, 3, plane)), 0.1
    if arrays[0].dtype.kind != "f":
        return
    clear = CLEAR_OF_IMAGES
    for words, weights in (
        ("blurred (weights 1 2 1 in both directions)", (0.25, 0.5, 0.25)),
        ("blurred (the mean of 3 x 3 pixels)", (1 / 3, 1 / 3, 1 / 3)),
        ("blurred (the mean of 5 x 5 pixels)", (0.2,) * 5),
        ("sharpened", (-0.25, 1.5, -0.25)),
    ):
        yield words, partial(_filtered, weights=weights, plane=plane), clear
    if min(arrays[0].shape[axis] for axis in plane) >= 4:
        yield "at half its resolution", partial(_halved, plane=plane), clear


def unpadded(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change, float]]:
    """Where the samples have bars of one value at their edges: without them, or with bars of another value."""
    channels = channel_axis(arrays[0].shape)
    if channels is None:
        return
    plane = _plane(channels)
    for which, axis in zip(("above and below", "at the left and right"), plane, strict=True):
        bars = [_bars(array, axis, channels) for array in arrays]
        first, last = min(bar[0] for bar in bars), min(bar[1] for bar in bars)
        size = arrays[0].shape[axis]
        if first + last < 2 or first + last > size - 4:
            continue
        middle, offset = (size - first - last) / size, (first - last) / 2
        scale, moved = 1 / middle, -offset / middle
        is_tall = axis == plane[0]
        spread = Placement((scale, 1.0) if is_tall else (1.0, scale), (moved, 0.0) if is_tall else (0.0, moved))
        yield f"without its bars {which}, scaled to the frame", spread.change(channels), CLEAR_OF_IMAGES
        if first:
            yield f"with its bars {which} all at the end", partial(_to_begin, first=first, axis=axis), 0.1
        for name, values in _fills(arrays, channels):
            yield (
                f"with {name} in its bars {which}",
                partial(_barred, first=first, last=last, axis=axis, channels=channels, values=values),
                0.1,
            )


def _plane(channels: int) -> tuple[int, int]:
    return (2, 3) if channels == 1 else (1, 2)


def _fills(arrays: Sequence[np.ndarray], channels: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """What an image may be padded with, in the values of the input."""
    count = arrays[0].shape[channels]
    low = min(float(array.min(initial=0.0)) for array in arrays)
    high = max(float(array.max(initial=0.0)) for array in arrays)
    yield "zeros", (0.0,) * count
    if low >= 0:
        unit = 1.0 if high <= 1 else LARGEST_BYTE
        yield f"{_GREY * unit:.3g} (grey, 114 of 255)", (_GREY * unit,) * count
        return
    others = tuple(axis for axis in range(arrays[0].ndim) if axis != channels)
    least = np.min([array.min(axis=others) for array in arrays], axis=0)
    yield "each channel's least value (black)", tuple(map(float, least))
    if count == 3:
        mean, deviation = NORMALISATIONS["ImageNet's"]
        grey = tuple((_GREY - m) / s for m, s in zip(mean, deviation, strict=True))
        yield "grey (114 of 255, by ImageNet's mean and deviation)", grey


def _placed(placement: Placement, channels: int, x: np.ndarray) -> np.ndarray:
    found, inside = np.asarray(x, np.float64), np.ones((), bool)
    for axis, scale, offset in zip(_plane(channels), placement.scale, placement.offset, strict=True):
        size = x.shape[axis]
        centre = (size - 1) / 2
        at = (np.arange(size) - centre - offset) / scale + centre
        low = np.clip(np.floor(at).astype(int), 0, size - 1)
        high, share = np.minimum(low + 1, size - 1), np.clip(at - low, 0.0, 1.0)
        shape = [size if k == axis else 1 for k in range(x.ndim)]
        parts = (np.take(found, low, axis), np.take(found, high, axis))
        found = parts[0] + (parts[1] - parts[0]) * share.reshape(shape)
        inside = inside & ((at > -0.5 - _SAME) & (at < size - 0.5 + _SAME)).reshape(shape)
    if placement.fill is not None:
        fill = np.reshape(placement.fill[1], [-1 if k == channels else 1 for k in range(x.ndim)])
        found = np.where(inside, found, fill)
    placed: np.ndarray = found.astype(x.dtype)
    return placed


def _filtered(x: np.ndarray, weights: Sequence[float], plane: tuple[int, int]) -> np.ndarray:
    """Along both axes; beyond the edge it is as at the edge."""
    found = np.asarray(x, np.float64)
    half = len(weights) // 2
    for axis in plane:
        at = np.arange(found.shape[axis])
        moved = (np.take(found, np.clip(at + k - half, 0, at[-1]), axis) * w for k, w in enumerate(weights))
        found = np.sum(list(moved), axis=0)
    filtered: np.ndarray = found.astype(x.dtype)
    return filtered


def _halved(x: np.ndarray, plane: tuple[int, int]) -> np.ndarray:
    """The mean of 2 x 2 pixels in the place of each of them."""
    found = np.asarray(x, np.float64)
    for axis in plane:
        at = np.arange(found.shape[axis])
        found = (np.take(found, at - at % 2, axis) + np.take(found, np.minimum(at - at % 2 + 1, at[-1]), axis)) / 2
    halved: np.ndarray = found.astype(x.dtype)
    return halved


def _bars(x: np.ndarray, axis: int, channels: int) -> tuple[int, int]:
    """How many entries at either end of an axis hold one value in each channel."""
    lines = np.moveaxis(x, (axis, channels), (0, 1)).reshape(x.shape[axis], x.shape[channels], -1)
    is_flat = [bool((np.ptp(each, axis=1) == 0).all()) for each in lines]
    first = next((k for k, flat in enumerate(is_flat) if not flat or (lines[k] != lines[0]).any()), len(lines))
    last = next((k for k, flat in enumerate(is_flat[::-1]) if not flat or (lines[-1 - k] != lines[-1]).any()), 0)
    return (first, last) if first < len(lines) else (0, 0)


def _barred(x: np.ndarray, first: int, last: int, axis: int, channels: int, values: Sequence[float]) -> np.ndarray:
    found = np.moveaxis(x, (axis, channels), (0, 1)).copy()
    fill = np.reshape(values, (1, -1, *(1 for _ in range(x.ndim - 2))))
    found[:first] = fill
    found[len(found) - last :] = fill
    return np.ascontiguousarray(np.moveaxis(found, (0, 1), (axis, channels)))


def _to_begin(x: np.ndarray, first: int, axis: int) -> np.ndarray:
    return np.roll(x, -first, axis)
