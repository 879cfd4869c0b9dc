"""Recurrent layers cost their steps, and weights that an exporter builds from constants cost what weights cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from mptune.graph.facts import facts_of
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import PRECISIONS, Precision
from mptune.targets.costs import group_costs, memory_need
from mptune.targets.roofline import roofline
from mptune.targets.target import load_target
from tests.graph import models
from tests.targets.conftest import Build

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FEATURES, HIDDEN = 32, 64


def recurrent(path: Path, op: str, steps: int, *, both: bool = False, built: bool = False) -> Model:
    """Linear, a recurrent layer and another Linear on (rows, steps, features), as torch's two exporters write it.

    Weights that are ``built`` come from Slice, Concat, Unsqueeze and Transpose of torch's tensors, as the newer
    exporter has them; else they are there as ONNX wants them, and the initial state is expanded from a shape.
    """
    gates, count = GATES[op], 2 if both else 1
    constants = {name: np.array([k]) for k, name in enumerate(("zero", "one"))}
    constants |= {f"at{k}": np.array([k * HIDDEN]) for k in range(gates + 1)}
    constants |= {"count": np.array([count]), "flat": np.array([2, steps, count * HIDDEN])}
    constants["start"] = np.zeros((count, 2 if built else 1, HIDDEN), np.float32)
    shapes = {"lin": (FEATURES, FEATURES), "bias": (count, 2 * gates * HIDDEN), "head": (count * HIDDEN, 10)}
    lines = [] if built else ["rows = Shape<start=0, end=1>(x)", "shape = Concat<axis=0>(count, rows, at1)"]
    lines += ["state = Identity(start)" if built else "state = Expand(start, shape)"]
    for name, columns in (("w", FEATURES), ("r", HIDDEN)):
        if not built:
            shapes[name] = count, gates * HIDDEN, columns
            continue
        for k in range(count):
            shapes[f"{name}{k}"] = columns, gates * HIDDEN
            lines += [f"{name}t{k} = Transpose<perm=[1, 0]>({name}{k})"]
            lines += [f"{name}{k}_{g} = Slice({name}t{k}, at{g}, at{g + 1}, zero)" for g in range(gates)]
            parts = ", ".join(f"{name}{k}_{g}" for g in reversed(range(gates)))
            lines += [f"{name}c{k} = Concat<axis=0>({parts})", f"{name}u{k} = Unsqueeze({name}c{k}, zero)"]
        lines += [f"{name} = Concat<axis=0>({', '.join(f'{name}u{k}' for k in range(count))})"]
    states = "state, state" if op == "LSTM" else "state"
    attributes = f'hidden_size={HIDDEN}, direction="{"bidirectional" if both else "forward"}"'
    lines += ["h = MatMul(x, lin)", "t = Transpose<perm=[1, 0, 2]>(h)"]
    lines += [f"made = {op}<{attributes}>(t, w, r, bias, , {states})", "back = Transpose<perm=[2, 0, 1, 3]>(made)"]
    lines += ["f = Reshape(back, flat)", "y = MatMul(f, head)"]
    graph = f"(float[2, {steps}, {FEATURES}] x) => (float[2, {steps}, 10] y) {{ {' '.join(lines)} }}"
    weights = [models.weight(name, *shape, scale=0.1) for name, shape in shapes.items()]
    numbers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return load_model(models.save(models.text(graph, *weights, *numbers), path.parent, path.name))


def predicted(model: Model) -> tuple[float, float]:
    """Predicted ms of all-FP32 and of all free groups in FP16."""
    grouped = GroupedModel(model, find_groups(model))
    terms = roofline(grouped, load_target("jetson-orin-nano-8gb"), static_shapes(model).shapes)
    fp32 = grouped.uniform(Precision.FP32)
    free = [group.id for group in grouped.groups if group.pinned is None]
    return terms.predict(fp32), terms.predict(fp32.replace(dict.fromkeys(free, Precision.FP16)))


@pytest.mark.parametrize(("op", "both"), [("LSTM", True), ("GRU", False), ("RNN", True)])
def test_two_exports_of_a_network_predict_the_same(tmp_path: Path, op: str, both: bool) -> None:
    ready = recurrent(tmp_path / "ready.onnx", op, 50, both=both)
    built = recurrent(tmp_path / "built.onnx", op, 50, both=both, built=True)
    assert predicted(built) == pytest.approx(predicted(ready), rel=0.05)
    need, other = (memory_need(model, static_shapes(model).shapes) for model in (ready, built))
    for precision in PRECISIONS:
        assert other.total(precision) == pytest.approx(need.total(precision), rel=0.05)


@pytest.mark.parametrize("op", GATES)
def test_recurrence_costs_its_steps(tmp_path: Path, op: str) -> None:
    """Four times the steps take about four times as long: each is a launch that waits for the one before."""
    short = predicted(recurrent(tmp_path / "short.onnx", op, 25))
    long = predicted(recurrent(tmp_path / "long.onnx", op, 100))
    launch = load_target("jetson-orin-nano-8gb").launch_us * 1e-3
    for few, many in zip(short, long, strict=True):
        assert few > 25 * launch
        assert 3.5 < many / few < 4.2


def test_both_directions_share_their_steps_and_double_their_work(tmp_path: Path) -> None:
    recurrences = []
    for both in (False, True):
        model = recurrent(tmp_path / f"{both}.onnx", "LSTM", 50, both=both)
        costs = group_costs(GroupedModel(model, find_groups(model)), static_shapes(model).shapes)
        recurrences += [recurrence for cost in costs.values() for recurrence in cost.recurrences]
    (steps, one), (other_steps, two) = recurrences
    assert steps == other_steps == 50
    assert one.matrix_flops == 2 * 2 * 4 * HIDDEN * HIDDEN
    assert two.matrix_flops == 2 * one.matrix_flops


def test_steps_lie_where_the_layout_says(build: Build) -> None:
    """Layout 1: (rows, steps, features)."""
    graph = "(float[2,70,3] x) => (float[2,70,1,4] y) { y = GRU<hidden_size=4, layout=1>(x, w, r) }"
    model = build(graph, w=(1, 12, 3), r=(1, 12, 4))
    (cost,) = group_costs(GroupedModel(model, find_groups(model)), {}).values()
    assert cost.recurrences[0][0] == 70
    assert cost.flops == 2 * 70 * 2 * (12 * 3 + 12 * 4)


def test_quantised_weights_are_not_folded(build: Build) -> None:
    """ONNX Runtime and TensorRT keep them in INT8: one byte an element."""
    graph = "(float[1,64] x) => (float[1,64] y) { w = DequantizeLinear(q, scale) y = MatMul(x, w) }"
    model = build(graph, q=np.ones((64, 64), np.int8), scale=np.array(0.1, np.float32))
    assert "w" not in facts_of(model).folded
    assert memory_need(model, {}).fp32_weights == 64 * 64 + 4
