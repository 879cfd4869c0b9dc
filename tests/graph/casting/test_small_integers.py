"""Masks that are built node by node are whole numbers, which no plan rounds; other values may be anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.writing.emulate import LIMIT, Emulator, small_integers
from mptune.graph.writing.weights import WeightBank
from tests.graph.helpers import run

SIZE = 8
X = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)
CONSTANTS = {
    "w": np.random.default_rng(1).normal(size=(SIZE, SIZE)).astype(np.float32),
    "shape": np.array([SIZE]),
    "where": np.array([[0], [1], [2]]),
    "regions": np.array([1.0, 2.0, 3.0], np.float32),
    "row": np.array([1, SIZE]),
    "column": np.array([SIZE, 1]),
    "far": np.array(-100.0, np.float32),
    "near": np.array(0.0, np.float32),
    "third": np.array(1 / 3, np.float32),
    "many": np.array(LIMIT + 0.0, np.float32),
}
MASK = [
    helper.make_node("ConstantOfShape", ["shape"], ["empty"]),
    helper.make_node("ScatterND", ["empty", "where", "regions"], ["region"]),
    helper.make_node("Reshape", ["region", "row"], ["a"]),
    helper.make_node("Reshape", ["region", "column"], ["b"]),
    helper.make_node("Sub", ["a", "b"], ["apart"]),
    helper.make_node("Equal", ["apart", "near"], ["same"]),
    helper.make_node("Where", ["same", "near", "far"], ["mask"]),
    helper.make_node("MatMul", ["x", "w"], ["scores"]),
    helper.make_node("Add", ["scores", "mask"], ["masked"]),
    helper.make_node("Softmax", ["masked"], ["weights"]),
    helper.make_node("MatMul", ["weights", "w"], ["y"]),
]


def save(path: Path, nodes: list[onnx.NodeProto], outputs: tuple[str, ...] = ("y",)) -> Model:
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)
    read = {name for node in nodes for name in node.input}
    constants = [numpy_helper.from_array(value, name) for name, value in CONSTANTS.items() if name in read]
    found = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", [info], found, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return load_model(path)


def test_a_mask_of_regions_is_known_to_be_whole_numbers(tmp_path: Path) -> None:
    found = small_integers(save(tmp_path / "m.onnx", MASK))
    assert {name: found[name] for name in ("region", "a", "apart", "mask")} == {
        "region": 3,
        "a": 3,
        "apart": 6,
        "mask": 100,
    }
    assert found.keys().isdisjoint({"x", "w", "scores", "masked", "weights", "y"})


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("Add", ["far", "third"], {}),
        ("Mul", ["far", "far"], {}),
        ("Add", ["many", "regions"], {}),
        ("Div", ["far", "many"], {}),
        ("Where", ["cond", "far", "third"], {}),
        ("ScatterND", ["empty", "where", "regions"], {"reduction": "add"}),
        ("Add", ["x", "far"], {}),
    ],
)
def test_other_values_may_be_anything(
    tmp_path: Path, op_type: str, inputs: list[str], attributes: dict[str, str]
) -> None:
    before = [
        helper.make_node("ConstantOfShape", ["shape"], ["empty"]),
        helper.make_node("Greater", ["x", "near"], ["cond"]),
    ]
    nodes = [*before, helper.make_node(op_type, inputs, ["y"], **attributes)]
    assert "y" not in small_integers(save(tmp_path / "m.onnx", nodes))


def test_a_switched_emulation_leaves_the_mask_to_be_folded_and_computes_the_same(tmp_path: Path) -> None:
    model = save(tmp_path / "m.onnx", MASK)
    groups = find_groups(model)
    grouped, bank = GroupedModel(model, groups), WeightBank.write(model, tmp_path)
    switching = Emulator(grouped, bank)
    path = switching.write_switched(tmp_path / "switched.onnx", [g.id for g in groups], precisions=REDUCED)
    behind: set[str] = {name for of in switching.switches.values() for name in of.values()}
    for node in onnx.load(path, load_external_data=False).graph.node:
        if behind & set(node.input):
            behind |= set(node.output)
    assert behind.isdisjoint({"empty", "region", "a", "b", "apart", "mask"}), "no switch stands before the mask's end"
    for precision in REDUCED:
        plan = grouped.uniform(Precision.FP32).replace({g.id: precision for g in groups})
        expected = run(Emulator(grouped, bank).write(plan, tmp_path / f"{precision}.onnx"), {"x": X})["y"]
        on = switching.on(plan)
        switches = {name: np.array(name in on) for of in switching.switches.values() for name in of.values()}
        assert not np.array_equal(expected, X)
        np.testing.assert_allclose(run(path, {"x": X, **switches})["y"], expected, rtol=1e-6)
