"""Inputs whose entries are one place further on, in another order, off by one, at the other end, or rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from mptune.diagnosis.causes.feeds.buffers import is_marks
from mptune.diagnosis.causes.feeds.change import Change, Feed, FeedChange, each, inputs_text, reversed_along
from mptune.diagnosis.causes.feeds.images import channel_axis

_MOST_AXES = 5
_COLOURS = 3
"""Channels of what is an image, and nothing else."""
_OFF_BY_ONE = (
    "entries are off by one there",
    "count positions, steps and indices from the same number on both sides, and see which entry is written last",
)
_NOT_WHOLE = (
    "an entry is not written there",
    "see which entry is written last, and whether it is written before the run",
)
_OTHER_END = ("sequences are padded at the other end there", "pad them at the same end on both sides")
_FEWER_DIGITS = (
    "that input is held in fewer digits there",
    "see in which type the deployment holds it, and give it as the samples have it",
)
_REORDERED = ("its entries come in another order there", "give the entries in the samples' order")


def entry_changes(feeds: Sequence[Feed], groups: Sequence[Sequence[str]]) -> Iterator[FeedChange]:
    """All ways of this kind.

    Args:
        feeds: the samples, in their order.
        groups: names of inputs of one shape and type that may be changed together; single ones, too.
    """
    for names in groups:
        arrays = [feed[name] for name in names for feed in feeds]
        first = arrays[0]
        if first.dtype.kind in "iu":
            yield from _of_whole_numbers(feeds, names)
        channels = channel_axis(first.shape)
        if not 2 <= first.ndim <= _MOST_AXES or (channels is not None and first.shape[channels] == _COLOURS):
            continue
        if is_marks(arrays):
            yield from _of_marks(feeds, names)
        for axis in range(1, first.ndim):
            if min(array.shape[axis] for array in arrays) >= 2:
                yield from _along(feeds, names, axis)
    yield from _padded(feeds)
    yield from _unmasked(feeds)


def rounded_changes(feeds: Sequence[Feed], groups: Sequence[Sequence[str]]) -> Iterator[FeedChange]:
    """Inputs in fewer digits."""
    for names in groups:
        arrays = [feed[name] for name in names for feed in feeds]
        if arrays[0].dtype != np.float32 or not all(np.isfinite(array).all() for array in arrays):
            continue
        for words, change in _ROUNDINGS:
            yield each(feeds, names, f"for {{}} rounded to {words}", change, _FEWER_DIGITS)
        for words, levels in (("INT8", 127), ("UINT8", 255)):
            largest = {name: max(float(np.abs(feed[name]).max(initial=0.0)) for feed in feeds) for name in names}
            steps = {name: most / levels for name, most in largest.items() if most}
            shown = " and ".join(f"{step:.3g}" for step in list(steps.values())[:2])

            def feed(k: int, steps: Mapping[str, float] = steps) -> Feed:
                return {**feeds[k], **{name: _to_steps(feeds[k][name], step) for name, step in steps.items()}}

            said = f"for {inputs_text(names)} rounded to {words}, in steps of {shown}"
            yield FeedChange(said, tuple(names), feed, *_FEWER_DIGITS)


def _to_steps(x: np.ndarray, step: float) -> np.ndarray:
    found: np.ndarray = (np.round(x / (step or 1.0)) * step).astype(x.dtype)
    return found


def _to_digits(x: np.ndarray, bits: int) -> np.ndarray:
    """To a mantissa of so many bits beside the leading one; the range of exponents stays."""
    fraction, exponent = np.frexp(x)
    found: np.ndarray = np.ldexp(np.round(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent).astype(x.dtype)
    return found


_ROUNDINGS: Sequence[tuple[str, Change]] = (
    ("whole numbers", np.round),
    ("FP8 (E4M3)", partial(_to_digits, bits=3)),
    ("FP8 (E5M2)", partial(_to_digits, bits=2)),
    ("BF16", partial(_to_digits, bits=7)),
    ("FP16", lambda x: x.astype(np.float16).astype(x.dtype)),
    ("INT8, each sample by its own largest value", lambda x: _to_steps(x, float(np.abs(x).max()) / 127)),
)


def _of_whole_numbers(feeds: Sequence[Feed], names: Sequence[str]) -> Iterator[FeedChange]:
    for by in (1, -1):
        words = f"plus {by}" if by > 0 else f"minus {-by}"
        yield each(feeds, names, f"for {{}} {words}", partial(_added, by=by, is_kept=False), _OFF_BY_ONE)
        yield each(feeds, names, f"for {{}} {words}, zeros kept", partial(_added, by=by, is_kept=True), _OFF_BY_ONE)


def _added(x: np.ndarray, by: int, *, is_kept: bool) -> np.ndarray:
    found: np.ndarray = np.where((x == 0) & is_kept, x, x + by).astype(x.dtype)
    return found


def _of_marks(feeds: Sequence[Feed], names: Sequence[str]) -> Iterator[FeedChange]:
    """Masks that let one entry more, or one fewer, through."""
    axis = feeds[0][names[0]].ndim - 1
    for by, where in ((-1, "before"), (1, "after")):
        more = partial(_with_moved, by=by, axis=axis, is_more=True)
        fewer = partial(_with_moved, by=-by, axis=axis, is_more=False)
        yield each(feeds, names, f"for {{}} with one more entry let through {where} the others", more, _OFF_BY_ONE)
        side = "first" if where == "before" else "last"
        yield each(feeds, names, f"for {{}} without the {side} entry that is let through", fewer, _OFF_BY_ONE)


def _with_moved(x: np.ndarray, by: int, axis: int, *, is_more: bool) -> np.ndarray:
    moved = _moved(x, by, axis)
    found: np.ndarray = np.maximum(x, moved) if is_more else np.minimum(x, moved)
    return found


def _along(feeds: Sequence[Feed], names: Sequence[str], axis: int) -> Iterator[FeedChange]:
    size = feeds[0][names[0]].shape[axis]
    for by, where in ((1, "on"), (-1, "back")):
        words = f"for {{}} one entry further {where} along axis {axis}"
        yield each(feeds, names, f"{words}, with zero at its end", partial(_moved, by=by, axis=axis), _OFF_BY_ONE)
        if size > 2:
            yield each(feeds, names, f"{words}, in a circle", partial(np.roll, shift=by, axis=axis), _OFF_BY_ONE)
    for entry, which in ((-1, "last"), (0, "first")):
        change = partial(_without, entry=entry, axis=axis)
        yield each(feeds, names, f"for {{}} with zero in the {which} entry of axis {axis}", change, _NOT_WHOLE)
    how = "exchanged" if size == 2 else "in reverse order"
    yield each(feeds, names, f"for {{}} with the entries of axis {axis} {how}", reversed_along(axis), _REORDERED)


def _moved(x: np.ndarray, by: int, axis: int) -> np.ndarray:
    """By one entry, with zero where none comes from."""
    return _without(np.roll(x, by, axis), entry=0 if by > 0 else -1, axis=axis)


def _without(x: np.ndarray, entry: int, axis: int) -> np.ndarray:
    found: np.ndarray = x.copy()
    np.moveaxis(found, axis, 0)[entry] = 0
    return found


def _padded(feeds: Sequence[Feed]) -> Iterator[FeedChange]:
    """All inputs that lie along a mask, with what it lets through at the other end."""
    for name, first in feeds[0].items():
        if first.ndim != 2 or first.shape[1] < 2 or not is_marks([feed[name] for feed in feeds]):
            continue
        names = [other for other, array in feeds[0].items() if array.ndim >= 2 and array.shape[:2] == first.shape]

        def feed(k: int, mask: str = name, along: Sequence[str] = tuple(names)) -> Feed | None:
            if any(feeds[k][one].shape[:2] != feeds[k][mask].shape for one in along):
                return None
            return {**feeds[k], **{one: _at_other_end(feeds[k][one], feeds[k][mask]) for one in along}}

        which = ", ".join(map(repr, names))
        words = f"with what {name!r} lets through at the other end, in {which}"
        yield FeedChange(words, tuple(names), feed, *_OTHER_END)


def _unmasked(feeds: Sequence[Feed]) -> Iterator[FeedChange]:
    """Each input whose samples end, or begin, with zeros along axis 1, with these at the other end."""
    for name in feeds[0]:
        arrays = [feed[name] for feed in feeds]
        if not 2 <= arrays[0].ndim <= 3 or is_marks(arrays):
            continue
        marks = [_not_padding(array) for array in arrays]
        if all(each.all() for each in marks) or not all(each.any() for each in marks):
            continue

        def feed(k: int, name: str = name, marks: Sequence[np.ndarray] = tuple(marks)) -> Feed:
            return {**feeds[k], name: _at_other_end(feeds[k][name], marks[k])}

        words = f"for input {name!r} with the zeros at the end of axis 1 at its other end"
        yield FeedChange(words, (name,), feed, *_OTHER_END)


def _not_padding(x: np.ndarray) -> np.ndarray:
    """Of each row, 0 where its entries from there on, or up to there, are all zero: (rows, entries of axis 1)."""
    used: np.ndarray = np.any(x.reshape(*x.shape[:2], -1) != 0, axis=2)
    marks = np.ones(used.shape, np.int64)
    for row, entries in enumerate(used):
        places = np.flatnonzero(entries)
        if places.size and (places[0] == 0 or places[-1] == entries.size - 1):
            marks[row, : places[0]] = marks[row, places[-1] + 1 :] = 0
    return marks


def _at_other_end(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Rows whose mask is ones, then zeros, or the other way round, rolled so that it is the reverse."""
    found: np.ndarray = x.copy()
    for row, marks in enumerate(mask):
        count = int((marks != 0).sum())
        by = marks.size - count if marks[0] else count - marks.size
        found[row] = np.roll(x[row], by, axis=0)
    return found
