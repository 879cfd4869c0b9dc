"""The types in which an engine computes, by TensorRT's inspector, compared with the plan.

Strongly typed networks compute in the types of the graph, but 10.0 to 10.11 support them in part, and inside a fused
kernel TensorRT is free. The inspector's JSON differs between 10 and 11: type and format are one text in 10
(``Format/Datatype``) and two in 11, and ``Bindings`` became ``I/O Tensors`` (NVIDIA's guide "Migrating IEngineInspector
Usage from TensorRT 10.x to 11.x"; the key ``Datatype`` is in TensorRT-RTX 1.7's library). Both are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mptune.graph.plan import REDUCED, Precision

_TYPE_KEYS = ("Datatype", "DataType", "Format/Datatype", "Format/DataType", "Format")
# "Row major linear FP16 format", "Channel major FP16 format where channel % 8 == 0", "Half"; "Row major linear BF16".
_BRAIN = re.compile(r"BF16|BFloat16", re.IGNORECASE)
_HALF = re.compile(r"(?<!B)FP16|(?<!B)Float16|\bHalf\b", re.IGNORECASE)
_SINGLE = re.compile(r"FP32|Float32|(?<!B)\bFloat\b|\bTF32\b", re.IGNORECASE)
_INT8 = re.compile(r"\bU?Int8\b", re.IGNORECASE)
_NODE = re.compile(r"^\[ONNX Layer: (?P<name>.*)\]$", re.DOTALL)
_SEPARATORS = re.compile(r"[\x1e\x1f]")


@dataclass(frozen=True)
class Layer:
    """One layer of a built engine.

    Attributes:
        nodes: names of the ONNX nodes that it came from; empty for a reformat of TensorRT's own.
        inputs: floating types of its inputs, as far as they are known.
    """

    name: str
    nodes: tuple[str, ...]
    inputs: frozenset[Precision]
    outputs: frozenset[Precision]


def read_layers(information: str) -> tuple[Layer, ...]:
    """Read the inspector's JSON.

    Returns:
        The layers with more than a name; empty where the engine was built without detailed verbosity.
    """
    return tuple(_layer(entry) for entry in _listed(information))


def misplaced_layers(nodes: Mapping[str, Precision], layers: Sequence[Layer]) -> tuple[tuple[str, ...], int]:
    """The layers that compute in another type than the plan says.

    Only layers whose nodes all have the same precision count, and whose type TensorRT gives.
    """
    judged = [layer for layer in layers if layer.outputs and len({nodes.get(n) for n in layer.nodes} - {None}) == 1]
    return tuple(layer.name for layer in judged if _broken(nodes, layer) is not None), len(judged)


def int8_layers(information: str) -> tuple[str, ...]:
    """Names of the layers in the inspector's JSON that read or write INT8."""
    found = []
    for entry in _listed(information):
        tensors = [one for key in ("Inputs", "Outputs") for one in entry.get(key) or () if isinstance(one, dict)]
        if any(_INT8.search(_type_text(one)) for one in tensors):
            found.append(str(entry.get("Name", "")))
    return tuple(found)


def type_warnings(
    nodes: Mapping[str, Precision], layers: Sequence[Layer], baseline: Sequence[Layer]
) -> tuple[str, ...]:
    """Compare an engine with its plan and with the all-FP32 engine.

    Only layers whose nodes all have the same precision count: what is fused across a boundary has both.
    """
    warnings = []
    realised = _realised(nodes, layers)
    if not {*nodes.values()}.isdisjoint(REDUCED) and realised and realised == _realised(nodes, baseline):
        warnings.append(
            "the engine computes in the same types as the all-FP32 engine, so the plan changed nothing: update"
            " TensorRT, or treat the plan as FP32"
        )
    other = [(layer, wanted) for layer in layers if (wanted := _broken(nodes, layer)) is not None]
    if other and not warnings:
        layer, wanted = other[0]
        got = ", ".join(sorted(precision.value for precision in layer.outputs))
        warnings.append(
            f"{len(other)} of {len(layers)} layers of the engine run in another type than the plan says, such as"
            f" {layer.name!r} ({got} in place of {wanted.value}): latency and error are those of this engine; update"
            " TensorRT to have the plan's"
        )
    return tuple(warnings)


def _listed(information: str) -> list[Mapping[str, Any]]:
    """The entries of the layers that have more than a name."""
    try:
        document = json.loads(information)
    except ValueError:
        return []
    listed = document.get("Layers", ()) if isinstance(document, dict) else ()
    return [entry for entry in listed if isinstance(entry, dict)]


def _layer(entry: Mapping[str, Any]) -> Layer:
    metadata = str(entry.get("Metadata") or "")
    found = (_NODE.match(part.strip()) for part in _SEPARATORS.split(metadata))
    return Layer(
        name=str(entry.get("Name", "")),
        nodes=tuple(match["name"] for match in found if match),
        inputs=_types(entry.get("Inputs", ())),
        outputs=_types(entry.get("Outputs", ())),
    )


def _types(tensors: Any) -> frozenset[Precision]:
    found = (_type(one) for one in tensors if isinstance(one, dict)) if isinstance(tensors, list) else ()
    return frozenset(precision for precision in found if precision is not None)


def _type(description: Mapping[str, Any]) -> Precision | None:
    """The floating type of a tensor; None for integers, other floats, and where TensorRT gives none."""
    text = _type_text(description)
    if _BRAIN.search(text):
        return Precision.BF16
    if _HALF.search(text):
        return Precision.FP16
    return Precision.FP32 if _SINGLE.search(text) else None


def _type_text(description: Mapping[str, Any]) -> str:
    return next((str(description[key]) for key in _TYPE_KEYS if description.get(key)), "")


def _realised(nodes: Mapping[str, Precision], layers: Sequence[Layer]) -> dict[str, frozenset[Precision]]:
    """Types of the inputs and outputs of the layers that each of the plan's nodes became part of."""
    realised: dict[str, frozenset[Precision]] = {}
    for layer in layers:
        for node in layer.nodes:
            if node in nodes:
                realised[node] = realised.get(node, frozenset()) | layer.inputs | layer.outputs
    return {node: types for node, types in realised.items() if types}


def _broken(nodes: Mapping[str, Precision], layer: Layer) -> Precision | None:
    """The precision that a layer should have, where none of its outputs has that type."""
    wanted = {nodes.get(node) for node in layer.nodes}
    if len(wanted) != 1 or not layer.outputs:
        return None
    precision = wanted.pop()
    return precision if precision is not None and precision not in layer.outputs else None
