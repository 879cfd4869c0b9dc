"""A tracker whose state is fed back: positions near 900 pixels, steps of a tenth of a pixel, 500 recorded steps.

In FP16 ``pos + step`` gives back ``pos``, as the spacing at 900 is 0.5. The error of one step is 2e-4 and says nothing;
after 500 steps fed back the positions are tens of pixels off.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from tests.graph.models import constant, text

POINTS, FEATURES, HIDDEN = 32, 16, 32
SEED = 15


def tracker(scale: float = 1.0) -> onnx.ModelProto:
    """The model: a step from features by two layers, added to the positions; ``scale`` multiplies the step."""
    rng = np.random.default_rng(SEED)
    first = rng.normal(0, FEATURES**-0.5, (FEATURES, HIDDEN))
    second = rng.normal(0, HIDDEN**-0.5, (HIDDEN, 2))
    graph = f"""(float[1,{POINTS},2] pos, float[1,{POINTS},{FEATURES}] features) => (float[1,{POINTS},2] next_pos) {{
        h = MatMul(features, w1) r = Relu(h) s = MatMul(r, w2) t = Tanh(s) step = Mul(t, gain)
        [advance] next_pos = Add(pos, step)
    }}"""
    return text(graph, constant("w1", first), constant("w2", second), constant("gain", 0.15 * scale))


def recorded(steps: int = 500, at: float = 900.0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """The inputs of each step of a sequence of which every state is the model's own, [steps, ...]."""
    rng = np.random.default_rng(SEED + 1)
    session = ReferenceEvaluator(tracker(scale))
    pos = (at + rng.uniform(-20, 20, (1, POINTS, 2))).astype(np.float32)
    feature = rng.normal(0, 1, (1, POINTS, FEATURES)).astype(np.float32)
    rows: dict[str, list[np.ndarray]] = {"pos": [], "features": []}
    for _ in range(steps):
        feature = (0.99 * feature + 0.14 * rng.normal(0, 1, feature.shape)).astype(np.float32)
        rows["pos"].append(pos)
        rows["features"].append(feature)
        (pos,) = session.run(None, {"pos": pos, "features": feature})
    return {name: np.concatenate(arrays) for name, arrays in rows.items()}
