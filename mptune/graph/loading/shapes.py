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

from mptune.graph.loading.model import Model, Node, output_types
from mptune.graph.loading.reading import INLINE_LIMIT, without_weights
from mptune.graph.loading.tensors import declaration, fixed_shape, type_of
from mptune.graph.ops import ALIASES, MOVEMENT, RESHAPES, SOFTMAX

ASSUMED_SIZE = 128
"""Of a symbolic dimension that is not the batch: a sequence, a height, a width. A power of two passes most networks."""


@dataclass(frozen=True)
class StaticShapes:
    """Concrete shapes.

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
    inputs = dict(given or {})
    pairs = (
        (dim, size) for i in model.inputs for dim, size in zip(i.shape or (), inputs.get(i.name, ()), strict=False)
    )
    assumed = {dim: size for dim, size in pairs if isinstance(dim, str)}
    # (time, batch, features): dimension 0 is the batch only where none says it is.
    batches = {
        dim for info in model.inputs for dim in info.shape or () if isinstance(dim, str) and "batch" in dim.lower()
    }
    first = -1 if batches else 0
    batches = batches or {i.shape[0] for i in model.inputs if i.shape and isinstance(i.shape[0], str)}
    for info in model.inputs:
        if info.name not in inputs and info.shape is not None:
            sizes = [batch if axis == first or dim in batches else ASSUMED_SIZE for axis, dim in enumerate(info.shape)]
            inputs[info.name] = tuple(
                dim if isinstance(dim, int) else assumed.setdefault(dim or f"{info.name}[{axis}]", sizes[axis])
                for axis, dim in enumerate(info.shape)
            )
    # ONNX's inference of the whole graph at these sizes.
    proto = without_weights(model.proto, [node.proto for node in model.nodes], model.initializers)
    del proto.graph.output[:]
    for value in proto.graph.input:
        if value.name in inputs and value.type.HasField("tensor_type"):
            code = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, code, inputs[value.name]))
    for info in model.runtime.values.values():
        dims = tuple(assumed.get(dim, dim) if isinstance(dim, str) else dim for dim in info.shape or ())
        proto.graph.value_info.append(declaration(replace(info, shape=None if info.shape is None else dims)))
    values: list[onnx.ValueInfoProto] = []
    with suppress(Exception):  # onnx raises several kinds for sizes that do not fit: the assumed ones, not the user's
        values += onnx.shape_inference.infer_shapes(proto, strict_mode=False, data_prop=True).graph.value_info
    stated = [(info.name, fixed_shape(info.shape)) for info in model.tensors.values()]
    stated += [*inputs.items(), *((value.name, fixed_shape(type_of(value.type)[1])) for value in values)]
    shapes = {name: shape for name, shape in stated if shape is not None}
    computed = [out for node in model.nodes for out in node.outputs if out and model.info(out).is_float32]
    if any(name not in shapes for name in computed):
        _walk(model, shapes)
    return StaticShapes(shapes, assumed, sum(name not in shapes for name in computed))


def _walk(model: Model, shapes: dict[str, tuple[int, ...]]) -> None:
    """Fill in missing shapes, node by node with the values of small integers: whole-graph inference has none."""
    small = {
        name: constant.numpy()
        for name, constant in model.initializers.items()
        if constant.nbytes <= INLINE_LIMIT and constant.dtype not in ("string", "bfloat16")
    }
    for node in model.nodes:
        if not node.is_standard or node.has_subgraph or node.op_type == "Constant":
            continue
        feeds = {name: small[name] for name in node.inputs if name in small}
        with suppress(Exception):  # an operator that cannot be evaluated alone leaves its shape unknown
            # Its values, where it computes from small ones alone, or from a shape.
            results: Sequence[np.ndarray] = ()
            if node.op_type == "Shape" and node.inputs[0] in shapes:
                bounds = {a.name: a.i for a in node.proto.attribute}
                shape = shapes[node.inputs[0]]
                results = [np.array(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], np.int64)]
            elif node.inputs and all(not name or name in small for name in node.inputs):
                is_fill = node.op_type in ("ConstantOfShape", "Expand")
                if not is_fill or math.prod(map(int, small[node.inputs[-1]])) * 8 <= INLINE_LIMIT:
                    results = _evaluated(model, node, feeds)
            for name, value in zip(node.outputs, map(np.asarray, results), strict=False):
                if name:
                    shapes[name] = tuple(value.shape)
                    small.update({name: value} if value.nbytes <= INLINE_LIMIT else {})
            if all(not out or out in shapes for out in node.outputs):
                continue
            if node.op_type == "GroupNormalization" and node.inputs[0] in shapes:  # ONNX infers nothing for it
                shapes[node.outputs[0]] = shapes[node.inputs[0]]
                continue
            for name, proto in output_types(model, node, {**dict.fromkeys(node.inputs), **shapes}, feeds).items():
                inferred = fixed_shape(type_of(proto)[1])
                if inferred is not None:
                    shapes.setdefault(name, inferred)


def _evaluated(model: Model, node: Node, feeds: Mapping[str, np.ndarray | None]) -> Any:
    """What a node computes of these values."""
    import onnx.reference  # Takes 0.1 s, and few models need it.

    opsets = {entry.domain: entry.version for entry in model.proto.opset_import}
    return onnx.reference.ReferenceEvaluator(node.proto, opsets=opsets).run(None, dict(feeds))


Units = Mapping[int, tuple[int, ...]]
"""Axis of an output -> the unit of each column along it; columns of one unit have the same number, 0 shares none."""

_HEADS = SOFTMAX | {"Sigmoid"}


def shared_units(model: Model, given: Mapping[str, tuple[int, ...]] | None) -> dict[str, Units]:
    """Output -> its units; only of outputs that hold values of a softmax or a sigmoid, where their shapes are known.

    The unit of a column is that of its head, which is such an operator whose result is only moved to the output. Heads
    that meet in a column, as levels of a pyramid do, share one.
    """
    heads: dict[str, list[str]] = {}
    for info in model.outputs:
        reached = {info.name: None}
        waiting = [info.name]
        for value in waiting:  # grows
            waiting += [name for name in _moved(model, value)[1] if name not in reached]
            reached.update(dict.fromkeys(waiting))
        heads[info.name] = sorted(value for value in reached if _moved(model, value)[0] in _HEADS)
    shapes = static_shapes(model, given=given).shapes if any(heads.values()) else {}
    units: dict[str, Units] = {}
    for output, names in heads.items():
        labels = _labels(model, output, names, shapes) if names else None
        if labels is None:
            continue
        by_axis = {}
        for axis in range(labels.ndim):
            rows = np.moveaxis(labels, axis, 0).reshape(labels.shape[axis], -1)
            present = np.array([(rows == head).any(axis=1) for head in range(len(names) + 1)])
            unit = np.arange(len(names) + 1)
            for column in np.unique(present[1:, ~present[0]], axis=1).T:
                together = unit[1:][column]
                unit[np.isin(unit, together)] = together.min(initial=len(names))
            by_axis[axis] = tuple(unit[np.where(present[0], 0, present.argmax(axis=0))].tolist())
        units[output] = by_axis
    return units


def _moved(model: Model, value: str) -> tuple[str, tuple[str, ...]]:
    """The operator that computes a value, and which inputs it moves to it; none where it computes something else."""
    index = model.producer.get(value)
    if index is None or not model.nodes[index].is_standard:
        return "", ()
    node = model.nodes[index]
    moved = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return node.op_type, moved if node.op_type in MOVEMENT | {"Concat", "Gather"} else ()


def _labels(model: Model, value: str, heads: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray | None:
    """Of each element of a value the number of the head that it comes from, from 1; 0 for none. None: shape unknown."""
    shape = shapes.get(value)
    if shape is None:
        return None
    nothing = np.broadcast_to(np.int16(heads.index(value) + 1 if value in heads else 0), shape)
    op_type, inputs = _moved(model, value)
    labels = {name: _labels(model, name, heads, shapes) for name in inputs}
    if not inputs or any(part is None for part in labels.values()):
        return None if inputs else nothing
    moved = labels[inputs[0]]
    if op_type not in RESHAPES | ALIASES | {"Cast"}:  # the operator itself moves the labels
        node = model.nodes[model.producer[value]]
        others = [name for name in node.inputs if name and name not in labels]
        if any(name not in model.initializers for name in others):
            return nothing
        results = _evaluated(model, node, {**labels, **{name: model.initializers[name].numpy() for name in others}})
        moved = np.asarray(results[node.outputs.index(value)])
    return moved.reshape(shape) if moved is not None and moved.size == nothing.size else nothing
