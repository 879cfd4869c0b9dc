"""Inputs that are mixed up, left over from another run, or not written at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from mptune.diagnosis.causes.feeds.change import (
    MIXED_UP,
    NOT_MASKED,
    NOT_WRITTEN,
    Feed,
    FeedChange,
    each,
    line,
)

_MOST_INPUTS = 6
"""Of more inputs, no two are exchanged."""


def buffer_changes(feeds: Sequence[Feed], groups: Sequence[Sequence[str]]) -> Iterator[FeedChange]:
    """Inputs exchanged, of another sample, zero, or without what a mask hides.

    Args:
        feeds: the samples, in their order.
        groups: names of inputs that may be changed together; single ones, too.
    """
    names = list(feeds[0])
    if len(names) <= _MOST_INPUTS:
        for one, other in itertools.combinations(names, 2):
            yield from _of_two(feeds, one, other)
    for group in groups:
        yield from _left_over(feeds, group)


def _of_two(feeds: Sequence[Feed], one: str, other: str) -> Iterator[FeedChange]:
    """Two inputs exchanged, or both from one buffer."""
    if any(feed[one].shape != feed[other].shape or feed[one].dtype != feed[other].dtype for feed in feeds):
        return
    if all(np.array_equal(feed[one], feed[other]) for feed in feeds):
        return

    def swapped(k: int) -> Feed:
        return {**feeds[k], one: feeds[k][other], other: feeds[k][one]}

    yield FeedChange(f"with the inputs {one!r} and {other!r} exchanged", (one, other), swapped, *MIXED_UP, clear=0.0)
    for to, source in ((one, other), (other, one)):
        words = f"with what belongs to {source!r} in the input {to!r}, too"
        yield FeedChange(words, (to,), partial(_with_other, feeds, to, source), *MIXED_UP, clear=0.0)


def _with_other(feeds: Sequence[Feed], to: str, source: str, k: int) -> Feed:
    return {**feeds[k], to: feeds[k][source]}


def _left_over(feeds: Sequence[Feed], names: Sequence[str]) -> Iterator[FeedChange]:
    """Inputs that are not written before a run: they hold what they held before, or nothing."""
    arrays = [feed[name] for name in names for feed in feeds]
    which = f"the input{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
    given = tuple(names)
    is_all = len(feeds[0]) == len(names)  # the outputs are another sample's then (``patterns.stale``)
    varies = any(not np.array_equal(feeds[0][name], feed[name]) for name in names for feed in feeds[1:])
    if any(array.any() for array in arrays):
        yield each(feeds, names, "with zeros in the {}", np.zeros_like, NOT_WRITTEN, clear=0.0)
    if is_marks(arrays):
        yield each(feeds, names, "for {} as 1 - x", line(-1.0, 1.0), clear=0.0)
        yield each(feeds, names, "with ones in the {}", np.ones_like, NOT_MASKED, clear=0.0)
    if not varies or is_all:
        return
    ways: tuple[tuple[str, Callable[[int], int]], ...] = (
        (f"with the sample before's values in {which}", lambda k: k - 1),
        (f"with the sample after's values in {which}", lambda k: k + 1),
        (f"with the first sample's values in {which} all the time", lambda k: 0 if k else -1),
    )
    for words, source in ways:
        yield FeedChange(words, given, partial(_of_other_sample, feeds, names, source), *NOT_WRITTEN, clear=0.0)


def _of_other_sample(feeds: Sequence[Feed], names: Sequence[str], source: Callable[[int], int], k: int) -> Feed | None:
    other = source(k)
    if not 0 <= other < len(feeds) or any(feeds[other][name].shape != feeds[k][name].shape for name in names):
        return None
    return {**feeds[k], **{name: feeds[other][name] for name in names}}


def is_marks(arrays: Sequence[np.ndarray]) -> bool:
    """Whether an input holds zeros and ones alone, and both: a mask."""
    return all(bool(np.isin(array, (0, 1)).all()) for array in arrays) and (
        any(array.any() for array in arrays) and not all(array.all() for array in arrays)
    )
