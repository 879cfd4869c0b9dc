"""Writes the corpus: small models that between them hold what converters break on.

python -m tests.graph.corpus.make          writes every file anew (the same bytes every time)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).resolve().parent
MICROSOFT = "com.microsoft"
FLOAT, FLOAT16, DOUBLE, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.INT64,
    TensorProto.BOOL,
)
Shape = Sequence[int | str | None]


class Net:
    """A graph under construction. Values are their names; node names carry the scope, as exporters write them."""

    def __init__(self, name: str, opset: int = 17, ir_version: int = 9) -> None:
        self.name, self.opset, self.ir_version = name, opset, ir_version
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.value_info: list[onnx.ValueInfoProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.scope = ""
        self._count = 0

    def input(self, name: str, shape: Shape, code: int = FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, code, shape))
        return name

    def output(self, value: str, name: str, shape: Shape | None, code: int = FLOAT) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], f"/{name}/Identity"))
        self.outputs.append(helper.make_tensor_value_info(name, code, shape))

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{self.scope}{stem}_{self._count}"

    def const(self, value: object, dtype: type = np.float32) -> str:
        name = self.fresh("constant")
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(values, np.int64)

    def weight(self, *shape: int, scale: float | None = None, dtype: type = np.float32) -> str:
        name = self.fresh("weight")
        fan_in = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        values = self.rng.standard_normal(shape) * (scale or fan_in**-0.5)
        self.constants.append(numpy_helper.from_array(values.astype(dtype), name))
        return name

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: object) -> str:
        return self.multi(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def multi(
        self, op_type: str, *inputs: str, outputs: int, domain: str = "", **attributes: object
    ) -> tuple[str, ...]:
        stem = self.fresh(op_type)
        names = (stem,) if outputs == 1 else tuple(f"{stem}.{k}" for k in range(outputs))
        self.nodes.append(helper.make_node(op_type, inputs, names, f"/{stem}", domain=domain, **attributes))
        return names

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, self.name, self.inputs, self.outputs, self.constants, value_info=self.value_info
        )
        domains = {n.domain for n in self.nodes if n.domain} | {f.domain for f in self.functions}
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
        made = helper.make_model(
            graph, opset_imports=imports, ir_version=self.ir_version, producer_name="mptune corpus"
        )
        made.functions.extend(self.functions)
        return made

    # Layers.

    def conv(self, x: str, cin: int, cout: int, kernel: int = 3, stride: int = 1) -> str:
        return self.op(
            "Conv",
            x,
            self.weight(cout, cin, kernel, kernel),
            self.weight(cout, scale=0.1),
            kernel_shape=[kernel, kernel],
            pads=[kernel // 2] * 4,
            strides=[stride, stride],
        )

    def batch_norm(self, x: str, channels: int) -> str:
        shift, mean = self.weight(channels, scale=0.1), self.weight(channels, scale=0.1)
        return self.op(
            "BatchNormalization", x, self.const(np.ones(channels)), shift, mean, self.const(np.full(channels, 0.8))
        )

    def linear(self, x: str, cin: int, cout: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(cin, cout)), self.weight(cout, scale=0.1))

    def mean(self, x: str) -> str:
        if self.opset < 18:
            return self.op("ReduceMean", x, axes=[-1], keepdims=1)
        return self.op("ReduceMean", x, self.ints(-1), keepdims=1)

    def layer_norm(self, x: str, width: int) -> str:
        if self.opset >= 17:
            return self.op("LayerNormalization", x, self.const(np.ones(width)), self.const(np.zeros(width)))
        centred = self.op("Sub", x, self.mean(x))
        variance = self.mean(self.op("Pow", centred, self.const(2.0)))
        deviation = self.op("Sqrt", self.op("Add", variance, self.const(1e-5)))
        scaled = self.op("Mul", self.op("Div", centred, deviation), self.const(np.ones(width)))
        return self.op("Add", scaled, self.const(np.zeros(width)))

    def rms_norm(self, x: str, width: int, eps: float) -> str:
        squares = self.mean(self.op("Mul", x, x))
        root = self.op("Sqrt", self.op("Add", squares, self.const(eps)))
        return self.op("Mul", self.op("Mul", x, self.op("Reciprocal", root)), self.const(np.ones(width)))

    def gelu(self, x: str) -> str:
        erf = self.op("Erf", self.op("Div", x, self.const(2**0.5)))
        return self.op("Mul", self.op("Mul", x, self.op("Add", erf, self.const(1.0))), self.const(0.5))

    def heads(self, x: str, tokens: int, width: int, heads: int, perm: Sequence[int]) -> str:
        split = self.op("Reshape", x, self.ints(0, tokens, heads, width // heads))
        return self.op("Transpose", split, perm=perm)

    def attention(self, x: str, tokens: int, width: int, heads: int, mask: str | None = None) -> str:
        q, k, v = (self.linear(x, width, width) for _ in range(3))
        q, v = (self.heads(t, tokens, width, heads, [0, 2, 1, 3]) for t in (q, v))
        k = self.heads(k, tokens, width, heads, [0, 2, 3, 1])
        scores = self.op("Mul", self.op("MatMul", q, k), self.const((width // heads) ** -0.5))
        if mask is not None:
            scores = self.op("Add", scores, mask)
        mixed = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", mixed, self.ints(0, tokens, width)), width, width)

    def block(self, x: str, tokens: int, width: int, heads: int, mask: str | None = None) -> str:
        self.scope = self.scope.rstrip("/") + "/attn/" if self.scope else "attn/"
        x = self.op("Add", x, self.attention(self.layer_norm(x, width), tokens, width, heads, mask))
        self.scope = self.scope.replace("/attn/", "/mlp/").replace("attn/", "mlp/")
        hidden = self.gelu(self.linear(self.layer_norm(x, width), width, 2 * width))
        x = self.op("Add", x, self.linear(hidden, 2 * width, width))
        self.scope = ""
        return x


def cnn_batchnorm() -> Net:
    net = Net("cnn_batchnorm")
    x = net.op("Relu", net.batch_norm(net.conv(net.input("image", ["batch", 3, 16, 16]), 3, 8), 8))
    for stage in range(2):
        net.scope = f"stage{stage}/"
        inner = net.op("Relu", net.batch_norm(net.conv(x, 8, 8), 8))
        x = net.op("Relu", net.op("Add", net.batch_norm(net.conv(inner, 8, 8), 8), x))
        x = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    net.scope = "head/"
    flat = net.op("Flatten", net.op("GlobalAveragePool", x))
    net.output(net.op("Gemm", flat, net.weight(10, 8), net.weight(10), transB=1), "logits", ["batch", 10])
    return net


def vit() -> Net:
    net = Net("vit")
    image = net.input("image", ["batch", 3, 16, 16])
    patches = net.op("Conv", image, net.weight(16, 3, 4, 4), net.weight(16), kernel_shape=[4, 4], strides=[4, 4])
    tokens = net.op("Transpose", net.op("Reshape", patches, net.ints(0, 16, -1)), perm=[0, 2, 1])
    batch = net.op("Gather", net.op("Shape", image), net.ints(0))
    shape = net.op("Concat", batch, net.ints(1, 16), axis=0)
    cls = net.op("Expand", net.weight(1, 1, 16, scale=1), shape)
    x = net.op("Add", net.op("Concat", cls, tokens, axis=1), net.weight(1, 17, 16, scale=0.1))
    for block in range(2):
        net.scope = f"blocks.{block}/"
        x = net.block(x, 17, 16, 2)
    first = net.op("Gather", net.layer_norm(x, 16), net.const(0, np.int64), axis=1)
    net.output(net.linear(first, 16, 10), "logits", ["batch", 10])
    return net


def _roll(net: Net, x: str, by: int, axes: Sequence[int]) -> str:
    for axis in axes:
        tail = net.op("Slice", x, net.ints(by), net.ints(np.iinfo(np.int64).max), net.ints(axis))
        head = net.op("Slice", x, net.ints(0), net.ints(by), net.ints(axis))
        x = net.op("Concat", tail, head, axis=axis)
    return x


def windows_roll() -> Net:
    """Swin's shifted windows: 8 x 8 pixels, windows of 4 x 4, a mask between what the roll brought together."""
    net = Net("windows_roll")
    x = net.input("features", ["batch", 8, 8, 16])
    rolled = _roll(net, net.layer_norm(x, 16), 2, [1, 2])
    cut = net.op("Reshape", rolled, net.ints(-1, 2, 4, 2, 4, 16))
    windows = net.op("Reshape", net.op("Transpose", cut, perm=[0, 1, 3, 2, 4, 5]), net.ints(-1, 16, 16))
    mask = np.where(net.rng.random((1, 1, 16, 16)) < 0.5, -100.0, 0.0) * (1 - np.eye(16))
    mixed = net.attention(windows, 16, 16, 2, net.op("Add", net.weight(1, 2, 16, 16, scale=0.1), net.const(mask)))
    whole = net.op("Transpose", net.op("Reshape", mixed, net.ints(-1, 2, 2, 4, 4, 16)), perm=[0, 1, 3, 2, 4, 5])
    back = _roll(net, net.op("Reshape", whole, net.ints(-1, 8, 8, 16)), -2, [1, 2])
    net.output(net.op("Add", x, back), "mixed", ["batch", 8, 8, 16])
    return net


def unet_resize() -> Net:
    net = Net("unet_resize")
    image = net.input("image", ["batch", 3, 16, 16])
    one = net.op("Relu", net.conv(image, 3, 8))
    two = net.op("Relu", net.conv(one, 8, 8, stride=2))
    three = net.op("Relu", net.conv(two, 8, 16, stride=2))
    up = net.op("Resize", three, "", net.const([1, 1, 2, 2]), mode="nearest", nearest_mode="floor",
                coordinate_transformation_mode="asymmetric")  # fmt: skip
    two = net.op("Relu", net.conv(net.op("Concat", up, two, axis=1), 24, 8))
    spatial = net.op("Slice", net.op("Shape", one), net.ints(2), net.ints(4))
    size = net.op("Concat", net.op("Slice", net.op("Shape", two), net.ints(0), net.ints(2)), spatial, axis=0)
    up = net.op("Resize", two, "", "", size, mode="linear", coordinate_transformation_mode="half_pixel")
    net.output(net.op("Sigmoid", net.conv(net.op("Concat", up, one, axis=1), 16, 1)), "mask", ["batch", 1, 16, 16])
    return net


def _best_boxes(net: Net) -> tuple[str, str]:
    """Boxes and scores from a grid, the best of them by TopK."""
    features = net.op("Relu", net.conv(net.input("image", [1, 3, 16, 16]), 3, 8, stride=2))
    scores = net.op("Sigmoid", net.conv(features, 8, 2, kernel=1))
    scores = net.op("Reshape", scores, net.ints(1, 2, -1))
    deltas = net.op(
        "Transpose", net.op("Reshape", net.conv(features, 8, 4, kernel=1), net.ints(1, 4, -1)), perm=[0, 2, 1]
    )
    y, x = np.meshgrid(np.arange(8) * 2.0, np.arange(8) * 2.0, indexing="ij")
    centres = np.stack([y, x], -1).reshape(1, 64, 2)
    near, far = net.multi("Split", net.op("Exp", deltas), net.ints(2, 2), outputs=2, axis=-1)
    boxes = net.op("Concat", net.op("Sub", net.const(centres), near), net.op("Add", net.const(centres), far), axis=-1)
    best = net.op("ReduceMax", scores, axes=[1], keepdims=0)
    _, order = net.multi("TopK", best, net.ints(20), outputs=2, axis=1)
    order = net.op("Squeeze", order, net.ints(0))
    return net.op("Gather", boxes, order, axis=1), net.op("Gather", scores, order, axis=2)


def detector_topk() -> Net:
    net = Net("detector_topk")
    boxes, scores = _best_boxes(net)
    net.output(boxes, "boxes", [1, 20, 4])
    net.output(scores, "scores", [1, 2, 20])
    return net


def detector() -> Net:
    """With NonMaxSuppression: as many outputs as survive."""
    net = Net("detector")
    boxes, scores = _best_boxes(net)
    kept = net.op("NonMaxSuppression", boxes, scores, net.const([5], np.int64), net.const([0.3]), net.const([0.4]))
    index = net.op("Squeeze", net.op("Slice", kept, net.ints(2), net.ints(3), net.ints(1)), net.ints(1))
    net.output(net.op("Gather", net.op("Squeeze", boxes, net.ints(0)), index), "boxes", [None, 4])
    net.output(net.op("GatherND", scores, kept), "scores", [None])
    net.output(kept, "selected", [None, 3], INT64)
    return net


def lstm() -> Net:
    net = Net("lstm")
    x = net.input("x", ["time", "batch", 6])
    gates = (net.weight(2, 32, 6, scale=0.3), net.weight(2, 32, 8, scale=0.3), net.weight(2, 64, scale=0.1))
    y, h, c = net.multi("LSTM", net.linear(x, 6, 6), *gates, outputs=3, hidden_size=8, direction="bidirectional")
    merged = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1, 3]), net.ints(0, 0, -1))
    net.output(net.linear(merged, 16, 4), "y", ["time", "batch", 4])
    net.output(net.op("Add", h, c), "state", [2, "batch", 8])
    return net


def gru() -> Net:
    """With an initial state, and the optional sequence lengths left out."""
    net = Net("gru")
    x, start = net.input("x", ["time", "batch", 6]), net.input("start", [1, "batch", 8])
    y, h = net.multi(
        "GRU",
        x,
        net.weight(1, 24, 6, scale=0.3),
        net.weight(1, 24, 8, scale=0.3),
        net.weight(1, 48, scale=0.1),
        "",
        net.op("Tanh", start),
        outputs=2,
        hidden_size=8,
        linear_before_reset=1,
    )
    net.output(net.op("Softmax", net.linear(net.op("Squeeze", y, net.ints(1)), 8, 4)), "y", ["time", "batch", 4])
    net.output(h, "state", [1, "batch", 8])
    return net


def flow_gridsample() -> Net:
    """Optical flow: features of two images, a cost, a flow, the second image warped by it."""
    net = Net("flow_gridsample")
    first, second = net.input("first", ["batch", 3, 12, 12]), net.input("second", ["batch", 3, 12, 12])
    w, b = net.weight(8, 3, 3, 3), net.weight(8, scale=0.1)
    features = [net.op("Tanh", net.op("Conv", image, w, b, pads=[1] * 4)) for image in (first, second)]
    cost = net.op("ReduceMean", net.op("Mul", *features), axes=[1], keepdims=1)
    flow = net.conv(net.op("Concat", *features, cost, axis=1), 17, 2)
    axis = (np.arange(12) + 0.5) / 6 - 1
    grid = np.stack(np.meshgrid(axis, axis, indexing="xy"), -1)[None]
    step = net.op("Mul", net.op("Transpose", flow, perm=[0, 2, 3, 1]), net.const(1 / 6))
    where = net.op("Add", net.const(grid), step)
    warped = net.op("GridSample", second, where, mode="bilinear", padding_mode="border", align_corners=0)
    net.output(flow, "flow", ["batch", 2, 12, 12])
    net.output(net.op("Sub", first, warped), "difference", ["batch", 3, 12, 12])
    return net


def layernorm_13() -> Net:
    """A block whose norms are written out, as exporters did before opset 17."""
    net = Net("layernorm_13", opset=13, ir_version=7)
    net.output(net.block(net.input("x", ["batch", 9, 16]), 9, 16, 2), "y", ["batch", 9, 16])
    return net


def rmsnorm_eps() -> Net:
    """eps = 1e-8 is zero in FP16."""
    net = Net("rmsnorm_eps", opset=18)
    x = net.input("x", ["batch", "tokens", 16])
    for _ in range(2):
        gate, up = (net.linear(net.rms_norm(x, 16, 1e-8), 16, 32) for _ in range(2))
        hidden = net.op("Mul", net.op("Mul", gate, net.op("Sigmoid", gate)), up)
        x = net.op("Add", x, net.linear(hidden, 32, 16))
    net.output(net.rms_norm(x, 16, 1e-8), "y", ["batch", "tokens", 16])
    return net


def _masked(name: str, low: float) -> Net:
    net = Net(name)
    x, keep = net.input("x", ["batch", 6, 16]), net.input("keep", ["batch", 1, 1, 6], INT64)
    drop = net.op("Sub", net.const(1.0), net.op("Cast", keep, to=FLOAT))
    mask = net.op("Mul", drop, net.const(low))
    for _ in range(2):
        x = net.block(x, 6, 16, 2, mask)
    net.output(x, "y", ["batch", 6, 16])
    return net


def mask_1e9() -> Net:
    return _masked("mask_1e9", -1e9)


def mask_min() -> Net:
    """The mask as transformers builds it: Where with the smallest FP32, causal and padding together."""
    net = Net("mask_min")
    x, keep = net.input("x", ["batch", 6, 16]), net.input("keep", ["batch", 1, 1, 6], BOOL)
    causal = net.const(np.tril(np.ones((1, 1, 6, 6))), np.bool_)
    both = net.op("And", causal, keep)
    mask = net.op("Where", both, net.const(0.0), net.const(np.finfo(np.float32).min))
    net.output(net.block(x, 6, 16, 2, mask), "y", ["batch", 6, 16])
    return net


def if_branches() -> Net:
    """Both branches read an outer value that the main graph uses too."""
    net = Net("if_branches")
    x, flag = net.input("x", ["batch", 8]), net.input("flag", [], BOOL)
    h = net.op("Relu", net.linear(x, 8, 8))
    w = net.weight(8, 8)

    def branch(name: str, op: str) -> onnx.GraphProto:
        nodes = [helper.make_node("MatMul", [h, w], [f"{name}_m"]), helper.make_node(op, [f"{name}_m"], [f"{name}_y"])]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", FLOAT, ["batch", 8])])

    picked = net.op("If", flag, then_branch=branch("yes", "Tanh"), else_branch=branch("no", "Sigmoid"))
    net.output(net.op("Add", net.linear(picked, 8, 8), net.op("MatMul", h, w)), "y", ["batch", 8])
    return net


def loop_state() -> Net:
    """A Loop that carries a float state, reads an outer value, and stacks what it computes on the way."""
    net = Net("loop_state")
    x = net.input("x", ["batch", 8])
    start, drive = net.linear(x, 8, 8), net.op("Tanh", net.linear(x, 8, 8))
    nodes = [
        helper.make_node("MatMul", ["state", "turn"], ["turned"]),
        helper.make_node("Add", ["turned", drive], ["pushed"]),
        helper.make_node("Tanh", ["pushed"], ["next"]),
        helper.make_node("ReduceMean", ["next"], ["level"], axes=[-1], keepdims=0),
        helper.make_node("Identity", ["go"], ["go_on"]),
    ]
    turn = numpy_helper.from_array((net.rng.standard_normal((8, 8)) * 0.3).astype(np.float32), "turn")
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        nodes,
        "body",
        [info("i", INT64, []), info("go", BOOL, []), info("state", FLOAT, ["batch", 8])],
        [info("go_on", BOOL, []), info("next", FLOAT, ["batch", 8]), info("level", FLOAT, ["batch"])],
        [turn],
    )
    last, levels = net.multi("Loop", net.const(4, np.int64), net.const(True, np.bool_), start, outputs=2, body=body)
    net.output(net.linear(last, 8, 4), "y", ["batch", 4])
    net.output(net.op("Mul", levels, net.const(2.0)), "levels", [4, "batch"])
    return net


def scan_sum() -> Net:
    net = Net("scan_sum")
    x = net.input("x", [5, 8])
    start = net.op("Relu", net.weight(8))
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Add", ["total", "row"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["next"]),
        helper.make_node("Identity", ["next"], ["out"]),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        [info("total", FLOAT, [8]), info("row", FLOAT, [8])],
        [info("next", FLOAT, [8]), info("out", FLOAT, [8])],
    )
    last, rows = net.multi("Scan", start, net.linear(x, 8, 8), outputs=2, num_scan_inputs=1, body=body)
    net.output(net.op("Add", net.linear(rows, 8, 8), last), "y", [5, 8])
    return net


def local_functions() -> Net:
    """A function that calls another, twice each, with an attribute of the caller's."""
    net = Net("local_functions")
    opset = [helper.make_opsetid("", 17)]
    gate = helper.make_function(
        "example.functions",
        "Swish",
        ["x"],
        ["y"],
        [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])],
        opset,
    )
    soft = helper.make_node("Softmax", ["g"], ["y"])
    soft.attribute.append(onnx.AttributeProto(name="axis", type=onnx.AttributeProto.INT, ref_attr_name="axis"))
    layer = helper.make_function(
        "example.functions",
        "Layer",
        ["x", "w"],
        ["y"],
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("Swish", ["m"], ["g"], domain="example.functions"),
            soft,
        ],
        [*opset, helper.make_opsetid("example.functions", 1)],
        ["axis"],
    )
    net.functions += [gate, layer]
    x = net.input("x", ["batch", 8])
    for axis in (-1, 1):
        x = net.op("Layer", x, net.weight(8, 8), domain="example.functions", axis=axis)
    net.output(net.op("Swish", x, domain="example.functions"), "y", ["batch", 8])
    return net


def qdq() -> Net:
    """INT8 weights per channel, activations per tensor, as quantisers write them; one branch is not quantised."""
    net = Net("qdq")
    x = net.input("x", ["batch", 8, 8, 8])

    def activation(value: str, scale: float) -> str:
        pair = (net.const(scale), net.const(0, np.int8))
        return net.op("DequantizeLinear", net.op("QuantizeLinear", value, *pair), *pair)

    for _ in range(2):
        values = net.rng.integers(-127, 128, (8, 8, 3, 3))
        scales = net.const(np.full(8, 0.002))
        w = net.op("DequantizeLinear", net.const(values, np.int8), scales, net.const(np.zeros(8), np.int8), axis=0)
        x = net.op("Relu", net.op("Conv", activation(x, 0.03), w, net.weight(8), pads=[1] * 4))
    pooled = net.op("Flatten", net.op("GlobalAveragePool", x))
    net.output(net.linear(pooled, 8, 4), "y", ["batch", 4])
    return net


def external_data() -> Net:
    """Its weights lie in external_data.bin."""
    net = Net("external_data")
    x = net.input("x", ["batch", 32])
    for _ in range(2):
        x = net.layer_norm(net.gelu(net.linear(x, 32, 32)), 32)
    net.output(x, "y", ["batch", 32])
    return net


def fp16_island() -> Net:
    """A part in FP16 already, with the Casts around it, and one Cast to FP16 and back to round."""
    net = Net("fp16_island")
    x = net.input("x", ["batch", 8])
    h = net.op("Relu", net.linear(x, 8, 8))
    half = net.op("Cast", h, to=FLOAT16)
    island = net.op("MatMul", half, net.weight(8, 8, dtype=np.float16))
    island = net.op("Tanh", net.op("Add", island, half))
    back = net.op("Cast", island, to=FLOAT)
    rounded = net.op("Cast", net.op("Cast", net.linear(x, 8, 8), to=FLOAT16), to=FLOAT)
    y = net.op("Add", net.linear(back, 8, 8), net.op("Mul", h, rounded))
    net.output(net.op("Add", y, back), "y", ["batch", 8])
    net.output(half, "half", ["batch", 8], FLOAT16)
    return net


def fp64_path() -> Net:
    """A sum in FP64, and a value rounded to BF16 and back."""
    net = Net("fp64_path")
    x = net.input("x", ["batch", 8])
    h = net.linear(x, 8, 8)
    wide = net.op("Cast", h, to=DOUBLE)
    total = net.op("ReduceSum", net.op("Mul", wide, wide), net.ints(-1), keepdims=1)
    norm = net.op("Cast", net.op("Sqrt", net.op("Add", total, net.const(1e-12, np.float64))), to=FLOAT)
    short = net.op("Cast", net.op("Cast", h, to=TensorProto.BFLOAT16), to=FLOAT)
    net.output(net.linear(net.op("Div", short, norm), 8, 4), "y", ["batch", 4])
    net.output(total, "total", ["batch", 1], DOUBLE)
    return net


def custom_domain() -> Net:
    """Two of ONNX Runtime's own operators, one with its type stated and one without."""
    net = Net("custom_domain")
    x = net.input("x", ["batch", 8])
    stated = net.op("Gelu", net.linear(x, 8, 8), domain=MICROSOFT)
    net.value_info.append(helper.make_tensor_value_info(stated, FLOAT, ["batch", 8]))
    h = net.op("Tanh", net.linear(stated, 8, 8))
    silent = net.op("FusedMatMul", h, net.weight(8, 8), domain=MICROSOFT, alpha=0.5)
    net.output(net.op("Add", silent, h), "y", ["batch", 8])
    net.output(net.op("Softmax", h), "shares", ["batch", 8])
    return net


def dynamic_sequence() -> Net:
    """Batch and sequence both dynamic: shapes computed in the graph, an embedding used at both ends."""
    net = Net("dynamic_sequence")
    ids = net.input("ids", ["batch", "sequence"], INT64)
    table = net.weight(32, 16, scale=0.5)
    x = net.op("Gather", table, ids)
    length = net.op("Gather", net.op("Shape", ids), net.const(1, np.int64))
    steps = net.op("Range", net.const(0, np.int64), length, net.const(1, np.int64))
    causal = net.op("GreaterOrEqual", net.op("Unsqueeze", steps, net.ints(1)), net.op("Unsqueeze", steps, net.ints(0)))
    mask = net.op("Where", causal, net.const(0.0), net.const(-1e4))
    angle = net.op("Mul", net.op("Unsqueeze", net.op("Cast", steps, to=FLOAT), net.ints(1)), net.const([1.0, 0.1] * 8))
    x = net.op("Add", x, net.op("Sin", angle))
    x = net.block(x, 0, 16, 2, mask)
    net.output(net.op("MatMul", net.layer_norm(x, 16), net.op("Transpose", table, perm=[1, 0])), "logits",
               ["batch", "sequence", 32])  # fmt: skip
    return net


def sequences() -> Net:
    """Sequences and an optional: their element type is part of their own type."""
    net = Net("sequences")
    x = net.input("x", ["batch", 8])
    parts = net.op("SplitToSequence", net.linear(x, 8, 8), net.const(4, np.int64), axis=1)
    first = net.op("SequenceAt", parts, net.const(0, np.int64))
    more = net.op("SequenceInsert", parts, net.op("Relu", first))
    joined = net.op("ConcatFromSequence", more, axis=1)
    box = net.op("OptionalGetElement", net.op("Optional", net.op("Tanh", joined)))
    net.output(net.linear(box, 12, 4), "y", ["batch", 4])
    return net


def constants() -> Net:
    """Constant nodes of every kind, values filled and counted in the graph, scalars, an empty tensor."""
    net = Net("constants")
    x = net.input("x", [2, 8])
    half = net.op("Constant", value_float=0.5)
    row = net.op("Constant", value_floats=[0.1 * k for k in range(8)])
    table = net.op("Constant", value=numpy_helper.from_array(net.rng.standard_normal((8, 8)).astype(np.float32)))
    zeros = net.op("ConstantOfShape", net.op("Shape", x))
    ones = net.op("ConstantOfShape", net.ints(8), value=numpy_helper.from_array(np.ones(1, np.float32)))
    eye = net.op("EyeLike", table, dtype=FLOAT)
    h = net.op("Add", net.op("Mul", net.op("MatMul", x, table), half), row)
    h = net.op("Add", net.op("Mul", h, ones), net.op("Add", zeros, net.op("MatMul", x, eye)))
    h = net.op("Concat", h, net.const(np.zeros((2, 0))), axis=1)
    count = net.op("Cast", net.op("Size", h), to=FLOAT)
    net.output(net.op("Div", h, net.op("Clip", count, net.const(1.0))), "y", [2, 8])
    net.output(half, "half", [])
    return net


CORPUS: tuple[Callable[[], Net], ...] = (
    cnn_batchnorm,
    vit,
    windows_roll,
    unet_resize,
    detector,
    detector_topk,
    lstm,
    gru,
    flow_gridsample,
    layernorm_13,
    rmsnorm_eps,
    mask_1e9,
    mask_min,
    if_branches,
    loop_state,
    scan_sum,
    local_functions,
    qdq,
    external_data,
    fp16_island,
    fp64_path,
    custom_domain,
    dynamic_sequence,
    sequences,
    constants,
)


def write(folder: Path = HERE) -> None:
    """Write every model, checked."""
    for make in CORPUS:
        net = make()
        assert net.name == make.__name__
        proto = net.model()
        onnx.checker.check_model(proto)
        path = folder / f"{net.name}.onnx"
        if net.name == "external_data":
            (folder / "external_data.bin").unlink(missing_ok=True)
            onnx.external_data_helper.convert_model_to_external_data(proto, location="external_data.bin")
            onnx.save_model(proto, path)
        else:
            path.write_bytes(proto.SerializeToString(deterministic=True))


if __name__ == "__main__":
    write()
