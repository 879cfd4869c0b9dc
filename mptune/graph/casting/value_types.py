"""Which type every FP32 value takes under a plan, and which values are needed in the other type as well.

The one place that decides it, for the typed model (``rewrite``), its emulation (``emulate``) and the count of Casts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mptune.errors import PlanError
from mptune.graph.casting.name_sets import Flags, Marked, Names
from mptune.graph.casting.own_casts import Folding, Folds, OwnCast, own_cast
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import all_graphs
from mptune.graph.op_rules import NodeRule, node_rule
from mptune.graph.plan import Precision, PrecisionPlan


@dataclass(frozen=True)
class Resolution:
    """What a plan means for each node and value.

    Attributes:
        fp16_nodes: whether each node runs in FP16, [nodes].
        half: values that their node computes in FP16.
        crossing: values that are needed in the type they are not computed in: one Cast each, in topological order.
        constants_fp16: constants that some node reads in FP16.
        constants_fp32: constants that some node reads as they are.
        folds: what becomes of the model's own Casts between FP32 and FP16.
    """

    fp16_nodes: Flags
    half: Marked
    crossing: Marked
    constants_fp16: Marked
    constants_fp32: Marked
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
    """Names that groups read: (name, group) pairs, a name may stand there for several."""

    def __init__(self, names: Names, pairs: Iterable[tuple[str, int]]) -> None:
        found = [(names.position[name], group) for name, group in pairs]
        self._names, self._groups = np.array(found, np.intp).reshape(-1, 2).T.copy()
        self._size = len(names)

    def of(self, chosen: Flags) -> Flags:
        """The names of the chosen groups, [names]; ``chosen`` has one flag for each group."""
        flags = np.zeros(self._size, np.bool_)
        flags[self._names[chosen[self._groups]]] = True
        return flags


class Flow:
    """The typing of one model under any plan. Made once; resolving a plan takes a few selections by group.

    Attributes:
        values: inputs of the graph and outputs of its nodes, in topological order.
        constants: those of FP32 type that nobody can override, in the model's order.
        group_of: each node's group, [nodes]; -1 for a node of none.
        maker: the group that decides whether a value is FP16, [values]; -1 for a value that never is.
        may_cross: whether some plan needs a value in the type that it is not computed in, [values].
        named: what is as it is under any plan and under its own name: the interface, and what subgraphs read.
    """

    def __init__(self, model: Model, groups: Sequence[LayerGroup]) -> None:
        self.model = model
        self.groups = tuple(groups)
        self._ids = tuple(group.id for group in groups)
        self.rules: tuple[NodeRule, ...] = tuple(node_rule(model, node) for node in model.nodes)
        self.group_of = self._nodes_by_group()
        self._group_of = np.array(self.group_of, np.intp)
        self.constants = Names(n for n, c in model.initializers.items() if c.dtype == "float" and not c.overridable)
        outputs = (out for node in model.nodes for out in node.outputs if out)
        self.values = Names((*(i.name for i in model.proto.graph.input), *outputs))
        self.named = frozenset(o.name for o in model.outputs) | {c for n in model.nodes for c in n.captures}
        self.own_casts = tuple(c for node in model.nodes if (c := own_cast(model, node)) is not None)
        self._own_at = {c.index: c for c in self.own_casts}
        self._widened = frozenset(c.result for c in self.own_casts if c.widens)
        self._fp16_values = frozenset(n for c in self.own_casts for n in (c.source, c.result) if self._is_fp16(n))
        self._reads = tuple(self._reads_of(position) for position in range(len(model.nodes)))
        self._cast_reads = tuple((i, reads.casts) for i, reads in enumerate(self._reads) if reads.casts is not None)
        makers = {name: g for g, reads in zip(self.group_of, self._reads, strict=True) for name in reads.outputs}
        self.maker = np.array([makers.get(name, -1) for name in self.values], np.intp)
        # What follows a group's precision stands by the group; what is FP32 under any plan in ``..._fp32``.
        self._values_read, self._values_fp32 = self._sorted_values(makers)
        self._constants_read, self._constants_fp32 = self._sorted_constants()
        given = (o.name for o in model.outputs if o.name in model.producer and o.name not in self.constants)
        self._outputs = self.values.marked(given).flags
        casts = self.values.marked(n for c in self.own_casts for n in (c.source, c.result) if n in self.values).flags
        self.may_cross: Flags = (
            self._values_read.of(np.ones(len(self.groups), np.bool_)) | self._values_fp32 | self._outputs | casts
        )

    def _nodes_by_group(self) -> list[int]:
        index = {node.name: node.index for node in self.model.nodes}
        group_of = [-1] * len(index)
        for position, group in enumerate(self.groups):
            for name in group.nodes:
                if name not in index:
                    raise PlanError(f"group {group.id} names a node {name!r} that the model has not")
                group_of[index[name]] = position
        return group_of

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
        outputs = tuple(node.outputs[o] for o in rule.outputs) if self.group_of[position] >= 0 else ()
        return _Reads(tuple(values), tuple(constants), outputs, casts)

    def _sorted_values(self, makers: Mapping[str, int]) -> tuple[_ByGroup, Flags]:
        read: list[tuple[str, int]] = []
        fp32: set[str] = set()
        for group, reads in zip(self.group_of, self._reads, strict=True):
            for name, follows in reads.values:
                if group < 0 or not follows:
                    fp32.add(name)
                elif makers.get(name) != group:
                    read.append((name, group))
        return _ByGroup(self.values, read), self.values.marked(fp32).flags

    def _sorted_constants(self) -> tuple[_ByGroup, Flags]:
        read: list[tuple[str, int]] = []
        # As they are under any plan: those that are outputs, and those that nothing reads.
        fp32 = {c for c in self.constants if c not in self.model.consumers or c in self.named}
        for group, reads in zip(self.group_of, self._reads, strict=True):
            for name, follows in reads.constants:
                if group < 0 or not follows:
                    fp32.add(name)
                else:
                    read.append((name, group))
        return _ByGroup(self.constants, read), self.constants.marked(fp32).flags

    def check(self, plan: PrecisionPlan) -> Flags:
        """Whether each group is FP16, [groups].

        Raises:
            PlanError: the plan is another model's, or lacks a group.
        """
        if plan.model_sha256 and plan.model_sha256 != self.model.sha256:
            raise PlanError(
                f"the plan is another model's: sha256 {plan.model_sha256[:12]}, not {self.model.sha256[:12]}",
                "give the model that the plan was made for",
            )
        precision: Iterable[Precision] = plan.precision.values()
        if tuple(plan.precision) != self._ids:
            self._check_groups(plan)
            precision = map(plan.precision.__getitem__, self._ids)
        fp16 = Precision.FP16
        return np.array([p is fp16 for p in precision], np.bool_)

    def _check_groups(self, plan: PrecisionPlan) -> None:
        unknown, missing = sorted(plan.precision.keys() - self._ids), sorted({*self._ids} - plan.precision.keys())
        if unknown or missing:
            what = f"names a group that the model has not: {unknown[0]}" if unknown else f"lacks a group: {missing[0]}"
            raise PlanError(f"the plan {what}", "was it made at another granularity?")

    def resolve(self, plan: PrecisionPlan) -> Resolution:
        """Type every value under ``plan``.

        Raises:
            PlanError: the plan does not fit the model.
        """
        fp16 = self.check(plan)
        in_group = np.append(fp16, False)  # the last serves what belongs to no group (-1)
        half = in_group[self.maker]
        read_fp32 = self._values_read.of(~fp16) | self._values_fp32 | self._outputs
        crossing = np.where(half, read_fp32, self._values_read.of(fp16))
        resolution = Resolution(
            in_group[self._group_of],
            Marked(self.values, half),
            Marked(self.values, crossing),
            Marked(self.constants, self._constants_read.of(fp16)),
            Marked(self.constants, self._constants_read.of(~fp16) | self._constants_fp32),
            Folds(),
        )
        return self._folded(resolution) if self.own_casts else resolution

    def _folded(self, resolution: Resolution) -> Resolution:
        """The same with the model's own Casts folded; marks what that makes cross, and the constants that it reads."""
        half = resolution.half
        folding = Folding(
            self.named,
            lambda name: name in half or name in self._fp16_values,
            resolution.crossing,
            resolution.constants_fp16,
            resolution.constants_fp32,
        )
        for index, casts in self._cast_reads:
            if casts.own is not None:
                folding.pass_cast(casts.own, half)
            for name, follows in casts.results:
                folding.read(name, bool(resolution.fp16_nodes[index]) and follows)
            for name in casts.any_type:
                folding.read_any(name)
        return replace(resolution, folds=folding.finish(self.own_casts))

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        group_fp16 = self.check(plan)
        return {
            node.name: Precision.FP16 if group_fp16[g] else Precision.FP32
            for node, g in zip(self.model.nodes, self.group_of, strict=True)
            if g >= 0
        }

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
