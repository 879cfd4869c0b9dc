"""What sessions of ONNX Runtime's CPU provider are opened with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from mptune.engines.ort.session import OPTIMISED_MODEL, OrtSession, Preset, SessionOptions
from tests.graph import models


@pytest.mark.parametrize(("preset", "is_fused"), [("reference", True), ("values", False), ("emulation", False)])
def test_where_values_or_epsilons_are_read_norms_are_not_fused(preset: Preset, is_fused: bool, tmp_path: Path) -> None:
    path = models.save(models.decomposed_norm(), tmp_path)
    folder = tmp_path / "optimised"
    folder.mkdir()
    OrtSession(path, SessionOptions(preset=preset, optimised_dir=folder)).close()
    graph = onnx.load(folder / OPTIMISED_MODEL, load_external_data=False).graph
    ops = {node.op_type for node in graph.node}
    assert ("Pow" in ops) is not is_fused  # a norm's variance


def test_layers_may_share_an_int8_weight(tmp_path: Path) -> None:
    """As the heads of a detector do, which its levels share; and their products are exact."""
    rng = np.random.default_rng(0)
    weight, scale = rng.integers(-127, 128, (64, 64)), np.float32(0.05)
    constants = [models.constant("scale", scale), models.constant("zero", 0, np.int8)]
    constants.append(models.constant("w", weight, np.int8))
    nodes = [models.node("DequantizeLinear", ["w", "scale", "zero"], "wf")]
    for before, after in (("x", "a"), ("a_dq", "b")):
        nodes += _quantised(before, f"{before}_in")
        nodes.append(models.node("MatMul", [f"{before}_in_dq", "wf"], after))
        nodes += _quantised(after, after)
    graph = models.model(nodes, [models.value("x", [4, 64])], [models.value("b_dq", [4, 64])], constants)
    x = rng.uniform(-6, 6, (4, 64)).astype(np.float32)
    session = OrtSession(models.save(graph, tmp_path), SessionOptions())
    native = session._open_session().get_session_options()  # products saturate on no processor, with VNNI or without
    assert native.get_session_config_entry("session.x64quantprecision") == "1"
    y = session.run({"x": x})["b_dq"]
    session.close()

    def rounded(values: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(values / scale), -128, 127)

    first = rounded(rounded(x) @ weight * scale * scale)
    assert np.array_equal(np.rint(y / scale), rounded(first @ weight * scale * scale))


def test_a_gemm_of_int8_activations_opens_and_is_exact(tmp_path: Path) -> None:
    """Its weights have a scale for each channel; the product beside it reads UINT8, and must not saturate either."""
    rng = np.random.default_rng(0)
    scale, scales = np.float32(0.05), rng.uniform(0.01, 0.05, 32).astype(np.float32)
    constants = [
        models.constant("scale", scale),
        models.constant("zero", 0, np.int8),
        models.constant("scales", scales),
    ]
    constants += [models.constant("zeros", np.zeros(32), np.int8), models.constant("zeros32", np.zeros(32), np.int32)]
    constants += [models.constant(name, rng.integers(-127, 128, (32, 32)), np.int8) for name in ("w", "v")]
    constants += [models.constant("b", rng.integers(-999, 999, 32), np.int32), models.constant("bs", scales * scale)]
    constants.append(models.constant("middle", 128, np.uint8))
    nodes = [
        models.node("DequantizeLinear", ["w", "scales", "zeros"], "wf", axis=0),
        models.node("DequantizeLinear", ["v", "scale", "zero"], "vf"),
        models.node("DequantizeLinear", ["b", "bs", "zeros32"], "bf", axis=0),
        *_quantised("x", "x"),
        models.node("Gemm", ["x_dq", "wf", "bf"], "a", transB=1),
        *_quantised("a", "a"),
        models.node("QuantizeLinear", ["x", "scale", "middle"], "u"),
        models.node("DequantizeLinear", ["u", "scale", "middle"], "u_dq"),
        models.node("MatMul", ["u_dq", "vf"], "c"),
        models.node("QuantizeLinear", ["c", "scale", "middle"], "c_q"),
        models.node("DequantizeLinear", ["c_q", "scale", "middle"], "c_dq"),
    ]
    outputs = [models.value(name, [4, 32]) for name in ("a_dq", "c_dq")]
    path = models.save(models.model(nodes, [models.value("x", [4, 32])], outputs, constants), tmp_path)
    x, found = rng.uniform(-6, 6, (4, 32)).astype(np.float32), []
    presets: tuple[Preset, ...] = ("reference", "values")
    for preset in presets:
        session = OrtSession(path, SessionOptions(preset=preset))
        found.append(session.run({"x": x}))
        session.close()
    for name, plain in found[1].items():
        apart = np.abs(found[0][name] - plain)
        assert apart.max() < 1.01 * scale, name  # one step, where a rounding is a tie
        assert np.count_nonzero(apart > scale / 2) <= 2, name


def _quantised(value: str, name: str) -> list[onnx.NodeProto]:
    return [
        models.node("QuantizeLinear", [value, "scale", "zero"], f"{name}_q"),
        models.node("DequantizeLinear", [f"{name}_q", "scale", "zero"], f"{name}_dq"),
    ]


def test_nodes_may_share_a_name(tmp_path: Path) -> None:
    """ONNX lets them; ONNX Runtime 1.31 does not. Weights outside the file are still found."""
    graph = models.mlp()
    for node in graph.graph.node:
        node.name = "layer"
    path = tmp_path / "model.onnx"
    onnx.save(graph, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(Exception, match="same node name"):  # where this no longer fails, nothing is to be done
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session = OrtSession(path, SessionOptions())
    x = np.ones((2, *session.inputs["x"][1][1:]), np.float32)
    found = session.run({"x": x})
    session.close()
    plain = onnxruntime.InferenceSession(models.mlp().SerializeToString(), providers=["CPUExecutionProvider"])
    for name, reference in zip(found, plain.run(list(found), {"x": x}), strict=True):
        np.testing.assert_allclose(found[name], reference, rtol=1e-5)
