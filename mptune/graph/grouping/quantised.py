"""Quantised parts: what stands between DequantizeLinear and QuantizeLinear, which engines run in INT8.

Runtimes fuse a quantised operator with the DequantizeLinear nodes before it and the QuantizeLinear after it, and a Cast
between them keeps them from doing so (TensorRT, "Working with Quantized Types", explicit quantization). So these nodes
stay as they are under any plan.
"""

from __future__ import annotations

from mptune.graph.grouping.layers import CONVOLUTIONS, find_layer
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.grouping.op_kinds import ANCHOR_KINDS, DATA_MOVEMENT
from mptune.graph.loading.model import Node
from mptune.graph.loading.tensors import STANDARD_DOMAINS
from mptune.graph.op_rules import casts_integers, node_rule

QUANTISED = "quantised"
"""Kind of pattern and of group."""

KEPT_QUANTISED = "quantised: engines run it in INT8, and a Cast beside it would keep them from fusing it"

_DOMAINS = STANDARD_DOMAINS | {"com.microsoft"}
_QUANTISED_PRODUCTS = CONVOLUTIONS | {"MatMul", "Gemm"}
INTEGER_PRODUCTS = frozenset({"MatMulInteger", "ConvInteger"})
_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool"})


def find_quantised(look: Lookup) -> tuple[tuple[int, frozenset[int]], ...]:
    """The quantised parts of a model: the node that names each, and the indices of its nodes.

    A part holds products whose both operands are dequantised, with the bias, batch norm and activation that are fused
    onto them, and every other node that computes from dequantised values alone and whose result is quantised again:
    directly, or through further nodes that only move, pool or combine values element by element. Where activations are
    quantised as they come (dynamic quantisation), what makes FP32 of a product's INT32 sums is a part: the Cast, the
    product with the scale, and the scale's own. The sums are past FP16's range before the scale.
    """
    search = _Quantised(look)
    return search.parts() if search.has_any else ()


def _is(node: Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and node.domain in _DOMAINS


class _Quantised:
    """The nodes that belong to quantised parts."""

    def __init__(self, look: Lookup) -> None:
        self._look = look
        self._nodes = look.model.nodes
        self._rescaled = {index for node in self._nodes for index in self._rescaling(node)}
        self.has_any = bool(self._rescaled) or any(_is(node, "DequantizeLinear") for node in self._nodes)
        self._cores = {n.index for n in self._nodes if self.has_any and self._is_core(n)}
        self._fed: set[int] = set()
        for node in self._nodes if self.has_any else ():
            if self._is_fed(node):
                self._fed.add(node.index)

    def parts(self) -> tuple[tuple[int, frozenset[int]], ...]:
        """See ``find_quantised``."""
        kept = set(self._rescaled)
        for node in reversed(self._nodes):
            if node.index in self._cores or (node.index in self._fed and self._is_quantised_again(node, kept)):
                kept.add(node.index)
        for index in sorted(self._cores):
            layer = find_layer(self._look, self._nodes[index], (), {})
            kept |= layer.nodes if layer is not None else frozenset()
        parts: dict[int, set[int]] = {}
        part_of: dict[int, int] = {}
        for index in sorted(kept):
            before = {part_of[p] for i in self._nodes[index].inputs if (p := self._producer_index(i)) in part_of}
            part = min(before, default=index)
            members = parts.setdefault(part, set())
            members.add(index)
            for other in before - {part}:
                members |= parts.pop(other)
            part_of.update(dict.fromkeys(members, part))
        return tuple(
            (min(members & self._cores, default=min(members)), frozenset(members)) for members in parts.values()
        )

    def _producer_index(self, tensor: str) -> int:
        """The node that computes a value, static or not; -1 where none does."""
        return self._look.model.producer.get(self._look.root(tensor), -1)

    def _is_dequantised(self, tensor: str) -> bool:
        """Whether a value, a constant weight or not, comes out of DequantizeLinear, maybe through views."""
        while (index := self._producer_index(tensor)) >= 0:
            node = self._nodes[index]
            if _is(node, "DequantizeLinear"):
                return True
            if node.op_type not in DATA_MOVEMENT or not node.is_standard:
                return False
            tensor = node.inputs[0]
        return False

    def _is_core(self, node: Node) -> bool:
        return (
            node.op_type in _QUANTISED_PRODUCTS
            and node.is_standard
            and bool(self._look.varying(node))
            and all(self._is_dequantised(operand) for operand in node.inputs[:2])
        )

    def _rescaling(self, node: Node) -> set[int]:
        """The nodes that make FP32 of the sums of an integer product; none where the node is no Cast of such sums."""
        sums = self._producer_index(node.inputs[0]) if casts_integers(self._look.model, node) else -1
        if sums < 0 or self._nodes[sums].op_type not in INTEGER_PRODUCTS or not self._nodes[sums].is_standard:
            return set()
        products = [r for r in self._look.readers(node.outputs[0]) if r.op_type == "Mul" and r.is_standard]
        scales = {self._producer_index(operand) for product in products for operand in product.inputs}
        of_scales = {i for i in scales if i >= 0 and self._nodes[i].op_type == "Mul" and self._reads_dynamic_scale(i)}
        return {node.index, *(product.index for product in products), *of_scales}

    def _reads_dynamic_scale(self, index: int) -> bool:
        makers = (self._producer_index(operand) for operand in self._nodes[index].inputs)
        return any(_is(self._nodes[maker], "DynamicQuantizeLinear") for maker in makers if maker >= 0)

    def _is_fed(self, node: Node) -> bool:
        """Whether a node computes from dequantised values alone, constants aside."""
        if not node.is_standard or node.op_type == "Constant" or node.has_subgraph:
            return False
        values = [i for i in self._look.varying(node) if self._look.model.info(i).is_float32]
        joins = node.op_type in _POOLS or node.op_type not in ANCHOR_KINDS
        if not values or not all(
            self._is_dequantised(i) or (joins and self._producer_index(i) in self._fed | self._cores) for i in values
        ):
            return False
        rule = node_rule(self._look.model, node)
        return bool(rule.inputs and rule.outputs)

    def _is_quantised_again(self, node: Node, kept: set[int]) -> bool:
        for tensor in node.outputs:
            for reader in self._look.readers(tensor) if tensor else ():
                if reader.index in kept:
                    return True
                if _is(reader, "QuantizeLinear") and self._look.root(reader.inputs[0]) == self._look.root(tensor):
                    return True
        return False
