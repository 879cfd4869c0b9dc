"""A tracker of many points in a panning scene, beside a descriptor: its positions near 900 move by .34 to .42 pixels.

No step is lost in FP16, whose spacing is 0.5 there, so nothing stands still: each is rounded to 0.5, and all to the
same side. One step is right to .2 pixels, and the descriptor's error hides that; over 500 steps the positions run away.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FEATURES, HIDDEN, COORDINATES, DESCRIPTOR, STEPS = 64, 512, 512, 1024, 500


def save_tracker(path: Path, seed: int = 0) -> None:
    """``frame`` [1, 64] and ``position`` [1, 512] -> ``next_position`` [1, 512] and ``descriptor`` [1, 1024]."""
    rng = np.random.default_rng(seed)
    constants: dict[str, np.ndarray] = {}

    def weight(name: str, rows: int, columns: int, scale: float = 1.0) -> str:
        return constant(name, rng.normal(size=(rows, columns)) * scale / np.sqrt(rows))

    def constant(name: str, value: object) -> str:
        constants[name] = np.array(value, np.float32)
        return name

    node = helper.make_node
    nodes = [
        node("Mul", ["position", constant("per_pixel", 1e-3)], ["where"], "locate/Mul"),
        node("MatMul", ["where", weight("wp", COORDINATES, HIDDEN, 0.3)], ["context"], "locate/MatMul"),
        node("MatMul", ["frame", weight("w1", FEATURES, HIDDEN)], ["encoded"], "encode/MatMul"),
        node("Add", ["encoded", "context"], ["joined"], "encode/Add"),
        node("Relu", ["joined"], ["a1"], "encode/Relu"),
        node("MatMul", ["a1", weight("w2", HIDDEN, HIDDEN)], ["hidden"], "trunk/MatMul"),
        node("Relu", ["hidden"], ["a2"], "trunk/Relu"),
        node("MatMul", ["a2", weight("w3", HIDDEN, COORDINATES)], ["motion"], "motion/MatMul"),
        node("Tanh", ["motion"], ["own"], "motion/Tanh"),
        node("Mul", ["own", constant("share", 0.04)], ["own_step"], "motion/Mul"),
        node("Add", ["own_step", constant("pan", 0.38)], ["step"], "motion/Add"),
        node("Add", ["position", "step"], ["next_position"], "update/Add"),
        node("MatMul", ["a2", weight("w4", HIDDEN, DESCRIPTOR)], ["raw"], "describe/MatMul"),
        node("Add", ["raw", constant("level", 30.0)], ["logits"], "describe/Add"),
        node("Softmax", ["logits"], ["descriptor"], "describe/Softmax"),
    ]
    shapes = {"frame": FEATURES, "position": COORDINATES, "next_position": COORDINATES, "descriptor": DESCRIPTOR}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in shapes.items()]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "panning", values[:2], values[2:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def frames(seed: int) -> np.ndarray:
    """Of one scene, shape (500, 64)."""
    rng = np.random.default_rng(seed)
    noise = 0.1 * rng.normal(size=(STEPS, FEATURES))
    return (rng.normal(size=FEATURES) + noise).astype(np.float32)


def roll(model: Path, seed: int) -> np.ndarray:
    """The positions that a model gives, fed back over the frames, from 600 to 800 on; shape (501, 512)."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    position = np.random.default_rng(seed).uniform(600, 800, (1, COORDINATES)).astype(np.float32)
    found = [position]
    for frame in frames(seed):
        (position,) = session.run(["next_position"], {"frame": frame[None], "position": position})
        found.append(position)
    return np.concatenate(found)


def record(model: Path, data: Path, seed: int) -> None:
    """Write the frames and the positions that the model itself gave, in FP32."""
    np.savez(data, frame=frames(seed), position=roll(model, seed)[:-1])
