"""The parsers of TensorRT 8.5 and 8.6 themselves: their layers carry the names that build.sh gives, and belong to the
nodes that constraints.py finds. build.sh of this folder compiles them; MPTUNE_PARSER_RECORDERS names where they are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

import tensorrt_rtx as rtx

from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.writing.weak import WEAK_BRANCHES, WeakModel, write_weak
from mptune.reporting.recipe import BuildRecipe
from mptune.reporting.weak import plan_document
from mptune.resources import read_template
from tests.graph import helpers
from tests.networks.networks import FILES, filled
from tests.weak import surface
from tests.weak.test_ownership import NO_MODEL, SMALL, hold

SHAPES = {
    "SHUFFLE": (1,),
    "SLICE": (1, 2, 3),
    "RESIZE": (1,),
    "FILL": (0,),
    "TOPK": (1,),
    "LOOP_OUTPUT": (1,),
    "ONE_HOT": (2,),
}
"""Type of a layer -> those of its inputs that are shapes."""


def recorded(program: Path, path: Path) -> SimpleNamespace:
    """The network that the parser makes of a model."""
    done = subprocess.run([program, path], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    tensors: dict[str, SimpleNamespace] = {}

    def tensor(entry: dict[str, Any] | None) -> SimpleNamespace | None:
        if entry is None:
            return None
        made = SimpleNamespace(
            name=entry["name"],
            dtype=rtx.DataType.__members__[entry["dtype"]],
            shape=tuple(entry["shape"]),
            is_network_output=entry["is_output"],
            is_shape_tensor=False,
            is_execution_tensor=True,
        )
        return tensors.setdefault(entry["name"], made)

    layers = []
    for line in done.stdout.splitlines():
        entry = json.loads(line)
        inputs, outputs = ([tensor(each) for each in entry[key]] for key in ("inputs", "outputs"))
        layers.append(
            SimpleNamespace(
                name=entry["name"],
                metadata=entry["metadata"],
                type=SimpleNamespace(name=entry["type"]),
                num_inputs=len(inputs),
                num_outputs=len(outputs),
                get_input=inputs.__getitem__,
                get_output=outputs.__getitem__,
                inputs=inputs,
                outputs=outputs,
            )
        )
    mark_shapes(layers)
    return SimpleNamespace(num_layers=len(layers), get_layer=layers.__getitem__, layers=layers)


def mark_shapes(layers: list[SimpleNamespace]) -> None:
    """A shape tensor is what a layer reads as a shape, and what that is computed from."""
    producers = {tensor.name: layer for layer in layers for tensor in layer.outputs}
    waiting = [layer.inputs[k] for layer in layers for k in SHAPES.get(layer.type.name, ()) if k < layer.num_inputs]
    while waiting:
        tensor = waiting.pop()
        if tensor is None or tensor.is_shape_tensor:
            continue
        tensor.is_shape_tensor = True
        producer = producers.get(tensor.name)
        if producer is not None and producer.type.name != "SHAPE":
            waiting += producer.inputs


PROGRAMS = os.environ.get("MPTUNE_PARSER_RECORDERS", "")
INSTANCE_NORM = "InstanceNormalization plugin was not found"
NOT_PARSED = {
    "cnn_dynamo_18": INSTANCE_NORM,
    "cnn_torchscript_13": INSTANCE_NORM,
    "cnn_torchscript_17": INSTANCE_NORM,
    "cnn_torchscript_20": INSTANCE_NORM,
    "diffusion_unet_torchscript_15": INSTANCE_NORM,
    "qdq": "input tensor shape misaligns with the input kernel shape",
    "two_stage_torchscript_16": "ROIAlign plugin was not found",
}
"""Model -> what the parser says of it. The recorder has no plugins, and Conv with a computed kernel needs an attribute
``kernel_shape`` (convMultiInput of onnx2trt_utils.cpp)."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not PROGRAMS, reason="MPTUNE_PARSER_RECORDERS names no folder of compiled parsers (build.sh)")
@pytest.mark.parametrize(
    ("version", "branch"), [("8.5.3", "tensorrt-8"), ("8.6.1", "tensorrt-8"), ("8.6.1", "tensorrt-8.6")]
)
def test_names_and_owners(version: str, branch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(PROGRAMS) / f"recorder-{version[:3]}"
    if not program.exists():
        pytest.skip(f"MPTUNE_PARSER_RECORDERS holds no {program.name} (build.sh)")
    script = tmp_path / "constraints.py"
    script.write_text(read_template("weak/constraints.py.in"))
    constraints = surface.load_script(script, surface.make_module(version), monkeypatch)
    checked = 0
    for name in (name for name in (*SMALL, *FILES) if name not in NO_MODEL):
        path = SMALL.get(name) or filled(name, tmp_path)
        model = load_typed_model(path)
        grouped = GroupedModel(model, find_groups(model))
        (plan,) = helpers.plans(model, grouped.groups, 1)[2:]
        try:
            weak = write_weak(grouped, plan, WEAK_BRANCHES[branch], tmp_path / "weak.onnx")
        except ModelError:
            continue
        if name in NOT_PARSED:
            with pytest.raises(ValueError, match=NOT_PARSED[name]):
                recorded(program, tmp_path / "weak.onnx")
            continue
        network = recorded(program, tmp_path / "weak.onnx")
        hold_names(constraints, weak, network, plan_document(plan, grouped, weak, BuildRecipe()))
        checked += 1
    assert checked >= 20


def hold_names(constraints: Any, weak: WeakModel, network: Any, document: dict[str, Any]) -> None:
    """What holds with any parser, and that the names which it registered say the same."""
    wrapped = constraints.trt._Network(network, constraints.trt)
    hold(constraints, weak, wrapped, document)
    assert {node.name for node in weak.nodes if node.is_named} <= set(wrapped._told)
    owners = constraints.constrain(constraints.trt._Network(network, constraints.trt), document).owners
    registered = {
        layer.name: match[1] for layer in network.layers if (match := re.fullmatch(r"(n\d{4,})(_\d+)?", layer.name))
    }
    assert registered.keys() & owners.keys()
    assert [(name, owners[name]) for name in registered if owners.get(name, registered[name]) != registered[name]] == []
