"""A tracker: positions near 900 pixels that a recurrent Add moves by small steps, recorded over 500 steps.

One step of it is right in FP16 to 2e-4, as positions are large. Fed back, FP16 spacing of 0.5 there swallows steps
below 0.25: the position stops. The cure costs one group: the Add in FP32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FEATURES = 64
HIDDEN = 768
STEPS = 500


def save_tracker(path: Path, seed: int = 0) -> None:
    """Write the model: ``frame`` [1, 64] and ``position`` [1, 2] -> ``next_position`` [1, 2] and ``confidence`` [1, 1].

    Three layers turn the frame into a velocity of at most 0.3 pixels a step and a confidence in 0..1.
    """
    generator = np.random.default_rng(seed)
    weights = {}

    def weight(name: str, *shape: int) -> str:
        weights[name] = (generator.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
        return name

    nodes = [
        helper.make_node("MatMul", ["frame", weight("w1", FEATURES, HIDDEN)], ["h1"], "encode/MatMul"),
        helper.make_node("Relu", ["h1"], ["a1"], "encode/Relu"),
        helper.make_node("MatMul", ["a1", weight("w2", HIDDEN, HIDDEN)], ["h2"], "trunk/MatMul"),
        helper.make_node("Relu", ["h2"], ["a2"], "trunk/Relu"),
        helper.make_node("MatMul", ["a2", weight("w3", HIDDEN, 2)], ["h3"], "motion/MatMul"),
        helper.make_node("Tanh", ["h3"], ["direction"], "motion/Tanh"),
        helper.make_node("Mul", ["direction", "pace"], ["step"], "motion/Mul"),
        helper.make_node("Add", ["position", "step"], ["next_position"], "update/Add"),
        helper.make_node("MatMul", ["a2", weight("w4", HIDDEN, 1)], ["h4"], "confidence/MatMul"),
        helper.make_node("Sigmoid", ["h4"], ["confidence"], "confidence/Sigmoid"),
    ]
    weights["pace"] = np.array(0.3, np.float32)
    shapes = {"frame": [1, FEATURES], "position": [1, 2], "next_position": [1, 2], "confidence": [1, 1]}
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "tracker", values[:2], values[2:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def record(model: Path, data: Path, seed: int = 1) -> None:
    """Write frames of one scene and the positions that the model itself gave, in FP32."""
    np.savez(data, frame=_frames(seed), position=roll(model, seed)[:-1])


def roll(model: Path, seed: int = 1) -> np.ndarray:
    """The positions that a model gives, fed back over the frames, from (900, 880) on; shape (STEPS + 1, 2)."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    positions = [np.array([[900.0, 880.0]], np.float32)]
    for frame in _frames(seed):
        feed = {"frame": frame[None], "position": positions[-1]}
        positions.append(session.run(["next_position"], feed)[0])
    return np.concatenate(positions)


def _frames(seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    scene = generator.normal(size=FEATURES)
    return (scene + 0.3 * generator.normal(size=(STEPS, FEATURES))).astype(np.float32)
