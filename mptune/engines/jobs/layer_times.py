"""The time of each layer group, from TensorRT's own profiler."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mptune.engines.base import Failure, Measurement
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.ops import anchor_kind
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm


@dataclass(frozen=True)
class LayerTime(JsonForm):
    """One layer of an engine, and its time."""

    nodes: tuple[str, ...]
    """Names of the nodes of the typed model that the layer computes; empty where the engine added it (a reformat) and
    it belongs to no node that is known."""
    ms: float
    """By the engine's own profiler, which has a cost: the sum over the layers is not the latency."""
    name: str = ""
    """In TensorRT's words."""
    types: tuple[Precision, ...] = ()
    """Floating types of what it writes; empty where the inspector gives none."""


@dataclass(frozen=True)
class EngineLayers(JsonForm):
    """The layers of the engine of one plan, in the engine's order: a file beside the engine."""

    plan: str
    layers: tuple[LayerTime, ...]

    @staticmethod
    def path(engine: Path) -> Path:
        return engine.with_suffix(".layers.json")


def group_times(
    layers: Sequence[LayerTime], owners: Mapping[str, str], *, minor: Collection[str] = ()
) -> dict[str, float]:
    """Group id -> milliseconds of its layers; ``owners`` is node name -> group id, without Casts at boundaries.

    A layer is charged to the groups whose main operators it computes, or to all of its groups where it computes none.
    Where it computes the main operators of several groups (one kernel of a whole block), each is charged an equal
    share, and a group whose shares exceed its own layers gets no entry. Neither does one that no layer computes: it may
    be fused into a layer that does not name it, so 0 would be wrong.
    """
    alone: dict[str, float] = {}
    shared: dict[str, float] = {}
    for layer in layers:
        nodes = [node for node in layer.nodes if node in owners]
        groups = dict.fromkeys(owners[node] for node in nodes)
        major = dict.fromkeys(owners[node] for node in nodes if node not in minor)
        times = shared if len(major) > 1 else alone
        alone.update({group: 0.0 for group in groups if group not in alone})
        for group in major or groups:
            times[group] = times.get(group, 0.0) + layer.ms / len(major or groups)
    return {group: ms + shared.get(group, 0.0) for group, ms in alone.items() if ms >= shared.get(group, 0.0)}


def with_group_times(
    measurement: Measurement, layers: Sequence[LayerTime] | Failure, grouped: GroupedModel
) -> Measurement:
    """Add a profile to the measurement of the same plan; a failed one adds a warning."""
    if isinstance(layers, Failure):
        text = (
            f"the engine's layers could not be profiled ({layers.kind.value}: {layers.message}): the gain of"
            " each group is learned from whole latencies alone"
        )
        return replace(measurement, warnings=(*measurement.warnings, text))
    # Nodes beside the main operator of their group (a product, a norm, ...), where it has one.
    main = {node.name for node in grouped.model.nodes if anchor_kind(node.op_type)}
    with_main = [group.nodes for group in grouped.groups if not main.isdisjoint(group.nodes)]
    minor = {name for nodes in with_main for name in nodes if name not in main}
    times = group_times(layers, grouped.owners, minor=minor)
    return replace(measurement, group_times_ms={group: ms * measurement.drift for group, ms in times.items()})
