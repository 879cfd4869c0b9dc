"""Hazards of a model and of what is seen of its values: where they are, how severe, and what they pin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard, ObservedValues, TensorRange, hazard_findings
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision
from tests.graph import models
from tests.graph.hazards.observed import magnitudes_of, ranges_on
from tests.graph.models import constant, text, weight


def hazards(proto: object, folder: Path, **given: object) -> tuple[Model, tuple[Hazard, ...]]:
    model = load_model(models.save(proto, folder))  # type: ignore[arg-type]
    return model, find_hazards(GroupedModel(model, find_groups(model)), **given)  # type: ignore[arg-type]


def test_weights_that_overflow_pin_their_group_where_nothing_is_measured(tmp_path: Path) -> None:
    _, found = hazards(models.product(np.eye(4) * 1e5), tmp_path)
    assert [(h.severity, h.place.group, h.place.tensor, h.value, h.code) for h in found] == [
        ("warning", "g000", "w", 1e5, "overflow")
    ]
    assert "4 of 16 values exceed FP16's 65504 and are held as 65504" in found[0].reason
    assert found[0].evidence["held_as"] == 65504
    assert list(pinned_by_hazards(found)) == ["g000"]
    assert pinned_by_hazards(found, is_measured=True) == {}
    assert pinned_by_hazards(found, Precision.BF16) == {}, "BF16 holds them"


def test_what_is_an_input_too_is_cast_in_each_run_and_becomes_infinite(tmp_path: Path) -> None:
    for node, expected in (("Mul(h, huge)", ["overflow"]), ("Add(h, huge)", ["overflow"]), ("Min(h, huge)", [])):
        graph = f"(float[4,4] x, float huge) => (float[4,4] y) {{ h = Relu(x) s = {node} y = Softmax(s) }}"
        _, found = hazards(text(graph, HUGE), tmp_path)
        assert [hazard.code for hazard in found] == expected
        assert {hazard.to_json()["evidence"]["held_as"] for hazard in found} <= {"inf"}
        assert len(pinned_by_hazards(found)) == len(found)


def test_infinite_weights_are_no_overflow_and_those_that_vanish_are_mentioned(tmp_path: Path) -> None:
    infinite, few, most = np.eye(4), np.ones((4, 4)), np.full((4, 4), 1e-9)
    infinite[0, 0], few[0] = -np.inf, 1e-9
    expected = ((infinite, []), (few, [("info", "weights")]), (most, [("warning", "weights")]))
    for weights, said in expected:
        found = hazards(models.product(weights), tmp_path)[1]
        assert [(h.severity, h.wording) for h in found] == said
        assert pinned_by_hazards(found) == {}


HUGE = constant("huge", -1e9)


def test_a_mask_of_many_layers_is_one(tmp_path: Path) -> None:
    """A decoder's layers, more than forty, read one mask."""
    layers = " ".join(f"a{k} = Add(p{k}, bias) p{k + 1} = Softmax(a{k})" for k in range(45))
    graph = f"(float[4,4] p0, float[4,4] drop) => (float[4,4] p45) {{ bias = Mul(drop, huge) {layers} }}"
    _, found = hazards(text(graph, HUGE), tmp_path)
    assert [(h.severity, h.code) for h in found] == [("info", "mask")]


@pytest.mark.parametrize("view", ["Expand(h, shape)", "Slice(h, start, end)", "Concat<axis = 0>(h)"])
def test_a_mask_is_one_through_views(view: str, tmp_path: Path) -> None:
    """A constant that is moved and repeated before it is added to the scores, and the sum before the softmax."""
    graph = f"""(float[4,4] x, float[4,4] drop) => (float[4,4] y)
        <int64[2] shape = {{4, 4}}, int64[1] start = {{0}}, int64[1] end = {{4}}>
        {{ h = Mul(drop, huge) e = {view} a = Add(x, e) i = Identity(a) y = Softmax(i) }}"""
    ranges = {"h": 1e9, "e": 1e9, "a": 1e9, "i": 1e9, "drop": 1.0, "x": 3.0}
    _, found = hazards(text(graph, HUGE), tmp_path, observed=magnitudes_of(ranges))
    assert {(h.severity, h.code) for h in found} == {("info", "mask")}


def test_adding_a_large_constant_is_a_mask_before_a_softmax_only(tmp_path: Path) -> None:
    graph = """(float[4,4] x) => (float[4,4] y) {
        m = MatMul(x, w) [mask] a = Add(m, huge) t = Transpose(a) p = Softmax(t) b = MatMul(p, w)
        [shift] y = Sub(b, huge)
    }"""
    _, found = hazards(text(graph, weight("w", 4, 4), HUGE), tmp_path)
    assert [(h.severity, h.place.node) for h in found] == [("warning", "shift"), ("info", "mask")]


def test_a_mask_that_is_filled_at_run_time(tmp_path: Path) -> None:
    graph = """(float[n,4] x, bool[n,4] keep) => (float[n,4] y) {
        s = Shape(x) [fill] low = ConstantOfShape<value = float[1] {-1e9}>(s) m = Where(keep, x, low) y = Softmax(m)
        [fill2] high = ConstantOfShape<value = float[1] {1e9}>(s) z = Div(x, high)
    }"""
    _, found = hazards(text(graph), tmp_path)
    assert [(h.severity, h.code, h.place.node, h.value) for h in found] == [("warning", "overflow", "fill2", 1e9)]


@pytest.mark.parametrize(
    ("small", "is_found"),
    [
        ("1,1,8,8", True),  # an image against a one-channel plane
        ("3,8,1", False),  # stretched over one axis
        ("1,3,1,1", False),  # a squeeze-and-excite gate
        ("1,1,1,1", False),  # a temperature
        ("1,1,1,8", False),  # a scale of columns
        ("1,3,8,8", False),
    ],
)
def test_what_is_stretched_at_a_static_batch_of_1(small: str, is_found: bool, tmp_path: Path) -> None:
    """An image of 8x8 and a computed value of this shape that is stretched to it."""
    graph = f"""(float[1,3,8,8] image, float[{small}] state) => (float[1,3,8,8] y) {{
        c = Conv(image, w) s = Sigmoid(state) [stretch] y = Mul(c, s)
    }}"""
    found = [h for h in hazards(text(graph, weight("w", 3, 3, 1, 1)), tmp_path)[1] if h.code == "broadcast"]
    assert [h.place.node for h in found] == (["stretch"] if is_found else [])
    for hazard in found:
        assert "[1, 3, 8, 8] with [1, 1, 8, 8]" in hazard.reason
        assert "Expand" in hazard.cure


def test_large_values_that_are_not_added_before_a_softmax_pin_their_group(tmp_path: Path) -> None:
    nodes = "[choose] a = Where(keep, x, huge) [product] y = MatMul(a, w)"
    proto = text(f"(float[4,4] x, bool[4,4] keep) => (float[4,4] y) {{ {nodes} }}", HUGE, weight("w", 4, 4))
    _, found = hazards(proto, tmp_path, observed=magnitudes_of({"a": 1e9, "x": 1.0}))
    assert {h.place.node for h in found if h.code == "overflow"} == {"choose", "product"}
    assert pinned_by_hazards(found).keys() == {h.place.group for h in found}


def test_what_goes_wrong_first_is_named_first(tmp_path: Path) -> None:
    nodes = "[Mul] z = Mul(x, x) [Mean] y = ReduceMean(z) [Add] w = Add(y, e) v = Sqrt(w) a = Div(x, v)"
    proto = text(f"(float[n,8] x) => (float[n,8] a) <float e = {{1e-12}}> {{ {nodes} }}")
    found = hazards(proto, tmp_path, observed=magnitudes_of({"z": 1e6, "y": 2e5, "w": 2e5}))[1]
    assert [h.place.node for h in found if h.code == "overflow"] == ["Mul", "Mean", "Add"]
    observed = ObservedValues({"a": TensorRange(1e6), "y": TensorRange(2.0, highest=2.0)})
    found = hazards(proto, tmp_path, observed=observed)[1]
    assert [h.code for h in found if not h.is_note and h.severity != "info"] == ["vanishing-epsilon", "overflow"]


MASKED = {
    "Softmax": "m = Add(x, mask) [softmax] y = Softmax<axis = 2>(m)",
    "MultiHeadAttention": """bias = Unsqueeze(mask, axis)
        [softmax] y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x, , , bias)""",
}


@pytest.mark.parametrize(
    ("form", "lowest", "count"),
    [("Softmax", -3.4e38, 1), ("Softmax", -1e4, 0), ("MultiHeadAttention", -3.4e38, 1)],
)
def test_a_row_that_is_masked_whole_is_a_finding(form: str, lowest: float, count: int, tmp_path: Path) -> None:
    """On four samples, the first row of each masked but for one element; in the third the last row is masked whole."""
    ends = "(float[n,4,4] x, float[n,4,4] mask) => (float[n,4,4] y) <int64[1] axis = {1}>"
    model = load_model(models.save(text(f"{ends} {{ {MASKED[form]} }}"), tmp_path))
    mask = np.zeros((4, 4, 4), np.float32)
    mask[2, -1, :] = mask[:, 0, 1:] = lowest
    x = np.random.default_rng(1).standard_normal((4, 4, 4)).astype(np.float32)
    observed = ranges_on(model, [{"x": x[k : k + 1], "mask": mask[k : k + 1]} for k in range(4)], tmp_path)
    found = find_hazards(GroupedModel(model, find_groups(model)), ObservedValues(observed))
    findings = hazard_findings([hazard for hazard in found if hazard.wording == "rows"], "inspect")
    assert [(f.code, f.severity, f.evidence["masked_rows"], f.where.samples) for f in findings] == [
        ("mask", "warning", 1, (2,))
    ] * count
    assert all("softmax" in finding.where.nodes for finding in findings)
