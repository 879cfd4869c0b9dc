"""Whether recorded outputs are those of the same samples prepared in another way: channels, range, layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from mptune.diagnosis.patterns.scaled import CLEAR, column_scale
from mptune.diagnosis.sides import Side, Sides
from mptune.errors import BaselineError
from mptune.finding import Finding, Where

_MOST_SAMPLES = 4
"""So many samples are run again for each way; two ways that agree on them all are one."""
_LARGEST_BYTE = 255.0

Change = Callable[[np.ndarray], np.ndarray]


def other_preparation(sides: Sides, unexplained: Sequence[Side]) -> Finding | None:
    """How the samples have to be changed for the model to give what was recorded; None where no way is found.

    Args:
        sides: of the comparison; the right one is recorded.
        unexplained: the outputs that no other cause explains.
    """
    feeds = [dict(feed) for feed in sides.runner.samples[:_MOST_SAMPLES]]
    best, found = CLEAR, None
    for number, (words, name, change) in enumerate(_ways(feeds)):
        changed = [{**feed, name: change(feed[name])} for feed in feeds]
        try:
            outputs = sides.runner.on(f"prepared-{number}", changed)
        except BaselineError:
            continue
        left = max(_left(side, [np.asarray(sample[side.name]) for sample in outputs]) for side in unexplained)
        if left <= best:
            best = left
            found = Finding(
                "data-do-not-fit",
                "warning",
                "compare",
                Where(inputs=(name,), outputs=tuple(side.where for side in unexplained)),
                {"left_share": left, "samples": len(feeds)},
                f"the model gives what was recorded for input {name!r} {words} ({100 * left:.2g} % of the difference is"
                f" left, on {len(feeds)} samples): the samples are prepared in another way there; precision is not the"
                " problem",
                "prepare the samples as in training on both sides: channels, range, layout",
            )
    return found


def _ways(feeds: Sequence[Mapping[str, np.ndarray]]) -> Iterator[tuple[str, str, Change]]:
    for name, first in feeds[0].items():
        if first.dtype.kind not in "fu" or first.ndim < 2:
            continue
        if first.ndim == 4:
            for axis in (1, 3):
                if first.shape[axis] == 3:
                    yield "with its channels in reverse order (RGB, BGR)", name, _reversed(axis)
                    yield "mirrored", name, _reversed(3 if axis == 1 else 2)
                    height, width = (2, 3) if axis == 1 else (1, 2)
                    if first.shape[height] == first.shape[width]:
                        yield "with height and width exchanged", name, _swapped(height, width)
        if first.dtype.kind != "f":
            continue
        low = min(float(feed[name].min(initial=0.0)) for feed in feeds)
        high = max(float(feed[name].max(initial=0.0)) for feed in feeds)
        if low >= 0 and 1 < high <= _LARGEST_BYTE:
            yield "divided by 255", name, _line(1 / _LARGEST_BYTE, 0.0)
            yield "as x / 127.5 - 1", name, _line(2 / _LARGEST_BYTE, -1.0)
        elif low >= 0 and high <= 1:
            yield "times 255", name, _line(_LARGEST_BYTE, 0.0)
            yield "as 2 x - 1", name, _line(2.0, -1.0)
        elif low >= -1 and high <= 1:
            yield "as (x + 1) / 2", name, _line(0.5, 0.5)


def _reversed(axis: int) -> Change:
    return lambda x: np.ascontiguousarray(np.flip(x, axis))


def _swapped(one: int, other: int) -> Change:
    return lambda x: np.ascontiguousarray(np.swapaxes(x, one, other))


def _line(factor: float, offset: float) -> Change:
    return lambda x: (x * factor + offset).astype(x.dtype)


def _left(side: Side, made: Sequence[np.ndarray]) -> float:
    """Share of an output's difference that is left against what was made; inf where it cannot be compared."""
    before = after = 0.0
    for got, wanted, again in zip(side.got, side.wanted, made, strict=False):
        if not got.shape == wanted.shape == again.shape or got.dtype.kind not in "fiub":
            return math.inf
        scale = column_scale(np.asarray(wanted, np.float64)) if wanted.ndim > 1 else 1.0
        before += float((((got - wanted) / scale) ** 2).sum())
        after += float((((got - again) / scale) ** 2).sum())
    return math.sqrt(after / before) if before > 0 and math.isfinite(after) else math.inf
