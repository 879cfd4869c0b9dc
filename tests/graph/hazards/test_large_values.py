"""Counters that stand still in FP16, differences whose operands are rounded, and twins that are sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.hazard import hazard_findings
from mptune.graph.loading.model import load_model
from tests.graph.hazards.observed import hazards_on
from tests.graph.models import constant, text


@pytest.mark.parametrize(
    ("start", "output", "is_named"), [(3000.0, "count_out", True), (30.0, "count_out", False), (3000.0, "other", False)]
)
def test_a_counter_that_stands_still(start: float, output: str, is_named: bool, tmp_path: Path) -> None:
    inputs, outputs = "float[n,4] x, float[n,1] count", f"float[n,4] y, float[n,1] {output}"
    nodes = f"[next] {output} = Add(count, one) y = Div(x, {output})"
    proto = text(f"({inputs}) => ({outputs}) <float one = {{1}}> {{ {nodes} }}")
    feed = {"x": np.ones((4, 4), np.float32), "count": np.float32([[start], [start + 2], [start + 4], [start + 6]])}
    found = hazards_on(proto, feed, tmp_path)
    assert [hazard.place.node for hazard in found if hazard.code == "stagnation"] == (["next"] if is_named else [])


def test_the_groups_that_compute_what_cancels_are_named_too(tmp_path: Path) -> None:
    graph = """(float[n,8] x) => (float[n,8] y) <int64[2] shape = {-1, 8}> {
        [first] a = MatMul(x, v) [second] b = MatMul(x, w) [view] r = Reshape(b, shape) [distance] d = Sub(a, r)
        [head] y = MatMul(d, u)
    }"""
    rng = np.random.default_rng(0)
    one = rng.uniform(1, 2, (8, 8)).astype(np.float32)
    proto = text(graph, constant("v", one), constant("w", one + 1e-4), constant("u", np.eye(8)))
    feed = {"x": rng.uniform(1, 2, (4, 8)).astype(np.float32)}
    hazards = [hazard for hazard in hazards_on(proto, feed, tmp_path) if hazard.code == "cancellation"]
    model = load_model(tmp_path / "model.onnx")
    owners = GroupedModel(model, find_groups(model)).owners
    assert {hazard.place.group for hazard in hazards} == {owners[n] for n in ("first", "second", "view", "distance")}
    (finding,) = hazard_findings(hazards, "inspect")
    assert finding.where.nodes == ("distance",)
    assert "at node 'distance'" in finding.text


def test_values_that_become_equal_are_counted_against_those_that_are(tmp_path: Path) -> None:
    nodes = "m = ReduceMax<axes = [-1]>(x) [it] e = Equal(x, m) y = Cast<to = 1>(e)"
    proto = text(f"(float[n,8] x) => (float[n,8] y) {{ {nodes} }}")
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
    graph = "(float[n,8] x) => (float[n,8] y) { [norm] y = LayerNormalization<axis = -1>(x, one, zero) }"
    proto = text(graph, constant("one", np.ones(8)), constant("zero", np.zeros(8)))
    values = deviation * np.random.default_rng(0).standard_normal((64, 8)) + offset
    hazards = hazards_on(proto, {"x": values.astype(np.float32)}, tmp_path)
    assert [(hazard.code, hazard.place.node) for hazard in hazards] == [("cancellation", "norm")] * is_named
    assert all("LayerNormalization changes by" in hazard.reason for hazard in hazards)
