"""What single values of a model hold on one or two feeds: to find the node where something begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from mptune.engines.base import Stage
from mptune.engines.jobs.checks.rows import first_other, relative_l2, row_feeds
from mptune.engines.jobs.samples import Feed, cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions
from mptune.engines.worker.child import WorkerState

Question = Literal["finite", "repeat", "constant", "rows", "batch"]
"""finite: one sample. repeat: one sample twice. constant: two samples that differ. rows: a row alone, and the same row
among different ones. batch: a row alone, and a batch."""


@dataclass(frozen=True)
class Sight:
    """What one value holds.

    Attributes:
        nan: how many NaN there are on the first feed.
        infinite: how many infinite values there are on the first feed.
        difference: relative L2 between the two feeds, of the same row where rows are compared; 0 where there is one
            feed, or where the two cannot be compared; infinite where a value belongs to pairs of rows.
    """

    shapes: tuple[tuple[int, ...], ...]
    nan: int = 0
    infinite: int = 0
    difference: float = 0.0
    is_equal: bool = True

    @property
    def is_finite(self) -> bool:
        """Neither NaN nor infinite."""
        return not (self.nan or self.infinite)

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
        found: dict[str, Sight] = {}
        for model in self.models:
            session = state.transient(partial(open_session, model, options))
            state.enter(Stage.RUN)
            feeds = self._feeds(session, samples)
            if not feeds:
                return {}
            results = [session.run(feed) for feed in feeds]
            for name in results[0]:
                found[name] = self._sight([values[name] for values in results])
            session.close()
        return found

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
        return Sight(shapes, nan, infinite, relative_l2(other, first), is_equal)


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
