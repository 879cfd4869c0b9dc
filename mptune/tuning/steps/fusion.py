"""Fusions that an engine computes wrongly: which value, marked as an output, cures them.

A builder may fuse nodes into a kernel that is wrong (NVIDIA/TensorRT#4813, #4837, #4854); an output inside prevents the
fusion. One value at a time is marked, and tells on which side of it the first fault lies. Where the fault is in each of
several blocks alike (#4837), no single value cures it, and the same one in every block is marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, Measurement, Toolchain
from mptune.engines.marks import Mark, Marks
from mptune.engines.toolchains.marking import MarksValues
from mptune.finding import Finding, FindingOrigin, OutputColumns, Where
from mptune.findings.wording import listed
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.model import Model
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.listener import Listener
from mptune.tuning.steps.attempts import doubt
from mptune.tuning.steps.baseline import ENGINE_CODE, FP32_LIMIT, FP32_LIMIT_TF32

FUSION_CODE = "fusion"

MOST_BUILDS = 48
"""So many engines are built; bisecting 2,000 values takes about 11, and the rest tries what is left one by one."""

_MOST_SINGLE = 32
"""So many of them have one value marked; in the others the same value is marked in every block."""

_FAR = 10.0
"""How many times the emulated error a measured one must be to be looked into: what is not emulated makes less."""

_LEAST = 1e-2
"""Errors up to this are not looked into, whatever is emulated."""

_FACTOR = 3.0
"""How many times its emulated error a single value may be off, and be right all the same."""

_VAIN = 2
"""After this many faults without a cure, no other is looked into: each costs dozens of builds."""

_MOST_NAMES = 4


@dataclass(frozen=True)
class Deviation:
    """Relative L2 of a value against the model in FP32, and how large it may be."""

    error: float
    limit: float

    @property
    def is_wrong(self) -> bool:
        """Whether it is beyond its limit, or no number."""
        return not self.error <= self.limit


Deviations = Mapping[str, Deviation]
"""Of the outputs that are judged, and of the values that were marked."""


@dataclass(frozen=True)
class Cure:
    """What a search for a wrong fusion has shown."""

    output: str
    before: Deviation
    wrong: tuple[str, ...]
    """Outputs that are wrong."""
    values: tuple[str, ...]
    """Marked together they cure it; empty where nothing that was tried does."""
    region: tuple[str, ...]
    """Names of the nodes that write and read the first of them; without a cure, those among which the fault lies."""
    groups: tuple[str, ...]
    """Their layer groups."""
    after: float
    """The largest error of an output then."""
    builds: int

    def finding(
        self, origin: FindingOrigin, engine: str, layers: Sequence[str], samples: tuple[int, ...] = ()
    ) -> Finding:
        """``fusion``, or ``engine-differs`` where nothing cures it; ``engine`` is what is wrong, in words."""
        evidence: dict[str, int | float | str] = {
            "relative_l2": self.before.error,
            "limit": self.before.limit,
            "output": self.output,
            "engines_built": self.builds,
        }
        if self.values:
            evidence |= {
                "marked": self.values[0],
                "values_marked": len(self.values),
                "relative_l2_marked": self.after,
                "layers": listed(layers, _MOST_NAMES),
            }
        return Finding.of(
            FUSION_CODE if self.values else ENGINE_CODE,
            origin,
            Where(self.region, self.groups, self.values, tuple(map(OutputColumns, self.wrong)), samples=samples),
            evidence,
            kind=origin if self.values else "no cure",
            region=listed([repr(node) for node in self.region], _MOST_NAMES),
            engine=engine,
            others=len(self.values) - 1 or None,
        )


def find_cure(
    grouped: GroupedModel,
    unmarked: Deviations,
    mark: Callable[[Sequence[str]], Deviations | Failure],
    is_over: Callable[[], bool] = lambda: False,
) -> Cure | None:
    """Look for values whose marking makes all outputs right; None where they are right as they are.

    Args:
        unmarked: of the engine as it is, on the sample on which it is worst.
        mark: builds and runs an engine with values marked.
        is_over: whether there is no time for another build.
    """
    wrong = {name: seen for name, seen in unmarked.items() if seen.is_wrong}
    if not wrong:
        return None
    worst = max(wrong, key=lambda name: wrong[name].error)
    search, builds = _Search(grouped.model, worst), 1
    right: list[str] = []  # Marked inside a wrong fusion, a value may be right, while others like it stay.

    def tried(values: Sequence[str]) -> tuple[Deviations, float] | None:
        nonlocal builds
        builds += 1
        seen = mark(values)
        if isinstance(seen, Failure):
            return None
        outputs = [seen[name] for name in unmarked]
        return seen, math.inf if any(each.is_wrong for each in outputs) else max(each.error for each in outputs)

    def cure(values: Sequence[str], after: float) -> Cure:
        region = search.around(values[0]) if values else search.region
        groups = tuple(dict.fromkeys(grouped.owners[node] for node in region if node in grouped.owners))
        return Cure(worst, wrong[worst], tuple(wrong), tuple(values), region, groups, after, builds)

    while builds < _MOST_SINGLE and not is_over() and (value := search.next()) is not None:
        if (shown := tried([value])) is None:
            search.tried.add(value)
            continue
        seen, after = shown
        if after < math.inf:
            return cure([value], after)
        if not seen[value].is_wrong:
            right.append(value)
        search.learn(value, is_wrong=seen[value].is_wrong)
    for values in dict.fromkeys(tuple(alike(grouped, value)) for value in reversed(right)):
        if len(values) > 1 and builds < MOST_BUILDS and not is_over():
            shown = tried(values)
            if shown is not None and shown[1] < math.inf:
                return cure(values, shown[1])
    return cure([], math.inf)


def alike(grouped: GroupedModel, value: str) -> tuple[str, ...]:
    """A value and those at the same place of the groups that repeat its own with other weights."""
    model = grouped.model
    node = model.nodes[model.producer[value]]
    own = next((group for group in grouped.groups if node.name in group.nodes), None)
    if own is None:
        return (value,)
    place, slot = own.nodes.index(node.name), node.outputs.index(value)
    by_name = {each.name: each for each in model.nodes}
    repeated = (group for group in grouped.groups if group.pattern == own.pattern)
    outputs = {output.name for output in model.outputs}
    values = (by_name[group.nodes[place]].outputs[slot] for group in repeated)
    return tuple(each for each in values if each not in outputs)


def _lineage(model: Model) -> list[int]:
    """For each node the nodes that it is computed from, itself among them, as bits."""
    of_node: list[int] = []
    for index, node in enumerate(model.nodes):
        bits = 1 << index
        for name in (*node.inputs, *node.captures):
            if name in model.producer:
                bits |= of_node[model.producer[name]]
        of_node.append(bits)
    return of_node


@dataclass
class _Search:
    """Narrows down the nodes among which the first fault lies.

    A value that is wrong is computed from it; one that is right, while the outputs stay wrong, is not.
    """

    model: Model
    output: str

    def __post_init__(self) -> None:
        self._lineage = _lineage(self.model)
        self.suspects = self._lineage[self.model.producer[self.output]]
        self.tried = {output.name for output in self.model.outputs}

    @property
    def region(self) -> tuple[str, ...]:
        return self._names(self.suspects)

    def next(self) -> str | None:
        """The value that halves the suspects best; then those that suspects read and write; None where none is left."""
        return max(self._values, key=self._worth, default=None)

    def learn(self, value: str, *, is_wrong: bool) -> None:
        self.tried.add(value)
        before = self._lineage[self.model.producer[value]]
        left = self.suspects & (before if is_wrong else ~before)
        self.suspects = left or self.suspects  # A fault that moves with what is marked leaves what is known.

    def around(self, value: str) -> tuple[str, ...]:
        """The suspects that write and read a value."""
        near = 1 << self.model.producer[value]
        for index in self.model.consumers.get(value, ()):
            near |= 1 << index
        return self._names(near & self.suspects) or self._names(near)

    @property
    def _values(self) -> list[str]:
        names: dict[str, None] = {}
        for index, node in enumerate(self.model.nodes):
            if self.suspects >> index & 1:
                names |= dict.fromkeys((*node.outputs, *node.inputs))
        return [name for name in names if name not in self.tried and self._can_be_marked(name)]

    def _can_be_marked(self, name: str) -> bool:
        if not name or name not in self.model.producer or name in self.model.initializers:
            return False
        return self.model.info(name).is_float32

    def _worth(self, value: str) -> int:
        before = self._lineage[self.model.producer[value]] & self.suspects
        count = before.bit_count()
        return min(count, self.suspects.bit_count() - count)

    def _names(self, bits: int) -> tuple[str, ...]:
        return tuple(node.name for index, node in enumerate(self.model.nodes) if bits >> index & 1)


class Fusions:
    """Looks into engines of a search that are far off, and has them built with the values that cure them marked."""

    def __init__(
        self,
        toolchain: Toolchain,
        settings: SearchSettings,
        listener: Listener,
        not_emulated: Collection[str],
        is_over: Callable[[], bool],
    ) -> None:
        self._toolchain = toolchain
        self._marking = toolchain.marking if isinstance(toolchain, MarksValues) else None
        self._settings, self._listener, self._is_over = settings, listener, is_over
        self._not_emulated = frozenset(not_emulated)
        self._vain = 0

    def cured(
        self,
        measurement: Measurement,
        judge: Callable[[Measurement], Evaluation],
        evaluate: Callable[[], Measurement | Failure],
    ) -> Measurement:
        """The measurement of a plan; of another engine, where this one is far off and marked values cure it."""
        marking = self._marking
        if marking is None or self._vain >= _VAIN:
            return measurement
        evaluation = judge(measurement)
        plan = evaluation.plan
        if not self._is_far_off(evaluation):
            return measurement
        is_baseline = evaluation.origin == ORIGIN_FP32
        engine = "the all-FP32 engine" if is_baseline else f"the engine of plan {plan.fingerprint}"
        self._listener.stage(f"{engine} is far off: looking for a wrong fusion, with {MOST_BUILDS} builds at most")
        marked, sample = marking.marks.of(plan), _worst_sample(evaluation.error)
        limit = FP32_LIMIT_TF32 if self._settings.tf32 and not is_baseline else FP32_LIMIT

        def mark(values: Sequence[str]) -> Deviations | Failure:
            errors = marking.errors(plan, (*marked, *values), sample)
            if isinstance(errors, Failure):
                return errors
            return {name: Deviation(error, max(limit, _FACTOR * rounded)) for name, (error, rounded) in errors.items()}

        unmarked = mark(())
        cure = None
        if not isinstance(unmarked, Failure):
            outputs = {name: unmarked[name] for name in marking.judged}
            cure = find_cure(marking.grouped, outputs, mark, self._is_over)
        if cure is None or not cure.values:
            self._vain += 1
            if cure is not None:
                region = listed([repr(node) for node in cure.region], _MOST_NAMES)
                self._listener.warning(
                    f"{engine}: no value that was marked as an output cures it ({cure.builds} engines were built); what"
                    f" is wrong begins among {region}"
                )
            return measurement
        wrong = marking.engine_file(plan)
        layers = () if wrong is None else marking.layers_of(wrong, cure.region)
        finding = cure.finding("search", engine, layers)
        before = marking.marks  # Another worker may have added some.
        marks = (_mark(marking.grouped, value, plan) for value in cure.values)
        marking.keep(Marks((*before.marks, *marks), (*before.findings, finding)))
        again = evaluate()
        if isinstance(again, Failure) or self._is_far_off(judge(again)):
            self._vain += 1
            marking.keep(before)
            return measurement
        if wrong is not None:
            marking.discard(wrong)
        self._listener.warning(finding.message)
        return again

    def _is_far_off(self, evaluation: Evaluation) -> bool:
        """Whether an engine computes what neither its plan's roundings nor those of FP32 explain."""
        if evaluation.origin == ORIGIN_FP32:
            return not self._settings.skip_checks and bool(doubt(evaluation, tf32=self._settings.tf32))
        if evaluation.has_own_value or not self._not_emulated.isdisjoint(evaluation.plan.reduced_groups):
            return False
        if evaluation.is_finite and evaluation.error_value <= _LEAST:
            return False
        emulated = self._emulated(evaluation)
        return math.isfinite(emulated) and not (evaluation.is_finite and evaluation.error_value <= _FAR * emulated)

    def _emulated(self, evaluation: Evaluation) -> float:
        """The emulated error of a plan; inf where it cannot be emulated."""
        if evaluation.emulated is not None:
            return evaluation.emulated
        errors = self._toolchain.predictor.emulate((evaluation.plan,))
        error = None if isinstance(errors, Failure) else errors[0].without(evaluation.ignored)
        return math.inf if error is None or not error.has(evaluation.metric) else error.value(evaluation.metric)


def _mark(grouped: GroupedModel, value: str, plan: PrecisionPlan) -> Mark:
    """For all plans that have the groups around the value in the precisions of this one."""
    model = grouped.model
    nodes = (model.producer[value], *model.consumers.get(value, ()))
    groups = (grouped.owners.get(model.nodes[index].name) for index in nodes)
    return Mark(value, {group: plan.precision[group] for group in groups if group is not None})


def _worst_sample(error: OutputError) -> int:
    """The search sample on which an output is off most."""
    rows = [values["relative_l2"] for values in error.per_output.values() if "relative_l2" in values]
    return int(np.nan_to_num(np.array(rows, dtype=float), nan=np.inf).max(axis=0).argmax()) if rows else 0
