"""Values whose spacing in FP16 decides: angles of a sine, coordinates of pixels, counters; and twins that are sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.hazard import hazard_findings
from mptune.graph.loading.model import load_model
from tests.graph import models
from tests.graph.hazards.observed import hazards_on
from tests.graph.models import constant, node, value


@pytest.mark.parametrize(("reached", "is_named"), [(9000.0, True), (60.0, False)])
@pytest.mark.parametrize("operator", ["Sin", "Cos"])
def test_an_angle_that_fp16_rounds_by_a_part_of_a_turn(
    operator: str, reached: float, is_named: bool, tmp_path: Path
) -> None:
    nodes = [node("Mul", ["position", "frequency"], "angle", "angle"), node(operator, ["angle"], "y", "encode")]
    shape = ["batch", 64]
    constants = [constant("frequency", 1.0)]
    proto = models.model(nodes, [value("position", shape)], [value("y", shape)], constants)
    position = np.linspace(0, reached, 64, dtype=np.float32)[None]
    found = [hazard for hazard in hazards_on(proto, {"position": position}, tmp_path) if hazard.severity != "info"]
    assert [(hazard.code, hazard.node) for hazard in found] == ([("spacing", "encode")] if is_named else [])
    assert all(f"{operator} changes by more than 0.1 for" in hazard.reason for hazard in found)


@pytest.mark.parametrize(("width", "is_named"), [(4096, True), (640, False)])
def test_coordinates_of_a_wide_image(width: int, is_named: bool, tmp_path: Path) -> None:
    nodes = [
        node("Add", ["grid", "flow"], "where", "move"),
        node("GridSample", ["image", "where"], "y", "sample", align_corners=1),
    ]
    inputs = [value("image", [1, 1, 2, width]), value("grid", [1, 2, 300, 2]), value("flow", [1, 2, 300, 2])]
    proto = models.model(nodes, inputs, [value("y", [1, 1, 2, 300])])
    rng = np.random.default_rng(0)
    feed = {name.name: rng.uniform(-1, 1, [d.dim_value for d in name.type.tensor_type.shape.dim]) for name in inputs}
    feed["flow"] *= 1e-3
    found = hazards_on(proto, {name: array.astype(np.float32) for name, array in feed.items()}, tmp_path)
    named = [hazard for hazard in found if hazard.code == "spacing"]
    assert [(hazard.node, hazard.tensor) for hazard in named] == ([("sample", "where")] if is_named else [])


@pytest.mark.parametrize(
    ("start", "output", "is_named"), [(3000.0, "count_out", True), (30.0, "count_out", False), (3000.0, "other", False)]
)
def test_a_counter_that_stands_still(start: float, output: str, is_named: bool, tmp_path: Path) -> None:
    nodes = [node("Add", ["count", "one"], output, "next"), node("Div", ["x", output], "y", "mean")]
    inputs = [value("x", ["batch", 4]), value("count", ["batch", 1])]
    outputs = [value("y", ["batch", 4]), value(output, ["batch", 1])]
    proto = models.model(nodes, inputs, outputs, [constant("one", 1.0)])
    feed = {"x": np.ones((4, 4), np.float32), "count": np.float32([[start], [start + 2], [start + 4], [start + 6]])}
    found = hazards_on(proto, feed, tmp_path)
    assert [hazard.node for hazard in found if hazard.code == "stagnation"] == (["next"] if is_named else [])


def test_the_groups_that_compute_what_cancels_are_named_too(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "v"], "a", "/first/MatMul"),
        node("MatMul", ["x", "w"], "b", "/second/MatMul"),
        node("Reshape", ["b", "shape"], "r", "/second/Reshape"),
        node("Sub", ["a", "r"], "d", "/distance/Sub"),
        node("MatMul", ["d", "u"], "y", "/head/MatMul"),
    ]
    rng = np.random.default_rng(0)
    one = rng.uniform(1, 2, (8, 8)).astype(np.float32)
    shape = constant("shape", [-1, 8], np.int64)
    constants = [constant("v", one), constant("w", one + 1e-4), constant("u", np.eye(8)), shape]
    proto = models.model(nodes, [value("x", ["batch", 8])], [value("y", ["batch", 8])], constants)
    feed = {"x": rng.uniform(1, 2, (4, 8)).astype(np.float32)}
    hazards = [hazard for hazard in hazards_on(proto, feed, tmp_path) if hazard.code == "cancellation"]
    model = load_model(tmp_path / "model.onnx")
    owners = GroupedModel(model, find_groups(model)).owners
    assert {hazard.group for hazard in hazards} == {owners[n.name] for n in nodes if n.name != "/head/MatMul"}
    (finding,) = hazard_findings(hazards, "inspect")
    assert finding.where.nodes == ("/distance/Sub",)
    assert "at node '/distance/Sub'" in finding.text
