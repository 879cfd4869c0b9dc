"""FP32 models that round as others do: as TF32, or as a mixed model does at some of its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.files import write_bytes
from mptune.graph.casting.value_types import new_suffix
from mptune.graph.loading.model import Model, Node, needed_nodes
from mptune.graph.ops import PRODUCTS
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.writing.model_file import add_cast, declare_rounded_outputs
from mptune.graph.writing.observe import without_outputs
from mptune.graph.writing.weights import WeightBank

Rounding = Literal["nearest", "truncated"]

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

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


_FLOAT = onnx.TensorProto.FLOAT

_PRECISIONS: Mapping[str, Precision] = {p.dtype: p for p in REDUCED if p.stored is p}

"""By element type."""

_REDUCED_CODES = frozenset(precision.onnx_type for precision in _PRECISIONS.values())

_INLINE_BYTES = 1 << 30

"""Widened constants of more stay outside of the file, as they are, and are cast: protobuf ends at 2 GiB."""

_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})


def reduced_values(model: Model) -> dict[str, Precision]:
    """The values of the main graph that are FP16 or BF16."""
    return {name: _PRECISIONS[info.dtype] for name, info in model.tensors.items() if info.dtype in _PRECISIONS}


def reduced_in_subgraphs(model: Model) -> bool:
    """Whether such values appear where only a copy of the model can hold them: in one with If, Loop or Scan."""
    return bool(reduced_values(model)) and any(node.has_subgraph for node in model.nodes)


def write_widened(model: Model, bank: WeightBank, path: Path, outputs: Sequence[str] | None = None) -> Path:
    """Write the model, computing in FP32, to ``path`` in the bank's folder.

    Args:
        outputs: values of the main graph that become the only outputs, and nodes that none of them needs are left
            out; None for the model's own outputs.
    """
    reduced = {} if reduced_in_subgraphs(model) else reduced_values(model)
    suffixes = new_suffix(model, "raw"), new_suffix(model, "half")
    proto = onnx.ModelProto(ir_version=max(model.proto.ir_version, 4))
    proto.opset_import.extend(model.proto.opset_import)
    graph = proto.graph
    graph.name = "widened"
    graph.sparse_initializer.extend(model.proto.graph.sparse_initializer)
    kept = [*model.nodes] if outputs is None else needed_nodes(model, outputs)
    read = {name for node in kept for name in (*node.inputs, *node.captures)} | set(outputs or ())
    entries = [info.name for info in model.inputs if info.name in reduced]
    for info in model.inputs:
        value = next(v for v in model.proto.graph.input if v.name == info.name)
        given = graph.input.add()
        given.CopyFrom(value)
        if info.name in reduced:
            given.type.tensor_type.elem_type = _FLOAT
    is_large = (
        sum(2 * constant.nbytes for name, constant in model.initializers.items() if name in reduced) > _INLINE_BYTES
    )
    for constant in model.initializers.values():
        if constant.node_index is None and (outputs is None or constant.name in read):
            if constant.name in reduced and is_large:
                stored = constant.name + suffixes[1]
                graph.initializer.append(bank.tensor_or_inline(constant, stored))
                add_cast(graph, stored, constant.name, Precision.FP32, stored)
            elif constant.name in reduced:
                wide = np.asarray(constant.numpy(), np.float32)
                graph.initializer.append(onnx.numpy_helper.from_array(wide, constant.name))
            else:
                graph.initializer.append(bank.tensor_or_inline(constant, constant.name))
    for name in entries:
        _add_rounding(graph, name, name + suffixes[0], reduced[name], *suffixes)
    for node in kept:
        _add(graph, node, reduced, entries, *suffixes)
    if outputs is None:
        for value in model.proto.graph.output:
            kind = graph.output.add()
            kind.CopyFrom(value)
            if value.name in reduced:
                kind.type.tensor_type.elem_type = _FLOAT
    else:
        for name in outputs:
            code = _FLOAT if name in reduced else onnx.TensorProto.DataType.Value(model.info(name).dtype.upper())
            graph.output.append(onnx.helper.make_tensor_value_info(name, code, None))
    declare_rounded_outputs(graph, model)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    return path


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
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.type == onnx.AttributeProto.TENSOR:
                tensors[node.output[0]] = attribute.t
    nodes = {node.name: node for node in proto.graph.node}
    if is_part:
        constants = {name: array for name, array in constants.items() if name in tensors}
        attributes = [each for each in attributes if each[0] in nodes]
    for name, array in constants.items():
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensors[name].data_type)
        tensors[name].CopyFrom(onnx.numpy_helper.from_array(np.asarray(array, dtype), tensors[name].name))
    for name, attribute, setting in attributes:
        kept = [each for each in nodes[name].attribute if each.name != attribute]
        del nodes[name].attribute[:]
        given = [] if setting is None else [onnx.helper.make_attribute(attribute, setting)]
        nodes[name].attribute.extend([*kept, *given])
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    return path


def _add(
    graph: onnx.GraphProto, node: Node, reduced: Mapping[str, Precision], entries: Collection[str], raw: str, half: str
) -> None:
    """Append a node; FP16 and BF16 results are computed in FP32 under another name, and rounded."""
    rounded = [name for name in node.outputs if name in reduced]
    proto = graph.node.add()
    proto.CopyFrom(node.proto)
    proto.name = node.name
    if entries:
        proto.input[:] = [name + raw if name in entries else name for name in node.inputs]
    if rounded:
        proto.output[:] = [name + raw if name in reduced else name for name in node.outputs]
    if reduced:
        for attribute in proto.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i in _REDUCED_CODES and rounded:
                attribute.i = _FLOAT
            if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in _REDUCED_CODES:
                wide = onnx.numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(wide))
    for name in rounded:
        _add_rounding(graph, name + raw, name, reduced[name], raw, half)


def _add_rounding(graph: onnx.GraphProto, source: str, result: str, precision: Precision, raw: str, half: str) -> None:
    add_cast(graph, source, source + half, precision, source + half)
    add_cast(graph, source + half, result, Precision.FP32, source + half + raw)
