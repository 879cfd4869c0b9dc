"""Models that are wrong in FP32 already, each with a twin that is sound: made by script with a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx

from tests.graph.models import constant, text
from tests.zoo.voice import frames, voice

WIDTH = 8


@dataclass(frozen=True)
class Specimen:
    """A model and its data."""

    proto: onnx.ModelProto
    data: Mapping[str, np.ndarray]  # the samples, concatenated
    code: str = ""  # the finding that it shows; "" for a sound twin
    node: str = ""  # that the finding names


def _weights(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 3


def _specimen(
    nodes: str,  # behind the product with weights ``h``, up to ``y``, in ONNX's text form
    given: str = "",  # constants in ONNX's text form
    *constants: onnx.TensorProto,
    ends: tuple[str, str] = ("B,8", "B,8"),  # the shapes of ``x`` and ``y``
    more: str = "",  # outputs besides ``y``
) -> Specimen:
    graph = f"(float[{ends[0]}] x) => (float[{ends[1]}] y {more}) <{given}> {{ h = MatMul(x, w) {nodes} }}"
    proto = text(graph.replace("<>", ""), constant("w", _weights()), *constants)
    shape = (8, *map(int, ends[0].split(",")[1:]))
    return Specimen(proto, {"x": np.random.default_rng(11).uniform(-1.0, 1.0, shape).astype(np.float32)})


def _exp(scale: float) -> Specimen:
    nodes = "s = Mul(h, scale) [exp] e = Exp(s) t = ReduceSum<keepdims = 1>(e, last) y = Div(e, t)"
    return _specimen(nodes, f"float scale = {{{scale}}}, int64[1] last = {{-1}}")


def _masked(whole: bool) -> Specimen:
    """A softmax over masked scores: NaN begins where all of a row is masked, and not at the mask."""
    mask = np.zeros((1, WIDTH), np.float32)
    mask[:, : WIDTH if whole else WIDTH // 2] = -np.inf
    return _specimen("m = Add(h, mask) [softmax] y = Softmax<axis = -1>(m)", "", constant("mask", mask))


def _noise(scale: float) -> Specimen:
    nodes = "[noise] r = RandomNormalLike<scale = 1.0>(h) n = Mul(r, scale) y = Add(h, n)"
    return _specimen(nodes, f"float scale = {{{scale}}}")


def _dropout(training: bool) -> Specimen:
    nodes = "[dropout] d = Dropout(h, ratio, training) y = Relu(d)"
    return _specimen(nodes, "float ratio = {0.4}", constant("training", training, bool))


def _batch_norm(training: bool) -> Specimen:
    statistics = [constant(name, np.full(WIDTH, number)) for name, number in (("s", 1), ("b", 0), ("m", 0), ("v", 1))]
    norm = "y, m2, v2 = BatchNormalization<training_mode = 1>" if training else "y = BatchNormalization"
    return _specimen(f"[norm] {norm}(h, s, b, m, v)", "", *statistics)


def _dead(zero: float) -> Specimen:
    return _specimen("[gate_by] g = Mul(h, gate) k = MatMul(g, w) y = Relu(k)", f"float gate = {{{zero}}}")


def _stuck(bias: float) -> Specimen:
    """Two outputs, one behind a sigmoid that is saturated."""
    nodes = "s = Add(h, bias) [clip] c = Clip(s, low, high) z = Add(c, high) y = Relu(h)"
    given = f"float bias = {{{bias}}}, float low = {{-2}}, float high = {{2}}"
    return _specimen(nodes, given, more=", float[B,8] z")


def _anchors() -> Specimen:
    """A table that is the same for all samples, as anchors are, and one made of the shape alone."""
    nodes = "z = Identity(table) n = Shape(h) size = Cast<to = 1>(n) y = Relu(h)"
    return _specimen(nodes, "", constant("table", _weights(5)), more=", float[8,8] z, float[2] size")


def _centred(axis: int, batch: int | str = "B") -> Specimen:
    """Less the mean: of the batch, identical rows stay identical, and equal to the row alone."""
    nodes = f"[mean] m = ReduceMean<axes = [{axis}]>(h) d = Sub(h, m) y = Add(d, x)"
    return _specimen(nodes, ends=(f"{batch},8", f"{batch},8"))


def _running(axis: int) -> Specimen:
    return _specimen("[running] c = CumSum(h, axis) y = Tanh(c)", f"int64 axis = {{{axis}}}")


def _attention(mixes: bool) -> Specimen:
    """Attention over the tokens of a row, or, where a Transpose is forgotten, over the rows of the batch."""
    turn = "Transpose<perm = [1, 0, 2]>" if mixes else "Transpose<perm = [0, 1, 2]>"
    nodes = f"""
        q = {turn}(h) k = Transpose<perm = [0, 2, 1]>(q) [scores] s = MatMul(q, k)
        p = Softmax<axis = -1>(s) o = MatMul(p, q) y = {turn}(o)
    """
    return _specimen(nodes, ends=("B,3,8", "B,3,8"))


def _pooled(shape: str) -> Specimen:
    """Features of three tokens, pooled; exported for one row, the Reshape takes the rows for tokens."""
    nodes = "[flatten] r = Reshape(h, shape) m = ReduceMean<axes = [1], keepdims = 0>(r) y = MatMul(m, w)"
    return _specimen(nodes, f"int64[3] shape = {{{shape}}}", ends=("B,3,8", "B,8"))


def _max_over_batch() -> Specimen:
    """[1, 8] for any number of rows, declared [B, 8]."""
    return _specimen("[reduced] m = ReduceMax<axes = [0]>(h) y = MatMul(m, w)")


def specimens() -> dict[str, Specimen]:
    """All of them by name; twins are called ``NAME_twin``, and some share one."""
    pairs: dict[str, tuple[str, str, Specimen, Specimen | None]] = {
        "exp": ("reference-not-finite", "exp", _exp(400.0), _exp(2.0)),
        "masked": ("reference-not-finite", "softmax", _masked(True), _masked(False)),
        "noise": ("not-deterministic", "noise", _noise(1.0), _noise(0.0)),
        "faint_noise": ("not-deterministic", "noise", _noise(3e-4), None),
        "dropout": ("not-deterministic", "dropout", _dropout(True), _dropout(False)),
        "batch_norm": ("not-deterministic", "norm", _batch_norm(True), _batch_norm(False)),
        "dead": ("reference-zero", "gate_by", _dead(0.0), _dead(1.0)),
        "stuck": ("output-constant", "clip", _stuck(90.0), _stuck(0.0)),
        "centred": ("rows-mix", "mean", _centred(0), _centred(1)),
        "centred_fixed": ("rows-mix", "mean", _centred(0, 4), _centred(1, 4)),
        "running": ("rows-mix", "running", _running(0), _running(1)),
        "attention": ("rows-mix", "scores", _attention(True), _attention(False)),
        "pooled": ("batch-not-kept", "flatten", _pooled("1, -1, 8"), _pooled("-1, 3, 8")),
        "max_over_batch": ("batch-not-kept", "reduced", _max_over_batch(), None),
    }
    broken = {name: replace(wrong, code=code, node=node) for name, (code, node, wrong, _) in pairs.items()}
    twins = {f"{name}_twin": twin for name, (_, _, _, twin) in pairs.items() if twin is not None}
    return {**broken, **twins, "anchors_twin": _anchors(), "voice_twin": Specimen(voice(), frames())}
