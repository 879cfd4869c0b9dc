"""Counters that stand still in FP16, differences whose operands are rounded, and twins that are sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.hazard import hazard_findings
from mptune.graph.loading.model import load_model
from tests.graph import models
from tests.graph.hazards.observed import hazards_on
from tests.graph.models import constant, node, value


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
    assert [hazard.place.node for hazard in found if hazard.code == "stagnation"] == (["next"] if is_named else [])


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
    assert {hazard.place.group for hazard in hazards} == {owners[n.name] for n in nodes if n.name != "/head/MatMul"}
    (finding,) = hazard_findings(hazards, "inspect")
    assert finding.where.nodes == ("/distance/Sub",)
    assert "at node '/distance/Sub'" in finding.text


def test_values_that_become_equal_are_counted_against_those_that_are(tmp_path: Path) -> None:
    nodes = [
        node("ReduceMax", ["x"], "m", "largest", axes=[-1], keepdims=1),
        node("Equal", ["x", "m"], "e", "it"),
        node("Cast", ["e"], "y", "as a number", to=onnx.TensorProto.FLOAT),
    ]
    proto = models.model(nodes, [value("x", ["batch", 8])], [value("y", None)], [], 17)
    rng = np.random.default_rng(0)
    near_one = (1 - 2e-4 * rng.uniform(0.1, 1, (64, 8))).astype(np.float32)
    (hazard,) = [h for h in hazards_on(proto, {"x": near_one}, tmp_path) if h.place.node == "it"]
    assert hazard.code == "spacing"
    assert "of what Equal finds equal" in hazard.reason
    even = rng.uniform(0.1, 0.9, (64, 8)).astype(np.float32)
    assert not [h for h in hazards_on(proto, {"x": even}, tmp_path) if h.place.node == "it"]


@pytest.mark.parametrize(("deviation", "offset", "is_named"), [(0.3, 300.0, True), (1.0, 3.0, False)])
@pytest.mark.smoke
def test_a_norm_that_takes_an_offset_out(deviation: float, offset: float, is_named: bool, tmp_path: Path) -> None:
    constants = [constant("one", np.ones(8, np.float32)), constant("zero", np.zeros(8, np.float32))]
    norm = [node("LayerNormalization", ["x", "one", "zero"], "y", "norm", axis=-1)]
    proto = models.model(norm, [value("x", ["batch", 8])], [value("y", ["batch", 8])], constants, 17)
    values = deviation * np.random.default_rng(0).standard_normal((64, 8)) + offset
    hazards = hazards_on(proto, {"x": values.astype(np.float32)}, tmp_path)
    assert [(hazard.code, hazard.place.node) for hazard in hazards] == [("cancellation", "norm")] * is_named
    assert all("LayerNormalization changes by" in hazard.reason for hazard in hazards)
