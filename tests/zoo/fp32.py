"""Models that are wrong in FP32 already, each with a twin that is sound: made by script with a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from tests.graph import models
from tests.graph.models import node, value
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


def _random(*shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    return np.random.default_rng(11).uniform(low, high, shape).astype(np.float32)


def _weights(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 3


def _model(
    nodes: list[onnx.NodeProto],
    constants: Mapping[str, object],
    x: list[int | str | None] | None = None,
    y: list[int | str | None] | None = None,
    extra: Mapping[str, list[int | str | None]] | None = None,
) -> onnx.ModelProto:
    """A product with weights, then these nodes from ``h`` to ``y``."""
    first = node("MatMul", ["x", "w"], "h", "first")
    held = [models.constant("w", _weights())]
    held += [models.constant(name, np.asarray(v), np.asarray(v).dtype) for name, v in constants.items()]
    outputs = [value("y", y or ["B", WIDTH]), *(value(name, dims) for name, dims in (extra or {}).items())]
    made: onnx.ModelProto = models.model([first, *nodes], [value("x", x or ["B", WIDTH])], outputs, held)
    return made


def f32(*values: float) -> np.ndarray:
    return np.array(values[0] if len(values) == 1 else values, np.float32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _exp(scale: float, code: str = "") -> Specimen:
    nodes = [
        node("Mul", ["h", "scale"], "s", "scaled"),
        node("Exp", ["s"], "e", "exp"),
        node("ReduceSum", ["e", "last"], "t", "total", keepdims=1),
        node("Div", ["e", "t"], "y", "share"),
    ]
    made = _model(nodes, {"scale": f32(scale), "last": i64(-1)})
    return Specimen(made, {"x": _random(8, WIDTH)}, code, "exp" if code else "")


def _masked(whole: bool) -> Specimen:
    """A softmax over masked scores: NaN begins where all of a row is masked, and not at the mask."""
    mask = np.zeros((1, WIDTH), np.float32)
    mask[:, : WIDTH if whole else WIDTH // 2] = -np.inf
    nodes = [node("Add", ["h", "mask"], "m", "masked"), node("Softmax", ["m"], "y", "softmax", axis=-1)]
    made = _model(nodes, {"mask": mask})
    return Specimen(made, {"x": _random(8, WIDTH)}, *(("reference-not-finite", "softmax") if whole else ()))


def _noise(scale: float, code: str = "") -> Specimen:
    nodes = [
        node("RandomNormalLike", ["h"], "r", "noise", scale=1.0),
        node("Mul", ["r", "scale"], "n", "scaled"),
        node("Add", ["h", "n"], "y", "add"),
    ]
    return Specimen(_model(nodes, {"scale": f32(scale)}), {"x": _random(8, WIDTH)}, code, "noise" if code else "")


def _dropout(training: bool) -> Specimen:
    nodes = [node("Dropout", ["h", "ratio", "training"], "d", "dropout"), node("Relu", ["d"], "y", "relu")]
    made = _model(nodes, {"ratio": f32(0.4), "training": np.array(training)})
    return Specimen(made, {"x": _random(8, WIDTH)}, *(("not-deterministic", "dropout") if training else ()))


def _batch_norm(training: bool) -> Specimen:
    constants = {"s": np.ones(WIDTH, np.float32), "b": np.zeros(WIDTH, np.float32), "m": np.zeros(WIDTH, np.float32)}
    attributes = {"training_mode": 1} if training else {}
    outputs = ["y", "m2", "v2"] if training else "y"
    nodes = [node("BatchNormalization", ["h", "s", "b", "m", "s2"], outputs, "norm", **attributes)]
    made = _model(nodes, {**constants, "s2": np.ones(WIDTH, np.float32)})
    return Specimen(made, {"x": _random(8, WIDTH)}, *(("not-deterministic", "norm") if training else ()))


def _dead(zero: float, code: str = "") -> Specimen:
    nodes = [
        node("Mul", ["h", "gate"], "g", "gate_by"),
        node("MatMul", ["g", "w"], "k", "second"),
        node("Relu", ["k"], "y", "relu"),
    ]
    return Specimen(_model(nodes, {"gate": f32(zero)}), {"x": _random(8, WIDTH)}, code, "gate_by" if code else "")


def _stuck(bias: float, code: str = "") -> Specimen:
    """Two outputs, one behind a sigmoid that is saturated."""
    nodes = [
        node("Add", ["h", "bias"], "s", "shifted"),
        node("Clip", ["s", "low", "high"], "c", "clip"),
        node("Add", ["c", "low"], "z", "offset"),
        node("Relu", ["h"], "y", "relu"),
    ]
    made = _model(nodes, {"bias": f32(bias), "low": f32(-2), "high": f32(2)}, extra={"z": ["B", WIDTH]})
    return Specimen(made, {"x": _random(8, WIDTH)}, code, "clip" if code else "")


def _anchors() -> Specimen:
    """A table that is the same for all samples, as anchors are, and one made of the shape alone."""
    nodes = [
        node("Identity", ["table"], "z", "anchors"),
        node("Shape", ["h"], "n", "shape"),
        node("Cast", ["n"], "size", "size", to=onnx.TensorProto.FLOAT),
        node("Relu", ["h"], "y", "relu"),
    ]
    made = _model(nodes, {"table": _weights(5)}, extra={"z": [WIDTH, WIDTH], "size": [2]})
    return Specimen(made, {"x": _random(8, WIDTH)})


def _centred(axis: int, batch: int | str = "B") -> Specimen:
    """Less the mean: of the batch, identical rows stay identical, and equal to the row alone."""
    nodes = [
        node("ReduceMean", ["h"], "m", "mean", axes=[axis], keepdims=1),
        node("Sub", ["h", "m"], "d", "centred"),
        node("Add", ["d", "x"], "y", "residual"),
    ]
    made = _model(nodes, {}, [batch, WIDTH], [batch, WIDTH])
    return Specimen(made, {"x": _random(8, WIDTH)}, *(("rows-mix", "mean") if axis == 0 else ()))


def _running(axis: int) -> Specimen:
    nodes = [node("CumSum", ["h", "axis"], "c", "running"), node("Tanh", ["c"], "y", "tanh")]
    made = _model(nodes, {"axis": np.array(axis, np.int64)})
    return Specimen(made, {"x": _random(8, WIDTH)}, *(("rows-mix", "running") if axis == 0 else ()))


def _attention(mixes: bool) -> Specimen:
    """Attention over the tokens of a row, or, where a Transpose is forgotten, over the rows of the batch."""
    turn = [1, 0, 2] if mixes else [0, 1, 2]
    nodes = [
        node("Transpose", ["h"], "q", "turned", perm=turn),
        node("Transpose", ["q"], "k", "keys", perm=[0, 2, 1]),
        node("MatMul", ["q", "k"], "s", "scores"),
        node("Softmax", ["s"], "p", "softmax", axis=-1),
        node("MatMul", ["p", "q"], "o", "mixed"),
        node("Transpose", ["o"], "y", "back", perm=turn),
    ]
    made = _model(nodes, {}, ["B", 3, WIDTH], ["B", 3, WIDTH])
    return Specimen(made, {"x": _random(8, 3, WIDTH)}, *(("rows-mix", "scores") if mixes else ()))


def _pooled(shape: tuple[int, ...]) -> Specimen:
    """Features of three tokens, pooled; exported for one row, the Reshape takes the rows for tokens."""
    nodes = [
        node("Reshape", ["h", "shape"], "r", "flatten"),
        node("ReduceMean", ["r"], "m", "pool", axes=[1], keepdims=0),
        node("MatMul", ["m", "w"], "y", "head"),
    ]
    made = _model(nodes, {"shape": i64(*shape)}, ["B", 3, WIDTH], ["B", WIDTH])
    data = {"x": _random(8, 3, WIDTH)}
    return Specimen(made, data, *(("batch-not-kept", "flatten") if shape[0] == 1 else ()))


def _summed(keeps: bool) -> Specimen:
    nodes = [
        node("ReduceMean", ["h"], "m", "mean", axes=[1 if keeps else 0], keepdims=0 if not keeps else 1),
        node("Tanh", ["m"], "y", "tanh"),
    ]
    made = _model(nodes, {}, y=["B", 1] if keeps else [WIDTH])
    return Specimen(made, {"x": _random(8, WIDTH)})


def _lost(by: str) -> Specimen:
    """[1, 10]-like outputs for any number of rows, declared [B, 10]."""
    kept = {"ReduceMax": {"axes": [0], "keepdims": 1}}
    nodes = [node(by, ["h"], "m", "reduced", **kept[by]), node("MatMul", ["m", "w"], "y", "head")]
    return Specimen(_model(nodes, {}), {"x": _random(8, WIDTH)}, "batch-not-kept", "reduced")


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
        "pooled": _pooled((1, -1, WIDTH)),
        "pooled_twin": _pooled((-1, 3, WIDTH)),
        "max_over_batch": _lost("ReduceMax"),
        "voice_twin": Specimen(voice(), frames()),
    }
