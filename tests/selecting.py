"""Small networks whose outputs have as many rows as their values call for: detectors with NMS, selected points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIZE = 16
"""Images are 3 x 16 x 16; heads have one box per position, 256 a image."""
CLASSES = 3


class Net:
    """Nodes and constants, under names that count up."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._random = np.random.default_rng(7)

    def const(self, value: object, dtype: type = np.int64) -> str:
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), f"c{len(self.constants)}"))
        return self.constants[-1].name

    def weight(self, *shape: int, scale: float) -> str:
        return self.const(self._random.normal(0, scale, shape), np.float32)

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: object) -> str:
        out = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name or f"{kind}_{out}", **attributes))
        return out

    def output(self, value: str, name: str, shape: list[int | str | None], kind: int = TensorProto.FLOAT) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], f"out_{name}"))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def save(self, path: Path, shape: list[int | str]) -> Path:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, "g", [x], self.outputs, self.constants)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.checker.check_model(proto)
        onnx.save(proto, path)
        return path


def _head(net: Net) -> tuple[str, str]:
    """Corners (batch, boxes, 4) in pixels and scores (batch, classes, boxes) of an image."""
    hidden = net.op("Relu", net.op("Conv", "x", net.weight(16, 3, 3, 3, scale=0.3), pads=[1] * 4))
    hidden = net.op("Relu", net.op("Conv", hidden, net.weight(16, 16, 3, 3, scale=0.15), pads=[1] * 4))
    raw = net.op("Conv", hidden, net.weight(4 + CLASSES, 16, 1, 1, scale=0.5))
    flat = net.op("Transpose", net.op("Reshape", raw, net.const([0, 4 + CLASSES, -1])), perm=[0, 2, 1])
    ys, xs = np.mgrid[:SIZE, :SIZE].reshape(2, -1) * 8.0
    centre = net.const(np.stack([xs, ys], axis=1)[None], np.float32)
    shift = net.op("Slice", flat, net.const([0]), net.const([2]), net.const([2]))
    size = net.op("Slice", flat, net.const([2]), net.const([4]), net.const([2]))
    half = net.op("Mul", net.op("Exp", net.op("Tanh", size)), net.const(6.0, np.float32))
    centre = net.op("Add", shift, centre)
    boxes = net.op("Concat", net.op("Sub", centre, half), net.op("Add", centre, half), axis=2)
    scores = net.op("Sigmoid", net.op("Slice", flat, net.const([4]), net.const([4 + CLASSES]), net.const([2])))
    return boxes, net.op("Transpose", scores, perm=[0, 2, 1])


def detector(
    path: Path, batch: int | str = 1, threshold: float = 0.6, rows: str = "apart", declared: int | None = None
) -> Path:
    """A detector with NonMaxSuppression inside, which takes ``batch`` images at a time; a name makes it dynamic.

    ``rows``: ``apart`` gives boxes, scores, labels and images as outputs of their own; ``together`` one output of rows
    (image, x1, y1, x2, y2, class, score); ``raw`` all boxes and what NonMaxSuppression returns. ``declared``: how many
    rows the file says that outputs have, as exporters write what they saw in one example.
    """
    net = Net()
    boxes, scores = _head(net)
    limits = net.const([100]), net.const([0.45], np.float32), net.const([threshold], np.float32)
    kept = net.op("NonMaxSuppression", boxes, scores, *limits, name="nms")
    column = [net.op("Gather", kept, net.const(k), axis=1) for k in range(3)]
    where = net.op("Concat", *(net.op("Unsqueeze", column[k], net.const([1])) for k in (0, 2)), axis=1)
    chosen = net.op("GatherND", boxes, where)
    score = net.op("GatherND", scores, kept)
    n = declared or "n"
    if rows == "raw":
        net.output(boxes, "boxes", [batch, SIZE * SIZE, 4])
        net.output(kept, "selected", [n, 3], TensorProto.INT64)
    elif rows == "together":
        floats = [net.op("Unsqueeze", net.op("Cast", column[k], to=TensorProto.FLOAT), net.const([1])) for k in (0, 1)]
        last = net.op("Unsqueeze", score, net.const([1]))
        net.output(net.op("Concat", floats[0], chosen, floats[1], last, axis=1), "detections", [n, 7])
    else:
        net.output(chosen, "boxes", [n, 4])
        net.output(score, "scores", [n])
        net.output(column[1], "labels", [n], TensorProto.INT64)
        net.output(column[0], "images", [n], TensorProto.INT64)
    return net.save(path, [batch, 3, SIZE, SIZE])


def points(path: Path) -> Path:
    """Features of the positions at which a score is positive, by NonZero, and the positions."""
    net = Net()
    hidden = net.op("Relu", net.op("Conv", "x", net.weight(8, 3, 3, 3, scale=0.3), pads=[1] * 4))
    score = net.op("Squeeze", net.op("Conv", hidden, net.weight(1, 8, 1, 1, scale=0.5)), net.const([0, 1]))
    where = net.op("NonZero", net.op("Greater", score, net.const(0.0, np.float32)), name="select")
    features = net.op("Transpose", net.op("Squeeze", hidden, net.const([0])), perm=[1, 2, 0])
    net.output(net.op("GatherND", features, net.op("Transpose", where, perm=[1, 0])), "features", ["n", 8])
    net.output(where, "positions", [2, "n"], TensorProto.INT64)
    return net.save(path, [1, 3, SIZE, SIZE])


def images(path: Path, count: int = 6, batch: int = 1, scale: float = 1.0) -> Path:
    """Smooth random images for these networks, ``count`` samples of ``batch`` each."""
    random = np.random.default_rng(3)
    x = random.normal(0, scale, (count * batch, 3, SIZE, SIZE)).astype(np.float32)
    np.savez(path, x=(x + np.roll(x, 1, axis=2) + np.roll(x, 1, axis=3)) / 2)
    return path
