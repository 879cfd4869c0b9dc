"""Which type every FP32 value takes under a plan, and which values are needed in the other type as well.

The one place that decides it, for the typed model (``rewrite``), its emulation (``emulate``) and the count of Casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mptune.errors import PlanError
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
    """

    fp16_nodes: Sequence[bool]
    half: frozenset[str]
    crossing: tuple[str, ...]
    constants_fp16: frozenset[str]
    constants_fp32: frozenset[str]


@dataclass(frozen=True)
class _Reads:
    """What one node reads of FP32 type: names, and whether each follows the node's precision."""

    values: tuple[tuple[str, bool], ...]
    constants: tuple[tuple[str, bool], ...]
    outputs: tuple[str, ...]


class Flow:
    """The typing of one model under any plan. Made once; resolving a plan is one pass over the nodes."""

    def __init__(self, model: Model, groups: Sequence[LayerGroup]) -> None:
        self.model = model
        self.groups = tuple(groups)
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
        # FP32 under any plan and under their own name: the interface, and what subgraphs read by name.
        self.named_fp32 = frozenset(o.name for o in model.outputs) | {c for n in model.nodes for c in n.captures}
        self._reads = tuple(self._reads_of(position) for position in range(len(model.nodes)))
        computed = {out for node in model.nodes for out in node.outputs if out}
        self._outputs = tuple(o.name for o in model.outputs if o.name in computed and o.name not in self.constants)
        # As they are under any plan: constants that are outputs, and those that nothing reads.
        self._constants_kept = frozenset(c for c in self.constants if c not in model.consumers or c in self.named_fp32)

    def _reads_of(self, position: int) -> _Reads:
        node, rule = self.model.nodes[position], self.rules[position]
        values: dict[tuple[str, bool], None] = {}
        constants: dict[tuple[str, bool], None] = {}
        for slot, name in (*enumerate(node.inputs), *((-1, c) for c in node.captures)):
            if not name or not self.model.info(name).is_float32:
                continue
            if name in self.constants:
                constants[name, slot in rule.inputs] = None
            elif slot not in rule.reads_any:
                values[name, slot in rule.inputs] = None
        return _Reads(tuple(values), tuple(constants), tuple(node.outputs[o] for o in rule.outputs))

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
        known = {group.id for group in self.groups}
        for wrong, what in (
            (set(plan.precision) - known, "names a group that the model has not"),
            (known - set(plan.precision), "lacks a group"),
        ):
            if wrong:
                raise PlanError(f"the plan {what}: {min(wrong)}", "was it made at another granularity?")
        return [plan.precision[group.id] is Precision.FP16 for group in self.groups]

    def resolve(self, plan: PrecisionPlan) -> Resolution:
        """Type every value under ``plan``.

        Raises:
            PlanError: the plan does not fit the model.
        """
        group_fp16 = [*self.check(plan), False]  # the last entry serves nodes without a group (-1)
        fp16_nodes = [group_fp16[g] for g in self.group_of]
        half: set[str] = set()
        crossing: dict[str, None] = {}
        constants_fp16: set[str] = set()
        constants_fp32 = set(self._constants_kept)
        for is_fp16, reads in zip(fp16_nodes, self._reads, strict=True):
            for name, follows in reads.values:
                if (name in half) != (is_fp16 and follows):
                    crossing[name] = None
            for name, follows in reads.constants:
                (constants_fp16 if is_fp16 and follows else constants_fp32).add(name)
            if is_fp16:
                half.update(reads.outputs)
        crossing.update((name, None) for name in self._outputs if name in half)
        return Resolution(
            fp16_nodes, frozenset(half), tuple(crossing), frozenset(constants_fp16), frozenset(constants_fp32)
        )

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
        return frozenset(name for reads in self._reads for name, follows in reads.constants if follows)


def new_suffix(model: Model, kind: str) -> str:
    """A suffix such that no name in the model ends with it: a name plus the suffix is always new."""
    taken = {
        name for graph in all_graphs(model.proto.graph) for node in graph.node for name in (node.name, *node.output)
    }
    taken |= {v.name for graph in all_graphs(model.proto.graph) for v in (*graph.input, *graph.initializer)}
    taken |= {node.name for node in model.nodes}
    suffix = f"__{kind}"
    while any(name.endswith(suffix) for name in taken):
        suffix += "_"
    return suffix
