"""The time of each layer group, from TensorRT's or ONNX Runtime's own profiler."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from mptune.engines.base import EngineError, Failure, FailureKind, Measurement, Stage
from mptune.engines.jobs.samples import cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.fusions import Nodes, computed_nodes, load_graph, take_optimised
from mptune.engines.ort.session import SessionOptions
from mptune.engines.worker.child import WorkerState
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.op_kinds import ANCHOR_KINDS

PROFILED_RUNS = 20
"""Executions that a profile averages over, without the longest. ONNX Runtime counts whole microseconds, so the mean
resolves more than the median."""
UNTIMED_RUNS = 5
"""Warm-up executions before these."""


@dataclass(frozen=True)
class LayerTime:
    """The time of one layer of an engine.

    Attributes:
        nodes: names of the nodes of the typed model that the layer computes; empty where the engine added it (a
            reformat) and it belongs to no node that is known.
    """

    nodes: tuple[str, ...]
    ms: float


def steady_mean(values: Sequence[float]) -> float:
    """The mean without the largest value, which may come from an interruption; a single value is its own mean."""
    ordered = sorted(values)
    kept = ordered[:-1] or ordered
    return sum(kept) / len(kept)


def minor_nodes(grouped: GroupedModel) -> frozenset[str]:
    """Names of the nodes beside the main operator of their group, where it has one (a product, a norm, ...)."""
    anchors = {node.name for node in grouped.model.nodes if node.op_type in ANCHOR_KINDS}
    anchored = [group.nodes for group in grouped.groups if not anchors.isdisjoint(group.nodes)]
    return frozenset(name for nodes in anchored for name in nodes if name not in anchors)


def group_times(
    layers: Sequence[LayerTime], owners: Mapping[str, str], *, minor: Collection[str] = ()
) -> dict[str, float]:
    """Sum the layers of each group.

    A layer is charged to the groups whose main operators it computes, or to all of its groups where it computes none:
    so a residual add fused into the next norm is charged to the norm. Where it computes the main operators of several
    groups, as when TensorRT makes one kernel of a whole block, the profile does not separate them: each is charged an
    equal share, and a group whose shares exceed its own layers gets no entry.

    Casts at boundaries belong to no group and are left out: the latency model learns their cost from whole latencies. A
    group that no layer computes gets no entry either: it may be folded away, or fused into a layer that does not name
    it, so 0 would be wrong.

    Args:
        owners: node name -> id of its group; nodes without a precision and Casts at boundaries are not in it.

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
    """Add a profile to the measurement of the same plan; a failed one adds a warning."""
    if isinstance(layers, Failure):
        text = (
            f"the engine's layers could not be profiled ({layers.kind.value}: {layers.message}): the gain of"
            " each group is learned from whole latencies alone"
        )
        return replace(measurement, warnings=(*measurement.warnings, text))
    times = group_times(layers, grouped.owners, minor=minor_nodes(grouped))
    return replace(measurement, group_times_ms={group: ms * measurement.drift for group, ms in times.items()})


_KERNEL = "_kernel_time"
_WITH_SUBGRAPH = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass(frozen=True)
class OrtProfileJob:
    """Take the layer times of a typed model in a session of its own.

    Attributes:
        folder: an empty folder for the profiler's files; it is empty again afterwards.
    """

    model: Path
    samples: Path
    folder: Path

    def run(self, state: WorkerState) -> tuple[LayerTime, ...]:
        feed = cached_samples(state, self.samples)[0]
        try:
            options = SessionOptions("cpu", profile_dir=self.folder)
            session = state.transient(partial(open_session, self.model, options))
            optimised = take_optimised(self.folder)
            state.enter(Stage.TIME)
            watch = session.stopwatch(feed)
            for _ in range(UNTIMED_RUNS + PROFILED_RUNS):
                watch.run_once()
            events = json.loads(session.end_profile().read_text(encoding="utf-8"))
        finally:
            _clear(self.folder)
        computed = computed_nodes(load_graph(self.model), optimised)
        return layer_times(events, optimised, computed)


def layer_times(
    events: Sequence[Mapping[str, Any]], optimised: onnx.GraphProto, computed: Sequence[Nodes]
) -> tuple[LayerTime, ...]:
    """Read ONNX Runtime's profile: the mean of each node over the last runs, without the longest."""
    durations: dict[tuple[str, str, str], list[float]] = {}
    for event in _outermost([event for event in events if _is_kernel(event)]):
        facts = event["args"]
        key = (str(facts["node_index"]), event["name"][: -len(_KERNEL)], str(facts["op_name"]))
        durations.setdefault(key, []).append(float(event["dur"]))
    if not durations:
        raise EngineError(FailureKind.ERROR, "ONNX Runtime's profile names no node")
    waiting: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for index, node in enumerate(optimised.node):
        waiting[node.name, node.op_type].append(index)
    layers = []
    for (number, name, op), values in durations.items():
        # Nodes without a name are named by operator and number; nodes of the same name come in the graph's order.
        queue = waiting.get((name, op)) or (waiting.get(("", op)) if name == f"{op}_{number}" else None)
        nodes = computed[queue.popleft()] if queue else ()
        layers.append(LayerTime(nodes, steady_mean(values[-PROFILED_RUNS:]) / 1e3))
    return tuple(layers)


def _is_kernel(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and str(event.get("name", "")).endswith(_KERNEL)


def _outermost(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events without those of subgraphs, whose time is part of the outer node's, which is reported after them."""
    kept: list[Mapping[str, Any]] = []
    for event in events:
        if event["args"]["op_name"] in _WITH_SUBGRAPH:
            while kept and kept[-1]["ts"] >= event["ts"]:
                kept.pop()
        kept.append(event)
    return kept


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
