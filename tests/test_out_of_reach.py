"""Operators that no plan reaches: the finding, and what a search and a TensorRT engine say of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.finding import Finding
from tests.contrib_models import BATCH, BUILDERS, CHANNELS, LENGTH, between_products, optimised, transformer
from tests.graph import models

pytestmark = pytest.mark.usefixtures("opened_here")

CODE = "operators-out-of-reach"


def _findings(path: Path) -> list[Finding]:
    return [finding for finding in mptune.inspect(path).findings if finding.code == CODE]


@pytest.fixture
def unknown_operator(tmp_path: Path) -> Path:
    """An operator of a domain of the user's, which ONNX Runtime has no library for."""
    return models.save(between_products("com.example.Foo(h)"), tmp_path)


@pytest.fixture
def for_this_cpu(tmp_path: Path) -> Path:
    """A small convolutional network as ONNX Runtime's highest level of optimisation lays it out for a CPU."""
    import onnxruntime

    graph = """(float[1,3,16,16] x) => (float[] y) {
        h = Conv<pads = [1, 1, 1, 1]>(x, a) p = MaxPool<kernel_shape = [2, 2]>(h) q = Conv(p, b)
        y = GlobalAveragePool(q) }"""
    proto = models.text(graph, models.weight("a", 32, 3, 3, 3), models.weight("b", 32, 32, 3, 3))
    options, path = onnxruntime.SessionOptions(), tmp_path / "model.onnx"
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    if not any(node.domain == "com.microsoft.nchwc" for node in onnx.load(path).graph.node):
        pytest.skip("ONNX Runtime lays out nothing for this CPU")
    return path


def test_an_operator_that_nobody_knows_is_a_finding_with_its_share(unknown_operator: Path) -> None:
    (finding,) = _findings(unknown_operator)
    assert finding.severity == "warning"
    assert finding.where.nodes == ("middle", "behind")
    assert finding.evidence["operators"] == "com.example.Foo"
    assert finding.evidence["untyped_nodes"] == 2
    assert float(finding.evidence["flops_share"]) > 0.05  # of the product behind it, at least one row
    assert "com.example.Foo" in finding.text
    assert "at least" in finding.text
    assert "not a registered function/op" in finding.text
    assert "local function" in finding.cure


def test_a_search_of_a_model_that_onnx_runtime_does_not_load_ends_at_once(
    unknown_operator: Path, tmp_path: Path
) -> None:
    data = np.zeros((4, LENGTH, CHANNELS), np.float32)
    with pytest.raises(mptune.BaselineError, match=r"com.example:Foo.*is not a registered function/op") as caught:
        mptune.search(unknown_operator, data=data, budget=4, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert "\n" not in caught.value.message


def test_operators_laid_out_for_a_cpu_are_a_finding(for_this_cpu: Path, tmp_path: Path) -> None:
    (finding,) = _findings(for_this_cpu)
    assert finding.evidence["flops_share"] == pytest.approx(1.0)
    assert finding.evidence["untyped_nodes"] == 0
    assert finding.cure.startswith("give the model from before the optimiser")
    data = np.random.default_rng(0).random((4, 3, 16, 16)).astype(np.float32)
    front = mptune.search(for_this_cpu, data=data, budget=2, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert {CODE, "nothing-to-tune"} <= {finding.code for finding in front.findings}


def test_a_search_of_an_optimised_model_reaches_every_group(tmp_path: Path) -> None:
    path = optimised(transformer(1), tmp_path)
    assert _findings(path) == []
    data = np.random.default_rng(0).standard_normal((BATCH * 2, LENGTH, CHANNELS)).astype(np.float32)
    front = mptune.search(path, data=data, budget=3, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert front.fp16 is not None
    assert front.fp16.is_finite
    assert 1e-5 < front.fp16.error_value < 1e-2
    assert len(front.fp16.plan.fp32_groups) == 0
    assert front.failures == 0
    (unparsed,) = [w for w in front.warnings if "TensorRT parses few of" in w]
    assert "com.microsoft.FusedMatMul" in unparsed
    assert "give the model from before" in unparsed


@pytest.mark.tensorrt_rtx
def test_an_engine_that_cannot_parse_an_operator_says_so_before_the_search(tmp_path: Path) -> None:
    path = optimised(transformer(1), tmp_path)
    data = np.zeros((4, LENGTH, CHANNELS), np.float32)
    with pytest.raises(mptune.TargetError, match=r"tensorrt-rtx cannot be used for .*\.FusedMatMul") as caught:
        mptune.search(path, data=data, budget=4, out=tmp_path / "run", target="rtx-4500-ada", engine="tensorrt-rtx")
    assert "before ONNX Runtime's optimiser" in str(caught.value.hint)


@pytest.mark.tensorrt_rtx
def test_a_norm_below_its_operator_set_is_parsed_by_tensorrt_rtx(tmp_path: Path) -> None:
    from mptune.engines.tensorrt.builder import ParseJob
    from mptune.processes.parent import run_once

    path = models.save(BUILDERS["LayerNormalization of opset 14"](), tmp_path)
    assert run_once(ParseJob("tensorrt-rtx", path), 60.0) is None
