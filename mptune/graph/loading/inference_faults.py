"""What crashes onnx's own shape inference or keeps it busy for ever, refused before it is called.

Found by 60,000 random nodes of every operator under onnx 1.23.2; ``onnx.checker`` lets all of it pass. None is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import onnx.helper

_INT32_MAX = 2**31 - 1

_FAULTS: Mapping[str, tuple[str, Callable[[Any, onnx.NodeProto], bool], str]] = {
    # operator: (attribute, whether its value is a fault, what is wrong with it). Einsum never ends, the rest crash.
    "Einsum": (
        "equation",
        lambda value, _: b"." in value.replace(b"...", b""),
        "has a dot outside an ellipsis",
    ),
    "Split": ("num_outputs", lambda value, node: value != len(node.output), "is not the number of outputs"),
    "GatherND": ("batch_dims", lambda value, _: not 0 <= value <= _INT32_MAX, "is out of range"),
    "LayerNormalization": ("axis", lambda value, _: abs(value) > _INT32_MAX, "is out of range"),
    "RMSNormalization": ("axis", lambda value, _: abs(value) > _INT32_MAX, "is out of range"),
}


def inference_fault(node: onnx.NodeProto) -> str:
    """What about a node would bring onnx's inference down; "" where nothing is known."""
    if node.op_type not in _FAULTS:
        return ""
    name, is_fault, what = _FAULTS[node.op_type]
    for attribute in node.attribute:
        if attribute.name == name and is_fault(attribute.s if name == "equation" else attribute.i, node):
            return f"{node.op_type}'s attribute {name} {what}"
    return ""
