"""The model with its FP32 values observed: the range of each on real data, reduced inside the graph.

It has a few small outputs per value instead of the value itself, so that all of them fit in memory at once. Largest,
smallest and sum of a value say all where the sum is finite. Where it is not, as with a mask of minus infinity, a second
model looks at each element of that value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from mptune.graph.writing.probing.nodes import ProbeTap, add_probes
from mptune.graph.writing.weights import WeightBank, inline_tensor

_AXES_ARE_INPUT = 18
"""From this operator set on, the axes of ReduceMax are an input."""


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
    suffix, tensors, added = new_suffix(model, "tap"), observed_tensors(model), onnx.GraphProto()
    build, rows = _Taps(added, model.opset, suffix), softmax_rows(model)
    answers: dict[str, list[ProbeTap]] = {}
    if by_element is not None:
        taps = [build.by_element(tensor) for tensor in tensors if tensor in by_element]
    else:
        taps = [build.tap(tensor, rows.get(tensor, ())) for tensor in tensors]
        for answer in add_probes(added, model, suffix, precisions):
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


class _Taps:
    """Appends the nodes that reduce values, and their outputs."""

    def __init__(self, graph: onnx.GraphProto, opset: int, suffix: str) -> None:
        self._graph = graph
        self._opset = opset
        self._suffix = suffix
        self._constants: set[str] = set()

    def tap(self, tensor: str, row: tuple[int, ...]) -> Tap:
        """Largest, smallest and sum of a value.

        Args:
            row: axes of a row, where a softmax is taken of the value; empty where none is.
        """
        return Tap(
            tensor,
            self._shape(tensor),
            lowest=self._result(self._add(tensor, "ReduceMin", [tensor], "lowest", keepdims=0)),
            highest=self._result(self._add(tensor, "ReduceMax", [tensor], "highest", keepdims=0)),
            total=self._result(self._add(tensor, "ReduceSum", [tensor], "total", keepdims=0)),
            masked=self._masked(tensor, row) if row else "",
        )

    def by_element(self, tensor: str) -> Tap:
        """The same of the finite elements, and how many are not. NaN compares false with everything."""
        infinity, zero = self._constant("infinity", np.inf), self._constant("zero", 0.0)
        finite = self._add(tensor, "Less", [self._add(tensor, "Abs", [tensor], "abs"), infinity], "finite")
        kept = self._add(tensor, "Where", [finite, tensor, zero], "kept")
        ones = self._add(
            tensor, "Cast", [self._add(tensor, "Not", [finite], "not_finite")], "ones", to=onnx.TensorProto.FLOAT
        )
        return Tap(
            tensor,
            self._shape(tensor),
            lowest=self._result(self._add(tensor, "ReduceMin", [kept], "lowest", keepdims=0)),
            highest=self._result(self._add(tensor, "ReduceMax", [kept], "highest", keepdims=0)),
            non_finite=self._result(self._add(tensor, "ReduceSum", [ones], "infinite", keepdims=0)),
        )

    def _masked(self, tensor: str, row: tuple[int, ...]) -> str:
        """How many rows hold nothing within FP16's range."""
        lowest = self._constant("lowest", -FP16_MAX)
        if self._opset < _AXES_ARE_INPUT:
            peak = self._add(tensor, "ReduceMax", [tensor], "peak", keepdims=0, axes=list(row))
        else:
            axes = f"{tensor}.axes{self._suffix}"
            self._graph.initializer.append(onnx.numpy_helper.from_array(np.array(row, np.int64), axes))
            peak = self._add(tensor, "ReduceMax", [tensor, axes], "peak", keepdims=0)
        below = self._add(
            tensor, "Cast", [self._add(tensor, "Less", [peak, lowest], "below")], "rows", to=onnx.TensorProto.FLOAT
        )
        return self._result(self._add(tensor, "ReduceSum", [below], "masked", keepdims=0))

    def _shape(self, tensor: str) -> str:
        name = self._add(tensor, "Shape", [tensor], "shape")
        self._graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [None]))
        return name

    def _result(self, name: str) -> str:
        self._graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []))
        return name

    def _add(self, tensor: str, op: str, inputs: list[str], what: str, **attributes: Any) -> str:
        """Append a node for a value; the name of its result, which is new."""
        name = f"{tensor}.{what}{self._suffix}"
        self._graph.node.append(onnx.helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def _constant(self, what: str, value: float) -> str:
        name = f"{what}{self._suffix}"
        if name not in self._constants:
            self._constants.add(name)
            self._graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.float32), name))
        return name
