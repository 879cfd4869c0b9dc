"""Models of a few nodes, whose costs are counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mptune.graph.loading.model import Model, load_model

Build = Callable[..., Model]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A model from nodes, shapes of its inputs and outputs, and its weights, or their shapes."""

    def make(nodes, inputs, outputs, weights=None, opset=17, types=None) -> Model:
        types = types or {}
        values = [
            [helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), s) for n, s in side.items()]
            for side in (inputs, outputs)
        ]
        initializers = [
            numpy_helper.from_array(w if isinstance(w, np.ndarray) else np.ones(w, np.float32), n)
            for n, w in (weights or {}).items()
        ]
        graph = helper.make_graph(nodes, "g", *values, initializers)
        domains = {node.domain for node in nodes} - {""}
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
        path = tmp_path / "m.onnx"
        onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=9), path)
        return load_model(path)

    return make
