"""The ways in which a deployment may feed the same samples otherwise, one table; each row is tried and judged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from mptune.data.samples import Feed
from mptune.diagnosis.rows import CLEAR, FP32_ROUNDING
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Side
from mptune.errors import BaselineError
from mptune.finding import Finding, Where
from mptune.findings.wording import listed

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
)
"""Mean and deviation of images in 0..1 (torchvision.models, openai/CLIP)."""
_REVERSED = "with its channels in reverse order (RGB, BGR)"
_MOST_INPUTS = 6  # with more inputs than this, no two are exchanged
_MOST_BYTES = 256 * 2**20  # of samples that are fed in one process
_MOST_CHECKED = 64  # samples that differ, on which a way is tried that explains the one that differs most
_MOST_EXPLAINED = 0.9  # share of these that a way has to explain which leaves more than rounding does
_LISTED = 8
_FP32_LEAVES = 1e-3  # share that other FP32 roundings may leave of a small difference


class Way(NamedTuple):
    """One row of the table."""

    words: str  # what follows "the model gives what was recorded"
    inputs: tuple[str, ...]
    feed: Callable[[int], Feed | None]  # index of a sample -> what is fed instead; None where the way does not apply


def ways(feeds: Sequence[Feed]) -> Iterator[Way]:
    """All ways that the inputs allow."""

    def changed(name: str, change: Change) -> Callable[[int], Feed]:
        return lambda k: {**feeds[k], name: np.ascontiguousarray(change(feeds[k][name]))}

    for name in feeds[0]:
        for words, change in _changes([feed[name] for feed in feeds]):
            yield Way(f"for input {name!r} {words}", (name,), changed(name, change))
    for first, second in itertools.combinations(feeds[0], 2) if len(feeds[0]) <= _MOST_INPUTS else ():
        if all(feed[first].shape == feed[second].shape and feed[first].dtype == feed[second].dtype for feed in feeds):
            words, pair = f"with the inputs {first!r} and {second!r} exchanged", (first, second)
            yield Way(words, pair, [{**feed, first: feed[second], second: feed[first]} for feed in feeds].__getitem__)
    for name in feeds[0]:
        yield Way(f"with zeros in the input {name!r}", (name,), changed(name, np.zeros_like))
        if len(feeds[0]) > 1:  # with one input, the outputs are those of another sample: stale rows
            pairs = ((feed, before[name]) for before, feed in itertools.pairwise(feeds))
            late = [None, *({**feed, name: its} if its.shape == feed[name].shape else None for feed, its in pairs)]
            yield Way(f"with the sample before's values in the input {name!r}", (name,), late.__getitem__)


def _changes(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Change]]:
    """Range, channels and layout of one input, in words and as a function."""

    def line(factor: float | np.ndarray, offset: float | np.ndarray) -> Change:
        return lambda x: (x * factor + offset).astype(x.dtype)

    def in_turn(first: Change, second: Change) -> Change:
        return lambda x: second(first(x))

    shape, is_float = arrays[0].shape, arrays[0].dtype.kind == "f"
    if arrays[0].dtype.kind not in "fu" or len(shape) < 2:
        return
    channels = next((axis for axis in (1, 3) if len(shape) == 4 and shape[axis] in (1, 3, 4)), None)
    values = [(words, line(factor, offset)) for words, factor, offset in _RANGES if is_float]
    if channels is not None and shape[channels] == 3:
        low, high = min(float(a.min(initial=0)) for a in arrays), max(float(a.max(initial=0)) for a in arrays)
        unit, times = 255.0 if low >= 0 and high > 1 else 1.0, "twice " if low < 0 else ""
        for whose, *numbers in _NORMALISATIONS if is_float else ():
            mean, deviation = (np.reshape(each, (3, 1, 1) if channels == 1 else (3,)) for each in numbers)
            what = f"{whose} mean and deviation"
            values.append((f"normalised {times}with {what}", line(1 / (unit * deviation), -mean / deviation)))
            values.append((f"without {what}", line(deviation, mean)))
            values.append((f"without {what}, in 0 to 255", line(255 * deviation, 255 * mean)))
        reverse = partial(np.flip, axis=channels)
        yield _REVERSED, reverse
        for words, change in values:
            # A mean belongs to a colour: it is taken off after the colours are exchanged, and given back before.
            order = (change, reverse) if words.startswith("without") else (reverse, change)
            yield f"{words}, {_REVERSED}", in_turn(*order)
    yield from values
    if channels is not None:
        height, width = (2, 3) if channels == 1 else (1, 2)
        yield "mirrored", partial(np.flip, axis=width)
        if shape[height] == shape[width]:
            yield "with height and width exchanged", lambda x: np.swapaxes(x, height, width)
        if shape[channels] > 1:
            axes, layout = ((0, 2, 3, 1), "NHWC") if channels == 1 else ((0, 3, 1, 2), "NCHW")
            words = f"in the layout {layout}, reshaped where it should be transposed"
            yield words, lambda x: x.transpose(axes).reshape(x.shape)


def other_feed(outputs: Sequence[Side]) -> list[Finding]:
    """``data-do-not-fit``, where the model gives what was recorded on samples that are fed in another way.

    It is the way that explains most samples, and leaves least of them.
    """
    sides = [side for side in outputs if not side.is_within and side.sides.origin in ("recorded", "engine")]
    arrays = [pair for side in sides for pair in zip(side.got, side.wanted, strict=True)]
    if not sides or any(got.shape != wanted.shape or got.dtype.kind not in "fiub" for got, wanted in arrays):
        return []
    runner, feeds = sides[0].sides.runner, [dict(feed) for feed in sides[0].sides.runner.samples]

    # Each way is tried on the sample that differs most of those that it changes, all of these in one process.
    sizes = [
        max(math.sqrt(_squares(s.got[k], s.wanted[k]) / max(_squares(s.wanted[k]), 1e-30)) for s in sides)
        for k in range(len(feeds))
    ]
    differing = sorted((k for k, size in enumerate(sizes) if FP32_ROUNDING < size < math.inf), key=lambda k: -sizes[k])
    worst = ((way, next((k for k in differing if way.feed(k) is not None), None)) for way in ways(feeds))
    first = [(way, k) for way, k in worst if k is not None]

    # What explains that one is tried on others: a way may hold for some samples alone.
    checked = differing[:: math.ceil(len(differing) / _MOST_CHECKED)] if differing else []
    best, findings = (0, 0.0), list[Finding]()
    for (way, k), again in zip(first, _outputs(runner, first), strict=True):
        if again is None or _left(sides, {k: again})[0] > CLEAR:
            continue
        tries = [(way, j) for j in dict.fromkeys((k, *checked)) if way.feed(j) is not None]
        given = {j: outputs for (_, j), outputs in zip(tries, _outputs(runner, tries), strict=True) if outputs}
        explained = {j: given[j] for j in sorted(given) if _left(sides, {j: given[j]})[0] <= CLEAR}
        share, rounding = _left(sides, explained)
        is_exact = share <= rounding
        if (len(explained), -share) > best and (is_exact or len(explained) >= _MOST_EXPLAINED * len(tries)):
            best = len(explained), -share
            samples = tuple(explained) if len(explained) < len(feeds) else ()
            where = Where(outputs=tuple(side.where for side in sides), inputs=way.inputs, samples=samples)
            evidence = {"left_share": share, "rounding_share": rounding, "samples": len(explained)}
            names = {"words": way.words, "tried": len(tries), "shown": listed(list(explained), _LISTED)}
            findings = [sides[0].finding("data-do-not-fit", evidence, where, is_exact=is_exact, **names)]
    return findings


def _outputs(runner: Runner, tries: Sequence[tuple[Way, int]]) -> list[Feed | None]:
    """What the model gives for each sample fed in a way; None where it does not run on it."""
    feeds = [way.feed(k) or {} for way, k in tries]
    half = len(tries) // 2
    if not half or sum(array.nbytes for feed in feeds for array in feed.values()) <= _MOST_BYTES:
        with suppress(BaselineError):
            return list(runner.on("prepared", feeds)) if feeds else []
    if not half:
        return [None]
    return [*_outputs(runner, tries[:half]), *_outputs(runner, tries[half:])]


def _left(sides: Sequence[Side], given: Mapping[int, Feed]) -> tuple[float, float]:
    """Shares of the difference of samples that a way leaves, and that rounding to FP16 leaves; of the worst output."""
    worst = (0.0, 1.0)
    for side in sides:
        exact, emulated = side.sides.runner.exact, side.sides.emulated
        before = sum(_squares(side.got[k], side.wanted[k]) for k in given)
        after = sum(_squares(side.got[k], again[side.name]) for k, again in given.items())
        roundings = (_squares(emulated[k][side.name], exact[k][side.name]) for k in given)
        rounded = sum(filter(math.isfinite, roundings))
        if not before > 0 or not math.isfinite(after):
            return math.inf, 1.0
        rounding = max(min(2 * math.sqrt(rounded / before), CLEAR), _FP32_LEAVES)
        worst = max(worst, (math.sqrt(after / before), rounding), key=lambda each: each[0] / each[1])
    return worst


def _squares(a: np.ndarray, b: np.ndarray | float = 0.0) -> float:
    """Sum of the squared differences; infinite where shapes differ."""
    if np.shape(b) not in ((), np.shape(a)):
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        return float(((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2).sum())
