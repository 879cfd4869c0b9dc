"""``mptune compare`` of models whose inputs are FP16: a converter's, or those that a deployment is fed with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from tests.diagnosis.recordings import session
from tests.graph.models import constant, save, text

TYPES = {"FP32": (np.float32, "float", 1), "FP16": (np.float16, "float16", 10)}


def write(path: Path, inputs: str, inside: str) -> Path:
    """Two layers, with inputs and outputs of one type and all else in the other."""
    rng = np.random.default_rng(0)
    (_, outer, outer_number), (dtype, _, inner_number) = TYPES[inputs], TYPES[inside]
    weights = [constant(f"w{k}", rng.normal(size=shape) / 4, dtype) for k, shape in enumerate(((16, 16), (16, 8)))]
    nodes = f"""i = Cast<to = {inner_number}>(x) [first] a = MatMul(i, w0) b = Relu(a) [second] c = MatMul(b, w1)
        y = Cast<to = {outer_number}>(c)"""
    return save(text(f"({outer}[4,16] x) => ({outer}[4,8] y) {{ {nodes} }}", *weights), path.parent, path.name)


def samples(inputs: str) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    dtype = TYPES[inputs][0]
    return [{"x": rng.normal(size=(4, 16)).astype(dtype)} for _ in range(4)]


@pytest.mark.parametrize(("of_model", "of_candidate"), [("FP32", "FP16"), ("FP16", "FP32"), ("FP16", "FP16")])
def test_models_with_fp16_inputs_are_fed_what_the_samples_say(of_model: str, of_candidate: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model.onnx", of_model, "FP32")
    candidate = write(tmp_path / "candidate.onnx", of_candidate, "FP16")
    found = mptune.compare(model, candidate, data=samples(of_model), trace=True)
    assert found.verdict == "agrees"
    assert found.findings[0].evidence


def test_recorded_outputs_of_a_model_with_fp16_inputs(tmp_path: Path) -> None:
    model, fed = write(tmp_path / "model.onnx", "FP16", "FP32"), samples("FP16")
    recorded = np.concatenate([session(model.read_bytes()).run(None, dict(one))[0] for one in fed])
    for name, values, agrees in (("sound", recorded, True), ("wrong", recorded * np.float16(1.5), False)):
        np.savez(tmp_path / f"{name}.npz", y=values)
        found = mptune.compare(model, data=fed, outputs=tmp_path / f"{name}.npz")
        assert (found.verdict == "agrees") == agrees, name
