"""Do the rows of a batch mix? And which node is the first whose values do."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from mptune.engines.base import EngineError, FailureKind, Stage
from mptune.engines.jobs.outputs import value_error
from mptune.engines.jobs.reference_report import RowReport
from mptune.engines.jobs.samples import Feed, Outputs, cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions
from mptune.processes.child import WorkerState

_MOST_ROWS = 4
_ROWS_BYTES = 1 << 30
"""Memory for a batch of different rows, bytes, by the estimate of one run's: there are two at least."""
_OTHER_SAMPLES = 8
"""Most samples that are searched for rows that differ."""
_NO_BATCH = re.compile(
    r"(?:^|[_\W])(?:seq|sequence|time|step|length|len|tokens?|frames?|points?|nodes?|edges?|vertices|height|width|[htw])",
    re.IGNORECASE,
)
"""A dimension with such a name holds the parts of one sample, which may well act on each other."""


@dataclass(frozen=True)
class RowFeeds:
    """One batch in three forms."""

    axes: Mapping[str, int]
    """Input -> its batch axis."""
    size: int
    is_dynamic: bool
    rows: tuple[Feed, ...]
    """Each row of ``mixed`` alone; the first alone where the batch is fixed, in which nothing else fits."""
    repeated: Feed
    mixed: Feed | None
    """Different rows; None where there are none."""
    is_whole: bool = True
    """No other input has a dynamic axis of the same size, which may be the batch under another name or none."""


def first_other(feeds: Sequence[Feed]) -> int | None:
    """Index of the first sample that differs from the first one; None where all are the same."""
    return next((k for k, feed in enumerate(feeds) if not _same(feed, feeds[0])), None)


def row_feeds(
    inputs: Mapping[str, Sequence[int | str | None]], samples: Sequence[Feed], most: int = _MOST_ROWS
) -> RowFeeds | None:
    """Batches to compare rows of; None where the model has no batch.

    The batch is dimension 0: of the inputs that share the first dynamic dimension 0, else of those that share the
    first fixed one above 1. Where inputs of two dimensions and more differ in a fixed one, it is no batch but the
    layers of a state, the nodes of a graph, or the like. An input may have the same dynamic dimension elsewhere, as a
    KV cache with keys and values stacked does. A dynamic dimension whose name says otherwise, or whose size differs
    among the samples, is no batch.
    """
    feed = samples[0]
    declared = {name: shape[0] for name, shape in inputs.items() if shape and name in feed}
    dynamic = [name for name, dim in declared.items() if not isinstance(dim, int)]
    if dynamic:
        size = max(2, feed[dynamic[0]].shape[0])
        batch = declared[dynamic[0]]
        if _NO_BATCH.search(str(batch or "")) or len({sample[dynamic[0]].shape[0] for sample in samples}) > 1:
            return None
        axes = {name: 0 for name in dynamic if declared[name] == batch}
        for name, shape in inputs.items():
            if batch and name in feed and name not in axes and batch in shape:
                axes[name] = list(shape).index(batch)
    else:
        size = next((dim for dim in declared.values() if isinstance(dim, int) and dim > 1), 1)
        axes = {name: 0 for name, dim in declared.items() if dim == size}
        if any(len(shape) > 1 and shape[0] != size for name, shape in inputs.items() if name in declared):
            return None
    if size < 2 or not axes or any(feed[name].shape[axis] < 1 for name, axis in axes.items()):
        return None
    first = _row(feed, axes, 0)
    repeated = {**first, **{name: np.repeat(first[name], size, axis) for name, axis in axes.items()}}
    others = _other_rows(first, axes, samples, most if dynamic else size)
    if dynamic:
        rows = (first, *others)
    elif others:
        rows = (first, *others, *(others[-1] for _ in range(size - 1 - len(others))))
    else:
        rows = (first,)
    mixed = None
    if len(rows) > 1:
        mixed = {**first, **{name: np.concatenate([row[name] for row in rows], axis) for name, axis in axes.items()}}
    is_whole = not any(
        not isinstance(dim, int) and not _NO_BATCH.search(dim or "") and length == feed[dynamic[0]].shape[0]
        for name, shape in inputs.items()
        if dynamic and name in feed and name not in axes
        for dim, length in zip(shape, feed[name].shape, strict=False)
    )
    return RowFeeds(axes, size, bool(dynamic), rows if dynamic else rows[:1], repeated, mixed, is_whole)


def _row(feed: Feed, axes: Mapping[str, int], row: int) -> dict[str, np.ndarray]:
    return {**feed, **{name: feed[name].take([row], axis) for name, axis in axes.items()}}


def _same(feed: Feed, other: Feed) -> bool:
    return all(np.array_equal(values, other[name]) for name, values in feed.items())


def _other_rows(first: Feed, axes: Mapping[str, int], samples: Sequence[Feed], most: int) -> list[Feed]:
    """Rows that differ from the first, and fit it: of the samples, else the first with its values in another order."""
    shared = {name: values for name, values in first.items() if name not in axes}
    others: list[Feed] = []
    for sample in samples[:_OTHER_SAMPLES]:
        size = min(sample[name].shape[axis] for name, axis in axes.items())
        for index in range(min(size, most)):
            row = {**_row(sample, axes, index), **shared}
            fits = all(row[name].shape == first[name].shape for name in axes)
            if fits and not any(_same(row, other) for other in (first, *others)):
                others.append(row)
        if len(others) >= most - 1:
            return others[: most - 1]
    if others:
        return others
    flipped = {name: np.flip(first[name], -1) if first[name].ndim > 1 else first[name] for name in axes}
    row = {**first, **flipped}
    if _same(row, first):
        row = {**first, **_halved(flipped)}
    return [] if _same(row, first) else [row]


def check_rows(
    session: OrtSession,
    samples: Sequence[Feed],
    dependent: Collection[str],
    outputs: Outputs,
    run_bytes: int | None = None,
) -> RowReport:
    """Run batches of identical and of different rows, and rows alone, and compare.

    ``outputs`` are those of the first sample; a run takes about ``run_bytes``.
    """
    most = _MOST_ROWS if not run_bytes else min(_MOST_ROWS, max(2, _ROWS_BYTES // run_bytes))
    feeds = row_feeds(session.inputs, samples, most)
    if feeds is None:
        return RowReport()
    count = feeds.size
    try:
        many = session.run(feeds.repeated)
        count = 1
        is_sample = _same(feeds.rows[0], samples[0])
        alone = (outputs if is_sample else session.run(feeds.rows[0])) if feeds.is_dynamic else None
        count = len(feeds.rows)
        mixed = None if feeds.mixed is None else session.run(feeds.mixed)
        last = session.run(feeds.rows[-1]) if feeds.is_dynamic and mixed is not None else None
    except EngineError as error:
        if not feeds.is_dynamic or error.kind is not FailureKind.ERROR:
            raise
        if not feeds.is_whole:
            return RowReport()
        name, axis = next(iter(feeds.axes.items()))
        return RowReport(count, failure=error.message, ran=samples[0][name].shape[axis])
    many, size = {name: values for name, values in many.items() if name not in dependent}, feeds.size
    rows = [name for name, values in many.items() if values.ndim and values.shape[0] == size]
    if alone is not None:
        rows = [name for name in rows if alone[name].shape[:1] != (size,)]
    repeated = {name: max(value_error(many[name][k], many[name][0]) for k in range(1, size)) for name in rows}
    if alone is None:
        report = RowReport(size, repeated)
        if mixed is not None:
            changes = {name: _distance(mixed[name], 0, many[name][0]) for name in rows}
            report = replace(report, mixed=changes)
        return report
    single = [name for name in rows if alone[name].shape[:1] == (1,)]
    report = RowReport(size, repeated, {name: value_error(many[name][0], alone[name][0]) for name in single})
    if mixed is not None and last is not None:
        report = _with_mixed(report, single, mixed, alone, last, len(feeds.rows))
    return _with_lost(session, report, many, alone, last) if feeds.is_whole else report


def _with_mixed(
    report: RowReport, names: Sequence[str], mixed: Outputs, alone: Outputs, last: Outputs, size: int
) -> RowReport:
    kept = [name for name in names if mixed[name].shape[:1] == (size,)]
    of_first = {name: _distance(mixed[name], 0, alone[name][0]) for name in kept}
    of_last = {name: _distance(mixed[name], size - 1, last[name][0]) for name in kept}
    worst = {name: max(of_first[name], of_last[name]) for name in kept}
    is_last = bool(kept) and max(of_last.values()) > max(of_first.values())
    return replace(report, mixed=worst, mixed_row=size - 1 if is_last else 0)


def _distance(batch: np.ndarray, row: int, alone: np.ndarray) -> float:
    """How far a row of a batch is from the row alone, against the larger of its norm and the mean row's.

    A row whose values are near zero among rows that are not would make rounding large.
    """
    error = value_error(batch[row], alone)
    norms = [float(np.linalg.norm(np.asarray(values, np.float64))) for values in (alone, *batch)]
    usual = float(np.sqrt(np.mean(np.square(norms[1:]))))
    if np.isfinite(error) and np.isfinite(usual) and usual > norms[0] > 0:
        return error * norms[0] / usual
    return error


def _with_lost(
    session: OrtSession, report: RowReport, many: Outputs, alone: Outputs, other: Outputs | None
) -> RowReport:
    """Outputs that have as many rows for a batch as for one row, although their shape or their values follow it.

    One that is not declared to have the batch, as a table of anchors is, has no rows to lose unless its size is 1, or
    of no name, and its values depend on the row.
    """
    lost = {}
    declared = {name: shape for name, (_, shape) in session.outputs.items()}
    batch = next((shape[0] for shape in session.inputs.values() if shape and isinstance(shape[0], str)), None)
    for name, values in many.items():
        shape = declared.get(name)
        if values.ndim == 0 or not shape or values.shape != alone[name].shape:
            continue
        differs = other is not None and not np.array_equal(other[name], alone[name])
        may_be_batch = shape[0] in (1, None) or (batch is None and isinstance(shape[0], str))
        if values.shape[0] != report.rows and (shape[0] == batch is not None or (may_be_batch and differs)):
            lost[name] = tuple(int(dim) for dim in values.shape)
    written = {name: "[" + ", ".join("?" if dim is None else str(dim) for dim in declared[name]) + "]" for name in lost}
    return replace(report, lost=lost, declared=written)


Question = Literal["finite", "repeat", "constant", "rows", "batch"]
"""finite: one sample. repeat: one sample twice. constant: two samples that differ. rows: a row alone, and the same row
among different ones. batch: a row alone, and a batch."""


@dataclass(frozen=True)
class Sight:
    """What one value holds."""

    shapes: tuple[tuple[int, ...], ...]
    nan: int = 0
    infinite: int = 0
    difference: float = 0.0
    """Relative L2 between the two feeds, of the same row where rows are compared; 0 where there is one feed, or where
    the two cannot be compared; infinite where a value belongs to pairs of rows."""
    is_equal: bool = True

    @property
    def is_finite(self) -> bool:
        """Neither NaN nor infinite."""
        return not (self.nan or self.infinite)

    @property
    def kind(self) -> str:
        """What stands there where it is not finite."""
        return "nan" if self.nan else "inf"

    @property
    def keeps_rows(self) -> bool:
        """Whether the first dimension grows with the batch."""
        first, second = (shape[:1] for shape in self.shapes)
        return first != second


@dataclass(frozen=True)
class SightJob:
    """Run models whose outputs are values of one model, and reduce each to a ``Sight``."""

    models: tuple[Path, ...]
    samples: Path
    provider: Provider
    question: Question
    index: int = 0

    def run(self, state: WorkerState) -> dict[str, Sight]:
        """See the class; empty where the samples do not have such feeds."""
        samples = cached_samples(state, self.samples)
        options = SessionOptions(self.provider, tf32=False, timing=False)
        sights: dict[str, Sight] = {}
        for model in self.models:
            session = state.transient(partial(open_session, model, options))
            state.enter(Stage.RUN)
            feeds = self._feeds(session, samples)
            if not feeds:
                return {}
            results = [session.run(feed) for feed in feeds]
            for name in results[0]:
                sights[name] = self._sight([values[name] for values in results])
            session.close()
        return sights

    def _feeds(self, session: OrtSession, samples: Sequence[Feed]) -> tuple[Feed, ...]:
        if self.question == "finite":
            return (samples[self.index],)
        if self.question == "repeat":
            return (samples[0], samples[0])
        if self.question == "constant":
            other = first_other(samples)
            return (samples[0], _halved(samples[0]) if other is None else samples[other])
        rows = row_feeds(session.inputs, samples)
        if rows is None or (rows.mixed is None and self.question == "rows"):
            return ()
        if self.question == "batch":
            return (rows.rows[0], rows.repeated)
        assert rows.mixed is not None
        return (rows.rows[self.index] if rows.is_dynamic else rows.repeated, rows.mixed)

    def _sight(self, arrays: Sequence[np.ndarray]) -> Sight:
        first, other = arrays[0], arrays[-1]
        is_float = first.dtype.kind == "f"
        nan = int(np.isnan(first).sum()) if is_float else 0
        infinite = int(np.isinf(first).sum()) if is_float else 0
        shapes = tuple(tuple(int(dim) for dim in array.shape) for array in arrays)
        if self.question == "rows":
            if first.shape == other.shape:
                if not first.ndim or not first.shape[0] or self.index >= first.shape[0]:
                    return Sight(shapes, nan, infinite)
                first, other = first[self.index], other[self.index]
            else:
                if _pairs_rows(first, other):
                    return Sight(shapes, nan, infinite, math.inf, is_equal=False)
                part = _row_of(first, other, self.index)
                if part is None:
                    return Sight(shapes, nan, infinite)
                other = part
        if first.dtype.kind not in "fiub" or len(arrays) == 1:
            return Sight(shapes, nan, infinite)
        is_equal = first.shape == other.shape and np.array_equal(first, other, equal_nan=is_float)
        return Sight(shapes, nan, infinite, value_error(other, first), is_equal)


def _halved(feed: Feed) -> Feed:
    """Another sample, where there is only one."""
    return {name: x * x.dtype.type(0.5) if x.dtype.kind == "f" else x for name, x in feed.items()}


def _pairs_rows(alone: np.ndarray, batch: np.ndarray) -> bool:
    """Whether two axes grew with the batch: each value belongs to a pair of rows, as in attention over the batch."""
    return alone.ndim == batch.ndim and sum(a != b for a, b in zip(alone.shape, batch.shape, strict=True)) > 1


def _row_of(alone: np.ndarray, batch: np.ndarray, row: int) -> np.ndarray | None:
    """The part of a batch that belongs to one row, by the one axis that grew; None where that is not clear."""
    if alone.ndim != batch.ndim:
        return None
    grown = [axis for axis in range(alone.ndim) if alone.shape[axis] != batch.shape[axis]]
    if len(grown) != 1 or alone.shape[grown[0]] == 0:
        return None
    (axis,) = grown
    size = alone.shape[axis]
    if batch.shape[axis] < (row + 1) * size:
        return None
    return batch.take(range(row * size, (row + 1) * size), axis)
