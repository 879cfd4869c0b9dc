"""Models of dynamic size: the error of one grows with the size, that of its sound twin does not."""

from __future__ import annotations

import numpy as np
import onnx

from tests.graph.models import constant, model, node, value
from tests.zoo.numbers import images, weights

SIZE, LARGEST = 16, 256


def pooled(by: str) -> onnx.ModelProto:
    """Features of an image, pooled: their sum leaves FP16's range where the image is large, their mean does not."""
    nodes = [
        node("Conv", ["image", "w"], "c", "features"),
        node("Relu", ["c"], "r", "relu"),
        node("Add", ["r", "one"], "s", "above zero"),
        node(by, ["s"], "p", "pool", axes=[2, 3], keepdims=0)
        if by == "ReduceMean"
        else node(by, ["s", "axes"], "p", "pool", keepdims=0),
        node("MatMul", ["p", "v"], "y", "head"),
    ]
    constants = [weights("w", 256, 3, 1, 1), weights("v", 256, 1024), constant("one", 1.0)]
    constants.append(constant("axes", [2, 3], np.int64))
    return model(nodes, [value("image", ["n", 3, "h", "w_"])], [value("y", ["n", 1024])], constants)


def data() -> dict[str, np.ndarray]:
    brightness = np.linspace(0.2, 1.0, 8, dtype=np.float32)[[0, 5, 2, 7, 4, 1, 6, 3]]
    return {"image": images(size=SIZE) * brightness[:, None, None, None]}
