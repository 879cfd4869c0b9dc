"""Six small networks with data that suit them, by seed, and what can be wrong with each: for the rate of false alarms.

Nothing is trained: weights are drawn, BatchNorm's statistics are those of the network's own data, and the data are
pictures, series, tokens and vectors, not noise. A fault changes the graph or the data in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SAMPLES = 8
OPSET = 17
Arrays = dict[str, np.ndarray]


@dataclass
class Network:
    """A graph in the making, with its data.

    Attributes:
        data: input -> samples along the first axis; one sample is one row.
    """

    rng: np.random.Generator
    data: Arrays
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def constant(self, name: str, value: object, dtype: type = np.float32) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        fan_in = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        return self.constant(name, self.rng.normal(0, fan_in**-0.5, shape))

    def add(self, operator: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def conv(self, x: str, name: str, n_in: int, n_out: int, kernel: int = 3, stride: int = 1) -> str:
        w = self.weight(f"{name}.w", n_out, n_in, kernel, kernel)
        return self.add("Conv", [x, w], name, pads=[kernel // 2] * 4, strides=[stride] * 2)

    def batch_norm(self, x: str, name: str, channels: int) -> str:
        """With the statistics of the data at this place."""
        seen = self.run(x)
        scale = self.constant(f"{name}.s", self.rng.uniform(0.8, 1.2, channels))
        bias = self.constant(f"{name}.b", self.rng.normal(0, 0.1, channels))
        moments = ((".m", seen.mean((0, 2, 3))), (".v", seen.var((0, 2, 3))))
        mean, variance = (self.constant(name + end, values) for end, values in moments)
        return self.add("BatchNormalization", [x, scale, bias, mean, variance], name)

    def run(self, output: str) -> np.ndarray:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(self.proto([output], "n").SerializeToString(), options)
        found: np.ndarray = session.run(None, self.data)[0]
        return found

    def proto(self, outputs: list[str] | None = None, batch: int | str = 1) -> onnx.ModelProto:
        """The model; its inputs have a batch of this size."""
        kinds = {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "u": TensorProto.UINT8}
        inputs = [
            helper.make_tensor_value_info(name, kinds[array.dtype.kind], [batch, *array.shape[1:]])
            for name, array in self.data.items()
        ]
        outs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs or self.outputs]
        graph = helper.make_graph(self.nodes, "network", inputs, outs, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def pictures(rng: np.random.Generator, size: int = 32) -> np.ndarray:
    """Smooth pictures of three channels in 0..1, shape (SAMPLES, 3, size, size)."""
    y, x = np.mgrid[0:size, 0:size] / size
    a, b, phase = (rng.uniform(low, high, (SAMPLES, 3, 1, 1)) for low, high in ((2, 9), (2, 9), (0, 6)))
    grain = rng.uniform(-0.05, 0.05, (SAMPLES, 3, size, size))
    return (0.5 + 0.4 * np.sin(a * x + b * y + phase) + grain).astype(np.float32)


def keypoints(rng: np.random.Generator, fault: str) -> Network:
    """Convolutions with BatchNorms; coordinates as the expectation under a softmax over the pixels."""
    net = Network(rng, {"image": pictures(rng)})
    x = net.add("Relu", [net.batch_norm(net.conv("image", "stem", 3, 8, stride=2), "stem.bn", 8)], "stem.act")
    x = net.add("Relu", [net.batch_norm(net.conv(x, "body", 8, 16), "body.bn", 16)], "body.act")
    heat = net.conv(x, "heat", 16, 4, 1)
    if fault == "sharp":  # correlations in the thousands, with two places that are about as good
        grain = rng.uniform(size=(8, 3, 32, 16)).astype(np.float32)
        net.data["image"][..., 16:] = net.data["image"][..., :16] + np.float32(1e-4) * grain
        heat = net.add("Mul", [heat, net.constant("sharpness", 3000.0)], "sharpen")
    flat = net.add("Reshape", [heat, net.constant("flat", [0, 4, 256], np.int64)], "flatten")
    place = net.add("Softmax", [flat], "softmax", axis=-1)
    grid = np.stack(np.meshgrid(np.linspace(0, 1, 16), np.linspace(0, 1, 16)), -1).reshape(256, 2)
    net.outputs = [net.add("MatMul", [place, net.constant("grid", grid)], "points")]
    if fault == "0..255":
        net.data["image"] = net.data["image"] * np.float32(255)
    return net


def autoencoder(rng: np.random.Generator, fault: str) -> Network:
    """Down, up, and a picture again."""
    net = Network(rng, {"image": pictures(rng)})
    x = net.add("Relu", [net.batch_norm(net.conv("image", "down", 3, 12, stride=2), "down.bn", 12)], "down.act")
    x = net.add("Relu", [net.batch_norm(net.conv(x, "code", 12, 6, stride=2), "code.bn", 6)], "code.act")
    if fault == "energy":  # the square of a feature that was scaled up
        x = net.add("Mul", [x, net.constant("gain", 400.0)], "raise")
        x = net.add("Mul", [x, x], "energy")
        x = net.add("Mul", [x, net.constant("back", 1e-5)], "lower")
    up = net.weight("up.w", 6, 12, 2, 2)
    x = net.add("Relu", [net.add("ConvTranspose", [x, up], "up", strides=[2, 2])], "up.act")
    up = net.weight("out.w", 12, 3, 2, 2)
    net.outputs = [net.add("Sigmoid", [net.add("ConvTranspose", [x, up], "out", strides=[2, 2])], "picture")]
    if fault == "repeated":
        net.data["image"][4:] = net.data["image"][:4]
    return net


def denoiser(rng: np.random.Generator, fault: str) -> Network:
    """Instance norms and a residual."""
    net = Network(rng, {"noisy": pictures(rng)})
    x = net.conv("noisy", "head", 3, 8)
    scale, bias = net.constant("in.s", np.ones(8)), net.constant("in.b", np.zeros(8))
    x = net.add("Relu", [net.add("InstanceNormalization", [x, scale, bias], "norm", epsilon=1e-5)], "act")
    if fault == "contrast":  # each channel by its contrast, of which a dark picture has none
        mean = net.add("ReduceMean", [x], "mean", axes=[2, 3])
        centred = net.add("Sub", [x, mean], "centre")
        spread = net.add("ReduceMean", [net.add("Mul", [centred, centred], "square")], "variance", axes=[2, 3])
        guarded = net.add("Add", [spread, net.constant("eps", 1e-9)], "guard")
        x = net.add("Div", [centred, net.add("Sqrt", [guarded], "deviation")], "by contrast")
        net.data["noisy"][2] = 0.0
    noise = net.conv(x, "tail", 8, 3)
    net.outputs = [net.add("Sub", ["noisy", noise], "clean")]
    if fault == "batch":
        mean = net.add("ReduceMean", [noise], "batch mean", axes=[0], keepdims=1)
        net.outputs = [net.add("Sub", ["clean", mean], "centred")]
    return net


def forecaster(rng: np.random.Generator, fault: str) -> Network:
    """A GRU over windows of a series with a season, and a linear head."""
    steps, width = 24, 16
    at = rng.uniform(0, 50, (SAMPLES, 1, 1)) + np.arange(steps)[:, None] + np.array([0.0, 3.0, 7.0])
    level = rng.uniform(-0.5, 0.5, (SAMPLES, 1, 1))
    series = np.sin(at / 3) + level + 0.05 * rng.normal(size=(SAMPLES, steps, 3))
    net = Network(rng, {"window": series.astype(np.float32)})
    x = net.add("Transpose", ["window"], "by time", perm=[1, 0, 2])
    weights = [net.constant(n, rng.normal(0, 0.25, (1, 3 * width, k))) for n, k in (("gru.w", 3), ("gru.r", width))]
    net.nodes.append(helper.make_node("GRU", [x, *weights], ["", "last"], name="gru", hidden_size=width))
    last = net.add("Squeeze", ["last", net.constant("first", [0], np.int64)], "state")
    if fault == "dropout":
        ratio, training = net.constant("ratio", 0.3), net.constant("training", True, np.bool_)
        last = net.add("Dropout", [last, ratio, training], "dropout")
    if fault == "clock":  # the time since the start of the record, which FP16 does not resolve
        day = net.add("ReduceMean", ["window"], "now", axes=[1], keepdims=0)
        day = net.add("MatMul", [day, net.weight("clock.w", 3, 1)], "minute")
        day = net.add("Add", [day, net.constant("start", 6000.0)], "clock")
        late = net.add("Sub", [day, net.constant("due", 6000.0)], "late")
        last = net.add("Add", [last, late], "with clock")
    net.outputs = [net.add("MatMul", [last, net.weight("head.w", width, 3)], "forecast")]
    return net


def encoder(rng: np.random.Generator, fault: str) -> Network:
    """Tokens with a padding mask, one attention layer, the mean over what is no padding."""
    length, width = 12, 16
    real = np.arange(length)[None] < rng.integers(4, length + 1, (SAMPLES, 1))
    ids = np.where(real, rng.integers(1, 64, (SAMPLES, length)), 0)
    net = Network(rng, {"ids": ids, "mask": real.astype(np.float32)})
    x = net.add("Gather", [net.weight("table", 64, width), "ids"], "embed")
    q, k, v = (net.add("MatMul", [x, net.weight(f"{n}.w", width, width)], n) for n in "qkv")
    scores = net.add("MatMul", [q, net.add("Transpose", [k], "kt", perm=[0, 2, 1])], "scores")
    wide = net.add("Unsqueeze", ["mask", net.constant("one axis", [1], np.int64)], "wide mask")
    low = -1e9 if fault == "mask" else -1e4
    padding = net.add("Sub", [net.constant("one", 1.0), wide], "padding")
    hidden = net.add("Mul", [padding, net.constant("low", low)], "low mask")
    place = net.add("Softmax", [net.add("Add", [scores, hidden], "masked")], "softmax", axis=-1)
    x = net.add("Add", [x, net.add("MatMul", [place, v], "mixed")], "residual")
    scale, bias = net.constant("ln.s", np.ones(width)), net.constant("ln.b", np.zeros(width))
    x = net.add("LayerNormalization", [x, scale, bias], "norm", axis=-1)
    column = net.add("Unsqueeze", ["mask", net.constant("last axis", [2], np.int64)], "column")
    real_rows = net.add("Mul", [x, column], "kept")
    total = net.add("ReduceSum", [real_rows, net.constant("axis", [1], np.int64)], "total", keepdims=0)
    count = net.add("ReduceSum", ["mask", net.constant("axis too", [1], np.int64)], "count", keepdims=1)
    pooled = net.add("Div", [total, count], "mean")
    if fault == "dead":
        pooled = net.add("Mul", [pooled, net.constant("closed", 0.0)], "gate")
    net.outputs = [net.add("MatMul", [pooled, net.weight("head.w", width, 5)], "logits")]
    return net


def matcher(rng: np.random.Generator, fault: str) -> Network:
    """Two towers; embeddings of length one, and their product."""
    parts = rng.normal(size=(SAMPLES, 2, 4)) @ rng.normal(size=(4, 24)) + 0.1 * rng.normal(size=(SAMPLES, 2, 24))
    net = Network(rng, {side: np.abs(parts[:, k]).astype(np.float32) for k, side in enumerate(("left", "right"))})
    ends = []
    for side in ("left", "right"):
        x = net.add("Relu", [net.add("MatMul", [side, net.weight(f"{side}.w", 24, 32)], f"{side} fc")], f"{side} act")
        x = net.add("MatMul", [x, net.weight(f"{side}.v", 32, 8)], f"{side} out")
        if fault == "empty" and side == "left":  # a vector of zeros has no direction
            axis = net.constant("axis", [1], np.int64)
            square = net.add("ReduceSum", [net.add("Mul", [x, x], "square"), axis], "sum", keepdims=1)
            length = net.add("Sqrt", [net.add("Add", [square, net.constant("eps", 1e-12)], "guard")], "length")
            x = net.add("Div", [x, length], "left unit")
            net.data["left"][[1, 5]] = 0.0
            net.data["left"][5, 0] = 1e-9
        else:
            x = net.add("Div", [x, net.add("ReduceL2", [x], f"{side} length", axes=[1], keepdims=1)], f"{side} unit")
        ends.append(x)
    score = net.add("Mul", ends, "products")
    net.outputs = [net.add("ReduceSum", [score, net.constant("last", [1], np.int64)], "cosine", keepdims=1)]
    if fault == "noise":
        net.nodes.append(helper.make_node("RandomNormalLike", ["cosine"], ["jitter"], name="jitter", scale=0.1))
        net.outputs = [net.add("Add", ["cosine", "jitter"], "scored")]
    return net


NETWORKS: Mapping[str, tuple[Callable[[np.random.Generator, str], Network], Mapping[str, frozenset[str]]]] = {
    "keypoints": (keypoints, {"0..255": frozenset({"data-do-not-fit"}), "sharp": frozenset({"spacing"})}),
    "autoencoder": (autoencoder, {"energy": frozenset({"overflow"}), "repeated": frozenset({"duplicate-samples"})}),
    "denoiser": (denoiser, {"contrast": frozenset({"vanishing-epsilon"}), "batch": frozenset({"rows-mix"})}),
    "forecaster": (forecaster, {"dropout": frozenset({"not-deterministic"}), "clock": frozenset({"cancellation"})}),
    "encoder": (encoder, {"mask": frozenset({"mask"}), "dead": frozenset({"reference-zero"})}),
    "matcher": (matcher, {"empty": frozenset({"vanishing-epsilon"}), "noise": frozenset({"not-deterministic"})}),
}
"""Name -> what makes it, and fault -> the codes that it is right to name."""
