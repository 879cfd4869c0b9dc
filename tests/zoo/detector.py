"""A small detector: boxes in pixels beside scores from 0 to 1, in several layouts. Made by a script with a seed.

Its objectness reads a feature of large magnitude, whose FP16 spacing is large beside what decides: rounded to FP16 it
moves scores by 0.1 and more, while boxes of hundreds of pixels hide that from the error of the whole tensor.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import onnx

from tests.graph.models import constant, text

Layout = Literal["rows", "columns", "apart", "heatmap"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
"""[N, anchors, 4 + 1 + classes], [N, 4 + 1 + classes, anchors], three outputs, [N, 4 + 1 + classes, H, W]."""

SIZE, CHANNELS, CLASSES = 32, 16, 3
CELLS = SIZE // 4

OBJECTNESS = 4
"""Column of the score."""


def detector(layout: Layout, seed: int = 0) -> onnx.ModelProto:
    """The model: input ``image`` [1, 3, 32, 32] in 0..1."""
    rng = np.random.default_rng(seed)
    constants: list[onnx.TensorProto] = []

    def conv(x: str, name: str, n_in: int, n_out: int, kernel: int = 1, stride: int = 1, scale: float = 1.0) -> str:
        weight = rng.standard_normal((n_out, n_in, kernel, kernel)) * scale / np.sqrt(n_in * kernel * kernel)
        constants.append(constant(f"{name}_w", weight))
        constants.append(constant(f"{name}_b", 0.1 * rng.standard_normal(n_out)))
        shape = f"strides = [{stride}, {stride}], pads = {[kernel // 2] * 4}"
        return f"{name} = Conv<{shape}>({x}, {name}_w, {name}_b)"

    blocks = [conv("image", "stem", 3, CHANNELS, 3, 2), "stem_act = Relu(stem)"]
    blocks += [conv("stem_act", "block0", CHANNELS, CHANNELS, 3, 2, 1.4), "x0 = Relu(block0)"]
    for number in (1, 2):
        x = f"x{number - 1}"
        blocks.append(conv(x, f"block{number}", CHANNELS, CHANNELS, 3, 1, 1.4))
        blocks.append(f"act{number} = Relu(block{number}) x{number} = Add({x}, act{number})")
    # Boxes: 4 numbers in pixels, hundreds of them.
    boxes = f"""
        {conv("x2", "box_conv", CHANNELS, CHANNELS)} box_act = Relu(box_conv)
        {conv("box_act", "box_head", CHANNELS, 4)} boxes = Mul(box_head, box_scale)
    """
    # Objectness: the difference of two large sums, as an energy against its threshold.
    objectness = f"""
        {conv("x2", "obj_conv", CHANNELS, CHANNELS)} obj_act = Relu(obj_conv) large = Mul(obj_act, obj_scale)
        shifted = Add(large, offset) margin = Sub(shifted, threshold)
        {conv("margin", "obj_head", CHANNELS, 1, scale=0.05)} objectness = Sigmoid(obj_head)
    """
    classes = f"{conv('x2', 'cls_head', CHANNELS, CLASSES)} classes = Sigmoid(cls_head)"
    columns, cells = 5 + CLASSES, CELLS * CELLS
    whole = "whole = Concat<axis = 1>(boxes, objectness, classes)"
    flat = f"{whole} flat = Reshape(whole, shape)"
    ends = {
        "apart": ("", ", ".join(f"float[1,{n},8,8] {k}" for k, n in (("boxes", 4), ("objectness", 1), ("classes", 3)))),
        "heatmap": (f"{whole} detections = Identity(whole)", f"float[1,{columns},8,8] detections"),
        "columns": (f"{flat} detections = Identity(flat)", f"float[1,{columns},{cells}] detections"),
        "rows": (f"{flat} detections = Transpose<perm = [0, 2, 1]>(flat)", f"float[1,{cells},{columns}] detections"),
    }
    end, outputs = ends[layout]
    given = "float[1] box_scale = {200}, float[1] obj_scale = {300}, float[1] offset = {40000}"
    given += f", float[1] threshold = {{40160}}, int64[3] shape = {{1, {columns}, {cells}}}"
    nodes = " ".join([*blocks, boxes, objectness, classes, end])
    model = text(f"(float[1,3,{SIZE},{SIZE}] image) => ({outputs}) <{given}> {{ {nodes} }}", *constants)
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
