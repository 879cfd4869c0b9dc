"""Arithmetic on shapes keeps its type under every plan: sizes stay exact, and TensorRT takes the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import helper, numpy_helper

from mptune.graph.facts import node_rule
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import models, rtx
from tests.graph.helpers import plans, run

WIDTH = "s = Shape(f); wi = Gather<axis=0>(s, three); wf = Cast<to=1>(wi);"
"""The width of ``f`` as FP32, shape [1]."""

CASES: dict[str, tuple[str, str]] = {
    "sizes of Resize": (
        """s = Shape(f); sf = Cast<to=1>(s); m = Mul(sf, doubles); fl = Floor(m); si = Cast<to=7>(fl);
        y = Resize<mode="linear">(f, , , si)""",
        "sf m fl si",
    ),
    "end of Slice": (
        f"{WIDTH} h = Mul(wf, half); c = Ceil(h); k = Cast<to=7>(c); y = Slice(f, zero, k, three)",
        "wf h c k",
    ),
    "a size that data use as well": (
        f"{WIDTH} h = Mul(wf, half); c = Floor(h); k = Cast<to=7>(c); p = Slice(f, zero, k, three); y = Div(p, h)",
        "wf h c k",
    ),
    "Reshape by a square root": (
        """flat = Flatten<axis=1>(f); s = Shape(flat); n = Gather<axis=0>(s, i1); hw = Div(n, four);
        hwf = Cast<to=1>(hw); side = Sqrt(hwf); k = Cast<to=7>(side); new = Concat<axis=0>(four, k, k);
        y = Reshape(flat, new)""",
        "hwf side k",
    ),
    "Pad to a multiple": (
        f"""{WIDTH} d = Div(wf, eight); up = Ceil(d); wide = Mul(up, eight); more = Sub(wide, wf);
        k = Cast<to=7>(more); pads = Concat<axis=0>(seven_zeros, k); y = Pad(f, pads)""",
        "wf d up wide more k",
    ),
    "Expand and Tile by a comparison": (
        """s = Shape(f); sf = Cast<to=1>(s); l = Less(sf, large); e = Where(l, s, ones); o = Expand(one, e);
        y = Add(f, o)""",
        "sf l",
    ),
}
"""Nodes after a convolution ``x`` -> ``f``, and the values that keep their type."""

DATA = {
    "attention's scale": f"{WIDTH} d = Sqrt(wf); y = Div(f, d)",
    "a mean by hand": f"{WIDTH} sum = ReduceSum(f, three); y = Div(sum, wf)",
    "a shape that is only looked at": "r = Relu(f); s = Shape(r); z = ConstantOfShape(s); y = Add(f, z)",
}
"""Nothing here computes a shape in floating point."""

FLOATS = {"doubles": [1, 1, 2, 2], "half": [0.5], "eight": [8], "one": [1]}
FLOATS |= {"large": [5000] * 4}
INTEGERS = {"ones": [1] * 4, "zero": [0], "seven_zeros": [0] * 7, "three": [3], "four": [4], "i1": [1]}
CONSTANTS = {name: np.array(values, np.float32) for name, values in FLOATS.items()}
CONSTANTS |= {name: np.array(values, np.int64) for name, values in INTEGERS.items()}


def make(path: Path, text: str, shape: Sequence[int | str] = (1, 3, "h", "w")) -> Model:
    nodes = [onnx.parser.parse_node(line) for line in text.split(";")]
    used = {name for node in nodes for name in node.input}
    weights = [numpy_helper.from_array(array, name) for name, array in CONSTANTS.items() if name in used]
    weights.append(numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32) / 3, "weight"))
    whole = [helper.make_node("Conv", ["x", "weight"], ["f"], "conv"), *nodes]
    proto = models.model(whole, [models.value("x", shape)], [models.value("y", None)], weights)
    return load_model(models.save(proto, path.parent, path.name))


@pytest.mark.parametrize("case", CASES)
def test_it_keeps_its_type_under_every_plan(case: str, tmp_path: Path) -> None:
    text, fixed = CASES[case]
    model = make(tmp_path / "m.onnx", text)
    owned = {name for group in find_groups(model) for name in group.nodes}
    for node in model.nodes:
        if set(node.outputs) & {*fixed.split()}:
            assert (node_rule(model, node).fixed or "").startswith("computes a shape")
            assert node.name not in owned


@pytest.mark.parametrize("case", DATA)
def test_scales_of_data_are_not_shapes(case: str, tmp_path: Path) -> None:
    model = make(tmp_path / "m.onnx", DATA[case])
    assert not [node for node in model.nodes if "computes a shape" in (node_rule(model, node).fixed or "")]


@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize("case", [*CASES, *DATA])
def test_tensorrt_rtx_builds_every_plan(case: str, tmp_path: Path) -> None:
    library = rtx.library()
    shape = (1, 3, 16, 16) if case == "Reshape by a square root" else (1, 3, "h", "w")
    model = make(tmp_path / "m.onnx", CASES[case][0] if case in CASES else DATA[case], shape)
    groups = find_groups(model)
    rewriter = Rewriter(GroupedModel(model, groups), WeightBank.write(model, tmp_path))
    every, _, *mixed = plans(model, groups, 1, seed=1)
    for plan in dict.fromkeys((every, *mixed)):
        assert rtx.refusal(library, rewriter.write(plan, tmp_path / "typed.onnx")) is None


@pytest.mark.parametrize("width", [2049, 4099])
@pytest.mark.parametrize("case", ["sizes of Resize", "end of Slice", "a size that data use as well"])
def test_sizes_above_2048_are_exact(case: str, width: int, tmp_path: Path) -> None:
    model = make(tmp_path / "m.onnx", CASES[case][0])
    grouped = GroupedModel(model, find_groups(model))
    typed = Rewriter(grouped).export(grouped.uniform(Precision.FP16), tmp_path / "t.onnx")
    feed = {"x": np.ones((1, 3, 1, width), np.float32)}
    assert run(typed, feed)["y"].shape == run(tmp_path / "m.onnx", feed)["y"].shape
