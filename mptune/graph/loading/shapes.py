"""Concrete shapes of every value without running the model, and which output columns share one unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.shape_inference

from mptune.graph.loading.inference import INLINE_LIMIT, declaration, without_weights
from mptune.graph.loading.model import Model, Node, output_types
from mptune.graph.loading.tensors import TensorInfo, fixed_shape, type_of
from mptune.graph.ops import ALIASES, MOVEMENT, RESHAPES, SOFTMAX

ASSUMED_SIZE = 128
"""Of a symbolic dimension that is not the batch: a sequence, a height, a width. A power of two passes most networks."""


@dataclass(frozen=True)
class StaticShapes:
    """What was found.

    Attributes:
        assumed: symbolic dimension -> the size that it was given.
        unknown: how many computed FP32 values have no concrete shape.
    """

    shapes: Mapping[str, tuple[int, ...]]
    assumed: Mapping[str, int]
    unknown: int


def static_shapes(model: Model, batch: int = 1, given: Mapping[str, tuple[int, ...]] | None = None) -> StaticShapes:
    """Infer the shape of every value with symbolic dimensions of the inputs at assumed sizes.

    Args:
        batch: size of a symbolic dimension 0, and of every dimension of the same name.
        given: shapes of inputs, by name: nothing is assumed of these.
    """
    assumed = {
        dim: size
        for info in model.inputs
        for dim, size in zip(info.shape or (), (given or {}).get(info.name, ()), strict=False)
        if isinstance(dim, str)
    }
    inputs = {
        info.name: (given or {}).get(info.name) or _concrete(info, model, batch, assumed) for info in model.inputs
    }
    shapes = _inferred(model, inputs, assumed)
    stated = {info.name: shape for info in model.tensors.values() if (shape := fixed_shape(info.shape)) is not None}
    shapes = {**stated, **shapes}
    computed = [out for node in model.nodes for out in node.outputs if out and model.info(out).is_float32]
    if any(name not in shapes for name in computed):
        _Walk(model, shapes).run()
    return StaticShapes(shapes, assumed, sum(name not in shapes for name in computed))


def _concrete(info: TensorInfo, model: Model, batch: int, assumed: dict[str, int]) -> tuple[int, ...] | None:
    """The shape of an input with sizes for its symbolic dimensions; None where its rank is unknown."""
    if info.shape is None:
        return None
    names = {dim for i in model.inputs for dim in i.shape or () if isinstance(dim, str)}
    batches = {name for name in names if "batch" in name.lower()}
    first = 0 if not batches else -1  # (time, batch, features): dimension 0 is the batch only where none says it is
    batches |= {i.shape[0] for i in model.inputs if i.shape and isinstance(i.shape[0], str)} if first == 0 else set()
    shape = []
    for axis, dim in enumerate(info.shape):
        if isinstance(dim, int):
            shape.append(dim)
            continue
        size = batch if axis == first or dim in batches else ASSUMED_SIZE
        shape.append(assumed.setdefault(dim or f"{info.name}[{axis}]", size))
    return tuple(shape)


def _inferred(
    model: Model, inputs: Mapping[str, tuple[int, ...] | None], assumed: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    proto = without_weights(model.proto, [node.proto for node in model.nodes], model.initializers)
    graph = proto.graph
    del graph.output[:]
    for value in graph.input:
        shape = inputs.get(value.name)
        if shape is not None and value.type.HasField("tensor_type"):
            code = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, code, shape))
    for info in model.runtime.values.values():
        dims = tuple(assumed.get(dim, dim) if isinstance(dim, str) else dim for dim in info.shape or ())
        graph.value_info.append(declaration(replace(info, shape=None if info.shape is None else dims)))
    values: list[onnx.ValueInfoProto] = []
    with suppress(Exception):  # onnx raises several kinds for sizes that do not fit: the assumed ones, not the user's
        values += onnx.shape_inference.infer_shapes(proto, strict_mode=False, data_prop=True).graph.value_info
    shapes = {**inputs, **{value.name: fixed_shape(type_of(value.type)[1]) for value in values}}
    return {name: shape for name, shape in shapes.items() if shape is not None}


class _Walk:
    """Node by node with the values of small integer tensors: what whole-graph inference does not compute."""

    def __init__(self, model: Model, shapes: dict[str, tuple[int, ...]]) -> None:
        self._model = model
        self._shapes = shapes
        self._values: dict[str, np.ndarray] = {
            name: constant.numpy()
            for name, constant in model.initializers.items()
            if constant.nbytes <= INLINE_LIMIT and constant.dtype not in ("string", "bfloat16")
        }
        self._opsets = list(model.proto.opset_import)

    def run(self) -> None:
        """Fill in the shapes that are missing."""
        for node in self._model.nodes:
            if not node.is_standard or node.has_subgraph or node.op_type == "Constant":
                continue
            try:
                if not self._compute(node) and any(out and out not in self._shapes for out in node.outputs):
                    self._infer(node)
            except Exception:  # an operator that cannot be evaluated alone leaves its shape unknown
                continue

    def _compute(self, node: Node) -> bool:
        """Compute a small value; False where it is not known from small values alone."""
        if node.op_type == "Shape" and node.inputs[0] in self._shapes:
            shape = self._shapes[node.inputs[0]]
            bounds = {a.name: a.i for a in node.proto.attribute}
            dims = shape[bounds.get("start", 0) : bounds.get("end", len(shape))]
            self._keep(node.outputs[0], np.array(dims, np.int64))
            return True
        if not node.inputs or not all(not i or i in self._values for i in node.inputs):
            return False
        if node.op_type in ("ConstantOfShape", "Expand"):
            shape = tuple(int(dim) for dim in self._values[node.inputs[-1]])
            if math.prod(shape) * 8 > INLINE_LIMIT:
                return False
        import onnx.reference  # Takes 0.1 s, and few models need it.

        evaluator = onnx.reference.ReferenceEvaluator(node.proto, opsets={o.domain: o.version for o in self._opsets})
        results = evaluator.run(None, {i: self._values[i] for i in node.inputs if i})
        for name, value in zip(node.outputs, results, strict=False):
            if name:
                self._keep(name, np.asarray(value))
        return True

    def _keep(self, name: str, value: np.ndarray) -> None:
        self._shapes[name] = tuple(value.shape)
        if value.nbytes <= INLINE_LIMIT:
            self._values[name] = value

    def _infer(self, node: Node) -> None:
        if node.op_type == "GroupNormalization" and node.inputs[0] in self._shapes:  # ONNX infers nothing for it
            self._shapes[node.outputs[0]] = self._shapes[node.inputs[0]]
            return
        values = {name: self._values[name] for name in node.inputs if name in self._values}
        unknown = dict.fromkeys(node.inputs)
        for name, proto in output_types(self._model, node, {**unknown, **self._shapes}, values).items():
            shape = fixed_shape(type_of(proto)[1])
            if shape is not None:
                self._shapes.setdefault(name, shape)


Units = Mapping[int, tuple[int, ...]]
"""Axis of an output -> the unit of each column along it; columns of one unit have the same number, 0 shares none."""

_HEADS = SOFTMAX | {"Sigmoid"}


def shared_units(model: Model, given: Mapping[str, tuple[int, ...]] | None) -> dict[str, Units]:
    """Output -> its units; only outputs that hold values of such an operator, and whose shapes can be inferred."""
    if not any(_heads(model, info.name) for info in model.outputs):
        return {}
    shapes = static_shapes(model, given=given).shapes
    units: dict[str, Units] = {}
    for info in model.outputs:
        heads = _heads(model, info.name)
        labels = _labels(model, info.name, heads, shapes) if heads else None
        if labels is not None:
            units[info.name] = {axis: _units(labels, axis, len(heads)) for axis in range(labels.ndim)}
    return units


def _moved(model: Model, value: str) -> tuple[str, tuple[str, ...]]:
    """The operator that computes a value, and which inputs it moves to it; none where it computes something else."""
    index = model.producer.get(value)
    if index is None or not model.nodes[index].is_standard:
        return "", ()
    node = model.nodes[index]
    moved = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return node.op_type, moved if node.op_type in MOVEMENT | {"Concat", "Gather"} else ()


def _heads(model: Model, output: str) -> tuple[str, ...]:
    """The results of such operators that are moved to an output."""
    left, heads = [output], dict[str, None]()
    seen = set(left)
    while left:
        value = left.pop()
        op_type, inputs = _moved(model, value)
        if op_type in _HEADS:
            heads[value] = None
        left += [name for name in inputs if name not in seen]
        seen.update(inputs)
    return tuple(sorted(heads))


def _labels(model: Model, value: str, heads: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray | None:
    """Of each element of a value the number of the head that it comes from, from 1; 0 for none. None: shape unknown."""
    shape = shapes.get(value)
    if shape is None:
        return None
    nothing = np.broadcast_to(np.int16(heads.index(value) + 1 if value in heads else 0), shape)
    op_type, inputs = _moved(model, value)
    if not inputs:
        return nothing
    labels = [_labels(model, name, heads, shapes) for name in inputs]
    if any(part is None for part in labels):
        return None
    moved = labels[0]
    if op_type not in RESHAPES | ALIASES | {"Cast"}:
        moved = _run(model, value, dict(zip(inputs, labels, strict=True)))
    return nothing if moved is None or moved.size != nothing.size else moved.reshape(shape)


def _run(model: Model, value: str, labels: Mapping[str, np.ndarray | None]) -> np.ndarray | None:
    """What an operator makes of the labels; None where one of its other inputs is not constant."""
    node = model.nodes[model.producer[value]]
    others = [name for name in node.inputs if name and name not in labels]
    if any(name not in model.initializers for name in others):
        return None
    import onnx.reference  # takes 0.1 s, and few models need it

    opsets = {entry.domain: entry.version for entry in model.proto.opset_import}
    feeds = {**labels, **{name: model.initializers[name].numpy() for name in others}}
    results: Any = onnx.reference.ReferenceEvaluator(node.proto, opsets=opsets).run(None, feeds)
    return np.asarray(results[node.outputs.index(value)])


def _units(labels: np.ndarray, axis: int, heads: int) -> tuple[int, ...]:
    """The unit of each column: that of its head. Heads that meet in a column, as levels of a pyramid do, share one."""
    rows = np.moveaxis(labels, axis, 0).reshape(labels.shape[axis], -1)
    present = np.array([(rows == head).any(axis=1) for head in range(heads + 1)])
    unit = np.arange(heads + 1)
    for column in np.unique(present[1:, ~present[0]], axis=1).T:
        together = unit[1:][column]
        unit[np.isin(unit, together)] = together.min(initial=heads)
    first = np.where(present[0], 0, present.argmax(axis=0))
    return tuple(unit[first].tolist())
