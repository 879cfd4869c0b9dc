"""Operators that no plan reaches: the finding, and what a search and a TensorRT engine say of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mptune
from mptune.finding import Finding
from tests.contrib_models import BATCH, BUILDERS, CHANNELS, LENGTH, between_products, optimised, transformer

pytestmark = pytest.mark.usefixtures("opened_here")

CODE = "operators-out-of-reach"


def _findings(path: Path) -> list[Finding]:
    return [finding for finding in mptune.inspect(path).findings if finding.code == CODE]


def _unknown_operator(path: Path) -> Path:
    """An operator of a domain of the user's, which ONNX Runtime has no library for."""
    model = between_products("Foo", domain="acme")
    model.opset_import.append(helper.make_opsetid("acme", 1))
    onnx.save(model, path)
    return path


def _for_this_cpu(path: Path) -> Path:
    """A small convolutional network as ONNX Runtime's highest level of optimisation lays it out for a CPU."""
    import onnxruntime

    rng = np.random.default_rng(0)
    weights = {"a": rng.standard_normal((32, 3, 3, 3)), "b": rng.standard_normal((32, 32, 3, 3))}
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["h"], pads=[1] * 4),
        helper.make_node("MaxPool", ["h"], ["p"], kernel_shape=[2, 2]),
        helper.make_node("Conv", ["p", "b"], ["q"]),
        helper.make_node("GlobalAveragePool", ["q"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array((value / 8).astype(np.float32), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return path


def test_an_operator_that_nobody_knows_is_a_finding_with_its_share(tmp_path: Path) -> None:
    (finding,) = _findings(_unknown_operator(tmp_path / "model.onnx"))
    assert finding.severity == "warning"
    assert finding.where.nodes == ("middle", "behind")
    assert finding.evidence["operators"] == "acme.Foo"
    assert finding.evidence["untyped_nodes"] == 2
    assert float(finding.evidence["flops_share"]) > 0.05  # of the product behind it, at least one row
    assert "acme.Foo" in finding.text
    assert "at least" in finding.text
    assert "not a registered function/op" in finding.text
    assert "local function" in finding.cure


def test_a_search_of_a_model_that_onnx_runtime_does_not_load_ends_at_once(tmp_path: Path) -> None:
    path = _unknown_operator(tmp_path / "model.onnx")
    data = np.zeros((4, LENGTH, CHANNELS), np.float32)
    with pytest.raises(mptune.BaselineError, match=r"acme:Foo.*is not a registered function/op") as caught:
        mptune.search(path, data=data, budget=4, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert "\n" not in caught.value.message


def test_operators_laid_out_for_a_cpu_are_a_finding(tmp_path: Path) -> None:
    path = _for_this_cpu(tmp_path / "model.onnx")
    if not any(node.domain == "com.microsoft.nchwc" for node in onnx.load(path).graph.node):
        pytest.skip("ONNX Runtime lays out nothing for this CPU")
    (finding,) = _findings(path)
    assert finding.evidence["flops_share"] == pytest.approx(1.0)
    assert finding.evidence["untyped_nodes"] == 0
    assert finding.cure.startswith("give the model from before the optimiser")


def test_a_search_with_nothing_in_reach_says_so(tmp_path: Path) -> None:
    path = _for_this_cpu(tmp_path / "model.onnx")
    if not any(node.domain == "com.microsoft.nchwc" for node in onnx.load(path).graph.node):
        pytest.skip("ONNX Runtime lays out nothing for this CPU")
    data = np.random.default_rng(0).random((4, 3, 16, 16)).astype(np.float32)
    front = mptune.search(path, data=data, budget=2, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert [f.code for f in front.findings if f.code == CODE] == [CODE]
    assert "nothing-to-tune" in [finding.code for finding in front.findings]


def test_what_the_optimiser_writes_at_its_extended_level_is_no_finding(tmp_path: Path) -> None:
    assert _findings(optimised(transformer(1), tmp_path)) == []


def test_a_search_of_an_optimised_model_reaches_every_group(tmp_path: Path) -> None:
    path = optimised(transformer(1), tmp_path)
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

    path = tmp_path / "model.onnx"
    onnx.save(BUILDERS["LayerNormalization of opset 14"](), path)
    assert run_once(ParseJob("tensorrt-rtx", path), 60.0) is None
