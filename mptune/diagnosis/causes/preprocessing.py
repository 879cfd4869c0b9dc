"""Whether recorded outputs are those of the same samples fed in another way (``feed_changes``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from mptune.diagnosis.causes.feed_changes import Feed, FeedChange, feed_changes
from mptune.diagnosis.patterns.scaled import CLEAR, column_scale
from mptune.diagnosis.sides import Side, Sides
from mptune.errors import BaselineError
from mptune.finding import Finding, Where

MOST_SAMPLES = 4
"""The samples that differ most are run again for each explanation that leaves little of the first of them."""
WORTH_MORE = 0.3
"""Share of the difference of one sample that an explanation leaves at most to be tried on more."""
_FED_AT_A_TIME_BYTES = 256 * 2**20


def other_preparation(sides: Sides, unexplained: Sequence[Side]) -> Finding | None:
    """How the inputs have to be changed for the model to give what was recorded; None where no way is found.

    Args:
        sides: of the comparison; the right one is recorded.
        unexplained: the outputs that no other cause explains.
    """
    feeds = [dict(feed) for feed in sides.runner.samples]
    ways = list(feed_changes(feeds))
    worst = most_different(unexplained)
    if not ways or not worst:
        return None
    first = _shares(sides, unexplained, [(way, [k]) for way in ways for k in _covered(way, worst, 1)], "prepared")
    likely = [way for way, share in first if share <= WORTH_MORE]
    pairs = [(way, _covered(way, worst, MOST_SAMPLES)) for way in likely]
    shares = _shares(sides, unexplained, pairs, "prepared-more")
    way, share = min(shares, key=lambda each: each[1], default=(None, math.inf))
    if way is None or share > CLEAR:
        return None
    count = len(_covered(way, worst, MOST_SAMPLES))
    return Finding(
        "data-do-not-fit",
        "warning",
        "compare",
        Where(inputs=way.inputs, outputs=tuple(side.where for side in unexplained)),
        {"left_share": share, "samples": count},
        f"the model gives what was recorded {way.words} ({left_text(share, count)}):"
        f" {way.meaning}; precision is not the problem",
        way.cure,
    )


def most_different(unexplained: Sequence[Side]) -> list[int]:
    """Indices of the samples that differ, those that differ most first."""
    count = len(unexplained[0].wanted)
    squares = np.zeros(count)
    for side in unexplained:
        known = [w.astype(np.float64).ravel() for w in side.wanted if w.dtype.kind in "fiub"]
        spread = float(np.nanvar(np.concatenate(known))) if known else 0.0
        for k, (got, wanted) in enumerate(zip(side.got, side.wanted, strict=True)):
            if got.shape != wanted.shape or got.dtype.kind not in "fiub":
                return []
            apart = np.asarray(got, np.float64) - np.asarray(wanted, np.float64)
            squares[k] += float((apart**2).sum()) / (spread or 1.0)
    return [int(k) for k in np.argsort(-squares, kind="stable") if 0 < squares[k] < math.inf]


def _covered(way: FeedChange, worst: Sequence[int], count: int) -> list[int]:
    """The first samples of these that a way says something of, at most so many."""
    return list(itertools.islice((k for k in worst if way.feed(k) is not None), count))


def _shares(
    sides: Sides, unexplained: Sequence[Side], pairs: Sequence[tuple[FeedChange, Sequence[int]]], name: str
) -> list[tuple[FeedChange, float]]:
    """What share of these samples' difference each way leaves; ways that the model does not run on are left out."""
    found: list[tuple[FeedChange, float]] = []
    for number, portion in enumerate(_portions(sides, [(way, samples) for way, samples in pairs if samples])):
        feeds = [[feed for k in samples if (feed := way.feed(k)) is not None] for way, samples in portion]
        made = _outputs(sides, f"{name}-{number}", feeds)
        found += [
            (way, left_share(unexplained, samples, outputs))
            for (way, samples), outputs in zip(portion, made, strict=True)
            if outputs
        ]
    return found


def _portions(
    sides: Sides, pairs: Sequence[tuple[FeedChange, Sequence[int]]]
) -> Iterator[list[tuple[FeedChange, Sequence[int]]]]:
    """Ways of which so much is fed at a time as a process may well hold; each feeds as much as the samples have."""
    portion: list[tuple[FeedChange, Sequence[int]]] = []
    room = _FED_AT_A_TIME_BYTES
    for way, samples in pairs:
        size = sum(array.nbytes for k in samples for array in sides.runner.samples[k].values())
        if portion and size > room:
            yield portion
            portion, room = [], _FED_AT_A_TIME_BYTES
        portion.append((way, samples))
        room -= size
    if portion:
        yield portion


def _outputs(sides: Sides, name: str, feeds: Sequence[Sequence[Feed]]) -> list[tuple[Feed, ...]]:
    """What the model gives for each way's feeds; nothing for a way that it does not run on."""
    try:
        flat = tuple(sides.runner.on(name, [feed for of_way in feeds for feed in of_way]))
    except BaselineError:  # one of them does not fit the model
        return [_alone(sides, f"{name}-{number}", of_way) for number, of_way in enumerate(feeds)]
    ends = np.cumsum([len(of_way) for of_way in feeds])
    return [flat[end - len(of_way) : end] for end, of_way in zip(ends, feeds, strict=True)]


def _alone(sides: Sides, name: str, feeds: Sequence[Feed]) -> tuple[Feed, ...]:
    try:
        return tuple(sides.runner.on(name, feeds))
    except BaselineError:
        return ()


def left_share(unexplained: Sequence[Side], samples: Sequence[int], made: Sequence[Feed]) -> float:
    """Share of the difference that is left in the worst output; infinite where one cannot be compared.

    Args:
        unexplained: the outputs.
        samples: indices of the samples.
        made: outputs for these, by name, that may be what was recorded.
    """
    return max(_left(side, samples, [np.asarray(outputs[side.name]) for outputs in made]) for side in unexplained)


def left_text(share: float, count: int) -> str:
    """What is left of the difference, on how many samples, in words."""
    samples = "sample" if count == 1 else f"{count} samples that differ most"
    return f"{100 * share:.2g} % of the difference is left, on the {samples}"


def _left(side: Side, samples: Sequence[int], made: Sequence[np.ndarray]) -> float:
    before = after = 0.0
    for k, again in zip(samples, made, strict=True):
        got, wanted = side.got[k], side.wanted[k]
        if not got.shape == wanted.shape == again.shape or got.dtype.kind not in "fiub":
            return math.inf
        scale = column_scale(np.asarray(wanted, np.float64)) if wanted.ndim > 1 else 1.0
        one, two, three = (np.asarray(each, np.float64) for each in (got, wanted, again))
        before += float((((one - two) / scale) ** 2).sum())
        after += float((((one - three) / scale) ** 2).sum())
    return math.sqrt(after / before) if before > 0 and math.isfinite(after) else math.inf
