"""Latency predicted from shapes and a device's peaks: the additive law ``base - gains + boundary costs``.

A group takes ``max(computing, moving) + launch`` (the roofline model: Williams, Waterman, Patterson, Communications of
the ACM 52(4), 2009). It is a prior, not a clock: it orders groups by what FP16 gains them. Where anything is measured,
the search fits the scale of the gains to its first two builds (all-FP32 and all-FP16). It is optimistic: it assumes
every epilogue fused. On an H200 it predicts 2.2 ms for a ViT-S of batch 8 in FP32 and 0.34 ms in FP16, where ONNX
Runtime, which fuses little, measures 3.6 and 1.6 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mptune.graph.groups import LayerGroup
from mptune.graph.model import Model, Node
from mptune.graph.op_rules import NodeRule, node_rule
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.targets.costs import GroupCost, Shape, ShapeTable, group_costs, ungrouped_cost
from mptune.targets.target import Target

__all__ = ["Boundary", "GroupCost", "LatencyTerms", "group_costs", "roofline"]

MATRIX_EFFICIENCY = 0.8
"""Share of the peak that a large matrix product reaches: 790 of 989 TFLOP/s, measured on an H200 in bf16."""

VECTOR_EFFICIENCY = 0.5
"""Share of the FP32 peak that element-wise arithmetic reaches: the peak counts fused multiply-adds, which are 2 FLOPs
in one instruction, and most element-wise operations are none. FP16 counts the same: runtimes compute it in FP32."""

BANDWIDTH_EFFICIENCY = 0.9
"""Share of the bandwidth that streaming kernels reach: copies at 4.3 of 4.8 TB/s, measured on an H200."""

TILE_ELEMENTS = 128 * 64
"""Output elements that one thread block computes of a matrix product. Blocks run in waves of one per multiprocessor,
and the last wave takes as long as a full one: small products leave most of a large GPU idle."""

CAST_LAUNCH_SHARE = 0.5
"""Share of a launch that a Cast costs: a kernel of its own in ONNX Runtime, as a rule fused into a neighbour by
TensorRT. 1 to 12 microseconds in all per boundary were measured on an H200 with ONNX Runtime."""

_CAST_BYTES = 4 + 2
"""A Cast reads each element in one type and writes it in the other."""


@dataclass(frozen=True)
class Boundary:
    """A tensor that needs a Cast where its producer and a reader differ in precision.

    Attributes:
        tensor: its name.
        producer_group: id of the group that computes it; None where it is FP32 under every plan (model inputs, nodes
            without a precision).
        consumer_groups: ids of the groups that read it, the producer's own group left out.
        cost_ms: of the Cast. All readers share one, so it is paid once.
        fp32_consumer: something reads it that is FP32 under every plan: the model's output, a subgraph, a node or an
            input without a precision.
    """

    tensor: str
    producer_group: str | None
    consumer_groups: tuple[str, ...]
    cost_ms: float
    fp32_consumer: bool = False

    def is_crossed(self, plan: PrecisionPlan) -> bool:
        """Whether the plan needs the Cast."""
        producer = _precision(plan, self.producer_group)
        if self.fp32_consumer and producer is Precision.FP16:
            return True
        return any(_precision(plan, group) is not producer for group in self.consumer_groups)


def _precision(plan: PrecisionPlan, group: str | None) -> Precision:
    return Precision.FP32 if group is None else plan.precision.get(group, Precision.FP32)


@dataclass(frozen=True)
class LatencyTerms:
    """The terms of the additive law, in milliseconds.

    Attributes:
        base_ms: all-FP32.
        gains_ms: group id -> what FP16 saves; negative where FP16 is slower, 0 for pinned groups.
        boundaries: every tensor that some plan needs a Cast for.
    """

    base_ms: float
    gains_ms: Mapping[str, float]
    boundaries: tuple[Boundary, ...]

    def predict(self, plan: PrecisionPlan) -> float:
        """Latency of a plan in milliseconds: ``base - gains of the FP16 groups + costs of the boundaries``."""
        gained = sum(self.gains_ms.get(group, 0.0) for group in plan.fp16_groups)
        return self.base_ms - gained + sum(b.cost_ms for b in self.boundaries if b.is_crossed(plan))


def roofline(model: Model, groups: Sequence[LayerGroup], target: Target, shapes: Mapping[str, Shape]) -> LatencyTerms:
    """Predict the latency terms of a model on a target.

    Args:
        model: the model.
        groups: its layer groups.
        target: the device.
        shapes: concrete shapes by tensor name (``group_costs``).
    """
    costs = group_costs(model, groups, shapes)
    fp32 = {group: group_ms(cost, target, Precision.FP32) for group, cost in costs.items()}
    fp16 = {group: group_ms(cost, target, Precision.FP16) for group, cost in costs.items()}
    pinned = {group.id for group in groups if group.pinned is not None}
    rest = ungrouped_cost(model, groups, shapes)
    table = ShapeTable(model, shapes)
    return LatencyTerms(
        base_ms=sum(fp32.values()) + rest.fp32_bytes / _bytes_per_ms(target),
        gains_ms={group: 0.0 if group in pinned else fp32[group] - fp16[group] for group in costs},
        boundaries=tuple(
            Boundary(
                edge.tensor, edge.producer, edge.consumers, cast_ms(table.elements(edge.tensor), target), edge.fixed
            )
            for edge in _edges(model, groups)
        ),
    )


def group_ms(cost: GroupCost, target: Target, precision: Precision) -> float:
    """Milliseconds that a group takes: the slower of computing and moving, and its launch."""
    is_fp16 = precision is Precision.FP16
    peak = target.fp16_tflops if is_fp16 else target.fp32_tflops
    computing = cost.matrix_flops / (peak * 1e9 * MATRIX_EFFICIENCY * _occupancy(cost.matrix_elements, target))
    computing += cost.vector_flops / (target.fp32_tflops * 1e9 * VECTOR_EFFICIENCY)
    moving = (cost.fp16_bytes if is_fp16 else cost.fp32_bytes) / _bytes_per_ms(target)
    return max(computing, moving) + cost.kernels * target.launch_us * 1e-3


def cast_ms(elements: int, target: Target) -> float:
    """Milliseconds that a Cast of a tensor between FP32 and FP16 takes."""
    return elements * _CAST_BYTES / _bytes_per_ms(target) + CAST_LAUNCH_SHARE * target.launch_us * 1e-3


def _bytes_per_ms(target: Target) -> float:
    return target.bandwidth_gbps * 1e6 * BANDWIDTH_EFFICIENCY


def _occupancy(elements: int, target: Target) -> float:
    """Share of the multiprocessors that have work, over all waves of thread blocks."""
    if target.sm_count is None or elements == 0:
        return 1.0
    blocks = math.ceil(elements / TILE_ELEMENTS)
    return blocks / (math.ceil(blocks / target.sm_count) * target.sm_count)


@dataclass(frozen=True)
class _Edge:
    """A float tensor between groups: who makes it, who reads it, whether an FP32 reader is fixed."""

    tensor: str
    producer: str | None
    consumers: tuple[str, ...]
    fixed: bool


def _edges(model: Model, groups: Sequence[LayerGroup]) -> list[_Edge]:
    """Every FP32 tensor, constants left out, that changes hands between groups or between a group and what is FP32.

    Follows ``mptune.graph.flow``, which decides where Casts stand.
    """
    group_of = {name: group.id for group in groups for name in group.nodes}
    rules = [node_rule(model, node) for node in model.nodes]
    named = {output.name for output in model.outputs}
    constants = {name for name, constant in model.initializers.items() if not constant.overridable}
    found = []
    for name, info in model.tensors.items():
        if not info.is_float32 or name in constants:
            continue
        producer = _producer(model, name, rules, group_of)
        consumers: dict[str, None] = {}
        fixed = name in named
        for index in model.consumers.get(name, ()):
            node = model.nodes[index]
            for follows in _reads(node, rules[index], name):
                if follows and node.name in group_of:
                    consumers[group_of[node.name]] = None
                else:
                    fixed = True
        others = tuple(group for group in consumers if group != producer)
        if others or (fixed and producer is not None):
            found.append(_Edge(name, producer, others, fixed))
    return found


def _producer(model: Model, tensor: str, rules: Sequence[NodeRule], group_of: Mapping[str, str]) -> str | None:
    index = model.producer.get(tensor)
    if index is None:
        return None
    node = model.nodes[index]
    return group_of.get(node.name) if any(node.outputs[slot] == tensor for slot in rules[index].outputs) else None


def _reads(node: Node, rule: NodeRule, tensor: str) -> list[bool]:
    """For each way in which a node reads a tensor, whether that follows the node's precision; free reads left out."""
    slots = [slot for slot, name in enumerate(node.inputs) if name == tensor and slot not in rule.reads_any]
    return [slot in rule.inputs for slot in slots] + [False] * node.captures.count(tensor)
