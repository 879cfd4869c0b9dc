"""Quantised parts: recognised, pinned as a kind of their own, and without Casts under any plan of the search."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mptune.engines.tensorrt.builder import parse_network
from mptune.graph.groups import GroupedModel, find_groups, plan_of_nodes
from mptune.graph.loading.model import load_model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import PRECISIONS, Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.targets.findings import quantised_findings
from mptune.tuning.space import load_space, make_space
from tests.graph import rtx
from tests.graph.helpers import run
from tests.graph.models import constant, model, node, save, text, value, weight
from tests.networks.networks import filled

CORPUS = Path(__file__).parent / "corpus"


class _Quantiser:
    """Builds a network as quantisers write it: INT8 or FP8, a scale for each weight or for each of its channels."""

    def __init__(self, code: int = TensorProto.INT8, is_per_channel: bool = False) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.code, self.is_per_channel = code, is_per_channel
        self.constants: list[onnx.TensorProto] = [constant("scale", 0.05), helper.make_tensor("zero", code, [], [0])]

    def op(self, kind: str, *inputs: str, name: str, **attributes: object) -> str:
        self.nodes.append(node(kind, inputs, f"{name}_out", name, **attributes))
        return f"{name}_out"

    def quantise(self, tensor: str) -> str:
        """QuantizeLinear and DequantizeLinear of an activation."""
        quantised = self.op("QuantizeLinear", tensor, "scale", "zero", name=f"{tensor}_q")
        return self.op("DequantizeLinear", quantised, "scale", "zero", name=f"{tensor}_dq")

    def weight(self, name: str, *shape: int) -> str:
        rng = np.random.default_rng(len(self.nodes))
        values = rng.integers(-127, 128, shape).ravel().tolist()
        self.constants.append(helper.make_tensor(f"{name}_int8", self.code, shape, values))
        if not self.is_per_channel:
            return self.op("DequantizeLinear", f"{name}_int8", "scale", "zero", name=f"{name}_dq")
        axis = 0 if len(shape) == 4 else 1
        self.constants.append(constant(f"{name}_scale", rng.uniform(1e-3, 5e-3, shape[axis])))
        self.constants.append(helper.make_tensor(f"{name}_zero", self.code, [shape[axis]], [0] * shape[axis]))
        return self.op(
            "DequantizeLinear", f"{name}_int8", f"{name}_scale", f"{name}_zero", name=f"{name}_dq", axis=axis
        )

    def conv(self, tensor: str, name: str) -> str:
        self.constants.append(weight(f"{name}_bias", 8))
        return self.op(
            "Conv", tensor, self.weight(f"{name}_w", 8, 8, 3, 3), f"{name}_bias", name=name, pads=[1, 1, 1, 1]
        )


def _residual(*, is_per_channel: bool = False) -> onnx.ModelProto:
    """A quantised residual block with a pool, a SiLU and a view; a float head of a convolution and a product."""
    q = _Quantiser(is_per_channel=is_per_channel)
    x = q.quantise("x")
    one = q.op("Relu", q.conv(x, "conv1"), name="relu1")
    two = q.conv(q.quantise(one), "conv2")
    added = q.op("Relu", q.op("Add", two, x, name="add"), name="relu2")
    silu_in = q.conv(q.quantise(added), "conv3")
    silu = q.op("Mul", silu_in, q.op("Sigmoid", silu_in, name="sigmoid"), name="mul")
    pooled = q.op("MaxPool", q.quantise(silu), name="pool", kernel_shape=[2, 2], strides=[2, 2])
    q.constants.append(constant("shape", [0, 8, 16], np.int64))
    view = q.op("Reshape", q.quantise(pooled), "shape", name="view")
    last = q.quantise(view)
    q.constants += [constant("square", [0, 8, 4, 4], np.int64), weight("head_w", 4, 8, 3, 3), weight("fc_w", 4, 3)]
    square = q.op("Reshape", last, "square", name="square_view")
    head = q.op("Relu", q.op("Conv", square, "head_w", name="head"), name="head_relu")
    flat = q.op("Flatten", q.op("GlobalAveragePool", head, name="gap"), name="flat")
    y = q.op("MatMul", flat, "fc_w", name="fc")
    return model(q.nodes, [value("x", ["batch", 8, 8, 8])], [value(y, ["batch", 3])], q.constants)


QUANTISED_NODES = {
    "conv1", "relu1", "conv2", "add", "relu2", "conv3", "sigmoid", "mul", "pool", "view",
}  # fmt: skip


@pytest.fixture
def residual(tmp_path: Path) -> GroupedModel:
    loaded = load_model(save(_residual(), tmp_path))
    return GroupedModel(loaded, find_groups(loaded))


@pytest.mark.parametrize("granularity", ["op", "fusion", "block"])
def test_quantised_parts_are_a_kind_of_their_own_and_pinned(residual: GroupedModel, granularity: str) -> None:
    groups = find_groups(residual.model, granularity)  # type: ignore[arg-type]
    parts = [group for group in groups if group.kind == "quantised"]
    assert {name for group in parts for name in group.nodes} == QUANTISED_NODES
    assert all(group.pinned is not None and "INT8" in group.pinned for group in parts)
    free = {name for group in groups if group.pinned is None for name in group.nodes}
    assert free == {"square_view", "head", "head_relu", "gap", "flat", "fc"}
    assert ("conv2", "add", "relu2") in {group.nodes for group in parts}


def test_no_cast_stands_inside_a_quantised_part(residual: GroupedModel, tmp_path: Path) -> None:
    written = [save(make(), tmp_path, f"{number}.onnx") for number, make in enumerate(WRITTEN.values())]
    exported = [filled(name, tmp_path) for name in EXPORTED]
    for path in (residual.model.path, CORPUS / "qdq.onnx", *written, *exported):
        loaded = load_model(path)
        for granularity in ("op", "fusion", "block"):
            grouped = GroupedModel(loaded, find_groups(loaded, granularity))
            space = make_space(grouped, load_space("default"))
            rng = random.Random(0)
            plans = [space.seeds[1].plan]
            plans += [space.plan({g: rng.choice(list(PRECISIONS)) for g in space.free}) for _ in range(5)]
            rewriter = Rewriter(grouped)
            parts = {name for g in grouped.groups if g.kind == "quantised" for name in g.nodes}
            for plan in plans:
                graph = onnx.load(rewriter.export(plan, tmp_path / "typed.onnx")).graph
                dequantised = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
                inside = {n.output[0] for n in graph.node if n.name in parts} | dequantised
                casts = {n.output[0]: n.name for n in graph.node if n.op_type == "Cast" and n.input[0] in inside}
                for read in (n for n in graph.node if n.name in parts or n.op_type == "QuantizeLinear"):
                    assert not [casts[name] for name in read.input if name in casts], read.name
            assert any(n.op_type == "Cast" for n in graph.node) or plan == space.seeds[0].plan


def _transformer(code: int = TensorProto.INT8) -> onnx.ModelProto:
    """A quantised feed-forward layer (MatMul with bias, GELU, Gemm) between float norms, and its residual."""
    q = _Quantiser(code, is_per_channel=True)
    q.constants += [weight("gain", 8), weight("shift", 8), weight("bias1", 16), weight("bias2", 8)]
    normed = q.op("LayerNormalization", "x", "gain", "shift", name="norm1")
    up = q.op("Add", q.op("MatMul", q.quantise(normed), q.weight("w1", 8, 16), name="up"), "bias1", name="add_bias")
    wide = q.op("Gelu", up, name="gelu", approximate="tanh")
    q.constants.append(constant("flat", [-1, 16], np.int64))
    rows = q.op("Reshape", q.quantise(wide), "flat", name="rows")
    down = q.op("Gemm", rows, q.weight("w2", 16, 8), "bias2", name="down")
    q.constants.append(constant("back", [2, 4, 8], np.int64))
    added = q.op("Add", q.op("Reshape", q.quantise(down), "back", name="back_view"), "x", name="residual")
    y = q.op("LayerNormalization", added, "gain", "shift", name="norm2")
    return model(q.nodes, [value("x", [2, 4, 8])], [value(y, [2, 4, 8])], q.constants, opset=20)


def test_a_view_of_a_dequantised_bias_is_no_group_of_its_own(tmp_path: Path) -> None:
    """As exporters share equal biases by Identity, and quantisers then quantise one of them."""
    q = _Quantiser()
    q.constants += [constant("gain", [1.0] * 8), helper.make_tensor("wide", TensorProto.INT32, [8], range(8))]
    q.constants.append(helper.make_tensor("zero32", TensorProto.INT32, [], [0]))
    again = q.op("Identity", q.op("DequantizeLinear", "wide", "scale", "zero32", name="bias_dq"), name="bias_again")
    y = q.op("LayerNormalization", "x", "gain", again, name="norm")
    loaded = load_model(save(model(q.nodes, [value("x", [4, 8])], [value(y, [4, 8])], q.constants), tmp_path))
    assert [(group.nodes, group.pinned) for group in find_groups(loaded)] == [(("bias_again", "norm"), None)]


WRITTEN = {
    "per tensor": _residual,
    "per channel": lambda: _residual(is_per_channel=True),
    "linear layers": _transformer,
    "FP8": lambda: _transformer(TensorProto.FLOAT8E4M3FN),
}
EXPORTED = ("retinanet_quantised", "retinanet_half_quantised", "whisper_quantised")


@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize("name", [*WRITTEN, *EXPORTED])
def test_tensorrt_sees_the_same_quantisation_under_every_plan(name: str, tmp_path: Path) -> None:
    """Every plan builds, with as many quantising layers as all-FP32."""
    library = rtx.library()
    loaded = load_model(save(WRITTEN[name](), tmp_path) if name in WRITTEN else filled(name, tmp_path))
    grouped = GroupedModel(loaded, find_groups(loaded))
    space = make_space(grouped, load_space("default"))
    rewriter = Rewriter(grouped)
    seen = []
    plans = [seed.plan for seed in space.seeds[:2]]
    rng = random.Random(1)
    plans += [space.plan({g: rng.choice(list(PRECISIONS)) for g in space.free}) for _ in range(2)]
    for number, plan in enumerate(plans):
        path = rewriter.export(plan, tmp_path / f"{number}.onnx")
        # More engines of the whole networks are built under `-m slow`; FP8 came with SM 8.9.
        is_built = name in WRITTEN or number in (1, 3)
        capabilities = rtx.COMPUTE_CAPABILITIES if name == "per tensor" else [(8, 9)]
        assert rtx.refusal(library, path, build=is_built, capabilities=capabilities) is None, plan
        _, network, parser = parse_network(library, path)
        layers = [network.get_layer(k) for k in range(network.num_layers)]
        kinds = {"QUANTIZE", "DEQUANTIZE"}
        seen.append(Counter((x.type.name, str(x.get_output(0).dtype)) for x in layers if x.type.name in kinds))
        del network, parser, layers
    assert sum(seen[0].values()) == sum(n.op_type in ("QuantizeLinear", "DequantizeLinear") for n in loaded.nodes)
    assert all(counts == seen[0] for counts in seen)


def test_the_finding_says_how_many_and_their_share(residual: GroupedModel) -> None:
    (finding,) = quantised_findings(residual, {}, "inspect")
    assert finding.code == "quantised-parts"
    assert finding.evidence["parts"] == 5
    assert finding.evidence["nodes"] == len(QUANTISED_NODES)
    assert 0.9 < float(finding.evidence["flops_share"]) < 1
    assert set(finding.where.nodes) == QUANTISED_NODES


def test_a_plan_by_nodes_leaves_quantised_parts_alone(residual: GroupedModel) -> None:
    found = plan_of_nodes(residual.model, {"op:Conv": Precision.FP16})
    precision = {n: found.plan.precision[g.id] for g in found.groups for n in g.nodes}
    assert precision["conv1"] is precision["conv2"] is Precision.FP32
    assert precision["head"] is Precision.FP16
    assert any("conv1" in warning and "INT8" in warning for warning in found.warnings)


def test_weights_alone_dequantised_leave_a_product_free(tmp_path: Path) -> None:
    q = _Quantiser()
    y = q.op("MatMul", "x", q.weight("w", 4, 3), name="fc")
    loaded = load_model(save(model(q.nodes, [value("x", [2, 4])], [value(y, [2, 3])], q.constants), tmp_path))
    (group,) = find_groups(loaded)
    assert (group.kind, group.pinned) == ("matmul", None)
    assert quantised_findings(GroupedModel(loaded, (group,)), {}, "inspect") == ()


def test_sums_of_dynamic_quantisation_are_rescaled_in_fp32(tmp_path: Path) -> None:
    """As quantize_dynamic writes a product: its INT32 sums are past FP16's range until they are scaled."""
    inner = 512
    graph = f"""(float[1,{inner}] x) => (float[1,16] last_out) <float scale = {{0.05}}, int8 zero = {{0}}> {{
        x_int8, x_scale, x_zero = DynamicQuantizeLinear(x) sums = MatMulInteger(x_int8, w_int8, x_zero, zero)
        [scales] s = Mul(x_scale, scale) [cast] f = Cast<to = 1>(sums) [rescale] y = Mul(f, s)
        a = Add(y, bias) r = Relu(a) last_out = MatMul(r, w)
    }}"""
    weights = constant("w_int8", np.random.default_rng(1).integers(-127, 128, (inner, 16)), np.int8)
    made = text(graph, weights, constant("bias", np.linspace(-1, 1, 16)), constant("w", np.eye(16) / 4))
    loaded = load_model(save(made, tmp_path))
    groups = find_groups(loaded)
    (part,) = [group for group in groups if group.kind == "quantised"]
    assert set(part.nodes) == {"scales", "cast", "rescale"}
    grouped = GroupedModel(loaded, groups)
    plan = make_space(grouped, load_space("default")).seeds[1].plan
    typed = Rewriter(grouped).write(plan, tmp_path / "typed.onnx")
    feed = {"x": np.abs(np.random.default_rng(2).normal(size=(1, inner))).astype(np.float32)}
    np.testing.assert_allclose(run(typed, feed)["last_out"], run(tmp_path / "model.onnx", feed)["last_out"], rtol=1e-2)
    (finding,) = quantised_findings(grouped, {"x": (1, inner)}, "inspect")
    assert finding.evidence["operators"] == 1
    assert finding.evidence["flops_share"] > 0.9


def test_operators_on_integers_are_counted_where_no_group_is_quantised(tmp_path: Path) -> None:
    """As quantize_static writes a convolution in its operator format: its FLOPs are those of the convolution."""
    graph = """(float[1,3,16,16] x) => (float[1,8,16,16] y) <float scale = {0.05}, int8 zero = {0}> {
        q = QuantizeLinear(x, scale, zero)
        c = QLinearConv<pads = [1, 1, 1, 1]>(q, scale, zero, w_int8, scale, zero, scale, zero)
        d = DequantizeLinear(c, scale, zero) y = Relu(d)
    }"""
    made = text(graph, constant("w_int8", np.full((8, 3, 3, 3), 3), np.int8))
    loaded = load_model(save(made, tmp_path))
    (finding,) = quantised_findings(GroupedModel(loaded, find_groups(loaded)), static_shapes(loaded).shapes, "inspect")
    assert (finding.evidence["parts"], finding.evidence["operators"]) == (0, 1)
    conv_flops, others = 2 * 8 * 27 * 256, 3 * 256 + 2 * 8 * 256
    assert finding.evidence["flops_share"] == pytest.approx(conv_flops / (conv_flops + others), rel=0.05)
