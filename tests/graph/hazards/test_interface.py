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
