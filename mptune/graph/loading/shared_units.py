"""Which columns of the model's outputs come from one Softmax, LogSoftmax or Sigmoid, and so share a unit.

Seen through operators that only move values. A column that holds any other value, such as a box's side, has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes

Units = Mapping[int, tuple[int, ...]]
"""Axis of an output -> the unit of each column along it; columns of one unit have the same number, 0 shares none."""

_HEADS = frozenset({"Softmax", "LogSoftmax", "Sigmoid"})
_COPIES = frozenset({"Identity", "Cast", "Dropout"})
_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_MOVES: Mapping[str, int | None] = {
    **dict.fromkeys(("Transpose", "Split", "Slice", "Gather", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"), 1),
    "Concat": None,
}
"""Operator -> how many of its inputs are values that it moves; None: all."""


def has_shared_units(model: Model) -> bool:
    """Whether an output holds values of such an operator."""
    return any(_heads(model, info.name) for info in model.outputs)


def shared_units(model: Model, given: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Units]:
    """Output -> its units; only outputs that hold values of such an operator, and whose shapes can be inferred.

    Args:
        model: the model.
        given: shapes of its inputs, as ``static_shapes`` takes them.
    """
    if not has_shared_units(model):
        return {}
    shapes = static_shapes(model, given=given).shapes
    found: dict[str, Units] = {}
    for info in model.outputs:
        heads = _heads(model, info.name)
        labels = _labels(model, info.name, heads, shapes) if heads else None
        if labels is not None:
            found[info.name] = {axis: _units(labels, axis, len(heads)) for axis in range(labels.ndim)}
    return found


def _moved(model: Model, value: str) -> tuple[str, tuple[str, ...]]:
    """The operator that computes a value, and which inputs it moves to it; none where it computes something else."""
    index = model.producer.get(value)
    if index is None or not model.nodes[index].is_standard:
        return "", ()
    node = model.nodes[index]
    if node.op_type in _COPIES | _RESHAPES:
        return node.op_type, node.inputs[:1]
    return node.op_type, node.inputs[: _MOVES[node.op_type]] if node.op_type in _MOVES else ()


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
    if any(one is None for one in labels):
        return None
    moved = labels[0]
    if op_type in _MOVES:
        moved = _run(model, value, dict(zip(inputs, labels, strict=True)))
    return nothing if moved is None or moved.size != nothing.size else moved.reshape(shape)


def _run(model: Model, value: str, labels: Mapping[str, np.ndarray | None]) -> np.ndarray | None:
    """What an operator makes of the labels; None where one of its other inputs is not constant."""
    node = model.nodes[model.producer[value]]
    others = [name for name in node.inputs if name and name not in labels]
    if any(name not in model.initializers for name in others):
        return None
    import onnx.reference  # takes 0.1 s, and few models need it

    opsets = {one.domain: one.version for one in model.proto.opset_import}
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
