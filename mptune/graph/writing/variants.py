"""FP32 models that are run to learn of a model: with its values as outputs, or rounding as TF32 or a mixed model does.

Values are observed as many at a time as memory holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.files import write_bytes
from mptune.graph.hazards.masks import softmax_rows
from mptune.graph.hazards.probes import ProbedNode, probed_nodes
from mptune.graph.loading.model import Model, Node, needed_nodes
from mptune.graph.loading.tensors import declaration
from mptune.graph.ops import PRODUCTS
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.value_types import new_suffix
from mptune.graph.writing import rewrite
from mptune.graph.writing.rewrite import cast_node
from mptune.graph.writing.weights import WeightBank, inline_tensor

_PART_BYTES = 1 << 29  # memory for the values of one part on one sample, bytes; a larger value is a part of its own
_MOST_OUTPUTS = 1000  # of one session: opening it takes time quadratic in their number
_UNKNOWN_BYTES = _PART_BYTES // 48  # taken for a value whose size is not known before the run
Rounding = Literal["nearest", "truncated"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
_TF32_DIGITS = 13  # bits of FP32's mantissa that TF32 lacks
_FLOAT = onnx.TensorProto.FLOAT
_PRECISIONS: Mapping[str, Precision] = {p.dtype: p for p in REDUCED if p.stored is p}  # by element type
_REDUCED_CODES = frozenset(precision.onnx_type for precision in _PRECISIONS.values())
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})


# -- values as outputs ----------------------------------------------------------------------------------------------


@dataclass
class ObservedPart:
    """Values that are observed in one session."""

    # FP32 value -> the axes of a row, where a softmax is taken of it; no axes elsewhere.
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    nodes: list[ProbedNode] = field(default_factory=list)  # those whose facts are filed under these values
    sample_bytes: int = 0  # about the memory of what the session gives on one sample

    @property
    def outputs(self) -> list[str]:
        """What the session gives: these values, and what the nodes read."""
        return sorted(frozenset(self.rows).union(*(node.reads for node in self.nodes)))


def observed_tensors(model: Model) -> tuple[str, ...]:
    """The FP32 values that are observed: graph inputs and everything computed, in topological order."""
    names = [i.name for i in model.inputs]
    names += [out for node in model.nodes for out in node.outputs if out and out not in model.initializers]
    return tuple(n for n in names if model.info(n).is_float32 and 0 not in (model.info(n).shape or ()))


def observed_parts(model: Model, shapes: Mapping[str, tuple[int, ...]], count: int = 1) -> list[ObservedPart]:
    """The values in parts that memory holds, about ``count`` at least.

    ``shapes`` are those on the largest sample, as far as they are known.
    """
    rows, nodes = softmax_rows(model), dict[str, list[ProbedNode]]()
    for probed in probed_nodes(model):
        nodes.setdefault(probed.key, []).append(probed)
    parts, outputs, tensors = list[ObservedPart](), set[str](), observed_tensors(model)
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.get(name, _UNKNOWN_BYTES) for name in tensors)
    most = _PART_BYTES if count == 1 else min(_PART_BYTES, 1.25 * total / count)
    for tensor in tensors:
        reads = frozenset((tensor,)).union(*(probed.reads for probed in nodes.get(tensor, ())))
        more = sum(sizes.get(name, _UNKNOWN_BYTES) for name in reads - outputs)
        if not parts or parts[-1].sample_bytes + more > most or len(outputs | reads) > _MOST_OUTPUTS:
            parts.append(ObservedPart())
            outputs = set()
        parts[-1].rows[tensor] = rows.get(tensor, ())
        parts[-1].nodes += nodes.get(tensor, ())
        parts[-1].sample_bytes += more
        outputs |= reads
    return parts


def write_with_outputs(
    model: Model, bank: WeightBank | None, path: Path, outputs: Sequence[str], inputs: Sequence[str] | None = None
) -> None:
    """Write the model with these values, of the main graph, as its only outputs, and what computes them.

    Args:
        bank: holds its weights, in the folder of ``path``; None writes them into the file.
        inputs: values of the main graph that become its only inputs; None leaves the model's own.
    """
    proto, nodes = _without_nodes(model, bank, outputs, inputs or ())
    if inputs is not None:
        del proto.graph.input[:]
        proto.graph.input.extend(declaration(model.info(name)) for name in inputs)
    for node in nodes:
        rewrite.add_node(proto.graph, node, node.inputs, node.outputs)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])


def _without_nodes(
    model: Model, bank: WeightBank | None, outputs: Sequence[str] | None = None, given: Sequence[str] = ()
) -> tuple[onnx.ModelProto, Sequence[Node]]:
    """The model with its large constants in the bank, still without nodes, and the nodes that it needs.

    ``outputs`` become its only ones, of any shape; None for its own, and all nodes. Nothing is before ``given``.
    """
    proto, nodes = onnx.ModelProto(), model.nodes if outputs is None else needed_nodes(model, outputs, given)
    proto.CopyFrom(rewrite.frame_of(model))
    read = {*(outputs or ()), *(name for node in nodes for name in (*node.inputs, *node.captures))}
    stored = inline_tensor if bank is None else bank.tensor_or_inline
    for name, constant in model.initializers.items():
        if constant.node_index is None and (outputs is None or constant.overridable or name in read):
            proto.graph.initializer.append(stored(constant, name))
    if outputs is not None:
        del proto.graph.output[:]
        proto.graph.output.extend(declaration(replace(model.info(name), shape=None)) for name in outputs)
    return proto, nodes


# -- roundings of TF32, and of mixed models -------------------------------------------------------------------------


def uses_products(model: Model) -> bool:
    """Whether TF32 changes anything of this model."""
    return any(n.op_type in PRODUCTS and n.is_standard and model.info(n.outputs[0]).is_float32 for n in model.nodes)


def write_tf32(model: Model, bank: WeightBank, path: Path, rounding: Rounding) -> Path:
    """Write the model with the operands of its products as TF32 to ``path`` in the bank's folder."""
    suffix, (proto, nodes) = new_suffix(model, "tf32"), _without_nodes(model, bank)
    graph = proto.graph

    @cache
    def rounded(value: str) -> str:
        """Append the nodes that round one value; the name of the result."""
        near, below = f"{value}.nearest{suffix}", f"{value}.below{suffix}"
        graph.node.extend(rewrite.split_nodes(value, near, near, _TF32_DIGITS))
        if rounding == "nearest":
            return near
        # Where rounding went away from zero, one unit less: 11 bits times (1 - 2^-11), to the nearest 11 bits below.
        near_size, size, is_above = f"{below}.size of near", f"{below}.size of value", f"{below}.is above"
        graph.node.append(rewrite.constant_node(f"{below}.shrink", 1 - 2.0**-11))
        graph.node.append(rewrite.node("Mul", f"{below}.smaller", near, f"{below}.shrink"))
        graph.node.extend([rewrite.node("Abs", near_size, near), rewrite.node("Abs", size, value)])
        graph.node.append(rewrite.node("Greater", is_above, near_size, size))
        graph.node.extend(rewrite.split_nodes(f"{below}.smaller", below, below, _TF32_DIGITS))
        graph.node.append(rewrite.node("Where", f"{value}.truncated{suffix}", is_above, below, near))
        return f"{value}.truncated{suffix}"

    for node in nodes:
        inputs, operands = list(node.inputs), 0
        if node.op_type in PRODUCTS and node.is_standard and model.info(node.outputs[0]).is_float32:
            operands = len(inputs) if node.op_type == "Einsum" else 2  # a bias is added in FP32
        for slot, value in enumerate(node.inputs[:operands]):
            inputs[slot] = rounded(value)
        rewrite.add_node(graph, node, inputs, node.outputs)
    return write_bytes(path, [proto.SerializeToString(deterministic=True)])


def write_widened(
    model: Model,
    bank: WeightBank,
    path: Path,
    outputs: Sequence[str] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    attributes: Sequence[tuple[str, str, Any]] = (),
) -> Path:
    """Write the model, computing in FP32, to ``path`` in the bank's folder.

    FP16 and BF16 results are computed in FP32 under another name, and rounded; constants of these types are cast.

    Args:
        outputs: values of the main graph that become the only outputs; None for the model's own.
        constants: other values, of the same shape, of initializers and results of nodes Constant of the main graph.
        attributes: node of the main graph, attribute, its other value; None leaves it out.
    """
    reduced = {name: _PRECISIONS[info.dtype] for name, info in model.tensors.items() if info.dtype in _PRECISIONS}
    if any(node.has_subgraph for node in model.nodes):
        reduced = {}  # a branch reads what is outside it under its own name, in its own type
    raw, half = new_suffix(model, "raw"), new_suffix(model, "half")
    proto, nodes = _without_nodes(model, bank, outputs)
    graph, others = proto.graph, dict[str, onnx.TensorProto]()
    for name, array in (constants or {}).items():
        code = _FLOAT if name in reduced else model.initializers[name].proto.data_type
        values = np.asarray(array, onnx.helper.tensor_dtype_to_np_dtype(code))
        others[name] = onnx.numpy_helper.from_array(values, name)

    def add_rounding(source: str, result: str, precision: Precision) -> None:
        graph.node.append(cast_node(source, source + half, precision))
        graph.node.append(cast_node(source + half, result, Precision.FP32, source + half + raw))

    for constant in graph.initializer:
        if constant.name in others:
            constant.CopyFrom(others[constant.name])
        elif constant.name in reduced:
            graph.node.append(cast_node(constant.name + half, constant.name, Precision.FP32, constant.name + half))
            constant.name += half
    fed = [value for value in graph.input if value.name not in model.initializers]
    del graph.input[:]
    graph.input.extend(fed)
    renamed = {value.name: value.name + raw for value in fed if value.name in reduced}
    for name, result in renamed.items():
        add_rounding(name, result, reduced[name])
    for node in nodes:
        results = [name for name in node.outputs if name in reduced]
        inputs = [renamed.get(name, name) for name in node.inputs]
        outs = [name + raw if name in reduced else name for name in node.outputs]
        copy = rewrite.add_node(graph, node, inputs, outs)
        for attribute in copy.attribute if reduced else ():
            if results and attribute.name in _TYPE_ATTRIBUTES and attribute.i in _REDUCED_CODES:
                attribute.i = _FLOAT
            if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in _REDUCED_CODES:
                wide = onnx.numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(wide))
        if node.outputs[0] in others:  # a Constant
            del copy.attribute[:]
            copy.attribute.append(onnx.helper.make_attribute("value", others[node.outputs[0]]))
        for _, changed, setting in (each for each in attributes if each[0] == node.name):
            rest = [attribute for attribute in copy.attribute if attribute.name != changed]
            rest += [] if setting is None else [onnx.helper.make_attribute(changed, setting)]
            del copy.attribute[:]
            copy.attribute.extend(rest)
        for name in results:
            add_rounding(name + raw, name, reduced[name])
    for value in (*graph.input, *graph.output):
        if value.name in reduced:
            value.type.tensor_type.elem_type = _FLOAT
    rewrite.declare_rounded_outputs(graph, model)
    return write_bytes(path, [proto.SerializeToString(deterministic=True)])
