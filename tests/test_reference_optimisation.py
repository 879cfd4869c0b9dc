"""Whether ONNX Runtime's graph optimisations change the FP32 reference, in ``inspect --data`` and in a search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import mptune
from mptune.finding import Finding
from tests.contrib_models import BATCH, CHANNELS, LENGTH, transformer
from tests.graph import models
from tests.graph.test_quantised import _residual
from tests.zoo.fp32 import specimens

pytestmark = pytest.mark.usefixtures("opened_here")

CODE = "reference-depends-on-optimisation"


def _four_bits(folder: Path) -> Path:
    """A product with weights of 4 bits: the optimised kernel rounds its activations to 8 bits."""
    rng = np.random.default_rng(0)
    w = helper.make_tensor("w", onnx.TensorProto.INT4, [64, 32], rng.integers(-8, 8, 64 * 32).tolist())
    graph = """(float[batch,8,64] x) => (float[] y) {
        d = DequantizeLinear<axis = 0, block_size = 32>(w, s) h = MatMul(x, d) y = Relu(h) }"""
    proto = models.text(graph, w, models.constant("s", rng.random((2, 32)) * 0.05 + 0.02), opset=21)
    proto.ir_version = 10
    return models.save(proto, folder)


def _difference(path: Path, data: np.ndarray) -> float:
    """Relative L2 between ONNX Runtime with and without graph optimisations, taken here."""
    import onnxruntime

    results = []
    for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        results.append(session.run(None, {"x": data[:1]})[0])
    return float(np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[1]))


def _found(path: Path, data: np.ndarray) -> list[Finding]:
    return [finding for finding in mptune.inspect(path, data=data).findings if finding.code == CODE]


def test_a_reference_that_depends_on_optimisation_is_a_finding(tmp_path: Path) -> None:
    path = _four_bits(tmp_path)
    data = np.random.default_rng(1).standard_normal((4, 8, 64)).astype(np.float32)
    expected = _difference(path, data)
    if expected < 1e-3:
        pytest.skip("this ONNX Runtime computes products with weights of 4 bits in FP32 here")
    (finding,) = _found(path, data)
    assert (finding.severity, finding.origin) == ("warning", "inspect")
    assert finding.evidence["relative_l2"] == pytest.approx(expected, rel=0.05)
    assert [output.name for output in finding.where.outputs] == ["y"]

    front = mptune.search(path, data=data, budget=2, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    (searched,) = [finding for finding in front.findings if finding.code == CODE]
    assert (searched.origin, searched.evidence) == ("search", finding.evidence)
    again = mptune.search(path, data=data, budget=2, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert [finding for finding in again.findings if finding.code == CODE] == [searched]


def test_rounding_alone_is_no_finding(tmp_path: Path) -> None:
    path = models.save(transformer(), tmp_path)
    data = np.random.default_rng(1).standard_normal((2 * BATCH, LENGTH, CHANNELS)).astype(np.float32)
    assert _found(path, data) == []


@pytest.mark.parametrize("name", ["dropout", "noise"])
def test_what_draws_random_numbers_differs_whatever_is_optimised(name: str, tmp_path: Path) -> None:
    one = specimens()[name]
    path = models.save(one.proto, tmp_path)
    codes = {finding.code for finding in mptune.inspect(path, data=dict(one.data)).findings}
    assert "not-deterministic" in codes
    assert CODE not in codes


def test_steps_of_quantised_activations_are_rounding(tmp_path: Path) -> None:
    proto = _residual()
    path = models.save(proto, tmp_path)
    shape = [dim.dim_value or 4 for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    assert _found(path, data) == []
