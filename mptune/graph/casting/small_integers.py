"""Values that no rounding changes: small whole numbers, such as the masks that an exporter writes out node by node.

FP16 holds every whole number up to 2,048, BF16 up to 256. A window mask of a Swin-T is built of region numbers by
ScatterND, Slice and Sub, and ends as 0 or -100: none of its values is rounded in either type, whatever the plan says.
"""

from __future__ import annotations

import numpy as np

from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import fill_value

LIMIT = 256
"""Every whole number up to this is a value of FP16 and of BF16."""

_MOST_ELEMENTS = 1 << 16
"""Constants of more elements are weights: none is looked at."""

_MOVES = DATA_MOVEMENT - {"Cast", "Dropout"} | {
    *("Concat", "Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "Where", "Pad", "Tile"),
    *("Expand", "Split", "Relu", "Neg", "Abs", "Max", "Min"),
}
"""Operators whose every output element is one of their input elements, but for its sign, or zero."""

_REDUCES = frozenset({"ScatterND", "ScatterElements"})
"""Of these, those that may add what they write to what is there."""


def small_integers(model: Model) -> dict[str, int]:
    """The float values that are whole numbers of at most ``LIMIT`` for any input -> bound of their magnitude."""
    bounds: dict[str, int] = {}
    for name, constant in model.initializers.items():
        if model.info(name).is_float32 and not constant.overridable and np.prod(constant.shape) <= _MOST_ELEMENTS:
            _keep(bounds, name, _bound_of(constant.numpy()))
    for node in model.nodes:
        if node.is_standard and not node.has_subgraph:
            bound = _bound(model, node, bounds)
            for name in node.outputs if bound is not None else ():
                if name and model.info(name).is_float32:
                    _keep(bounds, name, bound)
    return bounds


def _keep(bounds: dict[str, int], name: str, bound: int | None) -> None:
    if bound is not None and bound <= LIMIT:
        bounds[name] = bound


def _bound_of(values: np.ndarray) -> int | None:
    """The largest magnitude of whole numbers; None where there is another number among them."""
    if not np.isfinite(values).all() or (values != np.rint(values)).any():
        return None
    return int(np.abs(values).max(initial=0.0))


def _bound(model: Model, node: Node, bound_of: dict[str, int]) -> int | None:
    """The bound of a node's float outputs; None where they may be other numbers."""
    if node.op_type == "ConstantOfShape":
        return _bound_of(fill_value(node.proto))
    if node.op_type == "Cast":
        return 1 if model.info(node.inputs[0]).dtype == "bool" else bound_of.get(node.inputs[0])
    bounds = [bound_of.get(name) for name in node.inputs if name and model.info(name).is_float32]
    input_bounds = [bound for bound in bounds if bound is not None]
    if not input_bounds or len(input_bounds) < len(bounds):
        return None
    if node.op_type in _MOVES:
        adds = node.op_type in _REDUCES and any(a.name == "reduction" for a in node.proto.attribute)
        return None if adds else max(input_bounds)
    if node.op_type in ("Add", "Sub"):
        return sum(input_bounds)
    if node.op_type == "Mul":
        return int(np.prod(input_bounds))
    return None
