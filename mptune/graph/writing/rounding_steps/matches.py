"""Nodes that ONNX Runtime's CUDA provider computes together with others: products with scales, GELUs, SiLUs."""

from __future__ import annotations

import math

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.loading.model import Node

_NEARLY = 1e-3
"""Relative difference of a constant that was written with few digits, or in FP16."""


def divisions_of_gelus(grouped: GroupedModel, look: Lookup) -> frozenset[str]:
    """The names of the divisions by the root of 2 that begin a GELU: ``x / sqrt(2)``, its Erf, and that plus one.

    All are of one group: a plan may put a Cast between groups.
    """
    divisions: set[str] = set()
    for erf in grouped.model.nodes:
        if not erf.is_standard or erf.op_type != "Erf":
            continue
        division, after = look.producer(erf.inputs[0]), look.only_reader(erf)
        if division is None or after is None or look.only_reader(division) is not erf:
            continue
        if len(division.inputs) != 2 or division.inputs[1] not in grouped.model.initializers:
            continue
        nodes = (division, erf, after)
        if [node.op_type for node in nodes] != ["Div", "Erf", "Add"] or not all(n.is_standard for n in nodes):
            continue
        is_gelu = _is(look, division.inputs[1], math.sqrt(2.0)) and _is(look, look.other(after, erf.outputs[0]), 1.0)
        if is_gelu and grouped.in_one_group(nodes):
            divisions.add(division.name)
    return frozenset(divisions)


def sigmoids_of_silus(grouped: GroupedModel, look: Lookup) -> frozenset[str]:
    """The names of the sigmoids that are multiplied by their own input, or by what is scaled to it: QuickGelu.

    All are of one group: a plan may put a Cast between groups.
    """
    sigmoids: set[str] = set()
    for sigmoid in grouped.model.nodes:
        if not sigmoid.is_standard or sigmoid.op_type != "Sigmoid":
            continue
        product, scale = look.only_reader(sigmoid), look.producer(sigmoid.inputs[0])
        if product is None or not product.is_standard or product.op_type != "Mul":
            continue
        other, nodes = look.other(product, sigmoid.outputs[0]), [sigmoid, product]
        if other != sigmoid.inputs[0]:
            if scale is None or not scale.is_standard or scale.op_type != "Mul" or other not in scale.inputs:
                continue
            if look.only_reader(scale) is not sigmoid or look.number(look.other(scale, other)) is None:
                continue
            nodes.append(scale)
        if grouped.in_one_group(nodes):
            sigmoids.add(sigmoid.name)
    return frozenset(sigmoids)


def _is(look: Lookup, constant: str, value: float) -> bool:
    number = look.number(constant)
    return number is not None and math.isclose(number, value, rel_tol=_NEARLY)


def merged_with_scales(grouped: GroupedModel) -> frozenset[str]:
    """The names of nodes whose result is only an intermediate one of a product with its scales.

    Those of another group than their reader are not among them: a plan may put a Cast between the two.
    """
    return _Merging(grouped).found()


class _Merging:
    def __init__(self, grouped: GroupedModel) -> None:
        self._grouped = grouped
        self._model = grouped.model
        self._look = Lookup(grouped.model)

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
        return reader if self._grouped.in_one_group((node, reader)) and reader.inputs.count(out) == 1 else None

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
