"""Which outputs are the inputs of the next step, by name and shape, and which only look like it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.data.samples import Rollout
from mptune.graph.hazards.static import interface_findings, state_inputs, state_pairs
from mptune.graph.loading.model import Model, load_model
from tests.graph import models
from tests.zoo.voice import voice

Shapes = dict[str, list[int | str]]


def model(path: Path, inputs: Shapes, outputs: Shapes) -> Model:
    """A model with this interface; what it computes does not matter."""
    nodes = [models.node("ReduceMean", [next(iter(inputs))], "m", keepdims=0)]
    constants = []
    for name, shape in outputs.items():
        constants.append(models.constant(f"{name}.shape", [d if isinstance(d, int) else 1 for d in shape], np.int64))
        nodes.append(models.node("Expand", ["m", f"{name}.shape"], name))
    ends = [[models.value(name, shape) for name, shape in side.items()] for side in (inputs, outputs)]
    return load_model(models.save(models.model(nodes, *ends, constants), path.parent))


PAST: list[int | str] = ["batch", 4, "past", 16]
GROWN: list[int | str] = [1, 4, 8, 16]
STATE: list[int | str] = [2, 1, 32]


@pytest.mark.parametrize(
    ("inputs", "outputs", "pairs"),
    [
        (
            {"x": [1, 8], "past_key_values.0.key": PAST, "past_key_values.0.value": PAST},
            {"logits": [1, 8], "present.0.key": GROWN, "present.0.value": GROWN},
            {"present.0.key": "past_key_values.0.key", "present.0.value": "past_key_values.0.value"},
        ),
        ({"x": [1, 8], "past": PAST}, {"y": [1, 8], "present": GROWN}, {"present": "past"}),
        (
            {"x": [9, 1, 8], "h0": STATE, "c0": STATE},
            {"y": [9, 1, 8], "hn": STATE, "cn": STATE},
            {"hn": "h0", "cn": "c0"},
        ),
        ({"input": [1, 8], "state": STATE}, {"output": [1, 1], "stateN": STATE}, {"stateN": "state"}),
        ({"x": [1, 8], "h_in": STATE}, {"y": [1, 1], "h_out": STATE}, {"h_out": "h_in"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_state_is_known_by_name_and_shape(
    tmp_path: Path, inputs: Shapes, outputs: Shapes, pairs: dict[str, str]
) -> None:
    made = model(tmp_path / "m.onnx", inputs, outputs)
    assert dict(state_pairs(made)) == pairs
    (finding,) = interface_findings(made, "inspect")
    assert (finding.code, finding.severity) == ("state-fed-back", "info")
    assert {output.name for output in finding.where.outputs} == pairs.keys()
    assert set(finding.where.inputs) == set(pairs.values())
    assert finding.evidence["pairs"] == len(pairs)
    texts = [text.split(" ")[0] for text in finding.cure.split("--feedback ")[1:]]
    rollout = Rollout.parse(texts, 4, list(inputs), list(outputs), 8)
    assert rollout is not None
    assert dict(rollout.pairs).items() <= pairs.items()
    assert interface_findings(made, "search", tuple(pairs.items())) == (), "what is fed back is not advised again"


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"input": [1, 3, 8, 8]}, {"output": [1, 3, 8, 8]}),
        ({"input": [1, 8], "mask": [1, 8]}, {"output": [1, 8], "score": [1, 1]}),
        ({"x": [1, 8], "past_state": [2, 1, 32]}, {"y": [1, 8], "new_state": [2, 1, 16, 2]}),
        ({"x": [1, 8], "z": [1, 8]}, {"x1": [1, 8], "x2": [1, 8]}),
    ],
)
def test_twins_are_no_state(tmp_path: Path, inputs: Shapes, outputs: Shapes) -> None:
    assert interface_findings(model(tmp_path / "m.onnx", inputs, outputs), "inspect") == ()


@pytest.mark.parametrize(("operator", "paired"), [("If", True), ("", True), ("", False)])
def test_a_state_is_an_input_that_is_fed_back_or_begins_a_recurrent_layer(
    operator: str, paired: bool, tmp_path: Path
) -> None:
    proto = voice(operator)
    if not paired:
        del proto.graph.output[1]
    assert state_inputs(load_model(models.save(proto, tmp_path))) == {"state"}
    assert state_inputs(load_model(models.save(models.cnn(), tmp_path))) == frozenset()


GATES = "g = MatMul(x, w) z = Sigmoid(g) n = Tanh(g) "
CONTINUED = {
    "an operator": (
        "float[1,1,8] x, float[1,1,16] hidden",
        "float[1,1,16] y, float[1,1,16] context",
        "all, context = GRU <hidden_size=16> (x, w, r, , , hidden) y = Squeeze(all, one)",
        {"context": "hidden"},
    ),
    "the cell's state as well": (
        "float[t,1,8] x, float[1,1,16] a, float[1,1,16] b",
        "float[1,1,16] p, float[1,1,16] q",
        "all, p, q = LSTM <hidden_size=16> (x, w4, r4, , , a, b)",
        {"p": "a", "q": "b"},
    ),
    "layers": (
        "float[t,1,8] x, float[2,1,16] state_1",
        "float[2,1,16] Concat_55",
        "s, t = Split <axis=0> (state_1, ones) u, a = GRU <hidden_size=16> (x, w, r, , , s)"
        " v = Squeeze(u, one) k, b = GRU <hidden_size=16> (v, r, r, , , t) Concat_55 = Concat <axis=0> (a, b)",
        {"Concat_55": "state_1"},
    ),
    "gates": (
        "float[1,8] x, float[1,16] memory",
        "float[1,16] Add_9, float[1,1] score",
        GATES + "d = Sub(n, memory) e = Mul(z, d) Add_9 = Add(memory, e) score = ReduceMean(Add_9)",
        {"Add_9": "memory"},
    ),
    "a buffer": (
        "float[1,4,2] x, float[1,4,6] lately",
        "float[1,4,6] Slice_3, float[1,1,1] y",
        "c = Concat <axis=2> (lately, x) Slice_3 = Slice(c, two, eight, two) y = ReduceMean(c)",
        {"Slice_3": "lately"},
    ),
    "passed on": (
        "float[1,8] x, float[1,16] state",
        "float[1,16] state_out, float[1,16] y",
        "state_out = Identity(state) m = MatMul(x, w) y = Add(m, state)",
        {},
    ),
    "an image and a mask": (
        "float[1,3,8,8] image, float[1,1,8,8] mask",
        "float[1,3,8,8] y, float[1,1,8,8] m",
        "r = Relu(image) s = Mul(r, mask) y = Add(image, s) m = Sigmoid(mask)",
        {},
    ),
    "a depth that is refined": (
        "float[1,3,8,8] image, float[1,1,8,8] depth",
        "float[1,1,8,8] y",
        "m = ReduceMean <axes=[1]> (image) y = Add(depth, m)",
        {},
    ),
    "noise": (
        "float[1,8] x, float[1,16] eps",
        "float[1,16] z, float[1,16] mean, float[1,16] deviation",
        "mean = MatMul(x, w) deviation = Exp(mean) e = Mul(eps, deviation) z = Add(mean, e)",
        {},
    ),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_state_of_any_name_is_known_by_its_recurrence(name: str, tmp_path: Path) -> None:
    inputs, outputs, nodes, pairs = CONTINUED[name]
    graph = f"""({inputs}) => ({outputs}) <int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] eight = {{8}},
        int64[2] ones = {{1,1}}> {{ {nodes} }}"""
    gru = [models.weight("w", 1, 48, 8), models.weight("r", 1, 48, 16)]
    lstm = [models.weight("w4", 1, 64, 8), models.weight("r4", 1, 64, 16)]
    weights = [*gru, *lstm] if "GRU" in nodes or "LSTM" in nodes else [models.weight("w", 8, 16)]
    made = load_model(models.save(models.text(graph, *weights), tmp_path))
    assert dict(state_pairs(made)) == pairs
    findings = [each for each in interface_findings(made, "inspect") if each.code == "state-fed-back"]
    assert [f"--feedback {output}:{given}" in findings[0].cure for output, given in pairs.items()] == [True] * len(
        pairs
    )
    assert bool(findings) == bool(pairs)
