"""Arithmetic on shapes keeps its type under every plan: sizes stay exact, and TensorRT takes the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mptune.graph.facts import COMPUTES_SHAPE, node_rule
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import models, rtx
from tests.graph.helpers import plans, run

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
node = helper.make_node


def cast(source: str, result: str, to: int = INT64) -> NodeProto:
    return node("Cast", [source], [result], to=to)


WIDTH = [node("Shape", ["f"], ["s"]), node("Gather", ["s", "three"], ["wi"], axis=0), cast("wi", "wf", FLOAT)]
"""The width of ``f`` as FP32, shape [1]."""

CASES: dict[str, tuple[list[NodeProto], set[str]]] = {
    "sizes of Resize": (
        [
            node("Shape", ["f"], ["s"]),
            cast("s", "sf", FLOAT),
            node("Mul", ["sf", "doubles"], ["m"]),
            node("Floor", ["m"], ["fl"]),
            cast("fl", "si"),
            node("Resize", ["f", "", "", "si"], ["y"], mode="linear"),
        ],
        {"sf", "m", "fl", "si"},
    ),
    "scales of Resize": (
        [
            node("Shape", ["f"], ["s"]),
            cast("s", "sf", FLOAT),
            node("Div", ["sizes", "sf"], ["scales"]),
            node("Resize", ["f", "", "scales"], ["y"], mode="linear"),
        ],
        {"sf", "scales"},
    ),
    "scales in parts": (
        [
            *WIDTH,
            node("Div", ["thirty", "wf"], ["r"]),
            node("Concat", ["one", "one", "r", "r"], ["scales"], axis=0),
            node("Resize", ["f", "", "scales"], ["y"], mode="nearest"),
        ],
        {"wf", "r", "scales"},
    ),
    "end of Slice": (
        [
            *WIDTH,
            node("Mul", ["wf", "half"], ["h"]),
            node("Ceil", ["h"], ["c"]),
            cast("c", "k"),
            node("Slice", ["f", "zero", "k", "three"], ["y"]),
        ],
        {"wf", "h", "c", "k"},
    ),
    "a size that data use as well": (
        [
            *WIDTH,
            node("Mul", ["wf", "half"], ["h"]),
            node("Floor", ["h"], ["c"]),
            cast("c", "k"),
            node("Slice", ["f", "zero", "k", "three"], ["part"]),
            node("Div", ["part", "h"], ["y"]),
        ],
        {"wf", "h", "c", "k"},
    ),
    "ConstantOfShape": (
        [
            node("Shape", ["f"], ["s"]),
            cast("s", "sf", FLOAT),
            node("Add", ["sf", "zeros"], ["m"]),
            cast("m", "si"),
            node("ConstantOfShape", ["si"], ["z"]),
            node("Add", ["f", "z"], ["y"]),
        ],
        {"sf", "m", "si"},
    ),
    "Range": (
        [
            *WIDTH,
            node("Squeeze", ["wf"], ["w0"]),
            node("Range", ["f0", "w0", "f1"], ["r"]),
            node("Add", ["f", "r"], ["y"]),
        ],
        {"wf", "w0"},
    ),
    "Reshape by a square root": (
        [
            node("Flatten", ["f"], ["flat"], axis=1),
            node("Shape", ["flat"], ["s"]),
            node("Gather", ["s", "i1"], ["n"], axis=0),
            node("Div", ["n", "four"], ["hw"]),
            cast("hw", "hwf", FLOAT),
            node("Sqrt", ["hwf"], ["side"]),
            cast("side", "k"),
            node("Concat", ["four", "k", "k"], ["new"], axis=0),
            node("Reshape", ["flat", "new"], ["y"]),
        ],
        {"hwf", "side", "k"},
    ),
    "Pad to a multiple": (
        [
            *WIDTH,
            node("Div", ["wf", "eight"], ["d"]),
            node("Ceil", ["d"], ["up"]),
            node("Mul", ["up", "eight"], ["wide"]),
            node("Sub", ["wide", "wf"], ["more"]),
            cast("more", "k"),
            node("Concat", ["seven zeros", "k"], ["pads"], axis=0),
            node("Pad", ["f", "pads"], ["y"]),
        ],
        {"wf", "d", "up", "wide", "more", "k"},
    ),
    "Expand and Tile by a comparison": (
        [
            node("Shape", ["f"], ["s"]),
            cast("s", "sf", FLOAT),
            node("Less", ["sf", "large"], ["l"]),
            node("Where", ["l", "s", "ones"], ["e"]),
            node("Expand", ["one", "e"], ["o"]),
            node("Add", ["f", "o"], ["y"]),
        ],
        {"sf", "l"},
    ),
    "TopK": (
        [
            *WIDTH,
            node("Mul", ["wf", "half"], ["h"]),
            cast("h", "k"),
            node("TopK", ["f", "k"], ["y", "at"], axis=3),
        ],
        {"wf", "h", "k"},
    ),
}
"""Nodes after a convolution ``x`` -> ``f``, and the values that keep their type."""

DATA: dict[str, list[NodeProto]] = {
    "attention's scale": [*WIDTH, node("Sqrt", ["wf"], ["d"]), node("Div", ["f", "d"], ["y"])],
    "a mean by hand": [
        *WIDTH,
        node("ReduceSum", ["f", "three"], ["sum"]),
        node("Div", ["sum", "wf"], ["y"]),
    ],
    "a shape that is only looked at": [
        node("Relu", ["f"], ["r"]),
        node("Shape", ["r"], ["s"]),
        node("ConstantOfShape", ["s"], ["z"]),
        node("Add", ["f", "z"], ["y"]),
    ],
}
"""Nothing here computes a shape in floating point."""

CONSTANTS = {
    "doubles": np.array([1, 1, 2, 2], np.float32),
    "sizes": np.array([1, 4, 32, 32], np.float32),
    "thirty": np.array([30], np.float32),
    "half": np.array([0.5], np.float32),
    "eight": np.array([8], np.float32),
    "large": np.array([5000] * 4, np.float32),
    "one": np.array([1], np.float32),
    "ones": np.ones(4, np.int64),
    "zeros": np.zeros(4, np.float32),
    "zero": np.array([0], np.int64),
    "seven zeros": np.zeros(7, np.int64),
    "three": np.array([3], np.int64),
    "four": np.array([4], np.int64),
    "i1": np.array([1], np.int64),
    "f0": np.array(0, np.float32),
    "f1": np.array(1, np.float32),
}


def make(path: Path, nodes: Sequence[NodeProto], shape: Sequence[int | str] = (1, 3, "h", "w")) -> Model:
    used = {name for one in nodes for name in one.input}
    weights = [numpy_helper.from_array(array, name) for name, array in CONSTANTS.items() if name in used]
    weights.append(numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32) / 3, "weight"))
    whole = [node("Conv", ["x", "weight"], ["f"], "conv"), *nodes]
    proto = models.model(whole, [models.value("x", shape)], [models.value("y", None)], weights)
    return load_model(models.save(proto, path.parent, path.name))


@pytest.mark.parametrize("case", CASES)
def test_it_keeps_its_type_under_every_plan(case: str, tmp_path: Path) -> None:
    nodes, kept = CASES[case]
    model = make(tmp_path / "m.onnx", nodes)
    owned = {name for group in find_groups(model) for name in group.nodes}
    for one in model.nodes:
        if set(one.outputs) & kept:
            assert node_rule(model, one).fixed == COMPUTES_SHAPE
            assert one.name not in owned


@pytest.mark.parametrize("case", DATA)
def test_scales_of_data_are_not_shapes(case: str, tmp_path: Path) -> None:
    model = make(tmp_path / "m.onnx", DATA[case])
    assert not [one for one in model.nodes if node_rule(model, one).fixed == COMPUTES_SHAPE]


@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize("case", [*CASES, *DATA])
def test_tensorrt_rtx_builds_every_plan(case: str, tmp_path: Path) -> None:
    library = rtx.library()
    nodes = CASES[case][0] if case in CASES else DATA[case]
    shape = (1, 3, 16, 16) if case == "Reshape by a square root" else (1, 3, "h", "w")
    model = make(tmp_path / "m.onnx", nodes, shape)
    groups = find_groups(model)
    rewriter = Rewriter(GroupedModel(model, groups), WeightBank.write(model, tmp_path))
    every, _, *mixed = plans(model, groups, 1, seed=1)
    for plan in dict.fromkeys((every, *mixed)):
        assert rtx.refusal(library, rewriter.write(plan, tmp_path / "typed.onnx")) is None


@pytest.mark.parametrize("width", [2049, 4099])
@pytest.mark.parametrize(
    "case", ["sizes of Resize", "end of Slice", "a size that data use as well", "Pad to a multiple"]
)
def test_sizes_above_2048_are_exact(case: str, width: int, tmp_path: Path) -> None:
    model = make(tmp_path / "m.onnx", CASES[case][0])
    groups = find_groups(model)
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16)
    typed = Rewriter(GroupedModel(model, groups), WeightBank.write(model, tmp_path)).write(plan, tmp_path / "t.onnx")
    feed = {"x": np.ones((1, 3, 1, width), np.float32)}
    assert run(typed, feed)["y"].shape == run(tmp_path / "m.onnx", feed)["y"].shape
