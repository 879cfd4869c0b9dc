"""The layers of a built engine: the types that they run in, their times, and the times of layer groups."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mptune.engines.base import EngineError, Failure, FailureKind, Measurement
from mptune.files import write_json
from mptune.graph.groups import GroupedModel
from mptune.graph.ops import anchor_kind
from mptune.graph.plan import PRECISIONS, Precision
from mptune.json_form import JsonForm

_TYPE_KEYS = ("Datatype", "DataType", "Format/Datatype", "Format/DataType", "Format")
"""Where the inspector names a tensor's type, by version; a format may name it, too."""
_TYPES = (
    # Such as "Row major linear FP16 format", "Channel major FP16 format where channel % 8 == 0", "Half".
    (Precision.BF16, re.compile(r"BF16|BFloat16", re.IGNORECASE)),
    (Precision.FP16, re.compile(r"FP16|Float16|\bHalf\b", re.IGNORECASE)),
    (Precision.FP32, re.compile(r"FP32|Float32|\bFloat\b|\bTF32\b", re.IGNORECASE)),
)
_NODE = re.compile(r"\s*\[ONNX Layer: (?P<name>.*)\]\s*", re.DOTALL)
_SEPARATORS = re.compile(r"[\x1e\x1f]")


@dataclass(frozen=True)
class LayerTime(JsonForm):
    """One layer of an engine, and its time."""

    nodes: tuple[str, ...]
    """Names of the nodes of the typed model that the layer computes; empty where the engine added it (a reformat) and
    it belongs to no node that is known."""
    ms: float  # by the engine's own profiler, which has a cost: the sum over the layers is not the latency
    name: str = ""  # in TensorRT's words
    types: tuple[Precision, ...] = ()  # floating types of what it writes; empty where the inspector gives none


@dataclass(frozen=True)
class EngineLayers(JsonForm):
    """The layers of the engine of one plan, in the engine's order: a file beside the engine."""

    plan: str
    layers: tuple[LayerTime, ...]

    @staticmethod
    def path(engine_file: Path) -> Path:
        return engine_file.with_suffix(".layers.json")

    def write(self, engine_file: Path) -> None:
        write_json(self.path(engine_file), self.to_json())


def read_layers(information: str) -> tuple[LayerTime, ...]:
    """The layers in the inspector's JSON, without times; none where the engine was built without detailed verbosity."""
    try:
        document = json.loads(information)
    except ValueError:
        return ()
    layers = []
    for entry in document.get("Layers", ()) if isinstance(document, dict) else ():
        if not isinstance(entry, dict):  # a name alone
            continue
        parts = map(_NODE.fullmatch, _SEPARATORS.split(str(entry.get("Metadata") or "")))
        nodes = tuple(match["name"] for match in parts if match)
        types = set()  # without integers and other floats
        for output in entry.get("Outputs") or ():
            text = next((str(output[key]) for key in _TYPE_KEYS if output.get(key)), "")
            types.add(next((precision for precision, form in _TYPES if form.search(text)), None))
        layers.append(LayerTime(nodes, 0.0, str(entry.get("Name", "")), tuple(p for p in PRECISIONS if p in types)))
    return tuple(layers)


def layer_times(executions: Sequence[Mapping[str, float]], layers: Sequence[LayerTime]) -> tuple[LayerTime, ...]:
    """The profiler's times with the inspector's layers: means without the longest, which may be an interruption."""
    times = []
    for name in dict.fromkeys(name for execution in executions for name in execution):
        named = [layer for layer in layers if layer.name == name]
        ordered = sorted(execution.get(name, 0.0) for execution in executions)
        steady = ordered[:-1] or ordered
        nodes = tuple(node for layer in named for node in layer.nodes)
        types = tuple(precision for precision in PRECISIONS if any(precision in layer.types for layer in named))
        times.append(LayerTime(nodes, sum(steady) / len(steady), name, types))
    if not any(time.nodes for time in times):
        reported = f"{len(times)} layers, none of which the inspector traces to the model" if times else "no layers"
        raise EngineError(FailureKind.UNSUPPORTED, f"the profiler reports {reported}")
    return tuple(times)


@cache
def profiler_class(trt: Any) -> Any:
    """An ``IProfiler`` of this module that keeps the time of each layer, execution by execution."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        """Times of the same layer name within an execution are summed."""

        def __init__(self) -> None:
            super().__init__()
            self.executions: list[dict[str, float]] = []

        def start_execution(self) -> None:
            """Begin another execution; what is reported before the first one is dropped."""
            self.executions.append({})

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            if self.executions:
                times = self.executions[-1]
                times[layer_name] = times.get(layer_name, 0.0) + ms

    return Profiler


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
