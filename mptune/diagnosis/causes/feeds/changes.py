"""All ways in which a deployment may feed the same samples otherwise, in stages, the most frequent ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mptune.diagnosis.causes.feeds.buffers import buffer_changes
from mptune.diagnosis.causes.feeds.change import Feed, FeedChange, each
from mptune.diagnosis.causes.feeds.entries import entry_changes
from mptune.diagnosis.causes.feeds.geometry import turned_and_blurred, unpadded
from mptune.diagnosis.causes.feeds.images import channel_axis, colour_changes, image_changes

_MOST_ALONE = 4
"""Inputs of one shape and type; of more, such as the caches of many layers, all are changed together only."""


def feed_changes(feeds: Sequence[Feed]) -> Iterator[FeedChange]:
    """Ways that are tried first: range, channels and layout of images, inputs mixed up, left over or not written.

    Args:
        feeds: the samples, in their order.
    """
    for name in feeds[0]:
        for words, change in image_changes([feed[name] for feed in feeds]):
            yield each(feeds, [name], f"for {{}} {words}", change)
    yield from buffer_changes(feeds, input_groups(feeds))


def further_changes(feeds: Sequence[Feed]) -> Iterator[FeedChange]:
    """Ways that are tried where none of the first gives what was recorded: entries off by one, images placed otherwise.

    Args:
        feeds: the samples, in their order.
    """
    groups = input_groups(feeds)
    for names in groups:
        arrays = [feed[name] for name in names for feed in feeds]
        channels = channel_axis(arrays[0].shape)
        if channels is None or len({array.shape for array in arrays}) > 1:
            continue
        for words, change in colour_changes(arrays):
            yield each(feeds, names, f"for {{}} {words}", change)
        for words, change, clear in (*turned_and_blurred(arrays), *unpadded(arrays)):
            yield each(feeds, names, f"for {{}} {words}", change, clear=clear)
    yield from entry_changes(feeds, groups)


def input_groups(feeds: Sequence[Feed]) -> list[tuple[str, ...]]:
    """Inputs that may be changed together: each alone, and all of one shape and type, where there are some."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, array in feeds[0].items():
        alike.setdefault((array.shape, array.dtype), []).append(name)
    alone = [(name,) for names in alike.values() if len(names) <= _MOST_ALONE for name in names]
    return [*alone, *(tuple(names) for names in alike.values() if len(names) > 1)]
