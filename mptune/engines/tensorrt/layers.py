"""The layers of a built engine: the types that they run in, held against the plan, and their times."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.jobs.layer_times import LayerTime
from mptune.graph.plan import PRECISIONS, Precision

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
class Layer:
    """One layer of a built engine."""

    name: str
    nodes: tuple[str, ...]
    """The ONNX nodes that it came from; empty for a reformat of TensorRT's own."""
    outputs: frozenset[Precision] = frozenset()
    """The floating types of what it writes; empty where TensorRT gives none."""


def read_layers(information: str) -> tuple[Layer, ...]:
    """The layers in the inspector's JSON; none where the engine was built without detailed verbosity."""
    try:
        document = json.loads(information)
    except ValueError:
        return ()
    layers = []
    for entry in document.get("Layers", ()) if isinstance(document, dict) else ():
        if isinstance(entry, dict):  # else a name alone
            parts = map(_NODE.fullmatch, _SEPARATORS.split(str(entry.get("Metadata") or "")))
            nodes = tuple(match["name"] for match in parts if match)
            layers.append(Layer(str(entry.get("Name", "")), nodes, _precisions(entry.get("Outputs"))))
    return tuple(layers)


def _precisions(tensors: Any) -> frozenset[Precision]:
    """The floating types of tensors, without integers and other floats."""
    entries = [entry for entry in tensors if isinstance(entry, dict)] if isinstance(tensors, list) else []
    texts = [next((str(entry[key]) for key in _TYPE_KEYS if entry.get(key)), "") for entry in entries]
    matches = (next((precision for precision, form in _TYPES if form.search(text)), None) for text in texts)
    return frozenset(precision for precision in matches if precision is not None)


def type_warnings(nodes: Mapping[str, Precision], layers: Sequence[Layer]) -> tuple[str, ...]:
    """Compare an engine with its plan.

    Only layers whose nodes all have the same precision count: what is fused across a boundary has both.
    """
    others = []
    for layer in layers:
        planned = {nodes.get(node) for node in layer.nodes}
        precision = planned.pop() if len(planned) == 1 else None
        if precision is not None and layer.outputs and precision not in layer.outputs:
            others.append((layer, precision))
    if not others:
        return ()
    layer, precision = others[0]
    actual = ", ".join(sorted(each.value for each in layer.outputs))
    return (
        f"{len(others)} of {len(layers)} layers of the engine run in another type than the plan says, such as"
        f" {layer.name!r} ({actual} in place of {precision.value}): latency and error are those of this engine; update"
        " TensorRT to have the plan's",
    )


def layer_times(executions: Sequence[Mapping[str, float]], layers: Sequence[Layer]) -> tuple[LayerTime, ...]:
    """Combine the profiler's times with the inspector's layers."""
    nodes: dict[str, tuple[str, ...]] = {}
    types: dict[str, frozenset[Precision]] = {}
    for layer in layers:
        nodes[layer.name] = nodes.get(layer.name, ()) + layer.nodes
        types[layer.name] = types.get(layer.name, frozenset()) | layer.outputs
    names = dict.fromkeys(name for execution in executions for name in execution)
    if not any(nodes.get(name) for name in names):
        reported = f"{len(names)} layers, none of which the inspector traces to the model" if names else "no layers"
        raise EngineError(FailureKind.UNSUPPORTED, f"the profiler reports {reported}")
    return tuple(
        LayerTime(
            nodes.get(name, ()),
            _steady_mean([execution.get(name, 0.0) for execution in executions]),
            name,
            tuple(precision for precision in PRECISIONS if precision in types.get(name, ())),
        )
        for name in names
    )


def _steady_mean(values: Sequence[float]) -> float:
    """The mean without the largest value, which may come from an interruption; a single value is its own mean."""
    ordered = sorted(values)
    steady = ordered[:-1] or ordered
    return sum(steady) / len(steady)


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
