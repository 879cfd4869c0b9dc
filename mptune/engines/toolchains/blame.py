"""Which node is to blame where the untouched model is not sound on the samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mptune.engines.base import Failure, SampleSet
from mptune.engines.context import RunContext
from mptune.engines.jobs.reference_report import Place, ReferenceReport
from mptune.engines.jobs.rows import Question, Sight, SightJob
from mptune.engines.ort.session import Provider
from mptune.graph.facts import attribute
from mptune.graph.loading.model import Model, Node, needed_nodes
from mptune.graph.loading.tensors import Initializer
from mptune.graph.ops import RECURRENT, SHAPE_OF, operator
from mptune.processes.parent import Worker

REPEAT_WARNING = 1e-5
"""Two runs on one sample that differ by more are no rounding, in relative L2."""
ROWS_WARNING = 1e-4
"""A row of one batch and the same row alone, or in another batch."""
ALONG_SEQUENCE, BY_INDEX = "sequence", "index"
"""Values of places where rows meet that are no samples: steps of a sequence, or nodes of a graph."""
_AT_ONCE = 48
"""Most values that are outputs of one model, and in memory at the same time."""
_SEQUENTIAL = RECURRENT | {"Scan"}
"""Axis 0 of what these read is a sequence, whose steps follow from each other."""
_KEEP_AXES = frozenset(
    ("Identity", "Cast", "MatMul", "Add", "Sub", "Mul", "Div", "Relu", "Tanh", "Sigmoid", "LayerNormalization", "Clip")
)
_SHAPE_OPERATORS = SHAPE_OF | {"ConstantOfShape", "Range", "EyeLike"}
"""What they give does not depend on values, and is no fault."""
_WATCHED = frozenset({"float", "float16", "double", "int64", "int32", "int8", "uint8", "int16", "bool"})
Sights = Mapping[str, Sight]
"""Value -> what it holds; empty where that could not be run."""


@dataclass(frozen=True)
class Locator:
    """Finds the nodes to blame for what a report shows."""

    context: RunContext
    provider: Provider
    worker: Worker

    def locate(self, report: ReferenceReport, which: SampleSet) -> ReferenceReport:
        """The report with the places of what is wrong; a sound one costs nothing and stays as it is."""
        model, outputs, rows = self.context.model, report.outputs, report.rows
        places: dict[tuple[str, str], Place | None] = {}
        not_finite = {name: int(facts.get("bad_sample", 0.0)) for name, facts in outputs.items() if facts["non_finite"]}
        if not_finite:
            first = min(not_finite, key=lambda name: not_finite[name])
            sample = not_finite[first]
            sights = self._look("finite", which, [first], sample)
            places["reference-not-finite", first] = _not_finite(model, sights, first, sample)
        if not report.repeat_error <= REPEAT_WARNING:
            sights = self._look("repeat", which, list(outputs))
            places["not-deterministic", ""] = _source(model, sights, REPEAT_WARNING, outputs)
        stuck = [name for name, facts in outputs.items() if facts.get("constant") or facts["zero_fraction"] >= 1.0]
        if stuck:
            sights = self._look("constant", which, stuck)
            varying = {name for name, sight in sights.items() if not sight.is_equal}
            for name in stuck:
                places["output-constant", name] = _nearest(model, name, varying, "constant")
        worst, error = rows.worst_mixed
        if not error <= ROWS_WARNING:
            sights = self._look("rows", which, [worst], rows.mixed_row)
            culprit = _source(model, sights, min(ROWS_WARNING, error / 10), [worst])
            if culprit is not None and _takes_rows_by_index(model, culprit.tensor):
                culprit = replace(culprit, value=BY_INDEX)
            places["rows-mix", worst] = culprit
        else:  # a batch that cannot be taken apart: an operator that runs along axis 0, or picks rows, shows itself
            for name in (*rows.alone, *rows.repeated):
                places["rows-mix", name] = _where_rows_meet(model, name)
        if rows.lost:
            sights = self._look("batch", which, list(rows.lost))
            batched = {name for name, sight in sights.items() if sight.keeps_rows}
            for name in rows.lost:
                place = _nearest(model, name, batched, "")
                if place is not None and place.tensor in sights:
                    place = replace(place, value=str(list(sights[place.tensor].shapes[-1])))
                places["batch-not-kept", name] = place
        return replace(report, places={key: place for key, place in places.items() if place is not None})

    def _look(self, question: Question, which: SampleSet, outputs: Sequence[str], index: int = 0) -> Sights:
        """What the outputs and everything that they are computed from hold."""
        from mptune.graph.writing.observe import write_with_outputs

        context, model = self.context, self.context.model
        names = [info.name for info in model.inputs]
        names += [out for node in needed_nodes(model, outputs) for out in node.outputs if out not in model.initializers]
        watched = [name for name in names if name and model.info(name).dtype in _WATCHED]
        parts = [watched[start : start + _AT_ONCE] for start in range(0, len(watched), _AT_ONCE)]
        paths = [context.scratch(f"watch{number}") for number in range(len(parts))]
        try:
            for path, part in zip(paths, parts, strict=True):
                write_with_outputs(model, context.bank, path, part)
            job = SightJob(tuple(paths), context.samples(which), self.provider, question, index)
            sights = self.worker.call(job)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        return {} if isinstance(sights, Failure) else sights


def _place(node: Node, tensor: str, value: float | str, sample: int | None = None) -> Place:
    operator = node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
    return Place(node.name, operator, tensor, value, sample)


def _reads(node: Node) -> tuple[str, ...]:
    return tuple(name for name in (*node.inputs, *node.captures) if name)


def _where_rows_meet(model: Model, output: str) -> Place | None:
    """The first operator before an output that takes axis 0 of an input for a sequence; else that picks its rows."""
    nodes = needed_nodes(model, [output])
    for node in nodes:
        is_along = node.is_standard and node.op_type in _SEQUENTIAL and attribute(node, "layout") != 1
        if is_along and node.inputs and _keeps_axes(model, node.inputs[-1 if node.op_type == "Scan" else 0]):
            return _place(node, next(out for out in node.outputs if out), ALONG_SEQUENCE)
    for node in nodes:
        result = next((out for out in node.outputs if out), "")
        if _takes_rows_by_index(model, result) and _keeps_axes(model, node.inputs[0]):
            return _place(node, result, BY_INDEX)
    return None


def _takes_rows_by_index(model: Model, value: str) -> bool:
    """Whether a value is rows of another one, by indices that are fed: axis 0 holds the nodes of a graph, or the like.

    Indices that are computed from the values themselves, as those of TopK, do not count.
    """
    node = model.nodes[model.producer[value]] if value in model.producer else None
    if node is None or 1 not in operator(node.op_type).indices:
        return False
    if attribute(node, "axis") or attribute(node, "batch_dims"):
        return False
    before = needed_nodes(model, [node.inputs[1]])
    read = {node.inputs[1], *(name for other in before for name in _reads(other))}
    is_fed = any(info.name in read and info.dtype in ("int64", "int32") for info in model.inputs)
    return is_fed and not any(model.info(name).is_float32 for other in before for name in other.outputs)


def _keeps_axes(model: Model, value: str) -> bool:
    """Whether axis 0 of a value is axis 0 of an input, as nothing between them moves or makes axes."""
    while value in model.producer:
        node = model.nodes[model.producer[value]]
        if node.op_type not in _KEEP_AXES or not node.inputs:
            return False
        value = node.inputs[0]
    return any(info.name == value for info in model.inputs)


def _not_finite(model: Model, sights: Sights, output: str, sample: int) -> Place | None:
    """The first node that makes what is not finite of values that are.

    An infinity that a constant holds, as a mask does, is none until something makes NaN of it.
    """
    masked = {name for name, constant in model.initializers.items() if _holds_infinity(constant)}
    bad: set[str] = set()
    for info in model.inputs:
        if info.name in sights and not sights[info.name].is_finite:
            return Place("", "", info.name, sights[info.name].kind, sample)
    first: Place | None = None
    for node in needed_nodes(model, [output]):
        reads = _reads(node)
        for name in node.outputs:
            sight = sights.get(name)
            if sight is None or sight.is_finite:
                continue
            if bad.intersection(reads):
                bad.add(name)
            elif masked.intersection(reads) and not sight.nan and (name != output or first is not None):
                masked.add(name)
            else:
                bad.add(name)
                first = first or _place(node, name, sight.kind, sample)
    return first


def _holds_infinity(constant: Initializer) -> bool:
    is_float = constant.dtype in ("float", "float16", "double") and constant.nbytes > 0
    return is_float and not bool(np.isfinite(constant.numpy()).all())


def _source(model: Model, sights: Sights, limit: float, outputs: Iterable[str]) -> Place | None:
    """The first node whose value differs by more than the limit, and nothing that it reads does.

    Of those that an output comes from which differs itself.
    """
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
