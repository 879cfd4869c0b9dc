"""Do the rows of a batch mix, and does every output keep them?"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.engines.base import EngineError, FailureKind, RowReport
from mptune.engines.ort.session import OrtSession
from mptune.engines.outputs import value_error
from mptune.engines.samples import Feed, Outputs

ROWS_WARNING = 1e-4  # rows that differ by more are no rounding, in relative L2
_MOST_ROWS = 4
_ROWS_BYTES = 1 << 30
"""Memory for a batch of different rows, bytes, by the estimate of one run's: there are two at least."""
_OTHER_SAMPLES = 8  # most samples that are searched for rows that differ
_NO_BATCH = re.compile(
    r"(?:^|[_\W])(?:seq|sequence|time|step|length|len|tokens?|frames?|points?|nodes?|edges?|vertices|height|width|[htw])",
    re.IGNORECASE,
)
"""A dimension with such a name holds the parts of one sample, which may well act on each other."""
Dim = int | str | None


@dataclass(frozen=True)
class RowFeeds:
    """A batch of different rows, and its first and last row without the others."""

    axes: Mapping[str, int]  # input -> its batch axis
    count: int  # rows of ``batch``
    is_dynamic: bool
    batch: Feed
    first: Feed
    """The first row alone; among copies of itself where the batch is fixed, in which nothing else fits."""
    last: Feed
    is_whole: bool
    """No other input has a dynamic axis of the same size, which may be the batch under another name or none."""


def row_feeds(inputs: Mapping[str, Sequence[Dim]], samples: Sequence[Feed], most: int = _MOST_ROWS) -> RowFeeds | None:
    """Batches to compare rows of; None where the model has no batch.

    The batch is dimension 0: of the inputs that share the first dynamic dimension 0 (an input may have it elsewhere, as
    a KV cache with keys and values stacked does), else a fixed one above 1 that all inputs but single numbers share.
    One in which they differ is no batch but the layers of a state, the nodes of a graph, or the like; nor is a dynamic
    one whose name says otherwise, or whose size differs among the samples.
    """
    feed = samples[0]
    inputs = {name: shape for name, shape in inputs.items() if shape and name in feed}
    dynamic = [name for name, shape in inputs.items() if not isinstance(shape[0], int)]
    is_whole = True
    if dynamic:
        batch, length = inputs[dynamic[0]][0], feed[dynamic[0]].shape[0]
        if _NO_BATCH.search(str(batch or "")) or any(sample[dynamic[0]].shape[0] != length for sample in samples):
            return None
        size = 2
        axes = {name: list(shape).index(batch) for name, shape in inputs.items() if batch and batch in shape}
        axes = axes or {name: 0 for name in dynamic if inputs[name][0] == batch}
        others = ((d, n) for name in inputs.keys() - axes for d, n in zip(inputs[name], feed[name].shape, strict=False))
        is_whole = not any(n == length and not isinstance(d, int) and not _NO_BATCH.search(d or "") for d, n in others)
    else:
        axes = {name: 0 for name, shape in inputs.items() if [*shape] != [1]}
        sizes = {inputs[name][0] for name in axes}
        size = most = next((dim for dim in sizes if isinstance(dim, int)), 1) if len(sizes) == 1 else 1
        if any([*shape] == [size, size] for shape in inputs.values()):  # relates the rows, as the edges of a graph
            return None
    if size < 2 or any(feed[name].shape[axis] < 1 for name, axis in axes.items()):
        return None

    # Rows that differ and fit the first one: of the samples, else the first with its values in another order.
    first = _row(feed, axes, 0)
    shared = {name: values for name, values in first.items() if name not in axes}
    rows: list[Feed] = [first]
    for sample in samples[:_OTHER_SAMPLES]:
        for index in range(min(most, *(sample[name].shape[axis] for name, axis in axes.items()))):
            row = {**_row(sample, axes, index), **shared}
            fits = all(row[name].shape == first[name].shape for name in axes)
            if len(rows) < most and fits and not any(_same(row, other) for other in rows):
                rows.append(row)
    if len(rows) == 1:
        flipped = {name: np.flip(first[name], -1) if first[name].ndim > 1 else first[name] for name in axes}
        changed: tuple[Feed, ...] = ({**first, **flipped}, {**first, **halved(flipped)})
        rows += [row for row in changed if not _same(row, first)][:1]
    rows += [rows[-1]] * (size - len(rows))

    def joined(parts: Sequence[Feed]) -> Feed:
        return {**first, **{name: np.concatenate([part[name] for part in parts], axis) for name, axis in axes.items()}}

    start, end = (row if dynamic else joined([row] * size) for row in (rows[0], rows[-1]))
    return RowFeeds(axes, len(rows), bool(dynamic), joined(rows), start, end, is_whole)


def _row(feed: Feed, axes: Mapping[str, int], row: int) -> dict[str, np.ndarray]:
    return {**feed, **{name: feed[name].take([row], axis) for name, axis in axes.items()}}


def _same(feed: Feed, other: Feed) -> bool:
    return all(np.array_equal(values, other[name]) for name, values in feed.items())


def halved(feed: Feed) -> Feed:
    """Another sample, where there is only one."""
    return {name: x * x.dtype.type(0.5) if x.dtype.kind == "f" else x for name, x in feed.items()}


def first_other(feeds: Sequence[Feed]) -> int | None:
    """Index of the first sample that differs from the first one; None where all are the same."""
    return next((k for k, feed in enumerate(feeds) if not _same(feed, feeds[0])), None)


def check_rows(
    session: OrtSession,
    samples: Sequence[Feed],
    dependent: Collection[str],
    outputs: Outputs,
    run_bytes: int | None = None,
    row_axes: Mapping[str, int] | None = None,
) -> RowReport:
    """Run a batch of different rows, and its first and last row without the others, and compare.

    ``outputs`` are those of the first sample, ``dependent`` those whose shape depends on values. In a batch of another
    size, rounding may order what a TopK selects otherwise: columns are sorted along ``row_axes``.
    """
    most = _MOST_ROWS if not run_bytes else min(_MOST_ROWS, max(2, _ROWS_BYTES // run_bytes))
    feeds = row_feeds({name: shape for name, (_, shape) in session.inputs.items()}, samples, most)
    if feeds is None:
        return RowReport()
    count = rows_alone = 1 if feeds.is_dynamic else feeds.count
    try:
        first = outputs if _same(feeds.first, samples[0]) else session.run(feeds.first)
        last = session.run(feeds.last)
        count = feeds.count
        first, last, batch = (sorted_rows(each, row_axes or {}) for each in (first, last, session.run(feeds.batch)))
    except EngineError as error:
        if not feeds.is_dynamic or error.kind is not FailureKind.ERROR:
            raise
        # Another input may hold indices or lengths that fit this number of rows only, as edges of a graph do.
        others = (values for name, values in samples[0].items() if name not in feeds.axes)
        if not feeds.is_whole or any(values.dtype.kind in "iu" and values.size > 1 for values in others):
            return RowReport()
        name, axis = next(iter(feeds.axes.items()))
        return RowReport(count, failure=error.message, ran=samples[0][name].shape[axis])

    for values in () if feeds.is_dynamic else [first[name] for name in first.keys() - {*dependent} if first[name].ndim]:
        # Identical rows with different results are told apart by their positions: tokens or steps, and no samples.
        if len(values) != count or value_error(values, np.broadcast_to(values[0], values.shape)) > ROWS_WARNING:
            return RowReport()

    of_first, of_last = dict[str, float](), dict[str, float]()
    lost, declared = dict[str, tuple[int, ...]](), dict[str, str]()
    batch_name = next((shape[0] for _, shape in session.inputs.values() if shape and isinstance(shape[0], str)), None)
    for name, values in batch.items():
        if name in dependent:
            continue
        if values.shape[:1] == (count,) and first[name].shape[:1] == (rows_alone,):
            of_first[name] = _distance(values, 0, first[name][0])
            of_last[name] = _distance(values, count - 1, last[name][-1])
        # An output that has as many rows for a batch as for one row, although its shape or its values follow it. One
        # that is not declared to have the batch, as a table of anchors is, has no rows to lose unless its size is 1, or
        # of no name, and its values depend on the row.
        shape = session.outputs[name][1]
        can_lose = feeds.is_dynamic and feeds.is_whole and values.ndim > 0 and bool(shape)
        if not can_lose or values.shape != first[name].shape or values.shape[0] == count:
            continue
        differs = not np.array_equal(last[name], first[name])
        may_be_batch = shape[0] in (1, None) or (batch_name is None and isinstance(shape[0], str))
        if shape[0] == batch_name is not None or (may_be_batch and differs):
            lost[name] = tuple(int(dim) for dim in values.shape)
            declared[name] = f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"
    is_last = bool(of_last) and max(of_last.values()) > max(of_first.values())
    mixed = {name: max(error, of_last[name]) for name, error in of_first.items()}
    return RowReport(count, mixed, count - 1 if is_last else 0, not feeds.is_dynamic, lost, declared)


def sorted_rows(outputs: Outputs, axes: Mapping[str, int]) -> Outputs:
    """Outputs with each column sorted along the axis of rows that a TopK selects."""
    return {name: np.sort(array, axes[name]) if name in axes else array for name, array in outputs.items()}


def _distance(batch: np.ndarray, row: int, alone: np.ndarray) -> float:
    """How far a row of a batch is from the row alone, against the larger of its norm and the mean row's."""
    error = value_error(batch[row], alone)
    norm, *norms = (float(np.linalg.norm(np.asarray(values, np.float64))) for values in (alone, *batch))
    usual = float(np.sqrt(np.mean(np.square(norms))))
    return error * norm / usual if np.isfinite(error) and np.isfinite(usual) and usual > norm > 0 else error
