"""FP32 models that round as others do: as TF32, or as a mixed model does at some of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.files import write_bytes
from mptune.graph.loading.model import Model
from mptune.graph.ops import PRODUCTS
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.value_types import new_suffix
from mptune.graph.writing.model_file import cast_node, declare_rounded_outputs, scalar, split_nodes
from mptune.graph.writing.observe import declared, without_outputs
from mptune.graph.writing.weights import WeightBank

Rounding = Literal["nearest", "truncated"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
_TF32_DIGITS = 13
"""Bits of FP32's mantissa that TF32 lacks."""


def uses_products(model: Model) -> bool:
    """Whether TF32 changes anything of this model."""
    return any(n.op_type in PRODUCTS and n.is_standard and model.info(n.outputs[0]).is_float32 for n in model.nodes)


def write_tf32(model: Model, bank: WeightBank, path: Path, rounding: Rounding) -> Path:
    """Write the model with the operands of its products as TF32 to ``path`` in the bank's folder."""
    suffix, proto = new_suffix(model, "tf32"), without_outputs(model, bank, "tf32")
    graph = proto.graph
    graph.output.extend(model.proto.graph.output)
    copies = list(graph.node)
    del graph.node[:]

    def rounded(value: str) -> str:
        """Append the nodes that round one value; the name of the result."""
        near, below = f"{value}.nearest{suffix}", f"{value}.below{suffix}"
        graph.node.extend(split_nodes(value, near, near, _TF32_DIGITS))
        if rounding == "nearest":
            return near
        # Where rounding went away from zero, one unit less: 11 bits times (1 - 2^-11), to the nearest 11 bits below.
        steps = [
            ("Constant", [], "shrink", {"value": scalar(1 - 2.0**-11)}),
            ("Mul", [near, f"{below}.shrink"], "smaller", {}),
            ("Abs", [near], "size of near", {}),
            ("Abs", [value], "size of value", {}),
            ("Greater", [f"{below}.size of near", f"{below}.size of value"], "is above", {}),
        ]
        for op, inputs, name, more in steps:
            graph.node.append(onnx.helper.make_node(op, inputs, [f"{below}.{name}"], f"{below}.{name}", **more))
        graph.node.extend(split_nodes(f"{below}.smaller", below, below, _TF32_DIGITS))
        result = f"{value}.truncated{suffix}"
        graph.node.append(onnx.helper.make_node("Where", [f"{below}.is above", below, near], [result], result))
        return result

    done: dict[str, str] = {}
    for node, copy in zip(model.nodes, copies, strict=True):
        if node.op_type in PRODUCTS and node.is_standard and model.info(node.outputs[0]).is_float32:
            operands = len(node.inputs) if node.op_type == "Einsum" else 2  # a bias is added in FP32
            for slot, value in enumerate(node.inputs[:operands]):
                if value not in done:
                    done[value] = rounded(value)
                copy.input[slot] = done[value]
        graph.node.append(copy)
    return write_bytes(path, [proto.SerializeToString(deterministic=True)])


_FLOAT = onnx.TensorProto.FLOAT
_PRECISIONS: Mapping[str, Precision] = {p.dtype: p for p in REDUCED if p.stored is p}
"""By element type."""
_REDUCED_CODES = frozenset(precision.onnx_type for precision in _PRECISIONS.values())
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})


def write_widened(model: Model, bank: WeightBank, path: Path, outputs: Sequence[str] | None = None) -> Path:
    """Write the model, computing in FP32, to ``path`` in the bank's folder.

    FP16 and BF16 results are computed in FP32 under another name, and rounded; constants of these types are cast.

    Args:
        outputs: values of the main graph that become the only outputs, and nodes that none of them needs are left
            out; None for the model's own outputs.
    """
    reduced = {name: _PRECISIONS[info.dtype] for name, info in model.tensors.items() if info.dtype in _PRECISIONS}
    if any(node.has_subgraph for node in model.nodes):
        reduced = {}  # a branch reads what is outside it under its own name, in its own type
    raw, half = new_suffix(model, "raw"), new_suffix(model, "half")
    proto = without_outputs(model, bank, "widened", outputs)
    graph = proto.graph
    nodes = list(graph.node)
    del graph.node[:]

    def add_rounding(source: str, result: str, precision: Precision) -> None:
        graph.node.append(cast_node(source, source + half, precision))
        graph.node.append(cast_node(source + half, result, Precision.FP32, source + half + raw))

    for constant in graph.initializer:
        if constant.name in reduced:
            graph.node.append(cast_node(constant.name + half, constant.name, Precision.FP32, constant.name + half))
            constant.name += half
    given_values = [given for given in graph.input if given.name not in model.initializers]
    del graph.input[:]
    graph.input.extend(given_values)
    entries = [given for given in graph.input if given.name in reduced]
    renamed = {given.name: given.name + raw for given in entries}
    for given in entries:
        given.type.tensor_type.elem_type = _FLOAT
        add_rounding(given.name, renamed[given.name], reduced[given.name])
    for node in nodes:
        results = [name for name in node.output if name in reduced]
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [name + raw if name in reduced else name for name in node.output]
        for attribute in node.attribute if reduced else ():
            if results and attribute.name in _TYPE_ATTRIBUTES and attribute.i in _REDUCED_CODES:
                attribute.i = _FLOAT
            if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in _REDUCED_CODES:
                wide = onnx.numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(wide))
        graph.node.append(node)
        for name in results:
            add_rounding(name + raw, name, reduced[name])
    given_outputs = model.proto.graph.output
    graph.output.extend(given_outputs if outputs is None else [declared(model, name) for name in outputs])
    for value in graph.output:
        if value.name in reduced:
            value.type.tensor_type.elem_type = _FLOAT
    declare_rounded_outputs(graph, model)
    return write_bytes(path, [proto.SerializeToString(deterministic=True)])


def write_changed(
    widened: Path,
    path: Path,
    constants: Mapping[str, np.ndarray],
    attributes: Sequence[tuple[str, str, Any]],
    *,
    is_part: bool = False,
) -> Path:
    """Write what ``write_widened`` wrote once more, in the same folder, with other constants and attributes.

    Args:
        constants: initializer, or result of a node Constant, of the main graph -> its values, of the same shape.
        attributes: node of the main graph, attribute, its value; None leaves it out.
        is_part: the file has a part of the model: what it lacks is passed over.
    """
    proto = onnx.load(widened, load_external_data=False)
    tensors, wide = {tensor.name: tensor for tensor in proto.graph.initializer}, set[str]()
    for node in proto.graph.node:
        if node.op_type == "Cast" and node.input[0] in tensors:  # an FP16 constant, of which the Cast makes FP32
            tensors[node.output[0]] = tensors[node.input[0]]
            wide.add(node.output[0])
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.type == onnx.AttributeProto.TENSOR:
                tensors[node.output[0]] = attribute.t
    nodes = {node.name: node for node in proto.graph.node}
    if is_part:
        constants = {name: array for name, array in constants.items() if name in tensors}
        attributes = [each for each in attributes if each[0] in nodes]
    for name, array in constants.items():
        dtype = np.float32 if name in wide else onnx.helper.tensor_dtype_to_np_dtype(tensors[name].data_type)
        tensors[name].CopyFrom(onnx.numpy_helper.from_array(np.asarray(array, dtype), tensors[name].name))
    for name, attribute, setting in attributes:
        kept = [each for each in nodes[name].attribute if each.name != attribute]
        del nodes[name].attribute[:]
        given = [] if setting is None else [onnx.helper.make_attribute(attribute, setting)]
        nodes[name].attribute.extend([*kept, *given])
    return write_bytes(path, [proto.SerializeToString(deterministic=True)])
