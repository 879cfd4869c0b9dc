"""The model with its FP32 values observed: the range of each on real data, reduced inside the graph.

It has three small outputs per value instead of the value itself, so that all of them fit in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.files import write_bytes
from mptune.graph.casting.value_types import new_suffix
from mptune.graph.hazards.hazard import FP16_MAX
from mptune.graph.hazards.masked_rows import softmax_rows
from mptune.graph.loading.model import Model
from mptune.graph.plan import DEFAULT_PRECISIONS
from mptune.graph.writing.probe_nodes import ProbeTap, add_probes
from mptune.graph.writing.weights import WeightBank, inline_tensor

_AXES_ARE_INPUT = 18
"""From this operator set on, the axes of ReduceMax are an input."""


@dataclass(frozen=True)
class Tap:
    """The names of the outputs that describe one value.

    Attributes:
        tensor: the value in the model.
        absmax: largest finite magnitude, a scalar.
        non_finite: how many values are NaN or infinite, an FP32 scalar.
        shape: int64, one entry per dimension.
        probes: what is asked of nodes, filed under this value.
        lowest, highest: smallest and largest finite value, scalars.
        masked: how many rows of a softmax have no element within FP16's range, an FP32 scalar; "" where none is taken.
    """

    tensor: str
    absmax: str
    non_finite: str
    shape: str
    masked: str = ""
    lowest: str = ""
    highest: str = ""
    probes: tuple[ProbeTap, ...] = ()


def observed_tensors(model: Model) -> tuple[str, ...]:
    """The FP32 values that are observed: graph inputs and everything computed, in topological order."""
    names = [i.name for i in model.inputs]
    names += [out for node in model.nodes for out in node.outputs if out and out not in model.initializers]
    return tuple(n for n in names if model.info(n).is_float32 and 0 not in (model.info(n).shape or ()))


def write_observing_model(
    model: Model,
    bank: WeightBank | None,
    path: Path,
    *,
    branches: bool = False,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
) -> tuple[Tap, ...]:
    """Write the observing model to ``path`` (in the bank's folder, if there is one). Its only outputs are the taps.

    Args:
        model: the model.
        bank: holds its weights; None writes them into the file.
        path: where to write.
        branches: look at single elements only where a value is not finite throughout, which a runtime must then decide
            as it runs: a third of the time on a CPU, but a GPU would wait at each value. The taps are the same.
        precisions: that groups may have: probes round to them.

    Raises:
        RunError: the file cannot be written, or the disk is full.
    """
    suffix = new_suffix(model, "tap")
    proto = _without_outputs(model, bank, "observe")
    graph = proto.graph
    infinity, zero = f"infinity{suffix}", f"zero{suffix}"
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(np.inf, np.float32), infinity))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.float32), zero))
    lowest, rows = f"lowest{suffix}", softmax_rows(model)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(-FP16_MAX, np.float32), lowest))
    taps = tuple(
        _tap(graph, model.opset, tensor, suffix, (infinity, zero, lowest), rows.get(tensor, ()), branches=branches)
        for tensor in observed_tensors(model)
    )
    probes: dict[str, list[ProbeTap]] = {}
    for probe in add_probes(graph, model, suffix, precisions):
        probes.setdefault(probe.key, []).append(probe)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    return tuple(replace(tap, probes=tuple(probes.get(tap.tensor, ()))) for tap in taps)


def write_with_outputs(model: Model, bank: WeightBank | None, path: Path, tensors: Sequence[str]) -> None:
    """Write the model with these values, of the main graph, as its only outputs.

    Raises:
        RunError: the file cannot be written, or the disk is full.
    """
    proto = _without_outputs(model, bank, "watch")
    for name in tensors:
        code = onnx.TensorProto.DataType.Value(model.info(name).dtype.upper())
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, code, None))
    write_bytes(path, [proto.SerializeToString(deterministic=True)])


def _without_outputs(model: Model, bank: WeightBank | None, name: str) -> onnx.ModelProto:
    """The model as it is, but for its outputs; large constants lie in the bank."""
    proto = onnx.ModelProto(ir_version=max(model.proto.ir_version, 4))
    proto.opset_import.extend(model.proto.opset_import)
    graph = proto.graph
    graph.name = name
    graph.input.extend(model.proto.graph.input)
    graph.sparse_initializer.extend(model.proto.graph.sparse_initializer)
    for node in model.nodes:
        graph.node.add().CopyFrom(node.proto)
        graph.node[-1].name = node.name
    stored = inline_tensor if bank is None else bank.tensor_or_inline
    for constant in model.initializers.values():
        if constant.node_index is None:
            graph.initializer.append(stored(constant, constant.name))
    return proto


def _tap(
    graph: onnx.GraphProto,
    opset: int,
    tensor: str,
    suffix: str,
    bounds: tuple[str, str, str],
    row: tuple[int, ...],
    *,
    branches: bool,
) -> Tap:
    """Append the nodes that reduce one value. NaN compares false with everything, so it counts as not finite.

    Args:
        graph: the observing graph.
        opset: its operator set.
        tensor: the value.
        suffix: of new names.
        bounds: names of the constants infinity, zero and FP16's lowest value.
        row: axes of a row, where a softmax is taken of the value; empty where none is.
        branches: look at single elements only where the sum of all is not finite.
    """
    infinity, zero, lowest = bounds

    def add(op: str, inputs: list[str], what: str, **attributes: Any) -> str:
        out = f"{tensor}.{what}{suffix}"
        graph.node.append(onnx.helper.make_node(op, inputs, [out], name=out, **attributes))
        return out

    highest, lowest_seen, count = (f"{tensor}.{what}{suffix}" for what in ("highest", "lowest", "count"))
    careful = _careful(tensor, infinity, zero, suffix)
    if branches:
        # A sum with NaN or an infinite value in it is not finite. One that overflows is not either, and no harm.
        total = add("Abs", [add("ReduceSum", [tensor], "sum", keepdims=0)], "size")
        quick = [
            onnx.helper.make_node("ReduceMax", [tensor], [f"{tensor}.max{suffix}"], keepdims=0),
            onnx.helper.make_node("ReduceMin", [tensor], [f"{tensor}.min{suffix}"], keepdims=0),
            onnx.helper.make_node("Identity", [zero], [f"{tensor}.none{suffix}"]),
        ]
        node = onnx.helper.make_node(
            "If",
            [add("Less", [total, infinity], "is_finite")],
            [highest, lowest_seen, count],
            name=f"{tensor}.if{suffix}",
            then_branch=_branch(quick, [node.output[0] for node in quick]),
            else_branch=_branch(careful, [node.output[0] for node in careful[-3:]]),
        )
        graph.node.append(node)
    else:
        graph.node.extend(careful)
        for source, result in zip(careful[-3:], (highest, lowest_seen, count), strict=True):
            graph.node.append(onnx.helper.make_node("Identity", [source.output[0]], [result], name=result))
    # Of no values at all the largest is -infinity: 0 then.
    absmax = add("Max", [highest, add("Neg", [lowest_seen], "negated"), zero], "absmax")
    shape = add("Shape", [tensor], "shape")
    masked = ""
    if row:
        if opset < _AXES_ARE_INPUT:
            peak = add("ReduceMax", [tensor], "peak", keepdims=0, axes=list(row))
        else:
            axes = f"{tensor}.axes{suffix}"
            graph.initializer.append(onnx.numpy_helper.from_array(np.array(row, np.int64), axes))
            peak = add("ReduceMax", [tensor, axes], "peak", keepdims=0)
        below = add("Cast", [add("Less", [peak, lowest], "below")], "rows", to=onnx.TensorProto.FLOAT)
        masked = add("ReduceSum", [below], "masked", keepdims=0)
        graph.output.append(onnx.helper.make_tensor_value_info(masked, onnx.TensorProto.FLOAT, []))
    for name, code, dims in (
        (absmax, onnx.TensorProto.FLOAT, []),
        (count, onnx.TensorProto.FLOAT, []),
        (lowest_seen, onnx.TensorProto.FLOAT, []),
        (highest, onnx.TensorProto.FLOAT, []),
        (shape, onnx.TensorProto.INT64, [None]),
    ):
        graph.output.append(onnx.helper.make_tensor_value_info(name, code, dims))
    return Tap(tensor, absmax, count, shape, masked, lowest_seen, highest)


def _careful(tensor: str, infinity: str, zero: str, suffix: str) -> list[onnx.NodeProto]:
    """The nodes that look at each element; the last three give largest and smallest finite value, and how many are not.

    The names of their results are new in the graph, and in a branch of it.
    """
    made: list[onnx.NodeProto] = []

    def add(op: str, inputs: list[str], what: str, **attributes: Any) -> str:
        out = f"{tensor}.{what}{suffix}"
        made.append(onnx.helper.make_node(op, inputs, [out], name=out, **attributes))
        return out

    finite = add("Less", [add("Abs", [tensor], "abs"), infinity], "finite")
    kept = add("Where", [finite, tensor, zero], "kept")
    ones = add("Cast", [add("Not", [finite], "not_finite")], "ones", to=onnx.TensorProto.FLOAT)
    add("ReduceMax", [kept], "largest", keepdims=0)
    add("ReduceMin", [kept], "smallest", keepdims=0)
    add("ReduceSum", [ones], "infinite", keepdims=0)
    return made


def _branch(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> onnx.GraphProto:
    infos = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in outputs]
    return onnx.helper.make_graph(list(nodes), "branch", [], infos)
