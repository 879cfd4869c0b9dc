from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.find import find_hazards, over_threshold, pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.hazards.seen import Seen, TensorRange
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision
from tests.graph import models
from tests.graph.hazards.observed import seen_at
from tests.graph.models import constant, node, value, weight


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


def test_infinite_weights_are_no_overflow(tmp_path: Path) -> None:
    w = np.eye(4)
    w[0, 0] = -np.inf
    assert hazards(models.product(w), tmp_path)[1] == ()


def test_weights_that_vanish_are_mentioned(tmp_path: Path) -> None:
    few = np.ones((4, 4))
    few[0] = 1e-9
    assert [(h.severity, h.wording) for h in hazards(models.product(few), tmp_path)[1]] == [("info", "weights")]
    most = hazards(models.product(np.full((4, 4), 1e-9)), tmp_path)[1]
    assert [(h.severity, h.wording) for h in most] == [("warning", "weights")]
    assert pinned_by_hazards(most) == {}


def test_a_product_with_minus_1e9_pins_nothing(tmp_path: Path) -> None:
    """(1 - mask) * -65504 masks as well; its product reaches 1e9 in FP32 only."""
    seen = {"drop": 1.0, "bias": 1e9, "masked": 1e9, "scaled": 3.0}
    for ranges in ({}, seen, {**seen, "masked": 1e9 + 64}):
        _, found = hazards(models.attention(-1e9), tmp_path, seen=seen_at(ranges))
        assert [(h.severity, h.value, h.code) for h in found] == [("info", 1e9, "mask")]
        assert pinned_by_hazards(found) == {}
    _, found = hazards(models.attention(-1e9), tmp_path, seen=seen_at({**seen, "drop": 7e4}))
    assert {h.place.tensor for h in found if h.rules_out(Precision.FP16)} >= {"drop"}, "its own values do not fit"


def test_a_mask_of_many_layers_is_one(tmp_path: Path) -> None:
    """A decoder's layers, more than forty, read one mask."""
    nodes = [node("Mul", ["drop", "huge"], "bias", "mask")]
    for k in range(45):
        nodes.append(node("Add", [f"p{k}" if k else "x", "bias"], f"a{k}", f"add{k}"))
        nodes.append(node("Softmax", [f"a{k}"], f"p{k + 1}", f"softmax{k}"))
    inputs = [value("x", [4, 4]), value("drop", [4, 4])]
    _, found = hazards(models.model(nodes, inputs, [value("p45", [4, 4])], [constant("huge", -1e9)]), tmp_path)
    assert [(h.severity, h.code) for h in found] == [("info", "mask")]


@pytest.mark.parametrize("view", ["Expand", "Slice", "Concat"])
def test_a_mask_is_one_through_views(view: str, tmp_path: Path) -> None:
    """A constant that is moved and repeated before it is added to the scores, and the sum before the softmax."""
    inputs = {"Expand": ["h", "shape"], "Slice": ["h", "from", "to"], "Concat": ["h"]}[view]
    axis = {"axis": 0} if view == "Concat" else {}
    nodes = [
        node("Mul", ["drop", "huge"], "h", "mul"),
        node(view, inputs, "e", "view", **axis),
        node("Add", ["x", "e"], "a", "add"),
        node("Identity", ["a"], "i", "identity"),
        node("Softmax", ["i"], "y", "softmax"),
    ]
    constants = [constant("huge", -1e9), constant("shape", [4, 4], np.int64)]
    constants += [constant("from", [0], np.int64), constant("to", [4], np.int64)]
    given = [value("x", [4, 4]), value("drop", [4, 4])]
    ranges = {"h": 1e9, "e": 1e9, "a": 1e9, "i": 1e9, "drop": 1.0, "x": 3.0}
    _, found = hazards(models.model(nodes, given, [value("y", None)], constants), tmp_path, seen=seen_at(ranges))
    assert {(h.severity, h.code) for h in found} == {("info", "mask")}


def test_adding_a_large_constant_is_a_mask_before_a_softmax_only(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "m", "m"),
        node("Add", ["m", "huge"], "a", "mask"),
        node("Transpose", ["a"], "t", "t"),
        node("Softmax", ["t"], "p", "softmax"),
        node("MatMul", ["p", "w"], "b", "b"),
        node("Sub", ["b", "huge"], "y", "shift"),
    ]
    constants = [weight("w", 4, 4), constant("huge", -1e9)]
    _, found = hazards(models.model(nodes, [value("x", [4, 4])], [value("y", None)], constants), tmp_path)
    assert [(h.severity, h.place.node) for h in found] == [("warning", "shift"), ("info", "mask")]


def test_a_mask_that_is_filled_at_run_time(tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], "s", "shape"),
        node("ConstantOfShape", ["s"], "low", "fill", value=constant("v", [-1e9])),
        node("Where", ["keep", "x", "low"], "m", "where"),
        node("ConstantOfShape", ["s"], "high", "fill2", value=constant("v", [1e9])),
        node("Div", ["m", "high"], "d", "divide"),
        node("Softmax", ["d"], "y", "softmax"),
    ]
    inputs = [value("x", ["n", 4]), value("keep", ["n", 4], TensorProto.BOOL)]
    _, found = hazards(models.model(nodes, inputs, [value("y", None)]), tmp_path)
    assert [(h.severity, h.code, h.place.node, h.value) for h in found] == [
        ("warning", "overflow", "fill", 1e9),
        ("warning", "overflow", "fill2", 1e9),
    ], "a quotient is no mask"


def test_an_epsilon_in_an_attribute(tmp_path: Path) -> None:
    nodes = [
        node("InstanceNormalization", ["x", "s", "s"], "a", "tiny", epsilon=1e-12),
        node("InstanceNormalization", ["a", "s", "s"], "b", "usual"),
        node("LayerNormalization", ["b", "g"], "y", "in FP32 inside", epsilon=1e-12),
    ]
    constants = [weight("s", 4), weight("g", 6)]
    proto = models.model(nodes, [value("x", [2, 4, 6])], [value("y", [2, 4, 6])], constants)
    found = hazards(proto, tmp_path)[1]
    assert [(h.severity, h.code, h.place.node) for h in found] == [("warning", "vanishing-epsilon", "tiny")]


def stretched(batch: int | str) -> onnx.ModelProto:
    """Differences of all pairs: both operands are stretched, and both are computed."""
    nodes = [
        node("Unsqueeze", ["x", "one"], "a", "rows"),
        node("Unsqueeze", ["x", "two"], "b", "columns"),
        node("Sub", ["a", "b"], "d", "pairs"),
        node("Add", ["d", "bias"], "y", "bias"),
    ]
    constants = [constant("one", [1], np.int64), constant("two", [2], np.int64), weight("bias", 1, 5, 5)]
    return models.model(nodes, [value("x", [batch, 5])], [value("y", None)], constants)


def test_a_broadcast_with_a_static_batch_of_1(tmp_path: Path) -> None:
    _, found = hazards(stretched(1), tmp_path)
    assert [(h.severity, h.code, h.place.node) for h in found] == [("warning", "broadcast", "pairs")]
    assert "[1, 1, 5] with [1, 5, 1]" in found[0].reason
    assert "Expand" in found[0].cure
    assert hazards(stretched("batch"), tmp_path)[1] == hazards(stretched(2), tmp_path)[1] == ()


def combined(small: list[int], batch: int = 1, channels: int = 3) -> onnx.ModelProto:
    """An image of 8x8 and a computed value of this shape that is stretched to it."""
    nodes = [
        node("Conv", ["image", "w"], "c", "conv"),
        node("Reshape", ["state", "shape"], "r", "reshape"),
        node("Sigmoid", ["r"], "s", "sigmoid"),
        node("Mul", ["c", "s"], "y", "stretch"),
    ]
    constants = [weight("w", channels, 3, 1, 1), constant("shape", small, np.int64)]
    inputs = [value("image", [batch, 3, 8, 8]), value("state", [int(np.prod(small))])]
    return models.model(nodes, inputs, [value("y", [batch, channels, 8, 8])], constants)


@pytest.mark.parametrize(
    ("small", "is_found"),
    [
        ([1, 1, 8, 8], True),  # an image against a one-channel plane
        ([3, 8, 1], False),  # stretched over one axis
        ([1, 3, 1, 1], False),  # a squeeze-and-excite gate
        ([3, 1, 1], False),
        ([1, 1, 1, 1], False),  # a temperature
        ([1, 1, 1, 8], False),  # a scale of columns
        ([1, 3, 8, 8], False),
    ],
)
def test_what_is_stretched_at_a_static_batch_of_1(small: list[int], is_found: bool, tmp_path: Path) -> None:
    proto = combined(small)
    found = hazards(proto, tmp_path)[1]
    assert [h.place.node for h in found if h.code == "broadcast"] == (["stretch"] if is_found else [])


def test_over_threshold_names_groups_that_touch_large_values(tmp_path: Path) -> None:
    model = load_model(models.save(models.mlp(), tmp_path))
    assert over_threshold(GroupedModel(model, find_groups(model)), {"r": 600.0, "y": 10.0}, 512) == ("g001", "g002")


def _masked_attention(folder: Path, keep: str) -> tuple[Model, dict[str, float]]:
    """An attention core whose mask a Where chooses, with what FP32 shows of its values."""
    proto = models.attention(-1e9)
    graph = proto.graph
    for k in reversed(range(len(graph.node))):
        if graph.node[k].name in ("/mask/Cast", "/mask/Sub", "/mask/Mul"):
            del graph.node[k]
    graph.node.insert(0, node("Where", [keep, "none", "lowest"], "bias", "/mask/Where"))
    graph.initializer.extend([constant("none", 0.0), constant("lowest", np.finfo(np.float32).min)])
    lowest = -float(np.finfo(np.float32).min)
    return load_model(models.save(proto, folder)), {"bias": lowest, "masked": lowest, "scaled": 3.0, "scores": 9.0}


def test_a_finite_mask_seen_on_data_pins_no_attention_core(tmp_path: Path) -> None:
    model, ranges = _masked_attention(tmp_path, "keep")
    grouped = GroupedModel(model, find_groups(model))
    found = find_hazards(grouped, seen_at(ranges))
    assert pinned_by_hazards(found) == {}
    assert {(h.severity, h.code, h.place.tensor) for h in found} == {("info", "overflow", "lowest")}
    far = find_hazards(grouped, seen_at({**ranges, "scaled": 100.0}))
    assert pinned_by_hazards(far) == {}
    assert {(h.severity, h.place.tensor) for h in far if h.severity != "info"} == {("warning", "masked")}, (
        "-65504 - 100 is -inf"
    )


def test_large_values_that_are_not_added_before_a_softmax_pin_their_group(tmp_path: Path) -> None:
    nodes = [node("Where", ["keep", "x", "lowest"], "a", "choose"), node("MatMul", ["a", "w"], "y", "product")]
    inputs = [value("x", [4, 4]), value("keep", [4, 4], TensorProto.BOOL)]
    proto = models.model(nodes, inputs, [value("y", [4, 4])], [constant("lowest", -1e9), weight("w", 4, 4)])
    _, found = hazards(proto, tmp_path, seen=seen_at({"a": 1e9, "x": 1.0}))
    assert {h.place.node for h in found if h.code == "overflow"} == {"choose", "product"}
    assert pinned_by_hazards(found).keys() == {h.place.group for h in found}
    assert pinned_by_hazards(found, is_measured=True) == {}
    _, given = hazards(proto, tmp_path, seen=seen_at({"a": 1e9, "x": 7e4}))
    assert pinned_by_hazards(given, is_measured=True), "not because of the constant alone"


def test_what_goes_wrong_first_is_named_first(tmp_path: Path) -> None:
    steps = [("Mul", ["x", "x"], "z"), ("ReduceMean", ["z"], "y"), ("Add", ["y", "e"], "w"), ("Sqrt", ["w"], "v")]
    nodes = [node(op, inputs, out, f"/norm/{op}") for op, inputs, out in (*steps, ("Div", ["x", "v"], "a"))]
    vectors = value("x", ["batch", 8]), value("a", ["batch", 8])
    proto = models.model(nodes, [vectors[0]], [vectors[1]], [constant("e", 1e-12)])
    found = hazards(proto, tmp_path, seen=seen_at({"z": 1e6, "y": 2e5, "w": 2e5}))[1]
    assert [h.place.node for h in found if h.code == "overflow"] == ["/norm/Mul", "/norm/ReduceMean", "/norm/Add"]
    found = hazards(proto, tmp_path, seen=Seen({"a": TensorRange(1e6), "y": TensorRange(2.0, highest=2.0)}))[1]
    assert [h.code for h in found if not h.is_note and h.severity != "info"] == ["vanishing-epsilon", "overflow"]
