"""Masks among the values seen on data: values beyond FP16 that become infinite there and stay right."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.graph.grouping.attention import GLUE
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.hazards.constants import ANSWERS_INFINITY, comes_to_softmax
from mptune.graph.hazards.hazard import FP16_MAX
from mptune.graph.loading.model import Node

_CARRIES = GLUE | {"Add", "Sub", "Where", "Max", "Min", "Concat", "Slice", "Tile", "Gather", "Mul"}
"""What masks are assembled with. A Mul by a large constant makes one, and is not right itself: 0 * -inf is NaN."""


class MaskValues:
    """Which values beyond FP16 are masks, added or chosen on the way to a softmax.

    Args of ``__init__``: the model's values, and the largest finite magnitude of each that was observed.
    """

    def __init__(self, look: Lookup, ranges: Mapping[str, float]) -> None:
        self._look = look
        self._ranges = ranges
        self._known: dict[str, bool] = {}

    def may_be_infinite(self, node: Node, tensor: str) -> bool:
        """Whether a node that reads or computes ``tensor`` stays right where its values beyond FP16 are infinite."""
        if not self._is_mask(tensor):
            return False
        if node.op_type in ANSWERS_INFINITY:
            return True
        return node.op_type in _CARRIES - {"Mul"} and comes_to_softmax(self._look, node)

    def is_made_into_one(self, node: Node, tensor: str) -> bool:
        """Whether a product makes a mask of ``tensor``, or reads one: not right with infinities, as 0 * inf is NaN."""
        return node.op_type == "Mul" and self._is_mask(tensor) and comes_to_softmax(self._look, node)

    def _is_mask(self, tensor: str) -> bool:
        """Whether large values of ``tensor`` come from large constants or inputs, and not from what is computed."""
        if tensor not in self._known:
            self._known[tensor] = self._comes_from_masks(tensor)
        return self._known[tensor]

    def _comes_from_masks(self, tensor: str) -> bool:
        model = self._look.model
        index = model.producer.get(tensor)
        if tensor in model.initializers or index is None or model.nodes[index].op_type == "ConstantOfShape":
            return True
        node = model.nodes[index]
        if node.op_type not in _CARRIES or not node.is_standard:
            return False
        large = [i for i in node.inputs if i and self._is_large(i)]
        return bool(large) and all(self._is_mask(i) for i in large)

    def _is_large(self, tensor: str) -> bool:
        constant = self._look.model.initializers.get(tensor)
        if constant is None:
            return self._ranges.get(tensor, 0.0) > FP16_MAX
        if constant.dtype != "float" or constant.nbytes == 0:
            return False
        return bool(abs(constant.numpy()).max() > FP16_MAX)
