"""The model with its FP32 values observed: the range of each on real data, reduced inside the graph.

It has a few small outputs per value instead of the value itself, so that all of them fit in memory at once. Largest,
smallest and sum of a value say all where the sum is finite. Where it is not, as with a mask of minus infinity, a second
model looks at each element of that value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.files import write_bytes
from mptune.graph.casting.value_types import new_suffix
from mptune.graph.folded import FoldedValues, LeftOut
from mptune.graph.hazards.hazard import FP16_MAX
from mptune.graph.hazards.masked_rows import softmax_rows
from mptune.graph.loading.model import Model
from mptune.graph.plan import DEFAULT_PRECISIONS
from mptune.graph.writing.probing.builder import ProbeBuilder
from mptune.graph.writing.probing.nodes import ProbeTap, add_probes
from mptune.graph.writing.weights import WeightBank, inline_tensor


@dataclass(frozen=True)
class Tap:
    """The names of the outputs that describe one value, scalars unless said otherwise.

    Attributes:
        shape: int64, one entry per dimension.
        lowest, highest: smallest and largest value; finite ones alone where there is ``non_finite``.
        total: sum of the values, which is finite only if all of them are; "" where there is ``non_finite``.
        non_finite: how many values are NaN or infinite, FP32; "" where elements are not looked at.
        masked: how many rows of a softmax have no element within FP16's range, FP32; "" where none is taken.
    """

    tensor: str
    shape: str
    lowest: str
    highest: str
    total: str = ""
    non_finite: str = ""
    masked: str = ""
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
    by_element: Collection[str] | None = None,
    folded: FoldedValues | None = None,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
) -> tuple[Tap, ...]:
    """Write the observing model to ``path`` (in the bank's folder, if there is one). Its only outputs are the taps.

    Args:
        bank: holds its weights; None writes them into the file.
        by_element: values to look at element by element, and at no others, nor at probes; None looks at all, as fast as
            it goes: with a third of the nodes.
        folded: values that are constants already, in place of the nodes that compute them.
    """
    tensors, added, rows = observed_tensors(model), onnx.GraphProto(), softmax_rows(model)
    build = ProbeBuilder(added, model.opset, new_suffix(model, "tap"))
    answers: dict[str, list[ProbeTap]] = {}
    if by_element is not None:
        taps = [_tap_by_element(build, tensor) for tensor in tensors if tensor in by_element]
    else:
        taps = [_tap(build, tensor, rows.get(tensor, ())) for tensor in tensors]
        for answer in add_probes(build, model, precisions):
            answers.setdefault(answer.key, []).append(answer)
    left_out = (folded or FoldedValues()).unread(model, {name for node in added.node for name in node.input})
    proto = without_outputs(model, bank, "observe", left_out)
    proto.graph.MergeFrom(added)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    return tuple(replace(tap, probes=tuple(answers.get(tap.tensor, ()))) for tap in taps)


def write_with_outputs(model: Model, bank: WeightBank | None, path: Path, tensors: Sequence[str]) -> None:
    """Write the model with these values, of the main graph, as its only outputs."""
    proto = without_outputs(model, bank, "watch")
    for name in tensors:
        code = onnx.TensorProto.DataType.Value(model.info(name).dtype.upper())
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, code, None))
    write_bytes(path, [proto.SerializeToString(deterministic=True)])


def without_outputs(
    model: Model,
    bank: WeightBank | None,
    name: str,
    left_out: LeftOut = LeftOut(),  # noqa: B008  it is frozen
) -> onnx.ModelProto:
    """The model as it is, but for its outputs and what is left out; large constants lie in the bank."""
    proto = onnx.ModelProto(ir_version=max(model.proto.ir_version, 4))
    proto.opset_import.extend(model.proto.opset_import)
    graph = proto.graph
    graph.name = name
    graph.input.extend(model.proto.graph.input)
    graph.sparse_initializer.extend(model.proto.graph.sparse_initializer)
    for node in model.nodes:
        if node.index not in left_out.nodes:
            graph.node.add().CopyFrom(node.proto)
            graph.node[-1].name = node.name
    graph.initializer.extend(left_out.values)
    stored = inline_tensor if bank is None else bank.tensor_or_inline
    for constant in model.initializers.values():
        if constant.node_index is None and constant.name not in left_out.unread:
            graph.initializer.append(stored(constant, constant.name))
    return proto


def _tap(build: ProbeBuilder, tensor: str, row: tuple[int, ...]) -> Tap:
    """Largest, smallest and sum of a value; ``row`` are the axes of a row, where a softmax is taken of the value."""
    lowest, highest, total = (build.give(build.reduce(op, tensor)) for op in ("ReduceMin", "ReduceMax", "ReduceSum"))
    masked = ""
    if row:
        below = build.add("Less", build.reduce("ReduceMax", tensor, row), build.constant(-FP16_MAX))
        masked = build.give(build.count(below))
    return Tap(tensor, build.give_shape(tensor), lowest, highest, total, masked=masked)


def _tap_by_element(build: ProbeBuilder, tensor: str) -> Tap:
    """Largest and smallest of the finite elements, and how many are not. NaN compares false with everything."""
    finite = build.add("Less", build.add("Abs", tensor), build.constant(np.inf))
    kept = build.add("Where", finite, tensor, build.constant(0.0))
    lowest, highest = (build.give(build.reduce(op, kept)) for op in ("ReduceMin", "ReduceMax"))
    non_finite = build.give(build.count(build.add("Not", finite)))
    return Tap(tensor, build.give_shape(tensor), lowest, highest, non_finite=non_finite)
