"""Every floating layer of a parsed network belongs to a node, is told that node's precision, and no other layer is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

import tensorrt_rtx as rtx

from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.writing.weak import WEAK_BRANCHES, WeakModel, write_weak
from mptune.reporting.recipe import BuildRecipe
from mptune.reporting.weak import plan_document, trtexec_script
from mptune.resources import read_template
from tests.graph import helpers
from tests.networks.networks import FILES, filled
from tests.weak import surface, trtexec

GRAPH = Path(__file__).parents[1] / "graph"
SMALL = {path.stem: path for folder in ("corpus", "exported") for path in sorted((GRAPH / folder).glob("*.onnx"))}
QUICK = ("cnn_batchnorm", "detector_topk", "gru", "if_branches", "loop_state", "mask_1e9", "qdq", "vit")
NOT_WRITTEN = {
    "custom_domain": "com.microsoft::Gelu",
    "fp64_path": "BF16",
    "sequences": "SplitToSequence",
    "cnn_dynamo_21": "GroupNormalization",
    "diffusion_unet_dynamo_21": "GroupNormalization",
    "text_encoder_extended": "com.microsoft::FusedMatMul",
}
"""Model -> what it is refused for, of those that no TensorRT takes."""
NOT_PARSED = {"two_stage_torchscript_16": "ROIAlign plugin was not found"}
NO_MODEL = ("classifier",)


@pytest.fixture
def constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    script = tmp_path / "constraints.py"
    script.write_text(read_template("weak/constraints.py.in"))
    return surface.load_script(script, surface.make_module("10.3.0"), monkeypatch)


def told(network: Any) -> dict[str, str]:
    return {name: "fp16" if value == rtx.float16 else "fp32" for name, value in network._told.items()}


def hold(constraints: Any, weak: WeakModel, network: Any, document: dict[str, Any]) -> None:
    """What the issue asks of one network under one plan."""
    outcome = constraints.constrain(network, document)
    assert outcome.unowned == []
    assert outcome.refused == []
    precisions = {node.name: str(node.precision) for node in weak.nodes}
    assert len(precisions) == len(weak.nodes)
    floats = (rtx.float32, rtx.float16)
    for index in range(network.num_layers):
        layer = network.get_layer(index)._layer
        tensors = [layer.get_output(k) for k in range(layer.num_outputs)]
        tensors += [t for k in range(layer.num_inputs) if (t := layer.get_input(k)) is not None]
        skipped = layer.name in dict(outcome.skipped)
        if any(tensor.dtype in floats for tensor in tensors):
            assert skipped != (layer.name in network._told), layer.name
            assert skipped == (constraints.skip_reason(network.get_layer(index)) is not None)
        else:
            assert layer.name not in network._told
        named = set(
            re.findall(r"(?:^|\| )(n\d{4,})\b", " | ".join(re.findall(r"ONNX Layer: ([^\]]+)\]", layer.metadata)))
        )
        if layer.name in outcome.owners and named:
            assert outcome.owners[layer.name] in named
    for layer, kind in told(network).items():
        assert kind == precisions[outcome.owners[layer]]


def through_trtexec(weak: WeakModel, script: str) -> None:
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    precisions = {node.name: str(node.precision) for node in weak.nodes if node.is_named}
    read = trtexec.layer_precisions(options["layerPrecisions"])
    assert read == precisions
    assert {node.name: trtexec.plausible(read, node.name) for node in weak.nodes if node.is_named} == precisions
    types = trtexec.layer_output_types(options["layerOutputTypes"])
    assert types == {node.name: [str(node.precision)] for node in weak.nodes if node.is_named and node.is_whole}
    assert ("--fp16" in words) == ("fp16" in precisions.values())


def check(constraints: Any, path: Path, folder: Path, count: int) -> None:
    model = load_typed_model(path)
    grouped = GroupedModel(model, find_groups(model))
    for plan in helpers.plans(model, grouped.groups, count)[2:]:
        weak = write_weak(grouped, plan, WEAK_BRANCHES["tensorrt-10-weak"], folder / "weak.onnx")
        document = plan_document(plan, grouped, weak, BuildRecipe())
        network, _kept = surface.parse(constraints.trt, folder / "weak.onnx")
        hold(constraints, weak, network, document)
        through_trtexec(weak, trtexec_script(plan, weak, BuildRecipe()))


@pytest.mark.parametrize("name", QUICK)
def test_a_plan(name: str, constraints: Any, tmp_path: Path) -> None:
    check(constraints, SMALL[name], tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in (*SMALL, *FILES) if name not in NO_MODEL])
def test_random_plans(name: str, constraints: Any, tmp_path: Path) -> None:
    path = SMALL.get(name) or filled(name, tmp_path)
    if name in NOT_WRITTEN:
        with pytest.raises(ModelError, match=NOT_WRITTEN[name]):
            check(constraints, path, tmp_path, 1)
    elif name in NOT_PARSED:
        with pytest.raises(ValueError, match=NOT_PARSED[name]):
            check(constraints, path, tmp_path, 1)
    else:
        check(constraints, path, tmp_path, 20)


class Made:
    """A layer of a network, by the names of its tensors."""

    def __init__(self, inputs: str, outputs: str) -> None:
        self._inputs, self._outputs = inputs.split(), outputs.split()
        self.num_inputs, self.num_outputs = len(self._inputs), len(self._outputs)

    def get_input(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name=self._inputs[index])

    def get_output(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name=self._outputs[index])


def test_a_node_that_makes_no_layer_owns_none(constraints: Any) -> None:
    """``registerTensor`` of onnx-tensorrt 8.x renames what a Dropout reads, and adds no layer for it."""
    nodes = [("n0001", "x", "a"), ("n0002", "a", "b"), ("n0003", "b", "c"), ("n0004", "a c", "y")]
    document = {"nodes": [{"name": n, "inputs": i.split(), "outputs": o.split(), "static": False} for n, i, o in nodes]}
    layers = [Made("x", "b"), Made("b", "c0"), Made("c0", "c"), Made("b c", "y")]
    owners = constraints.find_owners(layers, document)
    assert [owners[index]["name"] for index in range(4)] == ["n0001", "n0003", "n0003", "n0004"]


def test_constants_have_the_rank_of_what_they_are_combined_with(constraints: Any, tmp_path: Path) -> None:
    """The parser adds no shuffle for them, and the outputs stay."""
    model = load_typed_model(SMALL["vit"])
    grouped = GroupedModel(model, find_groups(model))
    (plan,) = helpers.plans(model, grouped.groups, 1)[2:]
    write_weak(grouped, plan, WEAK_BRANCHES["tensorrt-8.6"], tmp_path / "weak.onnx")

    def broadcasts(path: Path) -> int:
        network, _kept = surface.parse(constraints.trt, path)
        return sum("Broadcast" in network.get_layer(k).name for k in range(network.num_layers))

    assert broadcasts(tmp_path / "weak.onnx") < broadcasts(SMALL["vit"]) / 2
    feed = helpers.feeds(model)
    expected, outputs = helpers.run(model.path, feed), helpers.run(tmp_path / "weak.onnx", feed)
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-5)
