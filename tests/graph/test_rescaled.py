"""Constants beyond FP16 that are rescaled: the function stays, and no group is kept in FP32 for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.hazards.observed import hazards_on
from tests.graph.helpers import relative_l2, run
from tests.graph.models import constant, node, text, value

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


def errors(proto: onnx.ModelProto, feed: Mapping[str, np.ndarray], folder: Path) -> dict[str, float]:
    """Of the all-FP16 model, of the same with a weight bank, and of the emulation; all-FP32 changes nothing."""
    model = load_model(models.save(proto, folder))
    grouped, bank = GroupedModel(model, find_groups(model)), WeightBank.write(model, folder / "bank")
    reference = run(model.path, feed)["y"]
    fp16 = grouped.uniform(Precision.FP16)
    written = {
        "fp32": Rewriter(grouped).export(grouped.uniform(Precision.FP32), folder / "fp32.onnx"),
        "exported": Rewriter(grouped).export(fp16, folder / "fp16.onnx"),
        "banked": Rewriter(grouped, bank).write(fp16, bank.directory / "fp16.onnx"),
        "emulated": Emulator(grouped, bank).write(fp16, bank.directory / "emulated.onnx"),
    }
    fp32 = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(written.pop("fp32")).graph.initializer}
    assert all(np.array_equal(fp32[t.name], onnx.numpy_helper.to_array(t)) for t in proto.graph.initializer)
    return {name: relative_l2(run(path, feed)["y"], reference) for name, path in written.items()}


@pytest.mark.parametrize("variance", [5e5, 1e8])
def test_variances_beyond_fp16(variance: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = np.clip(np.sqrt(variance) * rng.standard_normal((2, CHANNELS, 8)), -6e4, 6e4).astype(np.float32)
    assert max(errors(batch_norm(variance), {"x": x}, tmp_path).values()) < 2e-3
    hazards = hazards_on(batch_norm(variance), {"x": x}, tmp_path)
    assert [h for h in hazards if h.place.tensor == "variance"] == []
    assert "data-do-not-fit" not in {h.code for h in hazards}


def test_a_variance_that_another_node_reads_stays(tmp_path: Path) -> None:
    proto = batch_norm(5e5)
    proto.graph.node.append(node("Sqrt", ["variance"], "deviation", "root"))
    proto.graph.output.append(value("deviation", [CHANNELS]))
    model = load_model(models.save(proto, tmp_path))
    hazards = find_hazards(GroupedModel(model, find_groups(model)))
    assert "held_as" in next(h for h in hazards if h.place.tensor == "variance").evidence
