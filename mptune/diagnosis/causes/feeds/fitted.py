"""Ways to prepare an input that have numbers: gain and offset, place and scale; fitted by least squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.causes.feeds.change import PREPARED, Change, Feed, FeedChange, each
from mptune.diagnosis.causes.feeds.geometry import CLEAR_OF_IMAGES, Placement, placements
from mptune.diagnosis.causes.feeds.images import channel_axis

_MOST_COLUMNS = 8
"""Of more features, none has a gain and an offset of its own."""
_GAINS = (0.001, 0.01, np.pi / 180, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 180 / np.pi, 100.0, 1000.0)
_ROUNDS = 8
_FINER = 0.3
"""Each round measures effects by so much smaller steps, down to a thirtieth."""
_VALUES_FOR_EACH = 4
"""Values of the outputs that each number is fitted to at least."""
_DAMPINGS = (1e-6, 1e-3, 1e-1, 1.0)
_NOTHING_LEFT = 1e-5
_HOPELESS = 0.7
"""Two rounds that leave more than this share of the difference are not gone on with."""
_WORTH_PLACING = 0.7
_LEAST_GAIN = 0.02
"""A round that leaves more than this share less is followed by another."""
_UNIT = (
    "the input has another unit, mean or deviation there",
    "prepare the samples as in training on both sides: unit, mean, deviation",
)


@dataclass(frozen=True)
class Family:
    """Ways that differ in numbers.

    Attributes:
        inputs: that are changed.
        starts: numbers to begin with; the best of these is refined.
        steps: of each number, by which its effect is measured.
        change: numbers -> change of each of these inputs.
        words: numbers -> what follows ``the model gives what was recorded``, with ``{}`` for the inputs.
        said: meaning and cure.
        clear: as of ``FeedChange``.
        worth: share of the difference that the best start leaves at most to be refined.
    """

    inputs: tuple[str, ...]
    starts: tuple[np.ndarray, ...]
    steps: np.ndarray
    change: Callable[[np.ndarray], Change]
    words: Callable[[np.ndarray], str]
    said: tuple[str, str]
    clear: float
    worth: float = 1.0

    def way(self, feeds: Sequence[Feed], numbers: np.ndarray) -> FeedChange:
        """The way that has these numbers."""
        return each(feeds, self.inputs, self.words(numbers), self.change(numbers), self.said, self.clear)


Residuals = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray | None]]
"""Numbers of several ways -> what each leaves of the difference, a vector; None where the model does not run."""


def families(feeds: Sequence[Feed], groups: Sequence[Sequence[str]]) -> Iterator[Family]:
    """All that the inputs allow.

    Args:
        feeds: the samples, in their order.
        groups: names of inputs of one shape and type that may be changed together; single ones, too.
    """
    for names in groups:
        arrays = [feed[name] for name in names for feed in feeds]
        if arrays[0].dtype.kind != "f" or not any(array.any() for array in arrays):
            continue
        channels, features = channel_axis(arrays[0].shape), _feature_axis(arrays[0].shape)
        if channels is not None and len({array.shape for array in arrays}) == 1:
            yield _places(tuple(names), arrays, channels)
        yield _lines(tuple(names), arrays, channels)
        if features is not None:  # few values of the outputs may be too few for a line of each feature
            yield _lines(tuple(names), arrays, features)
        if channels is not None:
            yield _lines(tuple(names), arrays, channels, is_limited=True)


def fit(family: Family, scan: Residuals, residuals: Residuals, before: float) -> np.ndarray | None:
    """The numbers that leave least (Levenberg-Marquardt); None where nothing runs, or nothing is fitted.

    Args:
        family: the ways.
        scan: runs the model on a sample, for where to begin.
        residuals: runs the model on some samples.
        before: norm of the difference of these as it is.
    """
    left = [(float(np.linalg.norm(r)), k) for k, r in enumerate(scan(family.starts)) if r is not None]
    least = min((each for each in left if np.isfinite(each[0])), default=None)
    numbers = family.starts[0 if least is None else least[1]]
    (rest,) = residuals([numbers])
    if rest is None and least is not None and least[1]:
        return numbers  # time is up: as it was found
    if least is None or rest is None or rest.size < _VALUES_FOR_EACH * numbers.size:
        return None
    if np.linalg.norm(rest) > before and (again := residuals([family.starts[0]])[0]) is not None:
        numbers, rest = family.starts[0], again  # what is better on one sample is worse on more
    if np.linalg.norm(rest) > family.worth * max(before, 1e-30) * (1 + _NOTHING_LEFT):
        return None
    for number in range(_ROUNDS):
        steps = family.steps * max(_FINER**number, 1 / 30)
        moved = [each for each in residuals([numbers + step for step in np.diag(steps)]) if each is not None]
        if len(moved) < numbers.size:
            break
        effects = np.stack([(found - rest) / step for found, step in zip(moved, steps, strict=True)], axis=1)
        square = effects.T @ effects
        size = np.diag(square) + 1e-12 * np.trace(square) + 1e-30
        tried = [numbers - np.linalg.solve(square + np.diag(damping * size), effects.T @ rest) for damping in _DAMPINGS]
        made = residuals(tried)
        better = [
            (float(np.linalg.norm(found)), k)
            for k, found in enumerate(made)
            if found is not None and np.isfinite(found).all()
        ]
        now, (nearest, chosen) = float(np.linalg.norm(rest)), min(better, default=(np.inf, 0))
        if nearest >= now:
            break
        numbers, rest = tried[chosen], np.asarray(made[chosen])
        is_hopeless = number == 1 and nearest > _HOPELESS * before
        if is_hopeless or nearest > (1 - _LEAST_GAIN) * now or nearest <= _NOTHING_LEFT * before:
            break
    return numbers


def _feature_axis(shape: Sequence[int]) -> int | None:
    """The axis of a few features, each of which may have a unit of its own; None where there is none."""
    is_image = channel_axis(shape) is not None
    return len(shape) - 1 if not is_image and len(shape) >= 2 and 1 < shape[-1] <= _MOST_COLUMNS else None


def _lines(
    names: tuple[str, ...], arrays: Sequence[np.ndarray], axis: int | None, *, is_limited: bool = False
) -> Family:
    """A gain and an offset: of each entry of an axis, or of the whole input.

    Where limited, values stay within those that the samples have in the same channel: as brightness and contrast do.
    """
    first = arrays[0]
    count = 1 if axis is None else first.shape[axis]
    shape = [-1 if k == axis else 1 for k in range(first.ndim)]
    values = np.concatenate([array[np.isfinite(array)].ravel() for array in arrays])
    spread = float(values.std()) or float(np.abs(values).max()) or 1.0

    others = tuple(k for k in range(first.ndim) if k != axis)
    low = np.min([array.min(axis=others, keepdims=True) for array in arrays], axis=0) if is_limited else -np.inf
    high = np.max([array.max(axis=others, keepdims=True) for array in arrays], axis=0) if is_limited else np.inf

    def change(numbers: np.ndarray) -> Change:
        gain, offset = (np.reshape(each, shape) for each in np.split(np.asarray(numbers, np.float64), 2))
        return lambda x: np.clip(x * gain + offset * spread, low, high).astype(x.dtype)

    def words(numbers: np.ndarray) -> str:
        gains, offsets = np.split(numbers, 2)
        lines = [_line(gain, offset * spread, spread) for gain, offset in zip(gains, offsets, strict=True)]
        limited = ", limited to the samples' range" if is_limited else ""
        if len(set(lines)) == 1:
            return f"for {{}} as {lines[0]}{limited}"
        return f"for {{}} as {', '.join(lines)} (along axis {axis}){limited}"

    ones, zeros = np.ones(count), np.zeros(count)
    starts = [np.concatenate([gain * ones, zeros]) for gain in (1.0, *_GAINS)]
    starts.append(np.concatenate([-ones, ones * (values.min() + values.max()) / spread]))
    return Family(names, tuple(starts), np.full(2 * count, 1e-2), change, words, _UNIT, 0.1)


def _line(gain: float, offset: float, spread: float) -> str:
    times = "x" if abs(gain - 1) < 1e-3 else f"{gain:.4g} x"
    if abs(offset) < 2e-3 * max(1.0, abs(gain)) * spread:
        return times
    return f"{times} {'+' if offset > 0 else '-'} {abs(offset):.4g}"


def _places(names: tuple[str, ...], arrays: Sequence[np.ndarray], channels: int) -> Family:
    """An image's scale and place, with each usual filling around it."""
    height, width = (arrays[0].shape[axis] for axis in ((2, 3) if channels == 1 else (1, 2)))
    known = list(placements(arrays))
    fills = list(dict.fromkeys(place.fill for place in known))
    whole = [Placement((1.0, 1.0), fill=fill) for fill in fills]
    starts = tuple(np.array([*place.numbers, fills.index(place.fill)]) for place in (*whole, *known))

    def place(numbers: np.ndarray) -> Placement:
        fill = fills[min(max(round(float(numbers[4])), 0), len(fills) - 1)]
        return Placement((1.0, 1.0), fill=fill).with_numbers(np.clip(numbers[:4], [0.2, 0.2, -height, -width], None))

    def words(numbers: np.ndarray) -> str:
        return f"for {{}} {place(numbers).words(height, width)}"

    def change(numbers: np.ndarray) -> Change:
        return place(numbers).change(channels)

    steps = np.array([2 / height, 2 / width, 0.5, 0.5, 1e-3])
    return Family(names, starts, steps, change, words, PREPARED, CLEAR_OF_IMAGES, _WORTH_PLACING)
