"""One way to feed the samples otherwise, and the changes of single arrays that ways are put together of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.patterns.scaled import CLEAR

Feed = Mapping[str, np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]

_NAMED = 4
"""Inputs that are named, of a group."""

PREPARED = (
    "the samples are prepared in another way there",
    "prepare the samples as in training on both sides: channels, range, layout",
)
MIXED_UP = ("the inputs are mixed up there", "give each input by its name, and a buffer of its own")
NOT_MASKED = ("as if nothing were masked there", "give this input there as the samples have it")
NOT_WRITTEN = (
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
        clear: share of the difference that it leaves at most to come near to it: more where how values in between are
            found is not known, as where images are scaled; 0 where it holds or does not.
    """

    words: str
    inputs: tuple[str, ...]
    feed: Callable[[int], Feed | None]
    meaning: str
    cure: str
    clear: float = CLEAR


def each(
    feeds: Sequence[Feed],
    names: Sequence[str],
    words: str,
    change: Change,
    said: tuple[str, str] = PREPARED,
    clear: float = CLEAR,
) -> FeedChange:
    """The same change of some inputs, in every sample.

    Args:
        feeds: the samples, in their order.
        names: of the inputs, at least one.
        words: what follows ``the model gives what was recorded``; ``{}`` in them stands for the inputs.
        change: of each array.
        said: meaning and cure.
        clear: as of ``FeedChange``.
    """

    def feed(k: int) -> Feed:
        return {**feeds[k], **{name: change(feeds[k][name]) for name in names}}

    return FeedChange(words.format(inputs_text(names)), tuple(names), feed, *said, clear)


def inputs_text(names: Sequence[str]) -> str:
    """Inputs in words, the first few of them by name."""
    return f"input{'s' * (len(names) > 1)} {', '.join(map(repr, names[:_NAMED]))}{', ...' * (len(names) > _NAMED)}"


def line(factor: float | np.ndarray, offset: float | np.ndarray) -> Change:
    """Times a factor, plus an offset, in the array's type."""
    return lambda x: (x * factor + offset).astype(x.dtype)


def reversed_along(axis: int) -> Change:
    """The entries of an axis in reverse order."""
    return lambda x: np.ascontiguousarray(np.flip(x, axis))


def swapped(one: int, other: int) -> Change:
    """Two axes exchanged."""
    return lambda x: np.ascontiguousarray(np.swapaxes(x, one, other))


def after(first: Change, then: Change) -> Change:
    """One change after another."""
    return lambda x: then(first(x))
