"""Norms written out at opset 17 and up, in another precision than what they read (ONNX Runtime's LayerNormFusion)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import version_converter

from mptune.engines.ort.session import OrtSession, SessionOptions
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph.helpers import relative_l2, run
from tests.reporting.infer_support import infer_module

LAYERNORM = Path(__file__).parents[2] / "graph" / "corpus" / "layernorm_13.onnx"


@pytest.fixture
def raised(tmp_path: Path) -> Path:
    path = tmp_path / "raised.onnx"
    onnx.save(version_converter.convert_version(onnx.load(LAYERNORM), 17), path)
    return path


def mixed(path: Path, fp16_norms: bool) -> Path:
    """The model with its norms in one precision and all else in the other."""
    model = load_model(path)
    groups = find_groups(model)
    plan = {g.id: Precision.FP16 if (g.kind == "norm") is fp16_norms else Precision.FP32 for g in groups}
    bank = WeightBank.write(model, path.parent)
    rewriter = Rewriter(GroupedModel(model, groups), bank)
    return rewriter.write(PrecisionPlan(model.sha256, plan), path.parent / "typed.onnx")


@pytest.mark.parametrize("fp16_norms", [True, False])
def test_the_session_and_the_script_open_it(raised: Path, tmp_path: Path, fp16_norms: bool) -> None:
    typed = mixed(raised, fp16_norms)
    with pytest.raises(Exception, match="/LayerNormFusion/"):  # where this no longer fails, nothing is to be done
        onnxruntime.InferenceSession(str(typed), providers=["CPUExecutionProvider"])
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 9, 16), np.float32)}
    session = OrtSession(typed, SessionOptions())
    outputs = session.run(feeds)
    assert any("LayerNormFusion" in warning for warning in session.warnings)
    session.close()
    script = infer_module(raised, tmp_path)
    by_script = script["opened"](typed, onnxruntime.SessionOptions(), ["CPUExecutionProvider"], [])
    names = [output.name for output in by_script.get_outputs()]
    for given in (outputs, dict(zip(names, by_script.run(None, feeds), strict=True))):
        for name, reference in run(raised, feeds).items():
            assert relative_l2(given[name], reference) < 1e-2
