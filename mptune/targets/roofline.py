"""Latency predicted from shapes and a device's peaks: the additive law ``base - gains + boundary costs``.

A kernel takes ``max(computing, moving) + launch`` (the roofline model: Williams, Waterman, Patterson, Communications of
the ACM 52(4), 2009), a group the sum of its kernels. It is a prior, not a clock: it orders groups by what FP16 gains
them. Where anything is measured, the search fits the scale of the gains to its first two builds (all-FP32 and
all-FP16).

What the kernels are depends on the engine (``Execution``) and on the graph, never on the groups of the search: so
all-FP32 and all-FP16 take as long whatever the granularity. ``FUSED`` is one kernel for each group of ``fusion``, every
epilogue fused: it stands for TensorRT, and so for every latency that is predicted for a device that is not here, an
H200 included. It was held against 126 latencies that others published (``benchmarks/published``); no TensorRT engine
was at hand. ``UNFUSED`` is ONNX Runtime's CUDA provider, and was
held against 451 random plans of five models on an H200 (``benchmarks/roofline.py``): Kendall's tau 0.97 (ViT-S), 0.96
(ResNet-50), 0.93 (flow net), 0.94 (text encoder), 0.75 (digits, 0.3 ms of launches), all-FP32 and all-FP16 0.82 to 1.13
times what was measured. A model predicted by constants fitted to the other four: tau from 0.93, for digits 0.76, and
0.79 to 1.18.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mptune.graph.facts import facts_of
from mptune.graph.grouping import apart
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import CASTS_INTEGERS, LayerGroup, find_groups
from mptune.graph.loading.model import Model, Node
from mptune.graph.op_rules import NodeRule, node_rules
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.targets.costs import GroupCost, Recurrence, Shape, ShapeTable, group_costs, kernel_costs, ungrouped_cost
from mptune.targets.target import Target

__all__ = ["FUSED", "UNFUSED", "BoundaryCost", "Execution", "GroupCost", "LatencyTerms", "group_costs", "roofline"]

VECTOR_EFFICIENCY = 0.5
"""Share of the FP32 peak that element-wise arithmetic reaches: the peak counts fused multiply-adds, which are 2 FLOPs
in one instruction, and most element-wise operations are none. FP16 counts the same: runtimes compute it in FP32."""

_CAST_BYTES = 4 + 2
"""A Cast reads each element in one type and writes it in the other."""

_EDGE_BYTES = 4 - 2
"""What FP32 at an input or output moves beyond the traffic of the group that reads or writes it."""


@dataclass(frozen=True)
class Execution:
    """How an engine turns a model into kernels, and what share of a device's peaks these reach.

    Attributes:
        is_fused: one kernel per group of ``fusion`` (``group_costs``), else one per step (``kernel_costs``).
        fp32_matrix: share of the FP32 peak that convolutions and matrix products reach.
        fp16_matrix: the same of the peaks of tensor cores: FP16, BF16, TF32.
        bandwidth: share of the memory bandwidth that is reached.
        tile_elements: output elements that one thread block computes of a convolution or matrix product: small ones
            leave most of a large GPU idle.
        whole_waves: blocks run in waves of one per multiprocessor, and the last wave takes as long as a full one.
        cast_launches: launches that a Cast costs.
        launches: multiple of the device's own launch time that each kernel costs.
        tf32: convolutions and matrix products in FP32 may use TF32, where the device has it.
    """

    is_fused: bool
    fp32_matrix: float
    fp16_matrix: float
    bandwidth: float
    tile_elements: int
    whole_waves: bool
    cast_launches: float
    launches: float = 1.0
    tf32: bool = False

    def occupancy(self, elements: int, target: Target) -> float:
        """Share of the multiprocessors that have work, over all waves of thread blocks."""
        if target.sm_count is None or elements == 0:
            return 1.0
        if not self.whole_waves:
            return min(1.0, max(1.0, elements / self.tile_elements) / target.sm_count)
        blocks = math.ceil(elements / self.tile_elements)
        return blocks / (math.ceil(blocks / target.sm_count) * target.sm_count)


NETWORK_SHARE = 0.53
"""Share of what large kernels reach, on tensor cores and of the bandwidth, that whole networks reach; a launch takes
longer by as much. ``python -m benchmarks.published`` chooses it: least absolute deviations of the logarithms over
published latencies."""


def fused(share: float) -> Execution:
    """TensorRT, where networks reach a share of what large kernels reach.

    Large kernels, measured on an H200: a bf16 matrix product at 790 of 989 TFLOP/s, copies at 4.3 of 4.8 TB/s. The tile
    and the share of Casts that is not fused into a neighbour are nominal. Products in true FP32 reach in networks what
    they reach alone (``benchmarks.published``: published over predicted latency on a T4, 1.04 in the median).
    """
    return Execution(
        is_fused=True,
        fp32_matrix=0.8,
        fp16_matrix=0.8 * share,
        bandwidth=0.9 * share,
        tile_elements=128 * 64,
        whole_waves=True,
        cast_launches=0.5,
        launches=1 / share,
    )


FUSED = fused(NETWORK_SHARE)

UNFUSED = Execution(
    is_fused=False,
    fp32_matrix=0.5,
    fp16_matrix=0.8,
    bandwidth=0.44,
    tile_elements=3000,
    whole_waves=False,
    cast_launches=0.6,
)
"""ONNX Runtime's CUDA provider. ``fp16_matrix`` is what large kernels reach; the other shares, the tile and the Cast
are fitted to 461 random plans and both uniform ones of five models on an H200 together: least squares of the
logarithms, each model with the same weight (``benchmarks/roofline.py --fit``), rounded. Kernels of a few microseconds
do not get near to the bandwidth; a Cast is a kernel, but one of the shortest; partial waves fit better than whole ones,
as libraries choose another tile where theirs would leave a wave half empty."""


@dataclass(frozen=True)
class BoundaryCost:
    """A tensor that needs a Cast where its producer and a reader differ in precision.

    Attributes:
        producer_group: id of the group that computes it; None where it is FP32 under every plan (model inputs, nodes
            without a precision).
        consumer_groups: ids of the groups that read it, the producer's own group left out.
        cost_ms: of a Cast. All readers in one precision share one, so it is paid once.
        fp32_consumer: something reads it that is FP32 under every plan: the model's output, a subgraph, a node or an
            input without a precision.
    """

    tensor: str
    producer_group: str | None
    consumer_groups: tuple[str, ...]
    cost_ms: float
    fp32_consumer: bool = False

    def casts(self, plan: PrecisionPlan) -> int:
        """How many Casts the plan needs: one for each type that it is read in and not computed in."""
        wanted = {_precision(plan, group) for group in self.consumer_groups}
        if self.fp32_consumer:
            wanted.add(Precision.FP32)
        return len(wanted - {_precision(plan, self.producer_group)})


def _precision(plan: PrecisionPlan, group: str | None) -> Precision:
    return Precision.FP32 if group is None else plan.precision.get(group, Precision.FP32).stored


@dataclass(frozen=True)
class LatencyTerms:
    """The terms of the additive law, in milliseconds.

    Attributes:
        base_ms: all-FP32, without TF32.
        gains_ms: group id -> what FP16 saves, and others of its rate; negative where FP16 is slower, 0 for pinned
            groups.
        tf32_gain_ms: what TF32 saves in all groups together, where the search allows it: in every plan but all-FP32.
        own_gains_ms: precision of another rate, or size, than FP16's -> the same of it.
    """

    base_ms: float
    gains_ms: Mapping[str, float]
    boundaries: tuple[BoundaryCost, ...]
    tf32_gain_ms: float = 0.0
    own_gains_ms: Mapping[Precision, Mapping[str, float]] = field(default_factory=dict)

    def gain_ms(self, group: str, precision: Precision) -> float:
        """What a group saves in a reduced precision."""
        return self.own_gains_ms.get(precision, self.gains_ms).get(group, 0.0)

    def predict(self, plan: PrecisionPlan) -> float:
        """Latency of a plan in milliseconds: ``base - gains of the reduced groups + costs of the boundaries``."""
        return self.base_ms - self.saved_ms(plan) if plan.reduced_groups else self.base_ms

    def saved_ms(self, plan: PrecisionPlan) -> float:
        """What a plan saves against all-FP32; one without a reduced group as if it were a mixed plan, with its TF32."""
        gained = sum(self.gain_ms(group, plan.precision[group]) for group in plan.reduced_groups)
        return self.tf32_gain_ms + gained - sum(b.cost_ms * b.casts(plan) for b in self.boundaries)


def roofline(
    grouped: GroupedModel,
    target: Target,
    shapes: Mapping[str, Shape],
    execution: Execution = FUSED,
) -> LatencyTerms:
    """Predict the latency terms of a model on a target."""
    units = GroupedModel(grouped.model, find_groups(grouped.model))
    rest = ungrouped_cost(grouped, shapes)
    table = ShapeTable(grouped.model, shapes)

    def ms(groups: GroupedModel, precision: Precision, execution: Execution = execution) -> dict[str, float]:
        return _groups_ms(groups, target, shapes, execution, precision)

    def gains(precision: Precision) -> dict[str, float]:
        def saved(groups: GroupedModel) -> dict[str, float]:
            fast = ms(groups, precision)
            return {group: slow - fast[group] for group, slow in ms(groups, Precision.FP32).items()}

        return _shared_gains(grouped, units, saved)

    def rate(precision: Precision) -> tuple[float, int]:
        return _peak(target, precision, execution)[0], precision.nbytes

    base_ms = sum(ms(units, Precision.FP32, replace(execution, tf32=False)).values())
    return LatencyTerms(
        base_ms=base_ms + rest.fp32_bytes / _bytes_per_ms(target, execution),
        gains_ms=gains(Precision.FP16),
        boundaries=_boundaries(
            grouped,
            units if execution.is_fused else grouped,
            lambda tensor, at_edge: cast_ms(table.elements(tensor), target, execution, at_edge=at_edge),
        ),
        tf32_gain_ms=base_ms - sum(ms(units, Precision.FP32).values()),
        own_gains_ms={
            p: gains(p)
            for p in REDUCED
            if getattr(target, p.throughput) is not None and rate(p) != rate(Precision.FP16)
        },
    )


def _shared_gains(
    grouped: GroupedModel, units: GroupedModel, gains: Callable[[GroupedModel], Mapping[str, float]]
) -> dict[str, float]:
    """What FP16 saves in each group: its shares of what it saves in the units, which are the groups of ``fusion``.

    The free groups of a unit together save what the unit does, each about as much as its own nodes would alone.
    """
    pinned = {group.id for group in grouped.groups if group.pinned is not None and group.kind != apart.KIND}
    parts: dict[tuple[str, str], list[str]] = {}
    for name, group in grouped.owners.items():
        if group not in pinned:
            parts.setdefault((units.owners[name], group), []).append(name)
    alone = gains(
        GroupedModel(
            grouped.model, tuple(LayerGroup("/".join(ids), "", "", tuple(names), {}) for ids, names in parts.items())
        )
    )
    members: dict[str, dict[str, float]] = {}
    for unit, group in parts:
        members.setdefault(unit, {})[group] = alone[f"{unit}/{group}"]
    of_units = gains(units)
    shared = {group.id: 0.0 for group in grouped.groups}
    for unit, own in members.items():
        left, size = of_units[unit] - sum(own.values()), sum(map(abs, own.values()))
        for group, saved in own.items():
            shared[group] += saved + left * (abs(saved) / size if size else 1 / len(own))
    return shared


def _groups_ms(
    grouped: GroupedModel,
    target: Target,
    shapes: Mapping[str, Shape],
    execution: Execution,
    precision: Precision,
) -> dict[str, float]:
    if execution.is_fused:
        whole = group_costs(grouped, shapes)
        return {group: kernel_ms(cost, target, precision, execution) for group, cost in whole.items()}
    kernels = kernel_costs(grouped, shapes, precision)
    return {group: sum(kernel_ms(k, target, precision, execution) for k in each) for group, each in kernels.items()}


def kernel_ms(cost: GroupCost, target: Target, precision: Precision, execution: Execution = FUSED) -> float:
    """Milliseconds that a kernel takes: the slower of computing and moving, and its launch."""
    peak, share = _peak(target, precision, execution)
    computing = cost.matrix_flops / (peak * 1e9 * share * execution.occupancy(cost.matrix_elements, target))
    computing += cost.vector_flops / (target.fp32_tflops * 1e9 * VECTOR_EFFICIENCY)
    moving = (cost.fp32_bytes if precision.stored is Precision.FP32 else cost.fp16_bytes) / _bytes_per_ms(
        target, execution
    )
    steps = sum(_steps_ms(recurrence, target, precision, execution) for recurrence in cost.recurrences)
    return max(computing, moving) + cost.kernels * _launch_ms(target, execution) + steps


def _peak(target: Target, precision: Precision, execution: Execution) -> tuple[float, float]:
    """Peak of matrix products, TFLOP/s, and the share that an engine reaches; FP32's where a device lacks the other."""
    tf32 = target.tf32_tflops if execution.tf32 else None
    peak: float | None = tf32 if precision is Precision.FP32 else getattr(target, precision.throughput)
    exact = target.fp32_tflops, execution.fp32_matrix
    if peak is None:
        return exact
    tensor_cores = peak, execution.fp16_matrix
    return max(exact, tensor_cores, key=math.prod) if precision is Precision.FP32 else tensor_cores


def _steps_ms(recurrence: Recurrence, target: Target, precision: Precision, execution: Execution) -> float:
    """Milliseconds that the steps of a recurrent layer take, each a kernel that waits for the one before.

    Weights that the second level cache holds are read from memory once, which the group's own traffic counts.
    """
    peak, share = _peak(target, precision, execution)
    occupancy = execution.occupancy(recurrence.matrix_elements, target)
    computing = recurrence.matrix_flops / (peak * 1e9 * share * occupancy)
    weight_bytes = recurrence.weights * precision.nbytes
    is_cached = weight_bytes <= (target.l2_mb or 0.0) * 1e6
    moving = 0.0 if is_cached else weight_bytes / _bytes_per_ms(target, execution)
    return recurrence.steps * (max(computing, moving) + _launch_ms(target, execution))


def cast_ms(elements: int, target: Target, execution: Execution = FUSED, *, at_edge: bool = False) -> float:
    """Milliseconds that a Cast of a tensor between two precisions takes.

    ``at_edge``: of an input or output of the model. An engine that fuses has no kernel for it, but moves FP32 there.
    """
    if at_edge and execution.is_fused:
        return elements * _EDGE_BYTES / _bytes_per_ms(target, execution)
    launching = execution.cast_launches * _launch_ms(target, execution)
    return elements * _CAST_BYTES / _bytes_per_ms(target, execution) + launching


def _launch_ms(target: Target, execution: Execution) -> float:
    return target.launch_us * 1e-3 * execution.launches


def _bytes_per_ms(target: Target, execution: Execution) -> float:
    return target.bandwidth_gbps * 1e6 * execution.bandwidth


def _boundaries(
    grouped: GroupedModel, units: GroupedModel, cast_ms_of: Callable[[str, bool], float]
) -> tuple[BoundaryCost, ...]:
    """Every FP32 tensor between two groups or between a group and what is always FP32.

    Follows ``mptune.graph.casting.value_types``, which decides where Casts stand. Constants and what is folded before
    the run are left out: so are their Casts. ``units`` are the kernels, as groups. No Cast is paid for where integers
    are cast, as every reader gets them in its own type, and two where the tensor would stay inside a kernel otherwise,
    as it is then written and read, too.
    """
    model, owners = grouped.model, grouped.owners
    folded = facts_of(model).folded
    rules = node_rules(model)
    given, named = ({info.name for info in infos} for infos in (model.inputs, model.outputs))
    integers = {group.id for group in grouped.groups if group.pinned == CASTS_INTEGERS}
    boundaries = []
    for name, info in model.tensors.items():
        if not info.is_float32 or name in folded:
            continue
        producer = _producer(model, name, rules, owners)
        unit = _producer(model, name, rules, units.owners)
        consumers: dict[str, None] = {}
        readers: set[str] = set()
        fixed = name in named
        for index in model.consumers.get(name, ()):
            node = model.nodes[index]
            for follows in _reads(node, rules[index], name):
                if follows and node.name in owners:
                    consumers[owners[node.name]] = None
                    readers.add(units.owners[node.name])
                else:
                    fixed = True
        others = tuple(group for group in consumers if group != producer)
        if others or (fixed and producer is not None):
            stays_inside = not fixed and readers == {unit}
            casts = 0 if producer in integers else 2 if stays_inside else 1
            at_edge = name in given or (name in named and not others)
            boundaries.append(BoundaryCost(name, producer, others, casts * cast_ms_of(name, at_edge), fixed))
    return tuple(boundaries)


def _producer(model: Model, tensor: str, rules: Sequence[NodeRule], owners: Mapping[str, str]) -> str | None:
    index = model.producer.get(tensor)
    if index is None:
        return None
    node = model.nodes[index]
    return owners.get(node.name) if any(node.outputs[slot] == tensor for slot in rules[index].outputs) else None


def _reads(node: Node, rule: NodeRule, tensor: str) -> list[bool]:
    """For each way in which a node reads a tensor, whether that follows the node's precision; free reads left out."""
    slots = [slot for slot, name in enumerate(node.inputs) if name == tensor and slot not in rule.reads_any]
    return [slot in rule.inputs for slot in slots] + [False] * node.captures.count(tensor)
