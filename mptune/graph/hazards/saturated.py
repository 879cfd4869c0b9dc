"""How large values are in a reduced precision, where constants beyond it are held as its largest finite value.

A mask of -1e9 reaches 1e9 on data in FP32, and 65504 where its group runs in FP16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.folded import comes_from_beyond, shape_computing
from mptune.graph.grouping.lookup import attribute
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.hazards.hazard import group_of
from mptune.graph.loading.model import Node
from mptune.graph.loading.tensors import fill_value
from mptune.graph.plan import LARGEST, Precision

_OVERFLOWS_AT: Mapping[Precision, float] = {
    Precision.FP16: (2 - 2**-11) * 2.0**15,
    Precision.BF16: (2 - 2**-8) * 2.0**127,
}
"""The smallest value that rounds to infinity: half a spacing above the largest finite one (IEEE 754-2008, 4.3.1)."""

SELECTS = DATA_MOVEMENT - {"Cast"} | {
    "Abs",
    "Clip",
    "Concat",
    "Gather",
    "GatherElements",
    "GatherND",
    "Max",
    "Min",
    "Neg",
    "Pad",
    "ReduceMax",
    "ReduceMin",
    "Relu",
    "ScatterElements",
    "ScatterND",
    "Trilu",
    "Where",
}
"""Operators whose results have no larger magnitude than the largest of their inputs."""
SUMS = frozenset({"Add", "Sub", "Sum"})
PRODUCTS = frozenset({"Mul"})
_MAX_DEPTH = 64
_NONE = frozenset[str]()


class SaturatedRanges:
    """The largest magnitudes that values have in a precision because constants beyond it are held in it."""

    def __init__(self, types: ValueTypes, ranges: Mapping[str, float], precision: Precision) -> None:
        self._types = types
        self._ranges = ranges
        self._precision = precision
        self._largest, self._overflows_at = LARGEST[precision], _OVERFLOWS_AT[precision]
        self._known: dict[str, tuple[float, frozenset[str]]] = {}

    def fits(self, tensor: str) -> bool:
        """Whether a value stays finite where the precision holds the constants that it comes from."""
        return self.bound(tensor) < self._overflows_at

    def bound(self, tensor: str) -> float:
        """A magnitude that the value does not exceed; infinite where it is not known."""
        return self._look_up(tensor, _MAX_DEPTH)[0]

    def sources(self, tensor: str) -> frozenset[str]:
        """The values beyond the precision that it comes from: constants, and what is folded into one."""
        return self._look_up(tensor, _MAX_DEPTH)[1]

    def _look_up(self, tensor: str, depth: int) -> tuple[float, frozenset[str]]:
        if tensor not in self._known:
            self._known[tensor] = self._found(tensor, depth)
        return self._known[tensor]

    def _found(self, tensor: str, depth: int) -> tuple[float, frozenset[str]]:
        model = self._types.model
        constant = model.initializers.get(tensor)
        if constant is not None:
            return (math.inf, _NONE) if constant.overridable else self._held(tensor, constant.numpy())
        observed = self._ranges.get(tensor, math.inf)
        index = model.producer.get(tensor)
        if observed <= self._largest or index is None or depth == 0:
            return observed, _NONE
        if index in shape_computing(model) and group_of(self._types, model.nodes[index]) is None:
            is_held = comes_from_beyond(model, tensor, self._precision)
            return (min(observed, self._largest), frozenset((tensor,))) if is_held else (observed, _NONE)
        bound, sources = self._computed(model.nodes[index], depth - 1)
        return (min(observed, bound), sources) if sources else (observed, _NONE)

    def _held(self, name: str, values: np.ndarray) -> tuple[float, frozenset[str]]:
        magnitudes = np.abs(values.astype(np.float64, copy=False))
        absmax = float(np.max(magnitudes, where=np.isfinite(magnitudes), initial=0.0))
        return min(self._largest, absmax), frozenset((name,)) if absmax > self._largest else _NONE

    def _computed(self, node: Node, depth: int) -> tuple[float, frozenset[str]]:
        """By what a node reads, where it runs in the precision."""
        if group_of(self._types, node) is None or not self._types.rules[node.index].outputs:
            return math.inf, _NONE
        if node.op_type == "ConstantOfShape":
            return self._held(node.outputs[0], fill_value(node.proto))
        followed = self._types.rules[node.index].inputs
        read = [self._look_up(node.inputs[slot], depth) for slot in followed]
        sources = frozenset[str]().union(*(values for _, values in read))
        bounds = [bound for bound, _ in read]
        padding = attribute(node, "value") if node.op_type == "Pad" else None
        if isinstance(padding, float):  # an input from operator set 11 on
            held, is_beyond = self._held(node.outputs[0], np.array(padding))
            bounds, sources = [*bounds, held], sources | is_beyond
        if node.op_type in SELECTS:
            return max(bounds, default=math.inf), sources
        if node.op_type in SUMS:
            return sum(bounds), sources
        if node.op_type in PRODUCTS:
            return 0.0 if 0.0 in bounds else math.prod(bounds), sources
        return math.inf, _NONE
