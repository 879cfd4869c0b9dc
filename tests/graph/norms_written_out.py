"""Models with one norm that is written out, as exporters write it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper

from mptune.graph.loading.model import Model, load_model
from tests.graph import models

Step = tuple[str, str, str]
ROWS, WIDTH = 64, 32
LARGE = 700.0
"""Its square is beyond FP16's range."""

_RNG = np.random.default_rng(0)
X = (_RNG.normal(size=(ROWS, WIDTH)) * LARGE).astype(np.float32)
EYE = np.eye(WIDTH, dtype=np.float32)
GAIN = (1 + 0.1 * _RNG.normal(size=WIDTH)).astype(np.float32)

FORMS = {
    "divided": [("Div", "h s", "d"), ("Mul", "d gain", "y")],
    "by the inverse": [("Div", "one s", "r"), ("Mul", "h r", "d"), ("Mul", "gain d", "y")],
}
"""Ends of an RMSNorm that ONNX Runtime fuses."""


def rms_norm(
    folder: Path,
    *,
    opset: int = 17,
    end: str = "divided",
    square: str = "Pow",
    read_twice: bool = False,
    eps: float = 1e-5,
) -> Model:
    """``h = x @ eye``, and ``y`` its RMSNorm; where it is read twice, ``z = h * gain`` is another output."""
    squared = ("Pow", "h two", "q") if square == "Pow" else ("Mul", "h h", "q")
    mean = ("ReduceMean", "q axes" if opset >= 18 else "q", "m")
    steps = [("MatMul", "x eye", "h"), squared, mean, ("Add", "m eps", "a"), ("Sqrt", "a", "s"), *FORMS[end]]
    if read_twice:
        steps.append(("Mul", "h gain", "z"))
    return save(folder, steps, opset, ("y", "z") if read_twice else ("y",), eps)


def layer_norm(folder: Path, *, opset: int) -> Model:
    """``y`` is the LayerNorm of ``h = x @ eye``."""
    axes = " axes" if opset >= 18 else ""
    steps = [("MatMul", "x eye", "h"), ("ReduceMean", "h" + axes, "mu"), ("Sub", "h mu", "c"), ("Pow", "c two", "q")]
    steps += [("ReduceMean", "q" + axes, "m"), ("Add", "m eps", "a"), ("Sqrt", "a", "s"), ("Div", "c s", "d")]
    return save(folder, [*steps, ("Mul", "d gain", "e"), ("Add", "e gain", "y")], opset)


def save(
    folder: Path, steps: list[Step], opset: int = 17, outputs: tuple[str, ...] = ("y",), eps: float = 1e-5
) -> Model:
    """A model of these steps: operator, inputs, output."""
    numbers = {"two": 2.0, "one": 1.0, "half": 0.5, "root": 2.0**0.5, "eps": eps}
    constants = {"eye": EYE, "gain": GAIN, **{name: np.float32(value) for name, value in numbers.items()}}
    nodes = []
    for op_type, inputs, out in steps:
        axes = {"axes": [-1]} if op_type == "ReduceMean" and opset < 18 else {}
        nodes.append(helper.make_node(op_type, inputs.split(), [out], name=f"n_{out}", **axes))
    read = {name for node in nodes for name in node.input}
    given = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items() if name in read]
    if "axes" in read:
        given.append(numpy_helper.from_array(np.array([-1]), "axes"))
    x, *results = (models.value(name, [ROWS, WIDTH]) for name in ("x", *outputs))
    return load_model(models.save(models.model(nodes, [x], results, given, opset), folder, "written_out.onnx"))
