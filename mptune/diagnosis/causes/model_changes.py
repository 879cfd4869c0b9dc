"""What an engine or another exporter may take otherwise in one model: modes, axes, epsilons, paddings, operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.helper

_COORDINATES = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
_NEAREST = ("floor", "round_prefer_floor", "ceil", "round_prefer_ceil")
_INTERPOLATIONS: Sequence[Mapping[str, str]] = (
    {"mode": "nearest"},
    {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},  # torch's
    {"mode": "linear"},
    {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    {"mode": "cubic"},
)
_EPSILONS = (1e-5, 1e-3, 1e-6, 1e-12, 1e-4, 1e-2)
_NORMS = ("BatchNormalization", "LayerNormalization", "InstanceNormalization", "GroupNormalization")
_VALUES: Sequence[tuple[str, str, Sequence[Any]]] = (
    ("GridSample", "align_corners", (0, 1)),
    ("GridSample", "padding_mode", ("zeros", "border", "reflection")),
    *((norm, "epsilon", _EPSILONS) for norm in _NORMS),
    ("Gelu", "approximate", ("none", "tanh")),
    ("AveragePool", "count_include_pad", (0, 1)),
    ("LeakyRelu", "alpha", (0.01, 0.1, 0.2)),
    ("HardSigmoid", "alpha", (0.2, 1 / 6)),
    ("DepthToSpace", "mode", ("DCR", "CRD")),
    ("GRU", "linear_before_reset", (0, 1)),
    ("Pad", "mode", ("constant", "reflect", "edge")),
    ("Softmax", "axis", (-1, 1)),
)
"""Operator, attribute, values that one tool or another gives it; the same for all nodes of that operator."""
_REPLACEMENTS: Sequence[tuple[str, str, Mapping[str, Any], tuple[str, ...]]] = (
    ("MaxPool", "AveragePool", {}, ("dilations", "storage_order")),
    ("AveragePool", "MaxPool", {}, ("count_include_pad",)),
    *(("Relu", "LeakyRelu", {"alpha": slope}, ()) for slope in (0.01, 0.1, 0.2)),
    ("LeakyRelu", "Relu", {}, ("alpha",)),
)
"""Operator, what stands in its place, with these attributes, and without those."""
_BIASED = ("Conv", "ConvTranspose", "Gemm")
_BIAS = 2
"""Position of the bias among the inputs of these."""
_PADDED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool"})
_NAMED = 3
_SAME = 1e-6
"""Two numbers are one up to this share."""


@dataclass(frozen=True)
class ModelChange:
    """One change.

    Attributes:
        words: what is changed, from what to what.
        attribute: its name.
        nodes: names of the nodes.
        model: the changed model.
    """

    words: str
    attribute: str
    nodes: tuple[str, ...]
    model: onnx.ModelProto


def model_changes(model: onnx.ModelProto) -> Iterator[ModelChange]:
    """All changes that the model's operators allow, the most frequent first. Nodes of subgraphs stay as they are."""
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 0)
    yield from _resized(model, opset)
    yield from _padded(model)
    yield from _without_biases(model)
    for operator, attribute, values in _VALUES:
        for value in values:
            wanted = {
                index: {attribute: value}
                for index, node in _of(model, operator)
                if not _is_same(_value(node, attribute, opset), value) and _value(node, attribute, opset) is not None
            }
            yield from _changed(model, opset, attribute, wanted)
    yield from _other_operators(model)


def _resized(model: onnx.ModelProto, opset: int) -> Iterator[ModelChange]:
    name = "coordinate_transformation_mode"
    for mode in _COORDINATES:
        wanted = {i: {name: mode} for i, node in _of(model, "Resize") if _text(node, name, opset) != mode}
        yield from _changed(model, opset, name, wanted)
    for settings in _INTERPOLATIONS:
        resized = [i for i, node in _of(model, "Resize") if _text(node, "mode", opset) != settings["mode"]]
        yield from _changed(model, opset, "mode", dict.fromkeys(resized, settings))
    nearest = [(i, node) for i, node in _of(model, "Resize") if _text(node, "mode", opset) == "nearest"]
    for rounding in _NEAREST:
        for mode in ("", *_COORDINATES[:1], _COORDINATES[2]):
            wanted = {
                i: {"nearest_mode": rounding, **({name: mode} if mode else {})}
                for i, node in nearest
                if _text(node, "nearest_mode", opset) != rounding and _text(node, name, opset) != mode
            }
            yield from _changed(model, opset, "nearest_mode", wanted)


def _padded(model: onnx.ModelProto) -> Iterator[ModelChange]:
    """Padding that is not the same at both ends, at the other end: SAME_UPPER and SAME_LOWER."""
    wanted: dict[int, dict[str, Any]] = {}
    for index, node in enumerate(model.graph.node):
        pads = _value(node, "pads", 0) if node.op_type in _PADDED else None
        half = len(pads) // 2 if pads else 0
        if pads and list(pads[:half]) != list(pads[half:]):
            wanted[index] = {"pads": [*pads[half:], *pads[:half]]}
        elif node.op_type in _PADDED and _value(node, "auto_pad", 0) in (b"SAME_UPPER", b"SAME_LOWER"):
            is_upper = _value(node, "auto_pad", 0) == b"SAME_UPPER"
            wanted[index] = {"auto_pad": "SAME_LOWER" if is_upper else "SAME_UPPER"}
    yield from _changed(model, 0, "pads", wanted)


def _without_biases(model: onnx.ModelProto) -> Iterator[ModelChange]:
    """All products without what is added to them."""
    indices = [
        index
        for operator in _BIASED
        for index, node in _of(model, operator)
        if len(node.input) > _BIAS and node.input[_BIAS]
    ]
    if not indices:
        return
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for index in indices:
        del changed.graph.node[index].input[_BIAS:]
    names = tuple(model.graph.node[index].name for index in sorted(indices))
    where = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    yield ModelChange(f"without the biases of {where}", "bias", names, changed)


def _other_operators(model: onnx.ModelProto) -> Iterator[ModelChange]:
    """Poolings and activations that another implementation may have in place of the model's."""
    for operator, other, attributes, dropped in _REPLACEMENTS:
        nodes = [node for _, node in _of(model, operator) if len([out for out in node.output if out]) == 1]
        if not nodes:
            continue
        changed, names = onnx.ModelProto(), tuple(node.name for node in nodes)
        changed.CopyFrom(model)
        for index, node in _of(model, operator):
            if node.name not in names:
                continue
            copy = changed.graph.node[index]
            copy.op_type = other
            kept = [one for one in copy.attribute if one.name not in dropped]
            del copy.attribute[:]
            copy.attribute.extend(
                [*kept, *(onnx.helper.make_attribute(key, value) for key, value in attributes.items())]
            )
        settings = "".join(f" with {key!r} {_shown(value)}" for key, value in attributes.items())
        where = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        words = f"with {other}{settings} in place of {operator} at {where}"
        yield ModelChange(words, "op_type", names, changed)


def _of(model: onnx.ModelProto, operator: str) -> Iterator[tuple[int, onnx.NodeProto]]:
    for index, node in enumerate(model.graph.node):
        if node.op_type == operator and node.domain in ("", "ai.onnx"):
            yield index, node


def _changed(
    model: onnx.ModelProto, opset: int, attribute: str, wanted: Mapping[int, Mapping[str, Any]]
) -> Iterator[ModelChange]:
    """The model with these attributes of these nodes, where there are some."""
    if not wanted:
        return
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for index, attributes in wanted.items():
        node = changed.graph.node[index]
        kept = [one for one in node.attribute if one.name not in attributes]
        del node.attribute[:]
        node.attribute.extend([*kept, *(onnx.helper.make_attribute(name, value) for name, value in attributes.items())])
    first = min(wanted)
    node = model.graph.node[first]
    names = tuple(model.graph.node[index].name for index in sorted(wanted))
    parts = [
        f"{name!r} {_shown(value)} in place of {_shown(_value(node, name, opset))}"
        for name, value in wanted[first].items()
    ]
    where = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    yield ModelChange(f"with {' and '.join(parts)} at {node.op_type} {where}", attribute, names, changed)


def _value(node: onnx.NodeProto, name: str, opset: int) -> Any:
    """An attribute's value, its default where it is not given; None where the operator has none of that name."""
    for attribute in node.attribute:
        if attribute.name == name:
            return onnx.helper.get_attribute_value(attribute)
    if not opset or not onnx.defs.has(node.op_type, opset):
        return None
    info = onnx.defs.get_schema(node.op_type, opset).attributes.get(name)
    if info is None or not info.default_value.type:
        return None
    return onnx.helper.get_attribute_value(info.default_value)


def _text(node: onnx.NodeProto, name: str, opset: int) -> str:
    value = _value(node, name, opset)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, bytes):
        return bool(one.decode(errors="replace") == other)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _SAME * max(abs(one), abs(other))
    return bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
