"""A BatchNormalization whose constants are beyond FP16 stays FP32; its layer need not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.rounding_steps import with_rounding_steps
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.hazards.observed import hazards_on
from tests.graph.helpers import relative_l2, run
from tests.graph.models import constant, text

CHANNELS = 300
"""More than a kilobyte for each constant, so that a weight bank would hold them."""


def batch_norm(variance: float) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    vectors = {
        "scale": rng.uniform(-1, 1, CHANNELS),
        "bias": rng.standard_normal(CHANNELS),
        "mean": np.sqrt(variance) * rng.standard_normal(CHANNELS),
        "variance": variance * rng.uniform(0.1, 1, CHANNELS),
    }
    shape = f"float[batch,{CHANNELS},8]"
    nodes = "n = BatchNormalization(x, scale, bias, mean, variance) y = Relu(n)"
    return text(f"({shape} x) => ({shape} y) {{ {nodes} }}", *(constant(name, v) for name, v in vectors.items()))


@pytest.mark.parametrize("variance", [5e5, 1e8])
def test_variances_beyond_fp16(variance: float, tmp_path: Path) -> None:
    rng, proto = np.random.default_rng(1), batch_norm(variance)
    x = np.clip(np.sqrt(variance) * rng.standard_normal((2, CHANNELS, 8)), -6e4, 6e4).astype(np.float32)
    model = load_model(models.save(proto, tmp_path))
    grouped, bank = GroupedModel(model, find_groups(model)), WeightBank.write(model, tmp_path / "bank")
    fp16, emulator = grouped.uniform(Precision.FP16), Emulator(with_rounding_steps(grouped), bank)
    paths = Rewriter(grouped).export(fp16, tmp_path / "fp16.onnx"), emulator.write(fp16, bank.directory / "e.onnx")
    assert [node.op_type for node in onnx.load(paths[0]).graph.node] == ["BatchNormalization", "Cast", "Relu", "Cast"]
    reference = run(model.path, {"x": x})["y"]
    assert max(relative_l2(run(path, {"x": x})["y"], reference) for path in paths) < 1e-3
    hazards = hazards_on(proto, {"x": x}, tmp_path)
    assert [h for h in hazards if h.place.tensor == "variance"] == []
    assert "data-do-not-fit" not in {h.code for h in hazards}
