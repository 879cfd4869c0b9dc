"""Recurrent layers cost their steps, and weights that an exporter builds from constants cost what weights cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from mptune.graph.facts import facts_of
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import PRECISIONS, Precision
from mptune.targets.costs import group_costs, memory_need
from mptune.targets.roofline import roofline
from mptune.targets.target import load_target
from tests.graph import models
from tests.graph.models import value
from tests.targets.conftest import Build

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FEATURES, HIDDEN = 32, 64


class _Graph:
    """Nodes and weights, under names that count up."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def weight(self, *shape: int) -> str:
        return self.constant(self._random.normal(0, 0.1, shape).astype(np.float32))

    def constant(self, value: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(value, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def add(self, op: str, inputs: list[str], **attributes) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], f"{op}_{name}", **attributes))
        return name


def recurrent(path: Path, op: str, steps: int, *, both: bool, built: bool) -> Model:
    """Linear, a recurrent layer and another Linear on (rows, steps, features), as torch's two exporters write it.

    Weights that are ``built`` come from Slice, Concat, Unsqueeze and Transpose of torch's tensors, as the newer
    exporter has them; else they are there as ONNX wants them, and the initial state is expanded from a shape. The
    layer itself takes time first, and its input is transposed.
    """
    graph, gates = _Graph(), GATES[op]
    directions = 2 if both else 1

    def weights(columns: int) -> str:
        if not built:
            return graph.weight(directions, gates * HIDDEN, columns)
        parts = []
        for _ in range(directions):
            whole = graph.add("Transpose", [graph.weight(columns, gates * HIDDEN)], perm=[1, 0])
            pieces = [
                graph.add("Slice", [whole, *(graph.constant(np.array([v])) for v in (k * HIDDEN, (k + 1) * HIDDEN, 0))])
                for k in reversed(range(gates))
            ]
            one = graph.add("Concat", pieces, axis=0)
            parts.append(graph.add("Unsqueeze", [one, graph.constant(np.array([0]))]))
        return graph.add("Concat", parts, axis=0) if both else parts[0]

    hidden = graph.add("MatMul", ["x", graph.weight(FEATURES, FEATURES)])
    hidden = graph.add("Transpose", [hidden], perm=[1, 0, 2])
    if built:
        state = graph.constant(np.zeros((directions, 2, HIDDEN), np.float32))
    else:
        rows = graph.add("Shape", ["x"], start=0, end=1)
        count, size = graph.constant(np.array([directions])), graph.constant(np.array([HIDDEN]))
        shape = graph.add("Concat", [count, rows, size], axis=0)
        state = graph.add("Expand", [graph.constant(np.zeros((directions, 1, HIDDEN), np.float32)), shape])
    states = [state, state] if op == "LSTM" else [state]
    read = [hidden, weights(FEATURES), weights(HIDDEN), graph.weight(directions, 2 * gates * HIDDEN), "", *states]
    direction = "bidirectional" if both else "forward"
    made = graph.add(op, read, hidden_size=HIDDEN, direction=direction)  # (steps, directions, rows, hidden)
    back = graph.add("Transpose", [made], perm=[2, 0, 1, 3])
    flat = graph.add("Reshape", [back, graph.constant(np.array([2, steps, directions * HIDDEN]))])
    graph.nodes.append(helper.make_node("MatMul", [flat, graph.weight(directions * HIDDEN, 10)], ["y"], "head"))
    proto = models.model(graph.nodes, [value("x", [2, steps, FEATURES])], [value("y", [2, steps, 10])], graph.weights)
    return load_model(models.save(proto, path.parent, path.name))


def predicted(model: Model) -> tuple[float, float]:
    """Predicted ms of all-FP32 and of all free groups in FP16."""
    grouped = GroupedModel(model, find_groups(model))
    terms = roofline(grouped, load_target("jetson-orin-nano-8gb"), static_shapes(model).shapes)
    fp32 = grouped.uniform(Precision.FP32)
    free = [group.id for group in grouped.groups if group.pinned is None]
    return terms.predict(fp32), terms.predict(fp32.replace(dict.fromkeys(free, Precision.FP16)))


@pytest.mark.parametrize(("op", "both"), [("LSTM", True), ("GRU", False), ("RNN", True)])
def test_two_exports_of_a_network_predict_the_same(tmp_path: Path, op: str, both: bool) -> None:
    ready = recurrent(tmp_path / "ready.onnx", op, 50, both=both, built=False)
    built = recurrent(tmp_path / "built.onnx", op, 50, both=both, built=True)
    assert predicted(built) == pytest.approx(predicted(ready), rel=0.05)
    need, other = (memory_need(model, static_shapes(model).shapes) for model in (ready, built))
    for precision in PRECISIONS:
        assert other.total(precision) == pytest.approx(need.total(precision), rel=0.05)


@pytest.mark.parametrize("op", GATES)
def test_recurrence_costs_its_steps(tmp_path: Path, op: str) -> None:
    """Four times the steps take about four times as long: each is a launch that waits for the one before."""
    short = predicted(recurrent(tmp_path / "short.onnx", op, 25, both=False, built=False))
    long = predicted(recurrent(tmp_path / "long.onnx", op, 100, both=False, built=False))
    launch = load_target("jetson-orin-nano-8gb").launch_us * 1e-3
    for few, many in zip(short, long, strict=True):
        assert few > 25 * launch
        assert 3.5 < many / few < 4.2


def test_both_directions_share_their_steps_and_double_their_work(tmp_path: Path) -> None:
    costs = []
    for both in (False, True):
        model = recurrent(tmp_path / f"{both}.onnx", "LSTM", 50, both=both, built=False)
        found = group_costs(GroupedModel(model, find_groups(model)), static_shapes(model).shapes)
        (recurrence,) = [r for cost in found.values() for r in cost.recurrences]
        costs.append(recurrence)
    (steps, one), (other_steps, two) = costs
    assert steps == other_steps == 50
    assert one.matrix_flops == 2 * 2 * 4 * HIDDEN * HIDDEN
    assert two.matrix_flops == 2 * one.matrix_flops


def test_steps_lie_where_the_layout_says(build: Build) -> None:
    """Layout 1: (rows, steps, features)."""
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"], "gru", hidden_size=4, layout=1)
    model = build([node], {"x": [2, 70, 3]}, {"y": [2, 70, 1, 4]}, {"w": [1, 12, 3], "r": [1, 12, 4]})
    (cost,) = group_costs(GroupedModel(model, find_groups(model)), {}).values()
    assert cost.recurrences[0][0] == 70
    assert cost.flops == 2 * 70 * 2 * (12 * 3 + 12 * 4)


def test_quantised_weights_are_not_folded(build: Build) -> None:
    """ONNX Runtime and TensorRT keep them in INT8: one byte an element."""
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"], "dq"),
        helper.make_node("MatMul", ["x", "w"], ["y"], "mm"),
    ]
    weights = {"q": np.ones((64, 64), np.int8), "scale": np.array(0.1, np.float32)}
    model = build(nodes, {"x": [1, 64]}, {"y": [1, 64]}, weights)
    assert "w" not in facts_of(model).folded
    assert memory_need(model, {}).fp32_weights == 64 * 64 + 4
