"""After which steps a provider rounds to FP16 or BF16: its outputs against formulas, value by value.

    python -m benchmarks.roundings --precisions fp16 bf16

Each case is a model of a few nodes in the reduced precision, as mptune writes them, with formulas for its output: all
steps rounded, or some of them in FP32. The formula with the largest share of bit-identical values is the provider's,
and ``mptune.graph.writing.rounding_steps`` has to follow it. Products sum 16 values, so the order of summation hardly
matters. Where a case says what exact arithmetic gives, each formula's error is shown as a multiple of the provider's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from scipy.special import erf, expit, ndtr, softmax

from benchmarks.common import save
from mptune.engines.base import EngineError
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import SessionOptions
from mptune.graph.loading.tensors import from_stored, to_stored
from mptune.graph.plan import REDUCED, Precision

ROWS, COLUMNS = 512, 16
_OPSETS = {Precision.FP16: (17, 8), Precision.BF16: (22, 10)}
"""Operator set and IR version of the models: Conv has BFLOAT16 from operator set 22 on."""
_AXES_ARE_INPUTS = 18
"""The first operator set in which the axes of a mean are an input."""


def rounded_to(precision: Precision, values: np.ndarray) -> np.ndarray:
    """The precision's nearest values, in double precision.

    BFLOAT16 is reached from FP32, which rounds twice: no provider computes in double precision either.
    """
    if precision is Precision.FP16:
        with np.errstate(over="ignore"):  # beyond its range they are infinite
            return np.asarray(values).astype(np.float16).astype(np.float64)
    return from_stored(to_stored(np.asarray(values, np.float32), Precision.BF16)).astype(np.float64)


Rounding = Callable[[np.ndarray], np.ndarray]
Step = tuple[str, tuple[str, ...], str, Mapping[str, Any]]
"""Operator, inputs, output and attributes."""


@dataclass(frozen=True)
class Case:
    """Nodes from ``x`` to ``y``, their constants, the input, and the candidate formulas."""

    nodes: tuple[Step, ...]
    constants: Mapping[str, np.ndarray]
    x: np.ndarray
    formulas: Mapping[str, Callable[[], np.ndarray]]
    exact: Callable[[], np.ndarray] | None = None
    """Of the rounded input and the constants before they are rounded."""
    opset: int | None = None


_GELU: tuple[Step, ...] = (
    ("Div", ("a", "root"), "b", {}),
    ("Erf", ("b",), "c", {}),
    ("Add", ("c", "one"), "d", {}),
    ("Mul", ("a", "d"), "e", {}),
    ("Mul", ("e", "half"), "y", {}),
)
_SIGMOID: Step = ("Sigmoid", ("x",), "t", {})
_EPSILON, _EPSILON_DEFAULT = 1e-6, 1e-5
"""Of the norms here, and what a fused norm takes where it does not read that."""


def cases(precision: Precision) -> dict[str, Case]:
    """The cases in one precision, name -> case; all arrays hold values of that precision, in double precision."""

    def r(values: np.ndarray | float) -> np.ndarray:
        return rounded_to(precision, np.asarray(values))

    rng = np.random.default_rng(0)
    x, v, b = (r(rng.normal(size=shape)) for shape in ((ROWS, COLUMNS), (COLUMNS, COLUMNS), COLUMNS))
    image, kernel = (r(rng.normal(size=shape)) for shape in ((8, 16, 7, 7), (16, 16, 1, 1)))
    wide = r(rng.normal(size=(ROWS, COLUMNS)) * 3.0)
    scale, alpha = r(0.3), r(1.702)
    product, added = r(x @ v), r(x + b)
    root, root_of_half = r(np.sqrt(2.0)), r(np.sqrt(0.5))
    axes: Mapping[str, Any] = {"axes": [2, 3]} if _OPSETS[precision][0] < _AXES_ARE_INPUTS else {}

    def convolved() -> np.ndarray:
        found: np.ndarray = np.einsum("oi,nihw->nohw", kernel[:, :, 0, 0], image)
        return found

    def gelu_in_steps(values: np.ndarray, factor: np.ndarray | float) -> np.ndarray:
        return r(values * 0.5 * r(1.0 + r(erf(r(values * factor)))))

    def sigmoid_in_steps(values: np.ndarray) -> np.ndarray:
        """As ONNX Runtime's kernel (``OP_Sigmoid``) does with each of its operations rounded."""
        large = r(1.0 / r(1.0 + r(np.exp(-np.abs(values)))))
        return np.where(values > 0, large, r(1.0 - large))

    return {
        "product, then a scale": Case(
            (("MatMul", ("x", "v"), "t", {}), ("Mul", ("t", "scale"), "y", {})),
            {"v": v, "scale": scale},
            x,
            {"rounded once": lambda: r(x @ v * scale), "rounded in between": lambda: r(product * scale)},
        ),
        "a scale, then the product": Case(
            (("Mul", ("x", "scale"), "t", {}), ("MatMul", ("t", "v"), "y", {})),
            {"v": v, "scale": scale},
            x,
            {"rounded once": lambda: r(x @ v * scale), "rounded in between": lambda: r(r(x * scale) @ v)},
        ),
        "product and bias": Case(
            (("MatMul", ("x", "v"), "t", {}), ("Add", ("t", "bias"), "y", {})),
            {"v": v, "bias": b},
            x,
            {"rounded once": lambda: r(x @ v + b), "rounded in between": lambda: r(product + b)},
        ),
        "GELU": Case(
            (("Add", ("x", "bias"), "a", {}), *_GELU),
            {"bias": b, "root": root, "one": r(1.0), "half": r(0.5)},
            x,
            {
                "each step rounded": lambda: gelu_in_steps(added, 1.0 / root),
                "each step, times the rounded 0.7071": lambda: gelu_in_steps(added, root_of_half),
                "distribution rounded": lambda: r(added * r(ndtr(added))),
                "FP32 behind the bias": lambda: r(added * ndtr(added)),
                "FP32 throughout": lambda: r((x + b) * ndtr(x + b)),
            },
        ),
        "sigmoid": Case(
            (("Sigmoid", ("x",), "y", {}),),
            {},
            wide,
            {"rounded once": lambda: r(expit(wide)), "each step rounded": lambda: sigmoid_in_steps(wide)},
        ),
        "x times its sigmoid (SiLU)": Case(
            (_SIGMOID, ("Mul", ("x", "t"), "y", {})),
            {},
            wide,
            {
                "rounded once": lambda: r(wide * expit(wide)),
                "sigmoid rounded": lambda: r(wide * r(expit(wide))),
                "each step of the sigmoid rounded": lambda: r(wide * sigmoid_in_steps(wide)),
            },
        ),
        "x times the sigmoid of 1.702 x": Case(
            (("Mul", ("x", "alpha"), "s", {}), ("Sigmoid", ("s",), "t", {}), ("Mul", ("x", "t"), "y", {})),
            {"alpha": alpha},
            wide,
            {
                "rounded once": lambda: r(wide * expit(wide * alpha)),
                "product and sigmoid rounded": lambda: r(wide * r(expit(r(wide * alpha)))),
                "each step of the sigmoid rounded": lambda: r(wide * sigmoid_in_steps(r(wide * alpha))),
            },
        ),
        "another value times a sigmoid": Case(
            (("Add", ("x", "bias"), "a", {}), _SIGMOID, ("Mul", ("a", "t"), "y", {})),
            {"bias": b},
            wide,
            {
                "sigmoid rounded": lambda: r(r(wide + b) * r(expit(wide))),
                "each step of the sigmoid rounded": lambda: r(r(wide + b) * sigmoid_in_steps(wide)),
            },
        ),
        "tanh": Case(
            (("Tanh", ("x",), "y", {}),),
            {},
            wide,
            {"rounded once": lambda: r(np.tanh(wide))},
        ),
        "convolution and bias": Case(
            (("Conv", ("x", "k", "bias"), "y", {}),),
            {"k": kernel, "bias": b},
            image,
            {
                "rounded once": lambda: r(convolved() + b[:, None, None]),
                "rounded in between": lambda: r(r(convolved()) + b[:, None, None]),
            },
        ),
        **_folded(precision, x, image, kernel),
        **_activations(precision, wide, image),
        **_recurrent(precision),
        **_norms(precision, image, r(1.0 + 0.1 * rng.normal(size=COLUMNS)), b),
        "GELU without a bias": Case(
            tuple((op, tuple("x" if i == "a" else i for i in inputs), out, more) for op, inputs, out, more in _GELU),
            {"root": root, "one": r(1.0), "half": r(0.5)},
            wide,
            {
                "rounded once": lambda: r(wide * ndtr(wide)),
                "each step rounded": lambda: gelu_in_steps(wide, 1.0 / root),
                "each step, times the rounded 0.7071": lambda: gelu_in_steps(wide, root_of_half),
            },
        ),
        "softmax of values and a bias": Case(
            (("Add", ("x", "bias"), "t", {}), ("Softmax", ("t",), "y", {"axis": -1})),
            {"bias": b},
            wide,
            {"sum not rounded": lambda: r(softmax(wide + b, -1)), "sum rounded": lambda: r(softmax(r(wide + b), -1))},
        ),
        "mean over the last axes": Case(
            (("ReduceMean", ("x",) if axes else ("x", "axes"), "y", {**axes, "keepdims": 0}),),
            {} if axes else {"axes": np.array([2, 3], np.int64)},
            image,
            {
                "rounded once": lambda: r(image.mean(axis=(2, 3))),
                "sum rounded": lambda: r(r(image.sum(axis=(2, 3))) / 49),
            },
        ),
    }


def _folded(precision: Precision, x: np.ndarray, image: np.ndarray, kernel: np.ndarray) -> dict[str, Case]:
    """What ONNX Runtime makes of a product with one row and its bias, and of a BatchNormalization."""

    def r(values: np.ndarray | float) -> np.ndarray:
        return rounded_to(precision, np.asarray(values))

    rng = np.random.default_rng(2)
    v, b = r(rng.normal(size=(COLUMNS, ROWS))), r(rng.normal(size=ROWS))
    scale, offset, mean, variance = (r(rng.uniform(low, 2, 16)) for low in (0.3, -2, -2, 0.01))

    def convolved(values: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.einsum("oi,nihw->nohw", values[:, :, 0, 0], image)
        return found

    def normalised(values: np.ndarray) -> np.ndarray:
        columns = (c[:, None, None] for c in (scale, offset, mean, variance))
        gain, bias, centre, spread = columns
        return np.maximum(r(gain * (values - centre) / np.sqrt(spread + _EPSILON_DEFAULT) + bias), 0.0)

    def folded() -> np.ndarray:
        factor = r(scale / r(np.sqrt(r(variance + _EPSILON_DEFAULT))))
        bias = r(offset - r(mean * factor))
        return np.maximum(r(r(convolved(r(kernel * factor[:, None, None, None]))) + bias[:, None, None]), 0.0)

    statistics = {"scale": scale, "offset": offset, "mean": mean, "variance": variance}
    return {
        "product of one row, and bias": Case(
            (("MatMul", ("x", "v"), "t", {}), ("Add", ("t", "bias"), "y", {})),
            {"v": v, "bias": b},
            x[:1],
            {"rounded once": lambda: r(x[:1] @ v + b), "rounded in between": lambda: r(r(x[:1] @ v) + b)},
        ),
        "convolution and BatchNormalization": Case(
            (
                ("Conv", ("x", "k"), "t", {}),
                ("BatchNormalization", ("t", *statistics), "u", {}),
                ("Relu", ("u",), "y", {}),
            ),
            {"k": kernel, **statistics},
            image,
            {
                "folded in rounded steps": folded,
                "rounded in between": lambda: normalised(r(convolved(kernel))),
                "rounded once": lambda: normalised(convolved(kernel)),
            },
        ),
    }


def _activations(precision: Precision, x: np.ndarray, image: np.ndarray) -> dict[str, Case]:
    """Activations as Paddle exports them, in its operator set."""

    def r(values: np.ndarray | float) -> np.ndarray:
        return rounded_to(precision, np.asarray(values))

    def sigmoid_in_steps() -> np.ndarray:
        large = r(1.0 / r(1.0 + r(np.exp(-np.abs(x)))))
        return np.where(x > 0, large, r(1.0 - large))

    def hard_sigmoid(alpha: np.ndarray | float, *, product: Rounding = np.asarray) -> np.ndarray:
        return np.clip(r(product(x * alpha) + 0.5), 0.0, 1.0)

    sixth = float(np.float32(1 / 6))
    clipped: tuple[Step, ...] = (("Add", ("x", "three"), "a", {}), ("Clip", ("a", "zero", "six"), "c", {}))
    numbers = {"three": r(3.0), "zero": r(0.0), "six": r(6.0)}
    hard: Step = ("HardSigmoid", ("x",), "t", {"alpha": sixth, "beta": 0.5})
    return {
        "x times the sigmoid of x times 1": Case(
            (("Mul", ("x", "one"), "s", {}), ("Sigmoid", ("s",), "t", {}), ("Mul", ("x", "t"), "y", {})),
            {"one": r([1.0])},
            x,
            {
                "rounded once": lambda: r(x * expit(x)),
                "sigmoid rounded": lambda: r(x * r(expit(x))),
                "each step of the sigmoid rounded": lambda: r(x * sigmoid_in_steps()),
            },
            lambda: x * expit(x),
            12,
        ),
        "HardSigmoid": Case(
            ((*hard[:2], "y", hard[3]),),
            {},
            x,
            {
                "rounded once": lambda: hard_sigmoid(sixth),
                "alpha rounded": lambda: hard_sigmoid(r(sixth)),
                "alpha and product rounded": lambda: hard_sigmoid(r(sixth), product=r),
            },
            lambda: np.clip(x * sixth + 0.5, 0.0, 1.0),
            12,
        ),
        "x times its HardSigmoid": Case(
            (hard, ("Mul", ("x", "t"), "y", {})),
            {},
            x,
            {
                "rounded once": lambda: r(x * np.clip(x * sixth + 0.5, 0.0, 1.0)),
                "steps rounded": lambda: r(x * hard_sigmoid(sixth)),
                "steps and alpha rounded": lambda: r(x * hard_sigmoid(r(sixth))),
                "steps, alpha and product rounded": lambda: r(x * hard_sigmoid(r(sixth), product=r)),
            },
            lambda: x * np.clip(x * sixth + 0.5, 0.0, 1.0),
            12,
        ),
        "HardSwish written out": Case(
            (*clipped, ("Mul", ("x", "c"), "m", {}), ("Div", ("m", "six"), "y", {})),
            numbers,
            x,
            {
                "rounded once": lambda: r(x * np.clip(x + 3, 0, 6) / 6),
                "each step rounded": lambda: r(r(x * np.clip(r(x + 3), 0, 6)) / 6),
            },
            lambda: x * np.clip(x + 3, 0, 6) / 6,
            12,
        ),
        "LeakyRelu": Case(
            (("LeakyRelu", ("x",), "y", {"alpha": 0.2}),),
            {},
            x,
            {
                "rounded once": lambda: r(np.where(x > 0, x, 0.2 * x)),
                "alpha rounded": lambda: r(np.where(x > 0, x, r(0.2) * x)),
            },
            lambda: np.where(x > 0, x, 0.2 * x),
            12,
        ),
        "mean over an image": Case(
            (("GlobalAveragePool", ("x",), "y", {}),),
            {},
            image,
            {
                "rounded once": lambda: r(image.mean(axis=(2, 3), keepdims=True)),
                "sum rounded": lambda: r(r(image.sum(axis=(2, 3), keepdims=True)) / 49),
            },
            lambda: image.mean(axis=(2, 3), keepdims=True),
            12,
        ),
    }


_STEPS, _BATCH, _INPUTS, _HIDDEN = 24, 8, 32, 64
_SATURATES = 20.0
"""A sigmoid and a tanh of it are 1 in FP32."""


def _recurrent(precision: Precision) -> dict[str, Case]:
    """Recurrent layers: which values are rounded at each step; and their activations alone, in layers of one step."""

    def r(values: np.ndarray | float) -> np.ndarray:
        return rounded_to(precision, np.asarray(values))

    def same(values: np.ndarray) -> np.ndarray:
        return values

    def approximate(values: np.ndarray) -> np.ndarray:
        """A tanh that is off by up to 2^-11, as ``tanh.approx`` of CUDA is."""
        return np.round(np.tanh(values) * 2.0**10) / 2.0**10

    rng = np.random.default_rng(2)
    x = r(rng.normal(size=(_STEPS, _BATCH, _INPUTS)))
    scale = 1.0 / np.sqrt(_HIDDEN)

    def weights(gates: int) -> dict[str, np.ndarray]:
        shapes = {"w": (1, gates * _HIDDEN, _INPUTS), "v": (1, gates * _HIDDEN, _HIDDEN), "b": (1, 2 * gates * _HIDDEN)}
        return {name: rng.uniform(-scale, scale, size=shape) for name, shape in shapes.items()}

    def layer(
        op_type: str,
        constants: Mapping[str, np.ndarray],
        *,
        hidden: Rounding = same,
        cell: Rounding = same,
        sums: Rounding = same,
        activated: Rounding = same,
        tanh: Rounding = np.tanh,
    ) -> np.ndarray:
        w, v, b = (constants[name][0] for name in "wvb")
        gates = len(w) // _HIDDEN
        from_x, from_h = b[: len(w)], b[len(w) :]
        h, c, rows = np.zeros((_BATCH, _HIDDEN)), np.zeros((_BATCH, _HIDDEN)), []

        def sigmoid(values: np.ndarray) -> np.ndarray:
            return activated(0.5 + 0.5 * tanh(0.5 * values))

        for value in x:
            read, kept = np.split(value @ w.T + from_x, gates, 1), np.split(h @ v.T + from_h, gates, 1)
            if op_type == "LSTM":
                i, o, f, g = (sums(a + b) for a, b in zip(read, kept, strict=True))
                c = cell(sigmoid(f) * c + sigmoid(i) * activated(tanh(g)))
                h = hidden(sigmoid(o) * activated(tanh(c)))
            elif op_type == "GRU":
                z, reset = (sigmoid(sums(a + b)) for a, b in zip(read[:2], kept[:2], strict=True))
                h = hidden((1 - z) * activated(tanh(sums(read[2] + reset * kept[2]))) + z * h)
            else:
                h = hidden(tanh(sums(read[0] + kept[0])))
            rows.append(h[None])
        return np.stack(rows)

    def case(op_type: str, gates: int) -> Case:
        exact = weights(gates)
        constants = {name: r(values) for name, values in exact.items()}
        more = {"hidden_size": _HIDDEN} | ({"linear_before_reset": 1} if op_type == "GRU" else {})
        of = partial(layer, op_type, constants)
        return Case(
            ((op_type, ("x", "w", "v", "b"), "y", more),),
            constants,
            x,
            {
                "output rounded": lambda: r(of()),
                "hidden state rounded": lambda: of(hidden=r),
                "both states rounded": lambda: of(hidden=r, cell=r),
                "sums and states rounded": lambda: of(hidden=r, cell=r, sums=r),
                "sums, activations and states rounded": lambda: of(hidden=r, cell=r, sums=r, activated=r),
                "hidden state rounded, tanh approximate": lambda: of(hidden=r, tanh=approximate),
                "all rounded, tanh approximate": lambda: of(hidden=r, cell=r, sums=r, activated=r, tanh=approximate),
            },
            partial(layer, op_type, exact),
        )

    def probe(
        open_gates: tuple[float, float, float, float], column: int, of: Callable[[np.ndarray], np.ndarray]
    ) -> Case:
        """One step of an LSTM of one unit: gates of constants, but for the one in ``column``, which reads the input."""
        values = r(np.linspace(-4.0, 4.0, 4001))[None, :, None]
        w = np.zeros((1, 4, 1))
        w[0, column] = 1.0
        constants = {"w": w, "v": np.zeros((1, 4, 1)), "b": np.array([[*open_gates, 0.0, 0.0, 0.0, 0.0]])}
        return Case(
            (("LSTM", ("x", "w", "v", "b"), "y", {"hidden_size": 1}),),
            constants,
            values,
            {"rounded once": lambda: r(of(values))[:, None]},
            lambda: of(values)[:, None],
        )

    on = _SATURATES
    return {
        "LSTM": case("LSTM", 4),
        "GRU": case("GRU", 3),
        "RNN": case("RNN", 1),
        "tanh of the tanh of an LSTM": probe((on, on, -on, 0.0), 3, lambda x: np.tanh(np.tanh(x))),
        "sigmoid of an LSTM, times tanh(1)": probe((on, 0.0, -on, on), 1, lambda x: expit(x) * np.tanh(1.0)),
    }


def _norms(precision: Precision, image: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> dict[str, Case]:
    """Norms: of rows of all sizes, so that the epsilon shows; FP16 does not hold the squares of the largest."""

    def r(values: np.ndarray | float) -> np.ndarray:
        return rounded_to(precision, np.asarray(values))

    rows = np.random.default_rng(1).normal(size=(ROWS, COLUMNS)) * 10.0 ** np.linspace(-4, 3, ROWS)[:, None]
    x, count = r(rows), image[0, 0].size

    def root_mean(values: np.ndarray, epsilon: float) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + epsilon)

    def in_steps() -> np.ndarray:
        mean = r(r((r(x * x)).sum(-1, keepdims=True)) / COLUMNS)
        return r(r(x / r(np.sqrt(r(mean + r(_EPSILON))))) * gain)

    def instance_norm(gain: np.ndarray, bias: np.ndarray, *, whole: bool) -> np.ndarray:
        mean, variance = (of(axis=(2, 3), keepdims=True) for of in (image.mean, image.var))
        scales, biases = gain[:, None, None], bias[:, None, None]
        if whole:
            return r(scales * (image - mean) / np.sqrt(variance + _EPSILON) + biases)
        guarded = r(r(variance * count / (count - 1)) * r((count - 1) / count) + r(_EPSILON))
        return r(r(r(scales * r(image - r(mean))) / r(np.sqrt(guarded))) + biases)

    wide = r(np.random.default_rng(3).normal(size=(4, 128, 120)) + 0.5)
    scales, shifts = (np.random.default_rng(k).normal(size=120) * 0.2 + 1.0 for k in (4, 5))

    def layer_norm(values: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
        centred = values - values.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + _EPSILON_DEFAULT) * gain + bias

    def layer_norm_in_steps(values: np.ndarray) -> np.ndarray:
        centred = r(values - r(r(values.sum(-1, keepdims=True)) / 120))
        mean = r(r(r(centred**2).sum(-1, keepdims=True)) / 120)
        return r(r(r(centred / r(np.sqrt(r(mean + r(_EPSILON_DEFAULT))))) * r(scales)) + r(shifts))

    def layer_norm_case(before: tuple[Step, ...], values: Callable[[], np.ndarray], twice: np.ndarray) -> Case:
        return Case(
            (
                *before,
                ("ReduceMean", ("h",), "mu", {"axes": [-1]}),
                ("Sub", ("h", "mu"), "c", {}),
                ("Pow", ("c", "two"), "q", {}),
                ("ReduceMean", ("q",), "m", {"axes": [-1]}),
                ("Add", ("m", "epsilon"), "a", {}),
                ("Sqrt", ("a",), "s", {}),
                ("Div", ("c", "s"), "d", {}),
                ("Mul", ("d", "gain"), "e", {}),
                ("Add", ("e", "bias"), "y", {}),
            ),
            {"two": r(2.0), "epsilon": r(_EPSILON_DEFAULT), "gain": r(scales), "bias": r(shifts)},
            wide,
            {
                "rounded once": lambda: r(layer_norm(values(), r(scales), r(shifts))),
                "each step rounded": lambda: layer_norm_in_steps(values()),
            },
            lambda: layer_norm(twice, scales, shifts),
            12,
        )

    return {
        "LayerNorm written out, behind a product": layer_norm_case(
            (("Mul", ("x", "gain"), "h", {}),), lambda: r(wide * r(scales)), wide * scales
        ),
        "LayerNorm written out, behind a sum of two": layer_norm_case(
            (("Mul", ("x", "gain"), "t", {}), ("Add", ("x", "t"), "h", {})),
            lambda: r(wide + r(wide * r(scales))),
            wide + wide * scales,
        ),
        "RMSNorm written out": Case(
            (
                ("Pow", ("x", "two"), "q", {}),
                ("ReduceMean", ("q",) if _axes(precision) else ("q", "axes"), "m", _axes(precision)),
                ("Add", ("m", "epsilon"), "a", {}),
                ("Sqrt", ("a",), "s", {}),
                ("Div", ("x", "s"), "d", {}),
                ("Mul", ("d", "gain"), "y", {}),
            ),
            {
                "two": r(2.0),
                "epsilon": r(_EPSILON),
                "gain": gain,
                **({} if _axes(precision) else {"axes": np.array([-1], np.int64)}),
            },
            x,
            {
                "rounded once, its epsilon": lambda: r(root_mean(x, float(r(_EPSILON))) * gain),
                "rounded once, the default epsilon": lambda: r(root_mean(x, _EPSILON_DEFAULT) * gain),
                "each step rounded": in_steps,
            },
        ),
        **{
            name: Case(
                (("InstanceNormalization", ("x", "gain", "bias"), "y", {"epsilon": _EPSILON}),),
                {"gain": scales, "bias": biases},
                image,
                {
                    "rounded once": partial(instance_norm, scales, biases, whole=True),
                    "statistics and each step rounded": partial(instance_norm, scales, biases, whole=False),
                },
            )
            for name, scales, biases in (
                ("InstanceNormalization", gain, bias),
                ("InstanceNormalization without scale and bias", np.ones(COLUMNS), np.zeros(COLUMNS)),
            )
        },
    }


def _axes(precision: Precision) -> Mapping[str, Any]:
    """The last axis as an attribute of a reduction; nothing where it is an input."""
    return {"axes": [-1]} if _OPSETS[precision][0] < _AXES_ARE_INPUTS else {}


def _constant(name: str, value: np.ndarray, precision: Precision) -> TensorProto:
    if value.dtype == np.int64:
        return numpy_helper.from_array(value, name)
    if precision is Precision.FP16:
        return numpy_helper.from_array(np.asarray(value, np.float16), name)
    bits = to_stored(value, Precision.BF16).astype("<u2")
    return helper.make_tensor(name, TensorProto.BFLOAT16, value.shape, bits.tobytes(), raw=True)


def outputs(case: Case, precision: Precision, provider: str, folder: Path) -> np.ndarray:
    """The provider's outputs.

    Raises:
        EngineError: it has no kernel, or refuses the model.
    """
    # NumPy has no BFLOAT16 to feed; between FP16 Casts ONNX Runtime's CPU provider would round nothing at all.
    inside, outside = precision.onnx_type, TensorProto.FLOAT16
    steps = list(case.nodes)
    if precision is Precision.BF16:
        outside = TensorProto.FLOAT
        renamed = {"x": "x_reduced", "y": "y_reduced"}
        inner = ((op, tuple(renamed.get(i, i) for i in i_), renamed.get(out, out), more) for op, i_, out, more in steps)
        reading: Step = ("Cast", ("x",), "x_reduced", {"to": inside})
        steps = [reading, *inner, ("Cast", ("y_reduced",), "y", {"to": outside})]
    nodes = [helper.make_node(op, list(inputs), [out], **more) for op, inputs, out, more in steps]
    x = helper.make_tensor_value_info("x", outside, case.x.shape)
    y = helper.make_tensor_value_info("y", outside, None)
    constants = [_constant(name, value, precision) for name, value in case.constants.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    path = folder / "case.onnx"
    opset, ir_version = _OPSETS[precision]
    if precision is Precision.FP16 and case.opset is not None:
        opset = case.opset
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version), path)
    session = open_session(path, SessionOptions(provider, timing=False))  # type: ignore[arg-type]
    try:
        return session.run({"x": case.x.astype(helper.tensor_dtype_to_np_dtype(outside))})["y"].astype(np.float64)
    finally:
        session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precisions", nargs="+", choices=[str(p) for p in REDUCED], default=[str(p) for p in REDUCED])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float] | str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in map(Precision.named, options.precisions):
            rows = found.setdefault(str(precision), {})
            for name, case in cases(precision).items():
                print(f"{precision.name}: {name}")
                try:
                    values = outputs(case, precision, options.provider, Path(folder))
                except EngineError as error:
                    rows[name] = str(error)
                    print(f"          not run: {error}")
                    continue
                computed = {formula: of() for formula, of in case.formulas.items()}
                shares = {formula: float(np.mean(values == of)) for formula, of in computed.items()}
                exact = None if case.exact is None else case.exact()
                if exact is not None:
                    error, size = np.linalg.norm(values - exact), np.linalg.norm(exact)
                    print(f"          error {error / size:.2e}, largest difference {np.abs(values - exact).max():.2e}")
                rows[name] = shares
                for formula, share in sorted(shares.items(), key=lambda row: -row[1]):
                    times = "" if exact is None else f"  {np.linalg.norm(computed[formula] - exact) / error:5.2f} times"
                    print(f"  {share:6.1%}{times}  {formula}")
    save(options.json, {"provider": options.provider, "same_values": found})


if __name__ == "__main__":
    main()
