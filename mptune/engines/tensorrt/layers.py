"""The layers of a built engine: the types that they run in, and their times."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
    """Combine the profiler's times with the inspector's layers; several may have one name.

    A time is the mean without the longest, which may come from an interruption; a single one is its own mean.
    """
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
