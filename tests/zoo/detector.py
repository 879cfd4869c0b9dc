"""A small detector: boxes in pixels beside scores from 0 to 1, in several layouts. Made by a script with a seed.

Its objectness reads a feature of large magnitude, whose FP16 spacing is large beside what decides: rounded to FP16 it
moves scores by 0.1 and more, while boxes of hundreds of pixels hide that from the error of the whole tensor.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Layout = Literal["rows", "columns", "apart", "heatmap"]

LAYOUTS: tuple[Layout, ...] = ("rows", "columns", "apart", "heatmap")
"""[N, anchors, 4 + 1 + classes], [N, 4 + 1 + classes, anchors], three outputs, [N, 4 + 1 + classes, H, W]."""

SIZE, CHANNELS, CLASSES = 32, 16, 3
CELLS = SIZE // 4

OBJECTNESS = 4
"""Column of the score."""


def detector(layout: Layout, seed: int = 0) -> onnx.ModelProto:
    """The model: input ``image`` [1, 3, 32, 32] in 0..1."""
    rng = np.random.default_rng(seed)
    constants: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def constant(name: str, value: np.ndarray) -> str:
        dtype = np.int64 if value.dtype.kind == "i" else np.float32
        constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(op: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def conv(x: str, name: str, n_in: int, n_out: int, kernel: int = 1, stride: int = 1, scale: float = 1.0) -> str:
        weight = rng.standard_normal((n_out, n_in, kernel, kernel)) * scale / np.sqrt(n_in * kernel * kernel)
        inputs = [x, constant(f"{name}.w", weight), constant(f"{name}.b", 0.1 * rng.standard_normal(n_out))]
        pads = [kernel // 2] * 4
        return node("Conv", inputs, name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)

    x = node("Relu", [conv("image", "stem", 3, CHANNELS, 3, 2)], "stem.act")
    for number in range(3):
        stride = 2 if number == 0 else 1
        y = node("Relu", [conv(x, f"block{number}", CHANNELS, CHANNELS, 3, stride, 1.4)], f"block{number}.act")
        x = y if stride == 2 else node("Add", [x, y], f"block{number}.sum")
    # Boxes: 4 numbers in pixels, hundreds of them.
    box = node(
        "Mul",
        [
            conv(node("Relu", [conv(x, "box.conv", CHANNELS, CHANNELS)], "box.act"), "box.head", CHANNELS, 4),
            constant("box.scale", np.array([200.0])),
        ],
        "box.pixels",
    )
    # Objectness: the difference of two large sums, as an energy against its threshold.
    high = node(
        "Mul",
        [node("Relu", [conv(x, "obj.conv", CHANNELS, CHANNELS)], "obj.act"), constant("obj.scale", np.array([300.0]))],
        "obj.large",
    )
    offset = node("Add", [high, constant("obj.offset", np.array([40000.0]))], "obj.shifted")
    energy = node("Sub", [offset, constant("obj.threshold", np.array([40160.0]))], "obj.margin")
    score = node("Sigmoid", [conv(energy, "obj.head", CHANNELS, 1, scale=0.05)], "obj.score")
    classes = node("Sigmoid", [conv(x, "cls.head", CHANNELS, CLASSES)], "cls.score")
    columns = 5 + CLASSES
    if layout == "apart":
        outputs = {"boxes": box, "objectness": score, "classes": classes}
        for name, value in outputs.items():
            node("Identity", [value], name)
        infos = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, n, CELLS, CELLS])
            for name, n in (("boxes", 4), ("objectness", 1), ("classes", CLASSES))
        ]
    else:
        whole = "detections" if layout == "heatmap" else "all"
        node("Concat", [box, score, classes], whole, axis=1)
        shape = [1, columns, CELLS, CELLS]
        if layout != "heatmap":
            flat = constant("flat", np.array([1, columns, CELLS * CELLS]))
            node("Reshape", [whole, flat], "detections" if layout == "columns" else "flattened")
            shape = [1, columns, CELLS * CELLS]
        if layout == "rows":
            node("Transpose", ["flattened"], "detections", perm=[0, 2, 1])
            shape = [1, CELLS * CELLS, columns]
        infos = [helper.make_tensor_value_info("detections", TensorProto.FLOAT, shape)]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, SIZE, SIZE])
    graph = helper.make_graph(nodes, "detector", [image], infos, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def images(count: int, seed: int = 1) -> np.ndarray:
    """Smooth images in 0..1, shape (count, 3, 32, 32)."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.arange(SIZE), np.arange(SIZE))
    waves = rng.uniform(0.05, 0.6, (count, 3, 2, 1, 1)), rng.uniform(0, 6.3, (count, 3, 1, 1))
    values = np.sin(waves[0][:, :, 0] * across + waves[0][:, :, 1] * down + waves[1])
    return (0.5 + 0.5 * values).astype(np.float32)


def scores(outputs: dict[str, np.ndarray], layout: Layout) -> np.ndarray:
    """The objectness of every cell, in one order whatever the layout."""
    if layout == "apart":
        return outputs["objectness"].ravel()
    array = outputs["detections"]
    return (array[..., OBJECTNESS] if layout == "rows" else array[:, OBJECTNESS]).ravel()
