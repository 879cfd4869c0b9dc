"""The plan that one-step errors choose runs away; the one with --feedback keeps its positions, and is no slower.

A tracker of many points in a panning scene, beside a descriptor: its positions near 900 move by .34 to .42 pixels. No
step is lost in FP16, whose spacing is 0.5 there, so nothing stands still: each is rounded to 0.5, and all to the same
side. One step is right to .2 pixels, and the descriptor's error hides that; over 500 steps the positions run away.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import mptune
from mptune.graph.plan import PrecisionPlan
from tests.graph.models import constant, text
from tests.zoo.plans import emulator_of

FEATURES, HIDDEN, COORDINATES, DESCRIPTOR, STEPS = 64, 512, 512, 1024, 500
LIMIT_PX = 6.0


def tracker(seed: int) -> onnx.ModelProto:
    """``frame`` [1, 64] and ``position`` [1, 512] -> ``next_position`` [1, 512] and ``descriptor`` [1, 1024]."""
    rng = np.random.default_rng(seed)
    sizes = {"wp": (COORDINATES, HIDDEN, 0.3), "w1": (FEATURES, HIDDEN, 1), "w2": (HIDDEN, HIDDEN, 1)}
    sizes |= {"w3": (HIDDEN, COORDINATES, 1), "w4": (HIDDEN, DESCRIPTOR, 1)}
    weights = [constant(n, rng.normal(size=(a, b)) * scale / np.sqrt(a)) for n, (a, b, scale) in sizes.items()]
    graph = f"""(float[1,{FEATURES}] frame, float[1,{COORDINATES}] position)
        => (float[1,{COORDINATES}] next_position, float[1,{DESCRIPTOR}] descriptor)
        <float per_pixel = {{1e-3}}, float share = {{0.04}}, float pan = {{0.38}}, float level = {{30}}> {{
        where = Mul(position, per_pixel) context = MatMul(where, wp) encoded = MatMul(frame, w1)
        joined = Add(encoded, context) a1 = Relu(joined) hidden = MatMul(a1, w2) a2 = Relu(hidden)
        motion = MatMul(a2, w3) own = Tanh(motion) own_step = Mul(own, share) step = Add(own_step, pan)
        next_position = Add(position, step) raw = MatMul(a2, w4) logits = Add(raw, level) descriptor = Softmax(logits)
    }}"""
    return text(graph, *weights)


def frames(seed: int) -> np.ndarray:
    """Of one scene, shape (500, 64)."""
    rng = np.random.default_rng(seed)
    noise = 0.1 * rng.normal(size=(STEPS, FEATURES))
    return (rng.normal(size=FEATURES) + noise).astype(np.float32)


def roll(model: Path, seed: int) -> np.ndarray:
    """The positions that a model gives, fed back over the frames, from 600 to 800 on; shape (501, 512)."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    positions = [np.random.default_rng(seed).uniform(600, 800, (1, COORDINATES)).astype(np.float32)]
    for frame in frames(seed):
        positions += session.run(["next_position"], {"frame": frame[None], "position": positions[-1]})
    return np.concatenate(positions)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_the_plan_chosen_with_feedback_keeps_its_positions_at_no_higher_latency(tmp_path: Path, seed: int) -> None:
    path, data = tmp_path / "tracker.onnx", tmp_path / "data.npz"
    onnx.save(tracker(seed), path)
    exact = roll(path, seed + 1)
    np.savez(data, frame=frames(seed + 1), position=exact[:-1])
    _, emulator = emulator_of(path)

    def drift_px(plan: PrecisionPlan) -> float:
        """At the end of 500 steps, by an emulation apart from the search's."""
        rounded = roll(emulator.write(plan, tmp_path / "bank" / f"{plan.fingerprint}.onnx"), seed + 1)
        return float(np.abs(rounded - exact)[-1].max())

    given = {"data": data, "budget": 12, "target": "jetson-orin-nano-8gb"}
    one_step = mptune.search(path, out=tmp_path / "one", **given).chosen
    assert one_step is not None
    assert drift_px(one_step.plan) > 5 * LIMIT_PX, "each step of it is right to .2 pixels"
    fed_back = {"feedback": "next_position:position", "steps": STEPS, "max_latency_ms": one_step.latency.median_ms}
    rolled = mptune.search(path, out=tmp_path / "rolled", **fed_back, **given)
    assert rolled.limits_met
    assert rolled.chosen is not None
    assert rolled.chosen.latency.median_ms <= one_step.latency.median_ms
    assert drift_px(rolled.chosen.plan) <= LIMIT_PX
