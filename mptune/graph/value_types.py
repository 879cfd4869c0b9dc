"""Which type every FP32 value of a model takes under a plan, and in which other types it is needed as well.

The one place that decides it, for the typed model (``rewrite``), its emulation (``emulate``) and the count of Casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from mptune.errors import PlanError
from mptune.graph.facts import casts_integers, facts_of, node_rules
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import Model, given, once
from mptune.graph.loading.tensors import all_graphs, rounded
from mptune.graph.ops import COMPARISONS, FLOAT_TYPES, NodeRule
from mptune.graph.plan import Precision, PrecisionPlan


@dataclass(frozen=True)
class OwnCasts:
    """The model's own Casts, merged once for all plans: which values are one and the same."""

    # Index of a Cast between FP32 and FP32, FP16 or BF16, either way -> what it casts to, in topological order.
    casts: dict[int, Precision] = field(default_factory=dict)
    # FP32 result of a Cast from FP32 -> the FP32 value that it repeats.
    same: dict[str, str] = field(default_factory=dict)
    # (FP32 result of a Cast, precision) -> the value of that precision that it was cast from.
    reduced: dict[tuple[str, Precision], str] = field(default_factory=dict)
    # (FP32 value, precision) -> the result of the Cast that gives the value in that precision. A plan that computes or
    # needs the value so gives it this name, and the Cast goes.
    forms: dict[tuple[str, Precision], str] = field(default_factory=dict)
    # Result of a Cast -> the integers or the reduced value that every other form of it is cast from.
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolution:
    """What a plan means for each node and value."""

    node_precisions: tuple[Precision, ...]
    computed: Mapping[str, Precision]  # value -> the precision that its node computes it in, where that is not FP32
    casts: Mapping[str, AbstractSet[Precision]]  # value -> the others that it is needed in: one Cast each
    constants: Mapping[str, AbstractSet[Precision]]  # FP32 constant -> the precisions that it is needed in
    dropped: frozenset[int] = frozenset()  # the model's own Casts that are not needed any more, or among ``casts``

    def computed_in(self, value: str) -> Precision:
        """The precision that an FP32 value of the model is computed in."""
        return self.computed.get(value, Precision.FP32)


class ValueTypes:
    """The typing of one model under any plan. Made once; resolving a plan is one pass over the nodes."""

    def __init__(self, grouped: GroupedModel) -> None:
        self.model = model = grouped.model
        self.facts = facts_of(model)
        self.groups = grouped.groups
        self.rules: tuple[NodeRule, ...] = node_rules(model)
        # Those that are stored in each type that reads them.
        self.constants = {n: c for n, c in model.initializers.items() if c.dtype == "float" and not c.overridable}
        # What keeps its FP32 form and its name under any plan: the interface, and what subgraphs read.
        self.named = frozenset(o.name for o in model.outputs) | {c for n in model.nodes for c in n.captures}
        self.own = self._merged_casts()
        self._own_fp32 = {model.nodes[i].outputs[0] for i, to in self.own.casts.items() if to is Precision.FP32}
        position = {name: k for k, group in enumerate(self.groups) for name in group.nodes}
        # Each node's position among the groups, [nodes]; -1 for a node of none.
        self.group_of = [position.get(node.name, -1) for node in model.nodes]
        # Of each node: the FP32 values that it reads, whether in its own precision, and whether in any type.
        self._reads: list[dict[tuple[str, bool, bool], None]] = []
        for node, rule in zip(model.nodes, self.rules, strict=True):
            slots = (*enumerate(node.inputs), *((-1, captured) for captured in node.captures))
            floats = ((slot, name) for slot, name in slots if name and model.info(name).is_float32)
            self._reads.append({(name, slot in rule.inputs, slot in rule.reads_any): None for slot, name in floats})
        self._lacking: dict[Precision, Mapping[int, tuple[str, ...]]] = {Precision.FP32: {}}
        # Under any plan: constants that are outputs or that nothing reads stay, computed outputs are FP32.
        self._unmoved = tuple(c for c in self.constants if c not in model.consumers or c in self.named)
        self._outputs = tuple(o.name for o in model.outputs if o.name in model.producer)

    def _merged_casts(self) -> OwnCasts:
        model, own = self.model, OwnCasts()
        for node in model.nodes:
            if node.op_type != "Cast" or not node.is_standard:
                continue
            source, result = node.inputs[0], node.outputs[0]
            if casts_integers(model, node):
                own.sources[result] = source
            from_precision, to = (FLOAT_TYPES.get(model.info(name).dtype) for name in (source, result))
            if from_precision is None or to is None or Precision.FP32 not in (from_precision, to):
                continue
            own.casts[node.index] = to
            if from_precision is not Precision.FP32:
                own.reduced[result, from_precision] = own.sources[result] = source
                continue
            root = own.same.get(source, source)
            if to is Precision.FP32:
                own.same[result] = root
            if root not in self.constants and not (to is Precision.FP32 and root in self.named):
                own.forms.setdefault((root, to), result)
        return own

    def lacking(self, precision: Precision) -> Mapping[int, tuple[str, ...]]:
        """Position of each group that cannot have a precision -> its operators that could be FP16 and not this."""
        if precision not in self._lacking:
            by_group: dict[int, dict[str, None]] = {}
            for node, rule, position in zip(self.model.nodes, self.rules, self.group_of, strict=True):
                if position >= 0 and rule.precisions and precision not in rule.precisions:
                    by_group.setdefault(position, {})[node.op_type] = None
            self._lacking[precision] = {position: tuple(ops) for position, ops in by_group.items()}
        return self._lacking[precision]

    def _precisions_of_nodes(self, plan: PrecisionPlan) -> tuple[Precision, ...]:
        """The precision of each node, [nodes]: FP32 where it has none, or where its operator does not admit it.

        A group with an operator that lacks what others of it have is FP32 as a whole: patterns are never split.
        """
        if plan.model_sha256 and plan.model_sha256 != self.model.sha256:
            made_for = f"sha256 {plan.model_sha256[:12]}, not {self.model.sha256[:12]}"
            raise PlanError(f"the plan is another model's: {made_for}", "give the model that the plan was made for")
        ids = [group.id for group in self.groups]
        if unlike := sorted(plan.precision.keys() ^ {*ids}):
            what = "lacks a group" if unlike[0] in ids else "names a group that the model does not have"
            raise PlanError(f"the plan {what}: {unlike[0]}", "was it made at another granularity?")
        wanted = (plan.precision[group] for group in ids)
        of_group = [Precision.FP32 if k in self.lacking(p) else p for k, p in enumerate(wanted)]
        of_group.append(Precision.FP32)  # serves what belongs to no group (-1)
        of_node = (of_group[position] for position in self.group_of)
        return tuple(p if p in rule.precisions else Precision.FP32 for p, rule in zip(of_node, self.rules, strict=True))

    def resolve(self, plan: PrecisionPlan) -> Resolution:
        """Type every value under ``plan``."""
        precisions = [*self._precisions_of_nodes(plan)]
        own, fp32, nodes = self.own, Precision.FP32, self.model.nodes
        computed: dict[str, Precision] = {}
        casts: dict[str, set[Precision]] = {}
        constants: dict[str, set[Precision]] = {name: {fp32} for name in self._unmoved}
        read_as_they_are: set[str] = set()  # FP32 results of the model's own Casts
        for index, precision in enumerate(precisions):  # in topological order: what a node reads is typed already
            if index in own.casts:  # whether it stays is decided last
                continue
            if precision is not fp32 and nodes[index].op_type in COMPARISONS:
                # Unless its operands are there already: a Cast would save nothing, and might turn the answer.
                values = (name for name, *_ in self._reads[index] if not self._holds(precision, name))
                if any(v in own.sources or computed.get(own.same.get(v, v)) is not precision for v in values):
                    precision = precisions[index] = fp32
            if precision is not fp32:
                computed.update((nodes[index].outputs[slot], precision) for slot in self.rules[index].outputs)
            for name, is_own, is_any in self._reads[index]:
                wanted = precision if is_own else fp32
                if name in self._own_fp32 and wanted is fp32:
                    read_as_they_are.add(name)
                    continue
                value = own.same.get(name, name)
                if value in self.constants:
                    constants.setdefault(value, set()).add(wanted)
                elif not is_any and computed.get(value, fp32) is not wanted and (value, wanted) not in own.reduced:
                    casts.setdefault(value, set()).add(wanted)
        for name in self._outputs:
            if name in computed:
                casts.setdefault(name, set()).add(fp32)
        dropped: set[int] = set()
        for index, to in reversed(own.casts.items()):  # the last first, since one that stays needs what it reads
            (source, *_), (result, *_) = nodes[index].inputs, nodes[index].outputs
            value = own.same.get(source, source)
            is_idle = result not in self.model.consumers
            is_read = is_idle or result in self.named or result in read_as_they_are
            is_form = own.forms.get((value, to)) == result
            is_there = is_form and (to in casts.get(value, ()) or computed.get(value) is to)
            if is_there or (to is fp32 and not is_read):
                dropped.add(index)
            elif source in self.constants:
                constants.setdefault(source, set()).add(fp32)
            else:
                read_as_they_are.add(source)
        return Resolution(tuple(precisions), computed, casts, constants, frozenset(dropped))

    def _holds(self, precision: Precision, name: str) -> bool:
        """Whether a value is a constant that a precision has exactly."""
        values = self.constants[name].numpy() if name in self.constants else None
        return values is not None and np.array_equal(rounded(values, precision), values)

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        precisions = zip(self.model.nodes, self.group_of, self.resolve(plan).node_precisions, strict=True)
        return {node.name: precision for node, group, precision in precisions if group >= 0}

    def convertible_constants(self) -> frozenset[str]:
        """Constants that some plan reads in less than FP32: what the weight bank keeps more than once."""
        names = {name for reads in self._reads for name, is_own, _ in reads if is_own}
        return frozenset(self.own.same.get(name, name) for name in names).intersection(self.constants)


@once
def value_types(grouped: GroupedModel) -> ValueTypes:
    """The typing of a model, made once for its groups."""
    return ValueTypes(grouped)


def new_suffix(model: Model, kind: str) -> str:
    """A suffix such that no name in the model ends with it: a name plus the suffix is always new."""
    suffix, names = f"__{kind}", {name for node in model.nodes for name in (node.name, *node.outputs)}
    for graph in all_graphs(model.proto.graph):
        names |= given(graph).union(*((node.name, *node.output) for node in graph.node))
    while any(name.endswith(suffix) for name in names):
        suffix += "_"
    return suffix


_BF16_OPSET = 22  # from this operator set on, nearly all operators have BF16


def unsupported(types: ValueTypes, precision: Precision) -> dict[str, str]:
    """Group id -> why it cannot have a precision: operators that have FP16 and not this one at the operator set."""
    raised = f"; --opset {_BF16_OPSET} raises the model" if types.model.opset < _BF16_OPSET else ""
    return {
        types.groups[k].id: f"ONNX has no {precision.name} for {', '.join(ops)} at opset {types.model.opset}{raised}"
        for k, ops in types.lacking(precision).items()
    }
