"""Products that ONNX Runtime computes together with their scales: nothing is rounded in between.

``MatMul(q, k) * 0.125`` is one product with a factor in it, and so are scales in front of it, and several in a row
(``onnxruntime/core/optimizer/matmul_scale_fusion.cc``). Measured on an H200 (a flow network, groups alone in FP16, 256
rows): the errors of two correlations were emulated 1.21 and 1.17 times too large with those roundings, without them at
0.94 and 1.00 of the measured ones, and those of four attention cores within 1.2 % where they had been within 2.2 %.
"""

from __future__ import annotations

from collections.abc import Sequence

from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.loading.model import Model, Node


def merged_with_scales(model: Model, groups: Sequence[LayerGroup]) -> frozenset[str]:
    """The names of nodes whose result is only an intermediate one of a product with its scales.

    Those of another group than their reader are not among them: a plan may put a Cast between the two.
    """
    return _Merging(model, groups).found()


class _Merging:
    def __init__(self, model: Model, groups: Sequence[LayerGroup]) -> None:
        self._model = model
        self._look = Lookup(model)
        self._home = {name: group.id for group in groups for name in group.nodes}

    def found(self) -> frozenset[str]:
        products: set[str] = set()  # and the scales behind them
        ahead: set[str] = set()  # scales in front of products
        merged: set[str] = set()
        for node in self._model.nodes:
            if node.name in products or _is_product(node):
                reader = self._reader(node)
                if reader is not None and self._scaled(reader) == node.outputs[0]:
                    products.add(reader.name)
                    merged.add(node.name)
        for node in reversed(self._model.nodes):
            if node.name not in products and self._scaled(node):
                reader = self._reader(node)
                if reader is not None and (_is_product(reader) or reader.name in ahead):
                    ahead.add(node.name)
                    merged.add(node.name)
        return frozenset(merged)

    def _reader(self, node: Node) -> Node | None:
        """The one node of the same group that reads the result, where nothing else does."""
        (out,) = node.outputs
        reader = self._look.only_reader(node)
        if reader is None or self._model.consumers[out] != (reader.index,) or not self._model.info(out).is_float32:
            return None
        together = node.name in self._home and self._home.get(reader.name) == self._home[node.name]
        return reader if together and reader.inputs.count(out) == 1 else None

    def _scaled(self, node: Node) -> str | None:
        """What a node multiplies by, or divides by, one constant number."""
        if not node.is_standard or node.op_type not in ("Mul", "Div"):
            return None
        for value, scale in (node.inputs, node.inputs[::-1])[: 1 if node.op_type == "Div" else 2]:
            constant, shape = self._model.initializers.get(scale), self._model.info(value).shape
            if constant is None or not self._look.is_scalar(scale) or not shape or value in self._model.initializers:
                continue
            if len(constant.shape) <= len(shape):
                return value
        return None


def _is_product(node: Node) -> bool:
    return node.is_standard and node.op_type == "MatMul"
