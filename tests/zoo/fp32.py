"""Models that are wrong in FP32 already, each with a twin that is sound: made by script with a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from tests.graph.models import constant, text
from tests.zoo.voice import frames, voice

WIDTH = 8


@dataclass(frozen=True)
class Specimen:
    """A model and its data.

    Attributes:
        proto: the model.
        data: the samples, concatenated.
        code: the finding that it shows; "" for a sound twin.
        node: that the finding names; "" where it need not.
    """

    proto: onnx.ModelProto
    data: Mapping[str, np.ndarray]
    code: str = ""
    node: str = ""


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(11).uniform(-1.0, 1.0, shape).astype(np.float32)


def _weights(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 3


def _specimen(
    nodes: str,
    code: str = "",
    named: str = "",
    given: str = "",
    *constants: onnx.TensorProto,
    ends: tuple[str, str] = ("B,8", "B,8"),
    more: str = "",
) -> Specimen:
    """A product with weights, then these nodes from ``h`` to ``y``.

    Args:
        nodes: in ONNX's text form.
        code: the finding that it shows.
        named: the node that the finding names.
        given: constants in ONNX's text form.
        constants: further ones.
        ends: the shapes of ``x`` and ``y``.
        more: outputs besides ``y``.
    """
    graph = f"(float[{ends[0]}] x) => (float[{ends[1]}] y {more}) <{given}> {{ h = MatMul(x, w) {nodes} }}"
    proto = text(graph.replace("<>", ""), constant("w", _weights()), *constants)
    x = _random(8, *map(int, ends[0].split(",")[1:]))
    return Specimen(proto, {"x": x}, code, named if code else "")


def _exp(scale: float, code: str = "") -> Specimen:
    nodes = "s = Mul(h, scale) [exp] e = Exp(s) t = ReduceSum<keepdims = 1>(e, last) y = Div(e, t)"
    return _specimen(nodes, code, "exp", f"float scale = {{{scale}}}, int64[1] last = {{-1}}")


def _masked(whole: bool) -> Specimen:
    """A softmax over masked scores: NaN begins where all of a row is masked, and not at the mask."""
    mask = np.zeros((1, WIDTH), np.float32)
    mask[:, : WIDTH if whole else WIDTH // 2] = -np.inf
    nodes = "m = Add(h, mask) [softmax] y = Softmax<axis = -1>(m)"
    return _specimen(nodes, "reference-not-finite" if whole else "", "softmax", "", constant("mask", mask))


def _noise(scale: float, code: str = "") -> Specimen:
    nodes = "[noise] r = RandomNormalLike<scale = 1.0>(h) n = Mul(r, scale) y = Add(h, n)"
    return _specimen(nodes, code, "noise", f"float scale = {{{scale}}}")


def _dropout(training: bool) -> Specimen:
    nodes = "[dropout] d = Dropout(h, ratio, training) y = Relu(d)"
    code = "not-deterministic" if training else ""
    return _specimen(nodes, code, "dropout", "float ratio = {0.4}", constant("training", training, bool))


def _batch_norm(training: bool) -> Specimen:
    ones = [constant(name, np.ones(WIDTH)) for name in ("s", "s2")]
    zeros = [constant(name, np.zeros(WIDTH)) for name in ("b", "m")]
    norm = "y, m2, v2 = BatchNormalization<training_mode = 1>" if training else "y = BatchNormalization"
    code = "not-deterministic" if training else ""
    return _specimen(f"[norm] {norm}(h, s, b, m, s2)", code, "norm", "", *ones, *zeros)


def _dead(zero: float, code: str = "") -> Specimen:
    nodes = "[gate_by] g = Mul(h, gate) k = MatMul(g, w) y = Relu(k)"
    return _specimen(nodes, code, "gate_by", f"float gate = {{{zero}}}")


def _stuck(bias: float, code: str = "") -> Specimen:
    """Two outputs, one behind a sigmoid that is saturated."""
    nodes = "s = Add(h, bias) [clip] c = Clip(s, low, high) z = Add(c, low) y = Relu(h)"
    given = f"float bias = {{{bias}}}, float low = {{-2}}, float high = {{2}}"
    return _specimen(nodes, code, "clip", given, more=", float[B,8] z")


def _anchors() -> Specimen:
    """A table that is the same for all samples, as anchors are, and one made of the shape alone."""
    nodes = "z = Identity(table) n = Shape(h) size = Cast<to = 1>(n) y = Relu(h)"
    return _specimen(nodes, "", "", "", constant("table", _weights(5)), more=", float[8,8] z, float[2] size")


def _centred(axis: int, batch: int | str = "B") -> Specimen:
    """Less the mean: of the batch, identical rows stay identical, and equal to the row alone."""
    nodes = f"[mean] m = ReduceMean<axes = [{axis}]>(h) d = Sub(h, m) y = Add(d, x)"
    return _specimen(nodes, "" if axis else "rows-mix", "mean", ends=(f"{batch},8", f"{batch},8"))


def _running(axis: int) -> Specimen:
    nodes = "[running] c = CumSum(h, axis) y = Tanh(c)"
    return _specimen(nodes, "" if axis else "rows-mix", "running", f"int64 axis = {{{axis}}}")


def _attention(mixes: bool) -> Specimen:
    """Attention over the tokens of a row, or, where a Transpose is forgotten, over the rows of the batch."""
    turn = "Transpose<perm = [1, 0, 2]>" if mixes else "Transpose<perm = [0, 1, 2]>"
    nodes = f"""
        q = {turn}(h) k = Transpose<perm = [0, 2, 1]>(q) [scores] s = MatMul(q, k)
        p = Softmax<axis = -1>(s) o = MatMul(p, q) y = {turn}(o)
    """
    return _specimen(nodes, "rows-mix" if mixes else "", "scores", ends=("B,3,8", "B,3,8"))


def _pooled(shape: str) -> Specimen:
    """Features of three tokens, pooled; exported for one row, the Reshape takes the rows for tokens."""
    nodes = "[flatten] r = Reshape(h, shape) m = ReduceMean<axes = [1], keepdims = 0>(r) y = MatMul(m, w)"
    code = "batch-not-kept" if shape.startswith("1") else ""
    return _specimen(nodes, code, "flatten", f"int64[3] shape = {{{shape}}}", ends=("B,3,8", "B,8"))


def _max_over_batch() -> Specimen:
    """[1, 8] for any number of rows, declared [B, 8]."""
    nodes = "[reduced] m = ReduceMax<axes = [0]>(h) y = MatMul(m, w)"
    return _specimen(nodes, "batch-not-kept", "reduced")


def specimens() -> dict[str, Specimen]:
    """All of them by name; twins are called ``NAME_twin``."""
    return {
        "exp": _exp(400.0, "reference-not-finite"),
        "exp_twin": _exp(2.0),
        "masked": _masked(True),
        "masked_twin": _masked(False),
        "noise": _noise(1.0, "not-deterministic"),
        "faint_noise": _noise(3e-4, "not-deterministic"),
        "noise_twin": _noise(0.0),
        "dropout": _dropout(True),
        "dropout_twin": _dropout(False),
        "batch_norm": _batch_norm(True),
        "batch_norm_twin": _batch_norm(False),
        "dead": _dead(0.0, "reference-zero"),
        "dead_twin": _dead(1.0),
        "stuck": _stuck(90.0, "output-constant"),
        "stuck_twin": _stuck(0.0),
        "anchors_twin": _anchors(),
        "centred": _centred(0),
        "centred_twin": _centred(1),
        "centred_fixed": _centred(0, 4),
        "centred_fixed_twin": _centred(1, 4),
        "running": _running(0),
        "running_twin": _running(1),
        "attention": _attention(True),
        "attention_twin": _attention(False),
        "pooled": _pooled("1, -1, 8"),
        "pooled_twin": _pooled("-1, 3, 8"),
        "max_over_batch": _max_over_batch(),
        "voice_twin": Specimen(voice(), frames()),
    }
