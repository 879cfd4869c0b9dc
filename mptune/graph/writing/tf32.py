"""The FP32 model that rounds as TF32 does: the inputs of matrix products and convolutions to 10 bits of mantissa.

NVIDIA's tensor cores read FP32 operands as TF32 (8 bits of exponent, 10 of mantissa) and add up in FP32. Whether an
operand is rounded to the nearest or its low bits are cut off depends on the library, so both can be written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.files import write_bytes
from mptune.graph.casting.value_types import new_suffix
from mptune.graph.loading.model import Model
from mptune.graph.writing.observe import without_outputs
from mptune.graph.writing.weights import WeightBank

Rounding = Literal["nearest", "truncated"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
"""Operators that use TF32 where it is on."""

_OPERANDS = 2
"""A bias is added in FP32."""
_SPLIT = float((1 << 13) + 1)
"""Veltkamp's constant: splits off the upper 24 - 13 = 11 significant bits of an FP32 number (10 are stored)."""


def uses_products(model: Model) -> bool:
    """Whether TF32 changes anything of this model."""
    return any(n.op_type in PRODUCTS and n.is_standard and model.info(n.outputs[0]).is_float32 for n in model.nodes)


def write_tf32(model: Model, bank: WeightBank, path: Path, rounding: Rounding) -> Path:
    """Write the emulation to ``path`` in the bank's folder."""
    suffix = new_suffix(model, "tf32")
    proto = without_outputs(model, bank, "tf32")
    graph = proto.graph
    graph.output.extend(model.proto.graph.output)
    copies = list(graph.node)
    del graph.node[:]
    names = {key: f"{key}{suffix}" for key in ("split", "shrink")}
    for key, number in (("split", _SPLIT), ("shrink", 1 - 2.0**-11)):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(number, np.float32), names[key]))
    done: dict[str, str] = {}
    for node, copy in zip(model.nodes, copies, strict=True):
        if node.op_type in PRODUCTS and node.is_standard and model.info(node.outputs[0]).is_float32:
            operands = len(node.inputs) if node.op_type == "Einsum" else _OPERANDS
            for slot, name in enumerate(node.inputs[:operands]):
                if name not in done:
                    done[name] = _round(graph, name, suffix, names, rounding)
                copy.input[slot] = done[name]
        graph.node.append(copy)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    return path


def _round(graph: onnx.GraphProto, value: str, suffix: str, names: dict[str, str], rounding: Rounding) -> str:
    """Append the nodes that round one value; returns the name of the result."""

    def add(op: str, inputs: list[str], what: str, **attributes: Any) -> str:
        out = f"{value}.{what}{suffix}"
        graph.node.append(onnx.helper.make_node(op, inputs, [out], name=out, **attributes))
        return out

    scaled = add("Mul", [value, names["split"]], "scaled")
    rest = add("Sub", [scaled, value], "rest")
    nearest = add("Sub", [scaled, rest], "nearest")
    if rounding == "nearest":
        return nearest
    # Where rounding went away from zero, one unit less: 11 bits times (1 - 2^-11), to the nearest 11 bits below.
    smaller = add("Mul", [nearest, names["shrink"]], "smaller")
    again = add("Mul", [smaller, names["split"]], "again")
    over = add("Sub", [again, smaller], "over")
    below = add("Sub", [again, over], "below")
    is_above = add("Greater", [add("Abs", [nearest], "size"), add("Abs", [value], "given")], "is_above")
    return add("Where", [is_above, below, nearest], "truncated")
