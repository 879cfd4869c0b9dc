"""FLOPs and bytes, counted by hand on small models."""

from __future__ import annotations

import numpy as np
import pytest

from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.loading.model import Model
from mptune.targets.costs import GroupCost, ShapeTable, group_costs, is_convolutional, node_flops, ungrouped_cost
from tests.targets.conftest import Build


def costs_of(model: Model, *groups: str) -> list[GroupCost]:
    """The cost of groups of nodes whose names have one letter, or of all nodes."""
    names = groups or [[node.name for node in model.nodes]]
    parts = tuple(LayerGroup(f"g{k}", "", "", tuple(nodes), {}) for k, nodes in enumerate(names))
    return list(group_costs(GroupedModel(model, parts), {}).values())


@pytest.mark.parametrize(
    ("shapes", "out", "node", "weights", "expected"),
    [
        ("2,3,8,8", "2,9,4,4", "Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)", {"w": (9, 3, 3, 3)}, 2 * 9 * 4 * 4 * 27),
        ("1,4,8,8", "1,4,6,6", "Conv<group=4>(x, w)", {"w": (4, 1, 3, 3)}, 4 * 6 * 6 * 9),
        ("1,4,5,5", "1,6,10,10", "ConvTranspose<strides=[2,2]>(x, w)", {"w": (4, 6, 2, 2)}, 4 * 5 * 5 * 24),
        ("2,3,5,7 7,11", "2,3,5,11", "MatMul(x, z)", {}, 2 * 3 * 5 * 11 * 7),
        ("7,5 7,11", "5,11", "Gemm<transA=1>(x, z)", {}, 5 * 11 * 7),
        ("2,3,5 2,7,5", "2,3,7", 'Einsum<equation="bij, bkj -> bik">(x, z)', {}, 2 * 3 * 5 * 7),
        ("1,4,10,8 1,4,20,8", "1,4,10,8", "Attention(x, z, z)", {"opset": 23}, 2 * 4 * 10 * 20 * 8),
        ("9,2,5", "9,1,2,6", "LSTM<hidden_size=6>(x, w, r)", {"w": (1, 24, 5), "r": (1, 24, 6)}, 9 * 2 * 24 * (5 + 6)),
    ],
)
def test_products_count_two_for_each_multiply_add(
    build: Build, shapes: str, out: str, node: str, weights, expected: int
) -> None:
    inputs = ", ".join(f"float[{shape}] {name}" for shape, name in zip(shapes.split(), "xz", strict=False))
    model = build(f"({inputs}) => (float[{out}] y) {{ y = {node} }}", **weights)
    assert node_flops(model.nodes[0], ShapeTable(model, {})) == (2 * expected, True)


@pytest.mark.parametrize(
    ("node", "out", "expected"),
    [
        ("Relu(x)", "2,8,8", 128),
        ("Softmax(x)", "2,8,8", 5 * 128),
        ("ReduceMean<axes=[1,2], keepdims=0>(x)", "2", 128),
        ("GlobalAveragePool(x)", "2,8,1", 128),
        ("MaxPool<kernel_shape=[3]>(x)", "2,8,6", 96 * 3),
    ],
)
def test_flops_of_the_rest(build: Build, node: str, out: str, expected: int) -> None:
    model = build(f"(float[2,8,8] x) => (float[{out}] y) {{ y = {node} }}")
    assert node_flops(model.nodes[0], ShapeTable(model, {})) == (expected, False)


def test_only_the_rim_of_a_group_and_its_weights_count(build: Build) -> None:
    graph = "(float[4,8] x) => (float[4,16] y) { h = MatMul(x, w) i = Add(h, b) y = Relu(i) }"
    (got,) = costs_of(build(graph, w=(8, 16), b=(16,)))
    elements = 4 * 8 + 8 * 16 + 16 + 4 * 16
    assert (got.fp32_bytes, got.fp16_bytes) == (4 * elements, 2 * elements)
    assert (got.matrix_flops, got.vector_flops) == (2 * 4 * 16 * 8, 2 * 4 * 16)
    assert (got.flops, got.matrix_elements, got.kernels) == (got.matrix_flops + got.vector_flops, 64, 1)


def test_views_are_free_and_looked_through(build: Build) -> None:
    graph = "(float[2,5] x) => (float[10] y) { [a] h = Relu(x) [v] i = Reshape(h, shape) [b] y = Neg(i) }"
    first, view, second = costs_of(build(graph, shape=np.array([10])), "a", "v", "b")
    assert (first.fp32_bytes, view, second.fp32_bytes) == (4 * (10 + 10), GroupCost(), 4 * (10 + 10))
    graph = "(float[10] x) => (float[10] y) { [a] h = Relu(x) [b] i = Neg(h) [c] y = Add(h, i) }"
    first, second = costs_of(build(graph), "ab", "c")
    assert first.fp32_bytes == 4 * (10 + 10 + 10), "x in; h and i, which another group reads, out"
    assert second.fp32_bytes == 4 * (10 + 10 + 10)
    (got,) = costs_of(build("(float[2,5] x) => (float[2,5] y) { [a] h = Relu(x) [v] y = Flatten(h) }"), "a")
    assert got.fp32_bytes == 4 * (10 + 10), "an output is written by its producer"


def test_a_lookup_reads_what_it_returns_and_one_tensor_is_read_once(build: Build) -> None:
    (got,) = costs_of(build("(int64[3] ids) => (float[3,8] y) { y = Gather(table, ids) }", table=(1000, 8)))
    assert (got.fp32_bytes, got.fp16_bytes) == (4 * (24 + 24) + 8 * 3, 2 * (24 + 24) + 8 * 3)
    (got,) = costs_of(build("(float[10] x) => (float[10] y) { y = Mul(x, x) }"))
    assert got.fp32_bytes == 4 * (10 + 10)


def test_observed_shapes_win_and_what_is_unknown_counts_one(build: Build) -> None:
    model = build("(float[n,4] x) => (float[n,4] y) { h = Relu(x) y = Neg(h) }")
    for observed, rows in (({}, 1), ({"x": (6, 4)}, 6), ({"x": (6, 4), "h": (5, 4)}, 5)):
        assert ShapeTable(model, observed)["h"] == (rows, 4)
    table = ShapeTable(build("(float[30] x) => (float y) { h = com.example.Odd(x) y = Relu(h) }"), {})
    assert table.elements("h") == table.elements("nothing of that name") == 1


def test_nodes_without_a_precision_are_counted_apart(build: Build) -> None:
    model = build("(float[30] x) => (float[30] y) { [act] h = Relu(x) [odd] y = com.example.Odd(h) }")
    groups = find_groups(model)
    assert [group.nodes for group in groups] == [("act",)]
    assert ungrouped_cost(GroupedModel(model, groups), {}).fp32_bytes == 4 * (30 + 30)


@pytest.mark.parametrize(("columns", "expected"), [(17, True), (18, False)])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_convolutions_are_a_good_part_from_a_tenth_on(build: Build, op: str, columns: int, expected: bool) -> None:
    # The convolution has 2 * 16 * 8 multiply-adds, the product 16 * 8 * columns.
    graph = f"(float[8,2,8] x) => (float[8,2,{columns}] y) {{ c = {op}(x, w) y = MatMul(c, m) }}"
    assert is_convolutional(build(graph, w=(2, 2, 1), m=(8, columns)), {}) is expected
