"""Latency predicted from shapes and a device's peaks: the additive law ``base - gains + boundary costs``.

A kernel takes ``max(computing, moving) + launch`` (the roofline model: Williams, Waterman, Patterson, Communications of
the ACM 52(4), 2009). The kernels are those of TensorRT: one for each group of ``fusion``, every epilogue fused,
whatever the groups of the search. So all-FP32 and all-FP16 take as long at any granularity.

It is a prior, not a clock: it orders groups by what FP16 gains them. Where anything is measured, the search fits the
scale of the gains to its first two builds. It was compared with 126 latencies that others published
(``benchmarks/published``); no TensorRT engine was at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mptune.graph.facts import facts_of, node_rules
from mptune.graph.groups import CASTS_INTEGERS, GroupedModel, find_groups
from mptune.graph.interface import reduced_interface
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.targets.costs import GroupCost, Shape, ShapeTable, group_costs, ungrouped_cost, unit_costs
from mptune.targets.target import Target

NETWORK_SHARE = 0.53
"""Share of what large kernels reach, on tensor cores and of the bandwidth, that whole networks reach; a launch takes
longer by as much. ``python -m benchmarks.published`` chooses it: least absolute deviations of the logarithms over
published latencies."""

_MATRIX_SHARE, _BANDWIDTH_SHARE = 0.8, 0.9
"""Shares of the peaks that large kernels reach. Measured on an H200: a bf16 matrix product at 790 of 989 TFLOP/s,
copies at 4.3 of 4.8 TB/s. Products in true FP32 reach as much in whole networks (``benchmarks.published``: published
over predicted latency on a T4, 1.04 in the median)."""

_VECTOR_SHARE = 0.5
"""Share of the FP32 peak that element-wise arithmetic reaches: the peak counts fused multiply-adds, which are 2 FLOPs
in one instruction, and most element-wise operations are none. FP16 counts the same: runtimes compute it in FP32."""

TILE_ELEMENTS = 128 * 64  # output elements that one thread block computes of a convolution or matrix product; nominal
_CAST_LAUNCHES = 0.5  # share of Casts that are not fused into a neighbour; nominal
# A Cast reads each element in one type and writes it in the other. At the model's inputs and outputs there is no kernel
# for it, but FP32 is moved there.
_CAST_BYTES, _EDGE_BYTES = 4 + 2, 4 - 2


class Kernels:
    """How long kernels take on a device.

    Args:
        tf32: convolutions and matrix products in FP32 may use TF32, where the device has it.
        network_share: of what large kernels reach.
    """

    def __init__(self, target: Target, *, tf32: bool = False, network_share: float = NETWORK_SHARE) -> None:
        self._target = target
        self._tf32_tflops = target.tf32_tflops if tf32 else None
        self._share = network_share
        self._bytes_per_ms = target.bandwidth_gbps * 1e6 * _BANDWIDTH_SHARE * network_share
        self._launch_ms = target.launch_us * 1e-3 / network_share

    def ms(self, cost: GroupCost, precision: Precision, *, is_step: bool = False) -> float:
        """The slower of computing and moving, and the launch; the steps of recurrent layers one after another."""
        steps_ms = sum(count * self.ms(step, precision, is_step=True) for count, step in cost.recurrences)
        moved = cost.fp32_bytes if precision.stored is Precision.FP32 else cost.fp16_bytes
        if is_step and moved <= (self._target.l2_mb or 0.0) * 1e6:
            moved = 0.0  # weights that the cache holds are read from memory once, which the group's traffic counts
        # Thread blocks run in waves of one per multiprocessor: small products leave most of a large GPU idle.
        sms, blocks = self._target.sm_count, math.ceil(cost.matrix_elements / TILE_ELEMENTS)
        occupancy = blocks / (math.ceil(blocks / sms) * sms) if sms is not None and blocks else 1.0
        computing = cost.matrix_flops / (self.flops_per_ms(precision) * occupancy)
        computing += cost.vector_flops / (self._target.fp32_tflops * 1e9 * _VECTOR_SHARE)
        return max(computing, self.moving_ms(moved)) + cost.kernels * self._launch_ms + steps_ms

    def cast_ms(self, elements: int, *, at_edge: bool = False) -> float:
        """Of a tensor, from one precision to another; ``at_edge``: of an input or output of the model."""
        if at_edge:
            return self.moving_ms(elements * _EDGE_BYTES)
        return self.moving_ms(elements * _CAST_BYTES) + _CAST_LAUNCHES * self._launch_ms

    def moving_ms(self, count: float) -> float:
        """Of bytes to or from the memory."""
        return count / self._bytes_per_ms

    def flops_per_ms(self, precision: Precision) -> float:
        """Of large matrix products; those of FP32 where the device lacks a precision."""
        exact = self._target.fp32_tflops * 1e9 * _MATRIX_SHARE
        is_fp32 = precision is Precision.FP32
        peak = self._tf32_tflops if is_fp32 else getattr(self._target, precision.throughput)
        if peak is None:
            return exact
        on_tensor_cores = float(peak) * 1e9 * _MATRIX_SHARE * self._share
        return max(exact, on_tensor_cores) if is_fp32 else on_tensor_cores


@dataclass(frozen=True)
class BoundaryCost:
    """A tensor that needs a Cast where its producer and a reader differ in precision.

    Attributes:
        producer_group: id of the group that computes it; None where it is FP32 under every plan.
        consumer_groups: ids of the groups that read it, the producer's own group left out.
        cost_ms: of a Cast. All readers in one precision share one, so it is paid once.
        fp32_consumer: something reads it that is FP32 under every plan, such as an output of the model or a subgraph.
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
        gains_ms: group id -> what FP16 saves, and others of its rate; negative where it is slower, 0 where pinned.
        tf32_gain_ms: what TF32 saves in all groups together, where the search allows it: in every plan but all-FP32.
        own_gains_ms: precision of another rate, or size, than FP16's -> its gains.
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


def roofline(grouped: GroupedModel, target: Target, shapes: Mapping[str, Shape], *, tf32: bool = False) -> LatencyTerms:
    """Predict the latency terms of a model on a target."""
    model = grouped.model
    units = GroupedModel(model, find_groups(model))
    kernels, true_fp32 = Kernels(target, tf32=tf32), Kernels(target)
    of_units = group_costs(units, shapes)
    base_ms = sum(true_fp32.ms(cost, Precision.FP32) for cost in of_units.values())

    # The free groups that share a unit save together what it does, each about as much as its own nodes would alone.
    pinned = {group.id for group in grouped.groups if group.pinned is not None}
    parts = {name: (units.owners[name], group) for name, group in grouped.owners.items() if group not in pinned}
    of_parts = unit_costs(model, parts, shapes)
    members: dict[str, list[str]] = {}
    for unit, group in dict.fromkeys(parts.values()):
        members.setdefault(unit, []).append(group)

    def gains_ms(precision: Precision) -> dict[str, float]:
        def saved(cost: GroupCost) -> float:
            return kernels.ms(cost, Precision.FP32) - kernels.ms(cost, precision)

        gains = {group.id: 0.0 for group in grouped.groups}
        for unit, groups in members.items():
            alone = {group: saved(of_parts[unit, group]) for group in groups}
            left, size = saved(of_units[unit]) - sum(alone.values()), sum(map(abs, alone.values()))
            for group, own in alone.items():
                gains[group] += own + left * (abs(own) / size if size else 1 / len(alone))
        return gains

    rates = {p: (kernels.flops_per_ms(p), p.nbytes) for p in REDUCED if getattr(target, p.throughput) is not None}
    own_rates = [precision for precision, rate in rates.items() if rate != rates.get(Precision.FP16)]
    return LatencyTerms(
        base_ms=base_ms + true_fp32.moving_ms(ungrouped_cost(grouped, shapes).fp32_bytes),
        gains_ms=gains_ms(Precision.FP16),
        boundaries=_boundaries(grouped, units, kernels, ShapeTable(model, shapes)),
        tf32_gain_ms=base_ms - sum(kernels.ms(cost, Precision.FP32) for cost in of_units.values()),
        own_gains_ms={precision: gains_ms(precision) for precision in own_rates},
    )


def _boundaries(
    grouped: GroupedModel, units: GroupedModel, kernels: Kernels, table: ShapeTable
) -> tuple[BoundaryCost, ...]:
    """Every FP32 tensor between two groups or between a group and what is always FP32; ``units`` are the kernels.

    Follows ``mptune.graph.value_types``, which decides where Casts stand. Constants and what is folded before
    the run are left out: so are their Casts.
    """
    model, rules = grouped.model, node_rules(grouped.model)
    # What is FP16 at the interface is moved so, and no group in FP16 casts it.
    interface = reduced_interface(grouped)
    given, named = ({info.name for info in infos} - interface for infos in (model.inputs, model.outputs))
    uncast = facts_of(model).folded | interface.difference(model.producer)
    integers = {group.id for group in grouped.groups if group.pinned == CASTS_INTEGERS}
    boundaries = []
    for name, info in model.tensors.items():
        if not info.is_float32 or name in uncast:
            continue
        producer = unit = None
        if name in model.producer:
            node = model.nodes[model.producer[name]]
            if any(node.outputs[slot] == name for slot in rules[node.index].outputs):
                producer, unit = grouped.owners.get(node.name), units.owners.get(node.name)
        readers: dict[str, None] = {}  # groups whose precision it is read in
        reading_units: set[str] = set()
        is_read_in_fp32 = name in named  # under every plan
        for index in model.consumers.get(name, ()):
            node, rule = model.nodes[index], rules[index]
            group = grouped.owners.get(node.name)
            slots = {slot for slot, read in enumerate(node.inputs) if read == name and slot not in rule.reads_any}
            following = slots.intersection(rule.inputs) if group is not None else set()
            if group is not None and following:
                readers[group] = None
                reading_units.add(units.owners[node.name])
            if slots - following or name in node.captures:
                is_read_in_fp32 = True
        others = tuple(group for group in readers if group != producer)
        if not others and not (is_read_in_fp32 and producer is not None):
            continue
        if producer in integers:
            casts = 0  # every reader gets the integers in its own type
        elif not is_read_in_fp32 and reading_units == {unit}:
            casts = 2  # it would stay inside a kernel otherwise, and is written and read now
        else:
            casts = 1
        at_edge = name in given or (name in named and not others)
        cost_ms = casts * kernels.cast_ms(table.elements(name), at_edge=at_edge)
        boundaries.append(BoundaryCost(name, producer, others, cost_ms, is_read_in_fp32))
    return tuple(boundaries)
