"""FLOPs and bytes, counted by hand on small models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.loading.model import Model
from mptune.targets.costs import GroupCost, ShapeTable, group_costs, is_convolutional, node_flops, ungrouped_cost
from tests.graph.models import node
from tests.targets.conftest import Build


def flops(model: Model, op: str, shapes=None) -> tuple[float, bool]:
    found = next(n for n in model.nodes if n.op_type == op)
    return node_flops(found, ShapeTable(model, shapes or {}))


def together(model: Model, *nodes: str) -> GroupCost:
    group = LayerGroup("g", "g", "other", nodes or tuple(n.name for n in model.nodes), {})
    return group_costs(GroupedModel(model, (group,)), {})["g"]


class TestFlops:
    @pytest.mark.parametrize(
        ("op", "inputs", "out", "weights", "attributes", "expected"),
        [
            ("Conv", [[2, 3, 8, 8]], [2, 16, 4, 4], [[16, 3, 3, 3], [16]], {"strides": [2, 2], "pads": [1] * 4}, 13824),
            ("Conv", [[1, 4, 8, 8]], [1, 4, 6, 6], [[4, 1, 3, 3]], {"group": 4}, (4 * 6 * 6) * 9),
            ("ConvTranspose", [[1, 4, 5, 5]], [1, 6, 10, 10], [[4, 6, 2, 2]], {"strides": [2, 2]}, (4 * 5 * 5) * 24),
            ("MatMul", [[2, 3, 5, 7], [7, 11]], [2, 3, 5, 11], [], {}, 2 * 3 * 5 * 11 * 7),
            ("Gemm", [[7, 5], [7, 11]], [5, 11], [], {"transA": 1}, 5 * 11 * 7),
            ("Einsum", [[2, 3, 5], [2, 7, 5]], [2, 3, 7], [], {"equation": "bij, bkj -> bik"}, 2 * 3 * 5 * 7),
            ("Attention", [[1, 4, 10, 8], *[[1, 4, 20, 8]] * 2], [1, 4, 10, 8], [], {}, 2 * 4 * 10 * 20 * 8),
            ("LSTM", [[9, 2, 5]], [9, 1, 2, 6], [[1, 24, 5], [1, 24, 6]], {"hidden_size": 6}, 9 * 2 * 24 * (5 + 6)),
        ],
    )
    def test_products_count_two_for_each_multiply_add(
        self, build: Build, op: str, inputs, out, weights, attributes, expected: int
    ) -> None:
        given = {f"i{k}": shape for k, shape in enumerate(inputs)}
        constants = {f"w{k}": shape for k, shape in enumerate(weights)}
        made = node(op, [*given, *constants], "y", **attributes)
        model = build([made], given, {"y": out}, constants, opset=23 if op == "Attention" else 17)
        assert flops(model, op) == (2 * expected, True)

    @pytest.mark.parametrize(
        ("made", "out", "expected"),
        [
            (node("Relu", "x", "y"), [2, 8, 8], 128),
            (node("Softmax", ["x"], "y"), [2, 8, 8], 5 * 128),
            (node("ReduceMean", ["x"], "y", axes=[1, 2], keepdims=0), [2], 128),
            (node("GlobalAveragePool", ["x"], "y"), [2, 8, 1], 128),
            (node("MaxPool", ["x"], "y", kernel_shape=[3]), [2, 8, 6], 96 * 3),
        ],
        ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else None,
    )
    def test_the_rest(self, build: Build, made, out, expected: int) -> None:
        model = build([made], {"x": [2, 8, 8]}, {"y": out})
        assert flops(model, made.op_type) == (expected, False)


class TestTraffic:
    def test_only_the_rim_of_a_group_and_its_weights_count(self, build: Build) -> None:
        nodes = [
            node("MatMul", ["x", "w"], "h", "mm"),
            node("Add", ["h", "b"], "i", "bias"),
            node("Relu", ["i"], "y", "act"),
        ]
        model = build(nodes, {"x": [4, 8]}, {"y": [4, 16]}, {"w": [8, 16], "b": [16]})
        got = together(model)
        elements = 4 * 8 + 8 * 16 + 16 + 4 * 16
        assert (got.fp32_bytes, got.fp16_bytes) == (4 * elements, 2 * elements)
        assert (got.matrix_flops, got.vector_flops) == (2 * 4 * 16 * 8, 2 * 4 * 16)
        assert got.flops == got.matrix_flops + got.vector_flops
        assert got.matrix_elements == 64
        assert got.kernels == 1

    def test_views_are_free_and_looked_through(self, build: Build) -> None:
        nodes = [
            node("Relu", ["x"], "h", "a"),
            node("Reshape", ["h", "shape"], "i", "view"),
            node("Neg", ["i"], "y", "b"),
        ]
        model = build(nodes, {"x": [2, 5]}, {"y": [10]}, {"shape": np.array([10])})
        groups = tuple(LayerGroup(f"g{k}", "", "", (name,), {}) for k, name in enumerate(("a", "view", "b")))
        costs = group_costs(GroupedModel(model, groups), {})
        assert costs["g0"].fp32_bytes == 4 * (10 + 10)
        assert costs["g1"] == GroupCost()
        assert costs["g2"].fp32_bytes == 4 * (10 + 10)
        nodes = [node("Relu", ["x"], "h", "a"), node("Neg", ["h"], "i", "b"), node("Add", ["h", "i"], "y", "c")]
        model = build(nodes, {"x": [10]}, {"y": [10]})
        groups = (LayerGroup("g0", "", "", ("a", "b"), {}), LayerGroup("g1", "", "", ("c",), {}))
        costs = group_costs(GroupedModel(model, groups), {})
        assert costs["g0"].fp32_bytes == 4 * (10 + 10 + 10), "x in; h and i, which another group reads, out"
        assert costs["g1"].fp32_bytes == 4 * (10 + 10 + 10)
        flat = [node("Relu", ["x"], "h", "a"), node("Flatten", ["h"], "y", "view")]
        model = build(flat, {"x": [2, 5]}, {"y": [2, 5]})
        assert together(model, "a").fp32_bytes == 4 * (10 + 10), "an output is written by its producer"

    def test_a_lookup_reads_what_it_returns_and_one_tensor_is_read_once(self, build: Build) -> None:
        made = node("Gather", ["table", "ids"], "y", "look")
        model = build([made], {"ids": [3]}, {"y": [3, 8]}, {"table": [1000, 8]}, types={"ids": TensorProto.INT64})
        got = together(model)
        assert (got.fp32_bytes, got.fp16_bytes) == (4 * (24 + 24) + 8 * 3, 2 * (24 + 24) + 8 * 3)
        model = build([node("Mul", ["x", "x"], "y", "sq")], {"x": [10]}, {"y": [10]})
        assert together(model).fp32_bytes == 4 * (10 + 10)


def test_observed_shapes_win_and_what_is_unknown_counts_one(build: Build) -> None:
    nodes = [node("Relu", ["x"], "h"), node("Neg", ["h"], "y")]
    model = build(nodes, {"x": ["n", 4]}, {"y": ["n", 4]})
    assert ShapeTable(model, {})["h"] == (1, 4)
    assert ShapeTable(model, {"x": (6, 4)})["h"] == (6, 4)
    assert ShapeTable(model, {"x": (6, 4), "h": (5, 4)})["h"] == (5, 4)
    nodes = [node("Odd", ["x"], "h", "odd", domain="mine"), node("Relu", ["h"], "y", "act")]
    model = build(nodes, {"x": [30]}, {"y": None})
    assert ShapeTable(model, {}).elements("h") == ShapeTable(model, {}).elements("nothing of that name") == 1


def test_nodes_without_a_precision_are_counted_apart(build: Build) -> None:
    nodes = [node("Relu", ["x"], "h", "act"), node("Odd", ["h"], "y", "odd", domain="mine")]
    model = build(nodes, {"x": [30]}, {"y": [30]})
    groups = find_groups(model)
    assert [group.nodes for group in groups] == [("act",)]
    assert ungrouped_cost(GroupedModel(model, groups), {}).fp32_bytes == 4 * (30 + 30)


class TestConvolutional:
    @pytest.mark.parametrize(("columns", "expected"), [(17, True), (18, False)])
    @pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
    def test_more_than_a_tenth_is_a_good_part(self, build: Build, op: str, columns: int, expected: bool) -> None:
        # The convolution has 2 * 16 * 8 multiply-adds, the product 16 * 8 * columns.
        nodes = [node(op, ["x", "w"], "c"), node("MatMul", ["c", "m"], "y")]
        weights = {"w": [2, 2, 1], "m": [8, columns]}
        model = build(nodes, {"x": [8, 2, 8]}, {"y": [8, 2, columns]}, weights)
        assert is_convolutional(model, {}) is expected
