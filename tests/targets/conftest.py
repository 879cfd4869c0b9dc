"""Models of a few nodes, whose costs are counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from mptune.graph.loading.model import Model, load_model
from tests.graph import models

Build = Callable[..., Model]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A model from nodes, shapes of its inputs and outputs, and its weights, or their shapes."""

    def make(nodes, inputs, outputs, weights=None, opset=17, types=None) -> Model:
        codes = {**dict.fromkeys((*inputs, *outputs), TensorProto.FLOAT), **(types or {})}
        values = [[models.value(n, s, codes[n]) for n, s in side.items()] for side in (inputs, outputs)]
        arrays = {n: w if isinstance(w, np.ndarray) else np.ones(w, np.float32) for n, w in (weights or {}).items()}
        initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
        proto = models.model(nodes, *values, initializers, opset)
        proto.opset_import.extend(helper.make_opsetid(d, 1) for d in {node.domain for node in nodes} - {""})
        return load_model(models.save(proto, tmp_path))

    return make
