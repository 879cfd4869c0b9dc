"""The ways in which a deployment may feed the same samples otherwise, one table; each row is tried and judged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.data.samples import Feed
from mptune.diagnosis.causes.half import fp16_explanation
from mptune.diagnosis.comparison import finding
from mptune.diagnosis.patterns.roundings import CLEAR, column_scale, rms
from mptune.diagnosis.sides import Side
from mptune.errors import BaselineError
from mptune.finding import Finding, Where

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


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    words: str
    """What follows "the model gives what was recorded"."""
    inputs: tuple[str, ...]
    feed: Callable[[int], Feed | None]
    """Index of a sample -> what is fed in its place; None where the way does not apply to it."""
    kind: str
    """Of the finding's wording: what it means, and what to do."""


def ways(feeds: Sequence[Feed]) -> Iterator[Way]:
    """All ways that the inputs allow."""
    for name in feeds[0]:
        for words, change in _changes([feed[name] for feed in feeds]):
            yield Way(f"for input {name!r} {words}", (name,), _changed(feeds, name, change), "prepared")
    for first, second in itertools.combinations(feeds[0], 2) if len(feeds[0]) <= _MOST_INPUTS else ():
        if all(feed[first].shape == feed[second].shape and feed[first].dtype == feed[second].dtype for feed in feeds):
            yield Way(
                f"with the inputs {first!r} and {second!r} exchanged",
                (first, second),
                _exchanged(feeds, first, second),
                "mixed up",
            )
    for name in feeds[0]:
        yield Way(f"with zeros in the input {name!r}", (name,), _changed(feeds, name, np.zeros_like), "not written")
        if len(feeds[0]) > 1:  # with one input, the outputs are those of another sample: stale rows
            words = f"with the sample before's values in the input {name!r}"
            yield Way(words, (name,), _of_sample_before(feeds, name), "not written")


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


_MOST_BYTES = 256 * 2**20
"""Of samples that are fed in one process."""

_MOST_CHECKED = 64
"""Samples that differ, on which a way is tried that explains the one that differs most."""

_MOST_EXPLAINED = 0.9
"""Share of these that a way has to explain which leaves more than rounding does."""

_LISTED = 8
"""Samples that a text lists."""

_FP32_LEAVES = 1e-3
"""Share that other FP32 roundings may leave of a small difference."""


@dataclass(frozen=True)
class _Left:
    """What a way leaves of the difference of some samples, in the worst output."""

    share: float
    rounding: float
    """Share that rounding to FP16 would leave at most."""

    @property
    def is_exact(self) -> bool:
        return self.share <= self.rounding

    @property
    def is_explained(self) -> bool:
        return self.share <= max(CLEAR, self.rounding)


def other_feed(outputs: Sequence[Side]) -> list[Finding]:
    """``data-do-not-fit``, where the model gives what was recorded on samples that are fed in another way.

    It is the way that explains most samples, and leaves least of them.
    """
    if not outputs or outputs[0].sides.origin not in ("recorded", "engine"):
        return []
    unexplained = [side for side in outputs if not side.is_within and fp16_explanation(side) is None]
    if not unexplained:
        return []
    feeds = [dict(feed) for feed in unexplained[0].sides.runner.samples]
    differing = _most_different(unexplained)
    first = [(way, k) for way in ways(feeds) if (k := _first_changed(way, feeds, differing)) is not None]
    checked = differing[:: math.ceil(len(differing) / _MOST_CHECKED)] if differing else []
    best: tuple[int, float] = (0, 0.0)
    findings: list[Finding] = []
    for (way, k), again in zip(first, _outputs(unexplained, first), strict=True):
        if again is None or not _left(unexplained, [k], [again]).is_explained:
            continue
        covered = [(way, j) for j in dict.fromkeys((k, *checked)) if way.feed(j) is not None]
        made = {j: again for (_, j), again in zip(covered, _outputs(unexplained, covered), strict=True) if again}
        explained = sorted(j for j in made if _left(unexplained, [j], [made[j]]).is_explained)
        left = _left(unexplained, explained, [made[j] for j in explained])
        if not explained or (not left.is_exact and len(explained) < _MOST_EXPLAINED * len(covered)):
            continue
        if (len(explained), -left.share) > best:
            best = len(explained), -left.share
            findings = [_finding(unexplained, way, left, explained, len(covered), sorted(differing))]
    return findings


def which_samples(samples: Sequence[int]) -> str:
    """Samples by index, in words: ``sample 3``, ``samples 3, 7`` or ``samples 10 to 14``."""
    count = len(samples)
    if count == 1:
        return f"sample {samples[0]}"
    if count > 2 and samples[-1] - samples[0] == count - 1:
        return f"samples {samples[0]} to {samples[-1]}"
    return f"samples {', '.join(map(str, samples[:_LISTED]))}{', ...' * (count > _LISTED)}"


def _finding(
    unexplained: Sequence[Side], way: Way, left: _Left, explained: Sequence[int], tried: int, differing: Sequence[int]
) -> Finding:
    samples: tuple[int, ...] = ()
    names: dict[str, object] = {}
    if len(explained) < tried:
        samples = tuple(explained)
        names = {"others": tried - len(explained), "tried": tried}
    elif len(differing) < (count := len(unexplained[0].wanted)):
        samples = tuple(differing)
        names = {"differing": which_samples(samples), "count": count, "number": len(samples)}
    return finding(
        "data-do-not-fit",
        way.kind if left.is_exact else f"{way.kind} nearly",
        tuple(side.where for side in unexplained),
        {"left_share": left.share, "rounding_share": left.rounding, "samples": len(explained)},
        Where(inputs=way.inputs, samples=samples),
        words=way.words,
        explained=which_samples(explained),
        **names,
    )


def _first_changed(way: Way, feeds: Sequence[Feed], samples: Sequence[int]) -> int | None:
    """The first of these samples that a way changes."""
    for k in samples:
        fed = way.feed(k)
        if fed is not None and any(not np.array_equal(fed[name], feeds[k][name]) for name in way.inputs):
            return k
    return None


def _outputs(unexplained: Sequence[Side], tries: Sequence[tuple[Way, int]]) -> list[Feed | None]:
    """What the model gives for each sample fed in a way; None where it does not run on it."""
    runner = unexplained[0].sides.runner
    feeds = [way.feed(k) or {} for way, k in tries]
    if not feeds:
        return []
    half = len(tries) // 2
    if not half or sum(array.nbytes for feed in feeds for array in feed.values()) <= _MOST_BYTES:
        try:
            return list(runner.on("prepared", feeds))
        except BaselineError:
            if not half:
                return [None]
    return [*_outputs(unexplained, tries[:half]), *_outputs(unexplained, tries[half:])]


def _most_different(unexplained: Sequence[Side]) -> list[int]:
    """Indices of the samples that differ, those that differ most first."""
    count = len(unexplained[0].wanted)
    squares, least = np.zeros(count), np.zeros(count)
    for side in unexplained:
        if any(g.shape != w.shape or g.dtype.kind not in "fiub" for g, w in zip(side.got, side.wanted, strict=True)):
            return []
        values = np.concatenate([wanted.astype(np.float64).ravel() for wanted in side.wanted])
        spread = float(np.nanvar(values)) or 1.0
        exact = (_FP32_LEAVES if side.compared is None else side.compared.exact) ** 2
        for k, (got, wanted) in enumerate(zip(side.got, side.wanted, strict=True)):
            squares[k] += float(((got.astype(np.float64) - wanted.astype(np.float64)) ** 2).sum()) / spread
            least[k] += exact * got.size
    return [int(k) for k in np.argsort(-squares, kind="stable") if least[k] < squares[k] < math.inf]


def _left(unexplained: Sequence[Side], samples: Sequence[int], made: Sequence[Feed]) -> _Left:
    """What is left of the difference of samples, in the output where that is most; all of it without samples."""
    each = [_left_of(side, samples, [np.asarray(outputs[side.name]) for outputs in made]) for side in unexplained]
    return max(each, key=lambda left: left.share / left.rounding)


def _left_of(side: Side, samples: Sequence[int], made: Sequence[np.ndarray]) -> _Left:
    before = after = rounded = 0.0
    for k, again in zip(samples, made, strict=True):
        got, wanted = side.got[k], side.wanted[k]
        if not got.shape == wanted.shape == again.shape:
            return _Left(math.inf, 1.0)
        recorded, reference, made_again = (np.asarray(each, np.float64) for each in (got, wanted, again))
        scale = column_scale(reference) if reference.ndim > 1 else 1.0
        before += float((((recorded - reference) / scale) ** 2).sum())
        after += float((((recorded - made_again) / scale) ** 2).sum())
        rounded += _rounding(side, k, scale)
    if not before > 0 or not math.isfinite(after):
        return _Left(math.inf, 1.0)
    return _Left(math.sqrt(after / before), max(min(2 * math.sqrt(rounded / before), CLEAR), _FP32_LEAVES))


def _rounding(side: Side, k: int, scale: np.ndarray | float) -> float:
    """Squared difference that FP16 throughout makes in a sample, emulated; 0 where that is not known."""
    exact = np.asarray(side.sides.runner.exact[k][side.name], np.float64)
    emulated = np.asarray(side.sides.emulated[k][side.name], np.float64)
    if not exact.shape == emulated.shape == side.wanted[k].shape or not np.isfinite(emulated).all():
        return 0.0
    return rms((emulated - exact) / scale) ** 2 * exact.size
