"""The untouched model in FP32: reference outputs, observed ranges, and which node is to blame where it is not sound."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mptune.data.archive import read_sample_shapes
from mptune.data.rollout import Rollout
from mptune.engines.base import Failure, SampleSet
from mptune.engines.context import RunContext
from mptune.engines.environment import usable_cores
from mptune.engines.jobs.observing import ObserveJob
from mptune.engines.jobs.reference import ReferenceJob
from mptune.engines.jobs.reference_report import Place, ReferenceReport
from mptune.engines.jobs.rows import Question, Sight, SightJob
from mptune.engines.ort.cuda_session import NO_TF32
from mptune.engines.ort.fusions import FoldJob
from mptune.engines.ort.session import Provider
from mptune.engines.toolchains.emulation import run_bytes
from mptune.graph.facts import attribute
from mptune.graph.folded import FoldedValues, is_worthwhile, write_without_weights
from mptune.graph.hazards.seen import TensorRange
from mptune.graph.loading.model import Model, Node, needed_nodes
from mptune.graph.loading.shapes import shared_units, static_shapes
from mptune.graph.ops import RECURRENT, SHAPE_OF, operator
from mptune.processes.child import Call
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


@dataclass(frozen=True)
class Locator:
    """Finds the nodes to blame for what a report shows."""

    context: RunContext
    provider: Provider
    call: Call

    def locate(self, report: ReferenceReport, which: SampleSet) -> ReferenceReport:
        """The report with the places of what is wrong; a sound one costs nothing and stays as it is."""
        return replace(report, places=dict(self._places(report, which)))

    def _places(self, report: ReferenceReport, which: SampleSet) -> Iterator[tuple[tuple[str, str], Place]]:
        model, outputs = self.context.model, report.outputs
        bad = [name for name, facts in outputs.items() if facts["non_finite"]]
        if bad:
            sample = int(min(outputs[name].get("bad_sample", 0.0) for name in bad))
            first = next(name for name in bad if int(outputs[name].get("bad_sample", 0.0)) == sample)
            sights = self._sights("finite", which, [first], sample)
            yield from _named("reference-not-finite", first, _not_finite(model, sights, first, sample))
        if not report.repeat_error <= REPEAT_WARNING:
            sights = self._sights("repeat", which, list(outputs))
            culprit = _source(model, sights, outputs, lambda seen: not seen.difference <= REPEAT_WARNING)
            yield from _named("not-deterministic", "", culprit)
        stuck = [name for name, facts in outputs.items() if facts.get("constant") or facts["zero_fraction"] >= 1.0]
        if stuck:
            sights = self._sights("constant", which, stuck)
            for name in stuck:
                yield from _named("output-constant", name, _killer(model, sights, name))
        worst, error = report.rows.worst_mixed
        if not error <= ROWS_WARNING:
            sights = self._sights("rows", which, [worst], report.rows.mixed_row)
            limit = min(ROWS_WARNING, error / 10)
            culprit = _source(model, sights, [worst], lambda seen: not seen.difference <= limit)
            is_graph = culprit is not None and _takes_rows_by_index(model, culprit.tensor)
            yield from _named("rows-mix", worst, replace(culprit, value=BY_INDEX) if culprit and is_graph else culprit)
        else:  # a batch that cannot be taken apart: an operator that runs along axis 0, or picks rows, shows itself
            for name in (*report.rows.alone, *report.rows.repeated):
                yield from _named("rows-mix", name, _along_sequence(model, name) or _by_index(model, name))
        if report.rows.lost:
            lost = list(report.rows.lost)
            sights = self._sights("batch", which, lost)
            for name in lost:
                yield from _named("batch-not-kept", name, _batch_end(model, sights, name))

    def _sights(self, question: Question, which: SampleSet, outputs: Sequence[str], index: int = 0) -> Sights:
        """What the outputs and everything that they are computed from hold; empty where that cannot be run."""
        from mptune.graph.writing.observe import write_with_outputs

        context, model = self.context, self.context.model
        nodes = needed_nodes(model, outputs)
        names = [info.name for info in model.inputs]
        names += [out for node in nodes for out in node.outputs if out and out not in model.initializers]
        watched = [name for name in names if model.info(name).dtype in _WATCHED]
        paths: list[Path] = []
        try:
            for start in range(0, len(watched), _AT_ONCE):
                path = context.scratch(f"watch{start}")
                paths.append(path)
                write_with_outputs(model, context.bank, path, watched[start : start + _AT_ONCE])
            sights = self.call(SightJob(tuple(paths), context.samples(which), self.provider, question, index))
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        return {} if isinstance(sights, Failure) else sights


def _along_sequence(model: Model, output: str) -> Place | None:
    """The first operator before an output that takes axis 0 of an input for a sequence; None where none does."""
    for node in needed_nodes(model, [output]):
        sequence = node.inputs[0 if node.op_type != "Scan" else -1] if node.inputs else ""
        is_batch_first = attribute(node, "layout") == 1
        if not node.is_standard or node.op_type not in _SEQUENTIAL or is_batch_first:
            continue
        if _keeps_axes(model, sequence):
            return _place(node, next(out for out in node.outputs if out), ALONG_SEQUENCE)
    return None


def _by_index(model: Model, output: str) -> Place | None:
    """The first operator before an output that takes rows of an input by indices that are fed; None where none does."""
    for node in needed_nodes(model, [output]):
        if 1 in operator(node.op_type).indices and _keeps_axes(model, node.inputs[0]):
            result = next(out for out in node.outputs if out)
            if _takes_rows_by_index(model, result):
                return _place(node, result, BY_INDEX)
    return None


def _takes_rows_by_index(model: Model, value: str) -> bool:
    """Whether a value is rows of another one, by indices that are fed: axis 0 holds the nodes of a graph, or the like.

    Indices that are computed from the values themselves, as those of TopK, do not count.
    """
    node = model.nodes[model.producer[value]] if value in model.producer else None
    if (
        node is None
        or 1 not in operator(node.op_type).indices
        or attribute(node, "axis")
        or attribute(node, "batch_dims")
    ):
        return False
    before = needed_nodes(model, [node.inputs[1]])
    read = {node.inputs[1], *(name for other in before for name in _reads(other))}
    computed = {name for other in before for name in other.outputs}
    return any(info.name in read and info.dtype in ("int64", "int32") for info in model.inputs) and not any(
        model.info(name).is_float32 for name in computed
    )


def _keeps_axes(model: Model, value: str) -> bool:
    """Whether axis 0 of a value is axis 0 of an input, as nothing between them moves or makes axes."""
    while value in model.producer:
        node = model.nodes[model.producer[value]]
        if node.op_type not in _KEEP_AXES or not node.inputs:
            return False
        value = node.inputs[0]
    return any(info.name == value for info in model.inputs)


def _named(code: str, output: str, place: Place | None) -> Iterator[tuple[tuple[str, str], Place]]:
    if place is not None:
        yield (code, output), place


def _reads(node: Node) -> tuple[str, ...]:
    return tuple(name for name in (*node.inputs, *node.captures) if name)


def _place(node: Node, tensor: str, value: float | str, sample: int | None = None) -> Place:
    operator = node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
    return Place(node.name, operator, tensor, value, sample)


def _not_finite(model: Model, sights: Sights, output: str, sample: int) -> Place | None:
    """The first node that makes what is not finite of values that are.

    An infinity that a constant holds, as a mask does, is none until something makes NaN of it.
    """
    masked = {name for name, constant in model.initializers.items() if _holds_infinity(model, name)}
    bad: set[str] = set()
    first: Place | None = None
    for info in model.inputs:
        seen = sights.get(info.name)
        if seen is not None and not seen.is_finite:
            return Place("", "", info.name, seen.kind, sample)
    for node in needed_nodes(model, [output]):
        for name in node.outputs:
            seen = sights.get(name)
            if seen is None or seen.is_finite:
                continue
            reads = _reads(node)
            if bad.intersection(reads):
                bad.add(name)
            elif masked.intersection(reads) and not seen.nan:
                masked.add(name)
                if first is None and name == output:
                    return _place(node, name, seen.kind, sample)
            else:
                bad.add(name)
                first = first or _place(node, name, seen.kind, sample)
    if first is None and output in masked and output in model.producer:
        return _place(model.nodes[model.producer[output]], output, sights[output].kind, sample)
    return first


def _holds_infinity(model: Model, name: str) -> bool:
    constant = model.initializers[name]
    if constant.dtype not in ("float", "float16", "double") or constant.nbytes == 0:
        return False
    return not bool(np.isfinite(constant.numpy()).all())


def _source(model: Model, sights: Sights, outputs: Iterable[str], is_bad: Callable[[Sight], bool]) -> Place | None:
    """The first node with a bad value that has none among what it reads, of those that a bad output comes from."""
    bad = {name for name, seen in sights.items() if is_bad(seen)}
    stack = [name for name in outputs if name in bad]
    visited: set[str] = set()
    roots: list[tuple[int, str]] = []
    while stack:
        name = stack.pop()
        if name in visited or name not in model.producer:
            continue
        visited.add(name)
        position = model.producer[name]
        causes = [read for read in _reads(model.nodes[position]) if read in bad]
        if causes:
            stack += causes
        else:
            roots.append((position, name))
    if not roots:
        return None
    position, name = min(roots)
    return _place(model.nodes[position], name, sights[name].difference)


def _killer(model: Model, sights: Sights, output: str) -> Place | None:
    """The node nearest to the output that reads what differs from sample to sample, and gives what does not."""
    for node, name, reads in _backwards(model, output):
        if any(read in sights and not sights[read].is_equal for read in reads):
            return _place(node, name, "constant")
    return None


def _batch_end(model: Model, sights: Sights, output: str) -> Place | None:
    """The node nearest to the output that reads a value whose first dimension is the batch, and gives one without."""
    for node, name, reads in _backwards(model, output):
        if any(read in sights and sights[read].keeps_rows for read in reads):
            return _place(node, name, str(list(sights[name].shapes[-1])) if name in sights else "")
    return None


def _backwards(model: Model, output: str) -> Iterator[tuple[Node, str, list[str]]]:
    """Each node, its value and the computed values that it reads: breadth first from an output, float values first.

    Arithmetic on shapes and what it is computed from is left out.
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
        yield node, name, reads
        queue += sorted(reads, key=lambda read: not model.info(read).is_float32)


_CORES_BESIDE = 4
"""Fewest cores that have room for what runs beside the first worker."""


def observes_beside(provider: Provider) -> bool:
    """Whether ranges are observed while the reference is taken: on a GPU, where opening both is the host's work.

    On a CPU both take all cores.
    """
    return provider == "cuda" and usable_cores() >= _CORES_BESIDE


def worker_environment(*, tf32: bool) -> Mapping[str, str]:
    """More environment variables of a search's worker process."""
    return {} if tf32 else NO_TF32


@dataclass(eq=False)
class ReferenceModel:
    """Reference outputs and observed ranges of one model. Nothing runs before it is asked for."""

    context: RunContext
    provider: Provider
    call: Call
    """Runs a job in the worker."""
    rollout: Rollout | None = None
    timeout_s: float = math.inf
    """For a job in another worker, which ``other_worker`` makes."""
    other_worker: Callable[[], Worker] | None = None
    _observer: Worker | None = field(default=None, init=False)
    _observing: Future[Mapping[str, TensorRange] | Failure] | None = field(default=None, init=False)
    _ranges: Mapping[str, TensorRange] | None = field(default=None, init=False)

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        """See ``Toolchain``; with the search samples ranges are observed beside it, where there is room for both."""
        make_worker = self.other_worker
        is_first = which == "search" and self._ranges is None and self._observing is None
        if is_first and make_worker is not None and observes_beside(self.provider):
            self._observer = make_worker()
            pool = ThreadPoolExecutor(1, thread_name_prefix="mptune-observing")
            self._observing = pool.submit(self._observe_beside, self._observer, self.folded_values)
            pool.shutdown(wait=False)
        return self._reference(which)

    def _reference(self, which: SampleSet) -> ReferenceReport | Failure:
        paths = self.context
        is_search = which == "search"
        job = ReferenceJob(
            paths.model_path,
            paths.samples(which),
            paths.reference(which),
            self.provider,
            self._dependent,
            self.rollout,
            is_held_out=not is_search,
            units=shared_units(self.context.model, read_sample_shapes(paths.samples(which))[0]) if is_search else {},
            run_bytes=self._run_bytes(which),
        )
        report = self.call(job)
        if isinstance(report, Failure):
            return report
        return Locator(self.context, self.provider, self.call).locate(report, which)

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        """See ``Toolchain``; observed once."""
        if self._ranges is None:
            ranges = None if self._observing is None else self._observing.result()
            self._observing = None
            if ranges is None or isinstance(ranges, Failure):
                ranges = self._observe(self.call, self.folded_values, stage)
            if isinstance(ranges, Failure):
                return ranges
            self._ranges = ranges
        return self._ranges

    def _observe_beside(self, worker: Worker, folded: FoldedValues) -> Mapping[str, TensorRange] | Failure:
        with worker:
            return self._observe(lambda job: worker.call(job, self.timeout_s), folded)

    def stop_observing(self) -> bool:
        """End what is observed beside other jobs; whether there was anything."""
        observing, self._observing = self._observing, None
        if observing is None or self._observer is None:
            return False
        self._observer.abort()
        wait([observing])
        return True

    def _observe(
        self, call: Call, folded: FoldedValues, stage: Callable[[str], object] | None = None
    ) -> Mapping[str, TensorRange] | Failure:
        """The values part by part: each part is a model, and a session, of its own."""
        from mptune.graph.writing.observe import observed_parts, write_with_outputs

        context, samples = self.context, self.context.samples("search")
        shapes = max(read_sample_shapes(samples), key=lambda each: sum(map(math.prod, each.values())))
        parts = observed_parts(context.model, static_shapes(context.model, given=shapes).shapes)
        ranges: dict[str, TensorRange] = {}
        count = sum(len(part.rows) for part in parts)
        path, run_bytes = context.scratch("observe"), self._run_bytes("search")
        try:
            for part in parts:
                if stage is not None and len(parts) > 1:
                    stage(f"observing the ranges of values: {len(ranges)} of {count}")
                write_with_outputs(context.model, context.bank, path, part.outputs, folded)
                answer = call(ObserveJob(path, part, samples, self.provider, context.precisions, run_bytes))
                if isinstance(answer, Failure):
                    return answer
                ranges.update(answer)
        finally:
            path.unlink(missing_ok=True)
        return ranges

    @cached_property
    def folded_values(self) -> FoldedValues:
        """What no session needs to fold anew; nothing where that would save little, or where it does not work."""
        context, model = self.context, self.context.model
        if not is_worthwhile(model):
            return FoldedValues()
        paths = context.scratch("unfolded"), context.scratch("folded")
        try:
            answer = self.call(FoldJob(write_without_weights(model, paths[0]), paths[1]))
            return FoldedValues() if isinstance(answer, Failure) else FoldedValues.read(paths[1], model)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    @cached_property
    def _dependent(self) -> frozenset[str]:
        return frozenset(output.name for output in self.context.dependent_outputs)

    def _run_bytes(self, which: SampleSet) -> int | None:
        if self.provider != "cpu":
            return None
        return run_bytes(self.context.model, self.context.samples(which))
