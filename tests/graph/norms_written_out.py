"""Models with one norm that is written out, as exporters write it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import helper

from mptune.graph.loading.model import Model, load_model
from tests.graph import models
from tests.graph.models import constant

ROWS, WIDTH = 64, 32
LARGE = 700.0
"""Its square is beyond FP16's range."""

_RNG = np.random.default_rng(0)
X = (_RNG.normal(size=(ROWS, WIDTH)) * LARGE).astype(np.float32)
EYE = np.eye(WIDTH, dtype=np.float32)
GAIN = (1 + 0.1 * _RNG.normal(size=WIDTH)).astype(np.float32)

FORMS = {
    "divided": "d = Div(h, s) y = Mul(d, gain)",
    "by the inverse": "r = Div(one, s) d = Mul(h, r) y = Mul(gain, d)",
}
"""Ends of an RMSNorm that ONNX Runtime fuses."""
ROOT = "m = ReduceMean(q, axes) a = Add(m, eps) s = Sqrt(a)"


def rms_norm(
    folder: Path, *, opset: int = 17, end: str = "divided", read_twice: bool = False, eps: float = 1e-5
) -> Model:
    """``h = x @ eye``, and ``y`` its RMSNorm; where it is read twice, ``z = h * gain`` is another output."""
    nodes = f"h = MatMul(x, eye) q = Pow(h, two) {ROOT} {FORMS[end]}"
    more = " z = Mul(h, gain)" if read_twice else ""
    return save(folder, nodes + more, opset, ("y", "z") if read_twice else ("y",), eps)


def layer_norm(folder: Path, *, opset: int) -> Model:
    """``y`` is the LayerNorm of ``h = x @ eye``."""
    centred = "h = MatMul(x, eye) mu = ReduceMean(h, axes) c = Sub(h, mu) q = Pow(c, two)"
    return save(folder, f"{centred} {ROOT} d = Div(c, s) e = Mul(d, gain) y = Add(e, gain)", opset)


def save(folder: Path, nodes: str, opset: int = 17, outputs: tuple[str, ...] = ("y",), eps: float = 1e-5) -> Model:
    """A model of these nodes, named ``n_`` and their result."""
    ends = ", ".join(f"float[{ROWS},{WIDTH}] {name}" for name in outputs)
    proto = models.text(f"(float[{ROWS},{WIDTH}] x) => ({ends}) {{ {nodes} }}", opset=opset)
    for node in proto.graph.node:
        node.name = f"n_{node.output[0]}"
        if node.op_type == "ReduceMean" and opset < 18:  # whose axes were an attribute
            node.attribute.append(helper.make_attribute("axes", [-1]))
            del node.input[1]
    numbers = {"two": 2.0, "one": 1.0, "half": 0.5, "root": 2.0**0.5, "eps": eps, "eye": EYE, "gain": GAIN}
    constants = [*(constant(name, number) for name, number in numbers.items()), constant("axes", [-1], np.int64)]
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(c for c in constants if c.name in read)
    return load_model(models.save(proto, folder, "written_out.onnx"))
