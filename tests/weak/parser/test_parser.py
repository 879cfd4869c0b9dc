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
from mptune.graph.writing.weak import WEAK_BRANCHES, write_weak
from mptune.reporting.recipe import BuildRecipe
from mptune.reporting.text import read_template
from mptune.reporting.weak import plan_document
from tests.graph import helpers
from tests.weak import surface
from tests.weak.test_ownership import SMALL, hold

SHAPES = {"SHUFFLE": (1,), "SLICE": (1, 2, 3), "RESIZE": (1,), "FILL": (0,), "TOPK": (1,), "LOOP_OUTPUT": (1,), "ONE_HOT": (2,)}
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
    waiting = [
        layer.inputs[k] for layer in layers for k in SHAPES.get(layer.type.name, ()) if k < layer.num_inputs
    ]
    while waiting:
        tensor = waiting.pop()
        if tensor is None or tensor.is_shape_tensor:
            continue
        tensor.is_shape_tensor = True
        producer = producers.get(tensor.name)
        if producer is not None and producer.type.name != "SHAPE":
            waiting += producer.inputs
