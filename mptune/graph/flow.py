"""Which type every FP32 value takes under a plan, and which values are needed in the other type as well.

The one place that decides it, for the typed model (``rewrite``), its emulation (``emulate``) and the count of Casts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

from mptune.errors import PlanError
from mptune.graph.casts import Folding, Folds, OwnCast, own_cast
from mptune.graph.groups import LayerGroup
from mptune.graph.model import Model
from mptune.graph.op_rules import NodeRule, node_rule
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.tensors import all_graphs


@dataclass(frozen=True)
class Resolution:
    """What a plan means for each node and value.

    Attributes:
        fp16_nodes: one entry per node, whether it runs in FP16.
        half: values that their node computes in FP16.
        crossing: values that are needed in the type they are not computed in: one Cast each, in topological order.
        constants_fp16: constants that some node reads in FP16.
        constants_fp32: constants that some node reads as they are.
        folds: what becomes of the model's own Casts between FP32 and FP16.
    """

    fp16_nodes: Sequence[bool]
    half: Set[str]
    crossing: tuple[str, ...]
    constants_fp16: Set[str]
    constants_fp32: Set[str]
    folds: Folds

    @property
    def added_casts(self) -> int:
        """How many Casts the plan adds, less those of the model's own that it makes needless."""
        return len(self.crossing) - len(self.folds.dropped)


@dataclass(frozen=True)
class _CastReads:
    """What one node has to do with the model's own Casts: it is one, or reads what they compute."""

    own: OwnCast | None
    results: tuple[tuple[str, bool], ...]
    any_type: tuple[str, ...]


@dataclass(frozen=True)
class _Reads:
    """What one node reads of FP32 type: names, and whether each follows the node's precision."""

    values: tuple[tuple[str, bool], ...]
    constants: tuple[tuple[str, bool], ...]
    outputs: tuple[str, ...]
    casts: _CastReads | None


class _ByGroup:
    """Names, each with the group that it belongs to; a name may stand there for several."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._groups: list[int] = []

    def add(self, name: str, group: int) -> None:
        self._names.append(name)
        self._groups.append(group)

    def of(self, chosen: Sequence[bool]) -> set[str]:
        """The names of the chosen groups: one flag for each group."""
        return set(compress(self._names, map(chosen.__getitem__, self._groups)))


class Flow:
    """The typing of one model under any plan. Made once; resolving a plan takes a few selections by group."""

    def __init__(self, model: Model, groups: Sequence[LayerGroup]) -> None:
        self.model = model
        self.groups = tuple(groups)
        self._ids = frozenset(group.id for group in groups)
        self.rules: tuple[NodeRule, ...] = tuple(node_rule(model, node) for node in model.nodes)
        index = {node.name: node.index for node in model.nodes}
        self.group_of = [-1] * len(model.nodes)
        for position, group in enumerate(self.groups):
            for name in group.nodes:
                if name not in index:
                    raise PlanError(f"group {group.id} names a node {name!r} that the model has not")
                self.group_of[index[name]] = position
        self.constants = frozenset(
            name for name, c in model.initializers.items() if c.dtype == "float" and not c.overridable
        )
        # As they are under any plan and under their own name: the interface, and what subgraphs read by name.
        self.named = frozenset(o.name for o in model.outputs) | {c for n in model.nodes for c in n.captures}
        self.own_casts = tuple(c for node in model.nodes if (c := own_cast(model, node)) is not None)
        self._own_at = {c.index: c for c in self.own_casts}
        self._widened = frozenset(c.result for c in self.own_casts if c.widens)
        self._fp16_values = frozenset(n for c in self.own_casts for n in (c.source, c.result) if self._is_fp16(n))
        self._reads = tuple(self._reads_of(position) for position in range(len(model.nodes)))
        computed = {out for node in model.nodes for out in node.outputs if out}
        self._outputs = tuple(o.name for o in model.outputs if o.name in computed and o.name not in self.constants)
        # As they are under any plan: constants that are outputs, and those that nothing reads.
        self._constants_fp32 = {c for c in self.constants if c not in model.consumers or c in self.named}
        self._values_fp32: set[str] = set()
        self._computed, self._values_read, self._constants_read = _ByGroup(), _ByGroup(), _ByGroup()
        self._sort_by_group()
        self._cast_reads = tuple((i, reads.casts) for i, reads in enumerate(self._reads) if reads.casts is not None)
        order = (*(i.name for i in model.proto.graph.input), *(out for node in model.nodes for out in node.outputs))
        self._rank = {name: rank for rank, name in enumerate(order)}

    def _is_fp16(self, name: str) -> bool:
        return self.model.info(name).dtype == "float16"

    def _reads_of(self, position: int) -> _Reads:
        node, rule = self.model.nodes[position], self.rules[position]
        own = self._own_at.get(position)
        if own is not None:
            return _Reads((), (), (), _CastReads(own, (), ()))
        values: dict[tuple[str, bool], None] = {}
        constants: dict[tuple[str, bool], None] = {}
        results: dict[tuple[str, bool], None] = {}
        any_type: dict[str, None] = {}
        for slot, name in (*enumerate(node.inputs), *((-1, c) for c in node.captures)):
            if not name or not self.model.info(name).is_float32:
                continue
            if name in self.constants:
                constants[name, slot in rule.inputs] = None
            elif name in self._widened:
                if slot in rule.reads_any:
                    any_type[name] = None
                else:
                    results[name, slot in rule.inputs] = None
            elif slot not in rule.reads_any:
                values[name, slot in rule.inputs] = None
        casts = _CastReads(None, tuple(results), tuple(any_type)) if results or any_type else None
        return _Reads(tuple(values), tuple(constants), tuple(node.outputs[o] for o in rule.outputs), casts)

    def _sort_by_group(self) -> None:
        """What follows a group's precision goes to the group, what is read in FP32 under any plan to ``..._fp32``."""
        maker: dict[str, int] = {}
        for group, reads in zip(self.group_of, self._reads, strict=True):
            for name in reads.outputs:
                if group >= 0:
                    self._computed.add(name, group)
                    maker[name] = group
        for group, reads in zip(self.group_of, self._reads, strict=True):
            for name, follows in reads.values:
                if group < 0 or not follows:
                    self._values_fp32.add(name)
                elif maker.get(name) != group:
                    self._values_read.add(name, group)
            for name, follows in reads.constants:
                if group < 0 or not follows:
                    self._constants_fp32.add(name)
                else:
                    self._constants_read.add(name, group)

    def check(self, plan: PrecisionPlan) -> list[bool]:
        """One entry per group, whether it is FP16.

        Raises:
            PlanError: the plan is another model's, or lacks a group.
        """
        if plan.model_sha256 and plan.model_sha256 != self.model.sha256:
            raise PlanError(
                f"the plan is another model's: sha256 {plan.model_sha256[:12]}, not {self.model.sha256[:12]}",
                "give the model that the plan was made for",
            )
        if plan.precision.keys() != self._ids:
            unknown = sorted(plan.precision.keys() - self._ids)
            what = (
                f"names a group that the model has not: {unknown[0]}"
                if unknown
                else (f"lacks a group: {min(self._ids - plan.precision.keys())}")
            )
            raise PlanError(f"the plan {what}", "was it made at another granularity?")
        return [plan.precision[group.id] is Precision.FP16 for group in self.groups]

    def resolve(self, plan: PrecisionPlan) -> Resolution:
        """Type every value under ``plan``.

        Raises:
            PlanError: the plan does not fit the model.
        """
        fp16 = self.check(plan)
        fp32 = [not group for group in fp16]
        fp16_nodes = [*map([*fp16, False].__getitem__, self.group_of)]  # the last serves nodes of no group (-1)
        half = self._computed.of(fp16)
        constants_fp16 = self._constants_read.of(fp16)
        constants_fp32 = self._constants_read.of(fp32) | self._constants_fp32
        read_fp16 = self._values_read.of(fp16)
        read_fp32 = self._values_read.of(fp32) | self._values_fp32
        crossing = dict.fromkeys((read_fp16 - half) | (read_fp32 & half))
        folding = Folding(
            self.named,
            lambda name: name in half or name in self._fp16_values,
            crossing,
            self.constants,
            constants_fp16,
            constants_fp32,
        )
        for index, casts in self._cast_reads:
            self._pass_casts(folding, casts, fp16_nodes[index], half)
        folds = folding.finish(self.own_casts)
        crossing.update((name, None) for name in self._outputs if name in half)
        in_order = tuple(sorted(crossing, key=self._rank.__getitem__))
        return Resolution(fp16_nodes, half, in_order, constants_fp16, constants_fp32, folds)

    @staticmethod
    def _pass_casts(folding: Folding, reads: _CastReads, is_fp16: bool, half: set[str]) -> None:
        if reads.own is not None:
            folding.pass_cast(reads.own, half)
        for name, follows in reads.results:
            folding.read(name, is_fp16 and follows)
        for name in reads.any_type:
            folding.read_any(name)

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        group_fp16 = self.check(plan)
        return {
            node.name: Precision.FP16 if group_fp16[g] else Precision.FP32
            for node, g in zip(self.model.nodes, self.group_of, strict=True)
            if g >= 0
        }

    @cached_property
    def narrowable(self) -> frozenset[str]:
        """Values that some plan has computed in FP16."""
        return frozenset(name for reads in self._reads for name in reads.outputs)

    def convertible_constants(self) -> frozenset[str]:
        """Constants that some plan reads in FP16: what the weight bank keeps twice."""
        found = {name for reads in self._reads for name, follows in reads.constants if follows}
        # A constant that the model casts itself may be read through the Cast.
        return frozenset(found | {c.source for c in self.own_casts if c.source in self.constants})


def new_suffix(model: Model, kind: str) -> str:
    """A suffix such that no name in the model ends with it: a name plus the suffix is always new."""
    taken = {
        name for graph in all_graphs(model.proto.graph) for node in graph.node for name in (node.name, *node.output)
    }
    taken |= {v.name for graph in all_graphs(model.proto.graph) for v in (*graph.input, *graph.initializer)}
    taken |= {s.values.name for graph in all_graphs(model.proto.graph) for s in graph.sparse_initializer}
    taken |= {node.name for node in model.nodes}
    suffix = f"__{kind}"
    while any(name.endswith(suffix) for name in taken):
        suffix += "_"
    return suffix
