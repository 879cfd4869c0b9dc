"""Which node is to blame where the untouched model is not sound on the samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from mptune.engines.base import Failure, Place, ReferenceReport, SampleSet, Stage
from mptune.engines.context import RunContext
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions
from mptune.engines.outputs import value_error
from mptune.engines.samples import Feed, cached_samples
from mptune.engines.toolchains.rows import ROWS_WARNING, first_other, halved, row_feeds
from mptune.graph.facts import attribute
from mptune.graph.loading.model import Model, Node, needed_nodes
from mptune.graph.ops import RECURRENT, SHAPE_OF, operator
from mptune.processes.child import WorkerState
from mptune.processes.parent import Worker

Question = Literal["finite", "repeat", "constant", "rows", "batch"]
"""finite: one sample. repeat: one sample twice. constant: two samples that differ. rows: a row alone, and the same row
among different ones. batch: a row alone, and a batch."""
REPEAT_WARNING = 1e-5  # two runs on one sample that differ by more are no rounding, in relative L2
ALONG_SEQUENCE, BY_INDEX = "sequence", "index"
"""Values of places where rows meet that are no samples: steps of a sequence, or nodes of a graph."""
_AT_ONCE = 48  # most values that are outputs of one model, and in memory at the same time
_SEQUENTIAL = RECURRENT | {"Scan"}
"""Axis 0 of what these read is a sequence, whose steps follow from each other."""
_SHAPE_OPERATORS = SHAPE_OF | {"ConstantOfShape", "Range", "EyeLike"}
"""What they give does not depend on values, and is no fault."""
_WATCHED = frozenset({"float", "float16", "double", "int64", "int32", "int8", "uint8", "int16", "bool"})


@dataclass(frozen=True)
class Sight:
    """What one value holds."""

    shapes: tuple[tuple[int, ...], ...]
    kind: str = ""  # ``nan`` or ``inf`` where not all is finite
    difference: float = 0.0
    """Relative L2 between the two feeds, of the same row where rows are compared; 0 where there is one feed, or where
    the two cannot be compared; infinite where a value belongs to pairs of rows."""
    is_equal: bool = True

    @property
    def keeps_rows(self) -> bool:
        """Whether the first dimension grows with the batch."""
        first, second = (shape[:1] for shape in self.shapes)
        return first != second


Sights = Mapping[str, Sight]  # value -> what it holds; empty where that could not be run


@dataclass(frozen=True)
class SightJob:
    """Run models whose outputs are values of one model, and reduce each to a ``Sight``."""

    models: tuple[Path, ...]
    samples: Path
    provider: Provider
    question: Question
    index: int = 0  # of the sample, or of the row, the first or the last one

    def run(self, state: WorkerState) -> dict[str, Sight]:
        """See the class; empty where the samples do not have such feeds."""
        samples = cached_samples(state, self.samples)
        sights: dict[str, Sight] = {}
        for model in self.models:
            session = state.transient(partial(open_session, model, SessionOptions(self.provider)))
            state.enter(Stage.RUN)
            results = [session.run(feed) for feed in self._feeds(session, samples)]
            sights.update({name: self._sight([values[name] for values in results]) for name in (results or [{}])[0]})
        return sights

    def _feeds(self, session: OrtSession, samples: Sequence[Feed]) -> tuple[Feed, ...]:
        if self.question == "finite":
            return (samples[self.index],)
        if self.question == "repeat":
            return (samples[0], samples[0])
        if self.question == "constant":
            other = first_other(samples)
            return (samples[0], halved(samples[0]) if other is None else samples[other])
        rows = row_feeds({name: shape for name, (_, shape) in session.inputs.items()}, samples)
        return () if rows is None else (rows.last if self.index else rows.first, rows.batch)

    def _sight(self, arrays: Sequence[np.ndarray]) -> Sight:
        first, other = arrays[0], arrays[-1]
        is_float = first.dtype.kind == "f"
        kind = ("nan" if np.isnan(first).any() else "inf" if np.isinf(first).any() else "") if is_float else ""
        sight = Sight(tuple(tuple(int(dim) for dim in array.shape) for array in arrays), kind)
        if self.question == "rows":
            # The part of a batch that belongs to the row, by the one axis that grew.
            grown = [k for k, (a, b) in enumerate(zip(first.shape, other.shape, strict=False)) if a != b]
            if first.ndim != other.ndim or first.ndim == 0:
                return sight
            if len(grown) > 1:  # each value belongs to a pair of rows, as in attention over the batch
                return replace(sight, difference=math.inf, is_equal=False)
            axis = grown[0] if grown else 0
            length = first.shape[axis] if grown else 1
            if length == 0 or other.shape[axis] < (self.index + 1) * length:
                return sight
            part = range(self.index * length, (self.index + 1) * length)
            first, other = first if grown else first.take(part, axis), other.take(part, axis)
        if first.dtype.kind not in "fiub" or len(arrays) == 1:
            return sight
        is_equal = first.shape == other.shape and np.array_equal(first, other, equal_nan=is_float)
        return replace(sight, difference=value_error(other, first), is_equal=is_equal)


def locate(
    context: RunContext, provider: Provider, worker: Worker, report: ReferenceReport, which: SampleSet
) -> ReferenceReport:
    """The report with the places of what is wrong; a sound one costs nothing and stays as it is."""
    from mptune.graph.writing.variants import write_with_outputs

    model, outputs, rows = context.model, report.outputs, report.rows
    places: dict[tuple[str, str], Place | None] = {}

    def look(question: Question, outputs: Sequence[str], index: int = 0) -> Sights:
        """What all values before some outputs hold; in parts, each a model of its own."""
        names = [info.name for info in model.inputs]
        names += [out for node in needed_nodes(model, outputs) for out in node.outputs if out not in model.initializers]
        watched = [name for name in names if name and model.info(name).dtype in _WATCHED]
        parts = [watched[start : start + _AT_ONCE] for start in range(0, len(watched), _AT_ONCE)]
        paths = [context.scratch(f"watch{number}") for number in range(len(parts))]
        try:
            for path, part in zip(paths, parts, strict=True):
                write_with_outputs(model, context.bank, path, part)
            sights = worker.call(SightJob(tuple(paths), context.samples(which), provider, question, index))
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        return {} if isinstance(sights, Failure) else sights

    not_finite = {name: int(facts.get("bad_sample", 0.0)) for name, facts in outputs.items() if facts["non_finite"]}
    if not_finite:
        first = min(not_finite, key=lambda name: not_finite[name])
        sample = not_finite[first]
        places["reference-not-finite", first] = _not_finite(model, look("finite", [first], sample), first, sample)
    if not report.repeat_error <= REPEAT_WARNING:
        sights = look("repeat", list(outputs))
        places["not-deterministic", ""] = _source(model, sights, REPEAT_WARNING, outputs)
    stuck = [name for name, facts in outputs.items() if facts.get("constant") or facts["zero_fraction"] >= 1.0]
    if stuck:
        sights = look("constant", stuck)
        varying = {name for name, sight in sights.items() if not sight.is_equal}
        for name in stuck:
            places["output-constant", name] = _nearest(model, name, varying, "constant")
    worst, error = rows.worst_mixed
    if not error <= ROWS_WARNING:
        sights = look("rows", [worst], rows.mixed_row)
        culprit = _source(model, sights, min(ROWS_WARNING, error / 10), [worst])
        if culprit is not None:
            node = model.nodes[model.producer[culprit.tensor]]
            # Steps of a sequence may meet before the operator that says so, as in a convolution over time.
            recurrent = (n for n in needed_nodes(model, [worst]) if _is_sequential(n) and n.op_type in RECURRENT)
            along = (n for n in recurrent if n.inputs[0] in sights and sights[n.inputs[0]].keeps_rows)
            sequential = node if _is_sequential(node) else next(along, None)
            if sequential is not None:
                tensor = culprit.tensor if sequential is node else next(filter(None, sequential.outputs))
                culprit = _place(sequential, tensor, ALONG_SEQUENCE)
            elif _takes_rows_by_index(model, node):
                culprit = replace(culprit, value=BY_INDEX)
        places["rows-mix", worst] = culprit
    if rows.lost:
        sights = look("batch", list(rows.lost))
        batched = {name for name, sight in sights.items() if sight.keeps_rows}
        for name in rows.lost:
            place = _nearest(model, name, batched, "")
            if place is not None and place.tensor in sights:
                place = replace(place, value=str(list(sights[place.tensor].shapes[-1])))
            places["batch-not-kept", name] = place
    return replace(report, places={key: place for key, place in places.items() if place is not None})


def _place(node: Node, tensor: str, value: float | str, sample: int | None = None) -> Place:
    operator = node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
    return Place(node.name, operator, tensor, value, sample)


def _reads(node: Node) -> tuple[str, ...]:
    return tuple(name for name in (*node.inputs, *node.captures) if name)


def _is_sequential(node: Node) -> bool:
    return node.is_standard and node.op_type in _SEQUENTIAL and attribute(node, "layout") != 1


def _takes_rows_by_index(model: Model, node: Node) -> bool:
    """Whether a node gives rows of a value by indices that are fed: axis 0 holds the nodes of a graph, or the like.

    Indices that are computed from the values themselves, as those of TopK, do not count.
    """
    if 1 not in operator(node.op_type).indices or attribute(node, "axis") or attribute(node, "batch_dims"):
        return False
    before = needed_nodes(model, [node.inputs[1]])
    read = {node.inputs[1], *(name for other in before for name in _reads(other))}
    is_fed = any(info.name in read and info.dtype in ("int64", "int32") for info in model.inputs)
    return is_fed and not any(model.info(name).is_float32 for other in before for name in other.outputs)


def _not_finite(model: Model, sights: Sights, output: str, sample: int) -> Place | None:
    """The first node that makes what is not finite of values that are; infinite constants, as of masks, may stay so."""
    for info in model.inputs:
        if info.name in sights and sights[info.name].kind:
            return Place("", "", info.name, sights[info.name].kind, sample)
    floats = [(n, c) for n, c in model.initializers.items() if c.dtype in ("float", "float16", "double") and c.nbytes]
    masked = {name for name, constant in floats if not np.isfinite(constant.numpy()).all()}
    bad: set[str] = set()
    first: Place | None = None
    for node in needed_nodes(model, [output]):
        reads = _reads(node)
        for name in node.outputs:
            sight = sights.get(name)
            if sight is None or not sight.kind:
                continue
            if bad.intersection(reads):
                bad.add(name)
            elif masked.intersection(reads) and sight.kind == "inf" and (name != output or first is not None):
                masked.add(name)
            else:
                bad.add(name)
                first = first or _place(node, name, sight.kind, sample)
    return first


def _source(model: Model, sights: Sights, limit: float, outputs: Iterable[str]) -> Place | None:
    """The first node before an output that differs whose value differs by more than the limit, and nothing it reads."""
    bad = {name for name, sight in sights.items() if not sight.difference <= limit}
    stack, visited, roots = [name for name in outputs if name in bad], set[str](), list[tuple[int, str]]()
    while stack:
        name = stack.pop()
        if name in visited or name not in model.producer:
            continue
        visited.add(name)
        position = model.producer[name]
        causes = [read for read in _reads(model.nodes[position]) if read in bad]
        stack += causes
        if not causes:
            roots.append((position, name))
    if not roots:
        return None
    position, name = min(roots)
    return _place(model.nodes[position], name, sights[name].difference)


def _nearest(model: Model, output: str, sound: Collection[str], value: str) -> Place | None:
    """The node nearest to the output, breadth first, that reads one of the sound values.

    Float values come first. Arithmetic on shapes and what it is computed from is left out.
    """
    queue, visited = deque([output]), set[str]()
    while queue:
        name = queue.popleft()
        if name in visited or name not in model.producer:
            continue
        visited.add(name)
        node = model.nodes[model.producer[name]]
        if node.op_type in _SHAPE_OPERATORS:
            continue
        reads = [read for read in _reads(node) if read not in model.initializers]
        if any(read in sound for read in reads):
            return _place(node, name, value)
        queue += sorted(reads, key=lambda read: not model.info(read).is_float32)
    return None
