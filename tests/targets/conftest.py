"""Models of a few nodes, whose costs are counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mptune.graph.loading.model import Model, load_model
from tests.graph import models

Build = Callable[..., Model]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A model in ONNX's text form, with its weights by name, or the shapes of weights."""

    def make(graph: str, opset: int = 17, **weights: object) -> Model:
        arrays = {n: w if isinstance(w, np.ndarray) else np.ones(w, np.float32) for n, w in weights.items()}
        constants = [models.constant(name, array, array.dtype) for name, array in arrays.items()]
        return load_model(models.save(models.text(graph, *constants, opset=opset), tmp_path))

    return make
