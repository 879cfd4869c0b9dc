"""Emulated errors of plans: the models that are written, the jobs that run them, and the memory a run takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from mptune.data.archive import read_sample_shapes
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import EmulatedSamples, Failure, SampleSet, in_parts
from mptune.engines.context import RunContext
from mptune.engines.ort.session import Provider
from mptune.engines.samples import Scoring
from mptune.engines.toolchains.jobs import ErrorsJob, SwitchedErrorsJob
from mptune.graph.facts import FusedNodes
from mptune.graph.groups import GroupedModel
from mptune.graph.interface import with_reduced_interface
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import REDUCED, PrecisionPlan
from mptune.graph.writing.emulate import Cut, Emulator
from mptune.graph.writing.variants import write_tf32, write_with_outputs
from mptune.processes.parent import Worker
from mptune.targets.costs import Shape, group_costs, memory_need

STRETCHES = 8
"""Sessions that all plans of one group share on a CPU: each has switches for consecutive groups, and runs what comes
behind them alone. Fewer where a stretch would hold one group only."""
EMULATED_ROWS = 8
"""Rows that an emulated error is taken on before a plan is built; evaluations take all samples."""
_KEPT_BYTES, _SESSION_BYTES = 3 << 27, 1 << 25
"""Memory that sessions may take that stay open, and that each takes beside its weights, about. Twelve open sessions of
a transformer of 85 MB took 1.3 GB, which the FP32 model runs in 0.2 GB of; three take half, and no more time."""
QUICK_S = 10.0
"""Where all one-group errors take no longer, they are taken at once: parts would cost more than they save."""
LEAST_EMULATED, _GPU_QUICK_S, _GPU_S_PER_NODE = 2, 5.0, 1e-5
"""On a GPU fewer samples are taken where all one-group errors take longer, at least so many. A switched emulation takes
6 to 11 us a node on an H200."""
_FLOPS_PER_S, _S_PER_NODE = 1.5e10, 2e-5
"""Of one core: an estimate from the model alone, so that a search does the same on every machine, under any load, and
when it is resumed."""
_VALUES_EACH = 3
"""What a run holds of a value at once, in FP32 values at most: in an emulation as computed, in FP16, and rounded."""


def run_bytes(model: Model, samples: Path, provider: Provider) -> int | None:
    """Bytes (rather too many) for the values of one run in FP32 on the largest sample.

    None where sizes are unknown, and on a GPU, where runs go one by one.
    """
    if provider != "cpu":
        return None
    every = [shapes for shapes in read_sample_shapes(samples) if shapes]
    if not every:
        return None
    names = {tensor.name for tensor in model.inputs}
    largest = max(every, key=lambda shapes: sum(map(math.prod, shapes.values())))
    outputs = (out for node in model.nodes for out in node.outputs if out)
    if any(node.has_subgraph for node in model.nodes) or any(model.info(out).dtype == "undefined" for out in outputs):
        return None
    static = static_shapes(model, given={name: shape for name, shape in largest.items() if name in names})
    return None if static.unknown else _VALUES_EACH * memory_need(model, static.shapes).fp32_activations


@dataclass(eq=False)
class Emulation:
    """Emulates plans of one model. Lives in the parent process; models are written when they are first needed."""

    context: RunContext
    computed: GroupedModel
    """The same model and groups with a node for each step after which the target's engine rounds."""
    provider: Provider
    worker: Worker
    shapes: Mapping[str, Shape]  # concrete shapes of the FP32 values; empty where they are not known
    fused: Sequence[FusedNodes] = ()
    name: str = "emulated"
    unshared: Failure | None = field(default=None, init=False)
    _written: dict[str, Path] = field(default_factory=dict, init=False)

    def errors(
        self,
        plans: Sequence[PrecisionPlan],
        which: SampleSet = "search",
        part: range | None = None,
        limit: float = math.inf,
    ) -> tuple[OutputError, ...] | Failure:
        """The errors of plans on a set of samples, or on a part of ``samples``; ``limit``: as in ``ErrorsJob``."""
        # The stretch that holds all reduced groups of a plan, None where there is none -> the plans' indices.
        by_stretch: dict[tuple[str, ...] | None, list[int]] = {}
        for index, plan in enumerate(plans):
            reduced = set(plan.reduced_groups)
            stretches = self._stretches if self.provider == "cpu" and part is not None and reduced else ()
            home = next((stretch for stretch in stretches if reduced <= set(stretch)), None)
            by_stretch.setdefault(home, []).append(index)
        errors: dict[int, OutputError] = {}
        for stretch, numbers in by_stretch.items():
            members = [plans[number] for number in numbers]
            # On a CPU the switches of a whole model cost more than a session for each plan. And nothing is fused around
            # a switch, so an all-FP32 plan matches the reference bit by bit only in a session of its own. What is fed
            # back goes through every step of a session.
            apart = stretch is None and (self.provider == "cpu" or not any(plan.reduced_groups for plan in members))
            is_shared = not apart and self.unshared is None and self.context.settings.rollout is None
            run = partial(self._switched, stretch) if is_shared else partial(self._one_by_one, limit=limit)
            answer = run(members, which, part)
            if is_shared and isinstance(answer, Failure) and not answer.is_machine_fault:
                fault, answer = answer, self._one_by_one(members, which, part)
                if not isinstance(answer, Failure):  # Where that works, it was the switches that failed.
                    self.unshared = fault
            if isinstance(answer, Failure):
                return answer
            errors.update(zip(numbers, answer, strict=True))
        return tuple(errors[number] for number in range(len(plans)))

    def tf32_errors(self) -> tuple[OutputError, ...] | Failure:
        """The error of all-FP32 on the search samples, with the operands of its products rounded as TF32.

        To nearest: TF32's errors on an H200 are mostly half to 0.7 of FP16's (``benchmarks/results``), and operands
        that were truncated would give more than FP16's.
        """
        path = self.context.scratch("emulated-tf32")
        try:
            write_tf32(self.context.model, self.context.bank, path, "nearest")
            return self.worker.call(
                ErrorsJob((path,), self._scoring("search", None, ()), self.provider, self._run_bytes)
            )
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for path in self._written.values():
            path.unlink(missing_ok=True)
        self._written.clear()

    def _one_by_one(
        self, plans: Sequence[PrecisionPlan], which: SampleSet, part: range | None, limit: float = math.inf
    ) -> tuple[OutputError, ...] | Failure:
        # Nothing is rounded in an all-FP32 plan: its outputs are the reference.
        paths: list[Path | None] = []
        emulator = self._of_evaluations if part is None else self._emulator
        try:
            for plan in plans:
                path = self.context.scratch(f"{self.name}-{plan.fingerprint}")
                paths.append(emulator.write(plan, path) if plan.reduced_groups else None)
            # What is quick runs on all samples, and so do sequences, whose samples need each other.
            limit = math.inf if self.samples.per_plan is None or self.context.settings.rollout else limit
            scoring = self._scoring(which, part, plans)
            job = ErrorsJob(tuple(paths), scoring, self.provider, self._run_bytes, limit)
            return self.worker.call(job)
        finally:
            for written in filter(None, paths):
                written.unlink(missing_ok=True)

    def _switched(
        self, stretch: tuple[str, ...] | None, plans: Sequence[PrecisionPlan], which: SampleSet, part: range | None
    ) -> tuple[OutputError, ...] | Failure:
        emulator = self._of_evaluations if part is None else self._emulator
        # All of the run's, whatever these plans have: a session for each kind of plan would be opened at every change.
        wanted = {*self.context.precisions, *(p for plan in plans for p in plan.precision.values())}
        precisions = tuple(p for p in REDUCED if p in wanted) or REDUCED[:1]
        groups = tuple(g.id for g in self.computed.groups) if stretch is None else stretch
        kind = ["plan"] * (emulator is not self._emulator)
        name = "-".join(("whole" if stretch is None else groups[0], *map(str, precisions), *kind))
        cut = self._cuts.get(groups) if stretch is not None else None
        if name not in self._written:
            path = self.context.scratch(f"{self.name}-{name}")
            self._written[name] = emulator.write_switched(path, groups, precisions, cut)
        if cut is not None and "given" not in self._written:
            self._written["given"] = path = self.context.scratch(f"{self.name}-given")
            values = {value for given, _ in self._cuts.values() for value in given}
            write_with_outputs(self.computed.model, self.context.bank, path, sorted(values))
        # As many stay open as there is memory for; on a GPU one, as engines need the memory.
        each = self.context.bank.fp32_bytes + _SESSION_BYTES
        room = min(_KEPT_BYTES // each, STRETCHES if self.provider == "cpu" else 1)
        number = 0 if stretch is None else self._stretches.index(stretch) + 1
        job = SwitchedErrorsJob(
            self._written[name],
            tuple(map(emulator.on, plans)),
            tuple(emulator.switches[p][g] for p in precisions for g in groups if g in emulator.switches[p]),
            self._scoring(which, part, plans),
            self.provider,
            self._run_bytes,
            f"switched {number % room}" if room else None,
            None if cut is None else self._written["given"],
        )
        return self.worker.call(job)

    def _scoring(self, which: SampleSet, part: range | None, plans: Sequence[PrecisionPlan]) -> Scoring:
        # Absolute tolerances, and those of columns, need more than what orders plans.
        is_proposal = part is not None and not self.context.settings.tolerance
        plan = plans[0] if len(plans) == 1 and part is None else None
        return Scoring.in_run(self.context, which, plan, part=part, is_proposal=is_proposal)

    @cached_property
    def _run_bytes(self) -> int | None:
        return run_bytes(self.context.model, self.context.samples("search"), self.provider)

    @cached_property
    def samples(self) -> EmulatedSamples:
        """The search samples that errors are emulated on before a plan is built, ``EMULATED_ROWS`` rows."""
        count, rollout = len(read_sample_shapes(self.context.samples("search"))), self.context.settings.rollout
        steps = 1 if rollout is None else rollout.steps
        count //= steps
        # A sequence is many runs; two say how far sequences differ.
        rows = rows_per_sample(self.computed.model, self.context.settings.data_settings.batch, self.shapes)
        few = min(math.ceil(EMULATED_ROWS / rows) if rollout is None else 2, count)
        grouped = self.context.grouped
        if self.provider != "cpu":
            each_s = max(1, len(grouped.groups) * len(grouped.model.nodes)) * steps * _GPU_S_PER_NODE
            return EmulatedSamples((range(min(few, max(LEAST_EMULATED, int(_GPU_QUICK_S / each_s)))),), None)
        flops = sum(cost.flops for cost in group_costs(grouped, self.shapes).values())
        group_s = flops / _FLOPS_PER_S + len(grouped.model.nodes) * _S_PER_NODE
        is_quick = len(grouped.groups) * few * steps * group_s <= QUICK_S
        if is_quick:
            return EmulatedSamples((range(few),), None)
        return EmulatedSamples(in_parts(few), count)

    @cached_property
    def _stretches(self) -> tuple[tuple[str, ...], ...]:
        """Consecutive groups, by their ids."""
        groups = [group.id for group in self.computed.groups]
        count = min(STRETCHES, math.ceil(len(groups) / 2))
        ends = [len(groups) * number // count for number in range(count + 1)]
        return tuple(tuple(groups[start:end]) for start, end in itertools.pairwise(ends))

    @cached_property
    def _cuts(self) -> Mapping[tuple[str, ...], Cut]:
        """Stretch -> what its session is given, and the outputs that it computes: only what the stretch changes runs.

        Empty where the values take too much memory, or a type is not known.
        """
        cuts = {stretch: self._emulator.cut(stretch) for stretch in self._stretches}
        values = {value for given, _ in cuts.values() for value in given}
        sample_bytes = sum(4 * math.prod(self.shapes.get(name, ())) for name in values)
        is_known = all(self.computed.model.info(name).dtype != "undefined" for name in values)
        fits = 0 < sample_bytes * max(map(len, self.samples.parts)) <= _KEPT_BYTES
        return cuts if fits and is_known and all(outputs for _, outputs in cuts.values()) else {}

    @cached_property
    def _emulator(self) -> Emulator:
        return Emulator(self.computed, self.context.bank, self.fused)

    @cached_property
    def _of_evaluations(self) -> Emulator:
        """It rounds at a reduced interface, too, which no group's error alone has a part in."""
        grouped = with_reduced_interface(self.computed)
        return self._emulator if grouped is self.computed else Emulator(grouped, self.context.bank, self.fused)


def rows_per_sample(model: Model, batch: int, shapes: Mapping[str, Shape]) -> int:
    """How many independent rows a sample holds: the first dimension that all inputs and outputs share, else 1."""
    first = {value.shape[0] if value.shape else None for value in model.inputs}
    if len(first) != 1:
        return 1
    (declared,) = first
    rows = batch if isinstance(declared, str) else declared
    for value in model.outputs:
        dim = value.shape[0] if value.shape else None
        # An exporter may not know that an output has the rows of the inputs, and declare a symbol of its own for them.
        if dim != declared and (isinstance(dim, int) or shapes.get(value.name, ())[:1] != (rows,)):
            return 1
    return rows or 1
