"""Weights in INT8 for products of activations that are not quantised: their scale follows the product's precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.engines.tensorrt.builder import parse_network
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from tests.graph import rtx
from tests.graph.helpers import relative_l2, run
from tests.graph.models import constant, save, text


def _network(folder: Path, opset: int = 19, scale: float = 0.01, *, quantised: bool = False) -> GroupedModel:
    """Two products with weights in INT8; ``quantised``: the first one's activation comes out of INT8, too."""
    rng = np.random.default_rng(0)
    first = "[q] xq = QuantizeLinear(x, scale, zero) [dq] xd = DequantizeLinear(xq, scale, zero)" if quantised else ""
    nodes = f"""{first}
        [dq1] d1 = DequantizeLinear(w1, scale, zero) [fc1] h = MatMul({"xd" if quantised else "x"}, d1)
        [relu] r = Relu(h) [dq2] d2 = DequantizeLinear(w2, scale, zero) [fc2] y = MatMul(r, d2)
    """
    weights = [constant(n, rng.integers(-127, 128, (8, size)), np.int8) for n, size in (("w1", 8), ("w2", 4))]
    graph = f"(float[2,8] x) => (float[2,4] y) <int8 zero = {{0}}> {{ {nodes} }}"
    made = text(graph, *weights, constant("scale", scale), opset=opset)
    loaded = load_model(save(made, folder))
    return GroupedModel(loaded, find_groups(loaded))


def _casts(grouped: GroupedModel) -> int:
    typed = Rewriter(grouped).typed(grouped.uniform(Precision.FP16))
    return sum(n.op_type == "Cast" for n in typed.graph.node)


def test_the_scale_is_fp16_where_the_product_is(tmp_path: Path) -> None:
    grouped = _network(tmp_path)
    assert grouped.owners["dq1"] == grouped.owners["fc1"]
    assert grouped.owners["dq2"] == grouped.owners["fc2"]
    assert _casts(grouped) == 2  # of x and of y
    x = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    reference = run(grouped.model.path, x)["y"]
    fp16 = grouped.uniform(Precision.FP16)
    typed = run(Rewriter(grouped).export(fp16, tmp_path / "fp16.onnx"), x)["y"]
    emulated = run(Emulator(grouped).write(fp16, tmp_path / "emulated.onnx"), x)["y"]
    assert 1e-6 < relative_l2(typed, reference) < 1e-2
    assert relative_l2(emulated, typed) < 2e-3


@pytest.mark.parametrize(("opset", "scale"), [(17, 0.01), (19, 1e-6)])
def test_the_scale_stays_fp32_where_fp16_cannot_have_it(opset: int, scale: float, tmp_path: Path) -> None:
    grouped = _network(tmp_path, opset, scale)
    assert "dq1" not in grouped.owners
    assert _casts(grouped) == 4  # and of the two weights


def test_the_weights_of_a_quantised_part_stay_as_they_are(tmp_path: Path) -> None:
    grouped = _network(tmp_path, quantised=True)
    assert "dq1" not in grouped.owners
    assert grouped.owners["dq2"] == grouped.owners["fc2"]


@pytest.mark.tensorrt_rtx
def test_tensorrt_rtx_dequantises_to_fp16(tmp_path: Path) -> None:
    library = rtx.library()
    trt = library.trt
    grouped = _network(tmp_path)
    path = Rewriter(grouped).export(grouped.uniform(Precision.FP16), tmp_path / "fp16.onnx")
    _, network, _parser = parse_network(library, path)
    layers = [network.get_layer(k) for k in range(network.num_layers)]
    made = [layer.get_output(0).dtype for layer in layers if layer.type == trt.LayerType.DEQUANTIZE]
    assert made == [trt.float16] * 2
