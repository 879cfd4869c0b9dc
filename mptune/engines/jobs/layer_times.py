"""What each layer group takes, from what an engine's own profiler says of each layer that it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mptune.engines.base import Failure, Measurement
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.op_kinds import ANCHOR_KINDS

PROFILED_RUNS = 20
"""Executions that a profile is the mean of, the longest left out. ONNX Runtime counts whole microseconds, so that the
mean is finer than the median."""

UNTIMED_RUNS = 5
"""Executions before these."""


@dataclass(frozen=True)
class LayerTime:
    """What one layer of an engine takes.

    Attributes:
        nodes: names of the nodes of the typed model that the layer computes; empty where it is the engine's own (a
            reformat) and serves nothing that is known.
        ms: milliseconds per inference.
    """

    nodes: tuple[str, ...]
    ms: float


def steady_mean(values: Sequence[float]) -> float:
    """The mean without the largest value, which an interruption may have made; of a single one that one."""
    ordered = sorted(values)
    kept = ordered[:-1] or ordered
    return sum(kept) / len(kept)


def minor_nodes(grouped: GroupedModel) -> frozenset[str]:
    """Names of the nodes that only go along in their group: what stands beside a product, a norm or the like."""
    anchors = {node.name for node in grouped.model.nodes if node.op_type in ANCHOR_KINDS}
    anchored = [group.nodes for group in grouped.groups if not anchors.isdisjoint(group.nodes)]
    return frozenset(name for nodes in anchored for name in nodes if name not in anchors)


def group_times(
    layers: Sequence[LayerTime], owners: Mapping[str, str], *, minor: Collection[str] = ()
) -> dict[str, float]:
    """Sum the layers of each group.

    Of a residual addition that is fused into the next norm, the norm gets everything: the product before it has a layer
    of its own, and the addition only goes along. Where a layer computes more of several groups than what goes along, as
    when TensorRT makes one kernel of a whole block, nothing says what each of them takes: they share it alike, and
    those for which that is more than what is theirs alone get no entry.

    Casts at boundaries belong to no group and are left out: the surrogate learns their cost from whole latencies. A
    group of which no layer computes a node gets no entry either: 0 would be a measurement, and it may be folded away or
    hidden in a layer that does not say so.

    Args:
        layers: of one engine.
        owners: node name -> id of its group; nodes without a precision and Casts at boundaries are not in it.
        minor: nodes that only go along in their group (``minor_nodes``).

    Returns:
        Group id -> milliseconds.
    """
    alone: dict[str, float] = {}
    shared: dict[str, float] = {}
    for layer in layers:
        nodes = [node for node in layer.nodes if node in owners]
        groups = dict.fromkeys(owners[node] for node in nodes)
        major = dict.fromkeys(owners[node] for node in nodes if node not in minor)
        takers = major or groups
        times = shared if len(major) > 1 else alone
        for group in groups:
            alone.setdefault(group, 0.0)
            times[group] = times.get(group, 0.0) + (layer.ms / len(takers) if group in takers else 0.0)
    return {group: ms + shared.get(group, 0.0) for group, ms in alone.items() if ms >= shared.get(group, 0.0)}


def with_group_times(
    measurement: Measurement,
    layers: Sequence[LayerTime] | Failure,
    grouped: GroupedModel,
) -> Measurement:
    """Put a profile into the measurement of the same plan; one that failed, as a warning.

    Args:
        measurement: of the plan.
        layers: of its engine, or why there are none.
        grouped: the user's model and its layer groups.
    """
    if isinstance(layers, Failure):
        text = (
            f"the engine's layers could not be profiled ({layers.kind.value}: {layers.message}): what each group gains"
            " is learnt from whole latencies alone"
        )
        return replace(measurement, warnings=(*measurement.warnings, text))
    times = group_times(layers, grouped.owners, minor=minor_nodes(grouped))
    return replace(measurement, group_times_ms={group: ms * measurement.drift for group, ms in times.items()})
