from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from scipy.special import expit

from mptune.graph.facts import facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import LayerGroup, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.loading.tensors import from_stored, to_stored
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rounding_steps import folded_norms, merged_with_scales, with_rounding_steps
from mptune.graph.writing.weights import WeightBank
from tests.graph.helpers import feeds, relative_l2, run
from tests.graph.test_corpus import CORPUS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 5, 5)).astype(np.float32)
W = RNG.normal(size=(4, 3, 3, 3)).astype(np.float32)
B = RNG.normal(size=4).astype(np.float32)
V = RNG.normal(size=(16, 16)).astype(np.float32)
Y = ("y",)


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def save(path: Path, nodes: list[onnx.NodeProto], shape: list[int], opset: int) -> Model:
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    constants = [numpy_helper.from_array(W, "w"), numpy_helper.from_array(B, "b")]
    if opset >= 18:
        constants.append(numpy_helper.from_array(np.array([-1, 2]), "last"))
    graph = helper.make_graph(nodes, "g", [info], [out], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return load_model(path)


def mean(opset: int, *, keepdims: int) -> onnx.NodeProto:
    if opset >= 18:
        return helper.make_node("ReduceMean", ["x", "last"], ["y"], keepdims=keepdims)
    return helper.make_node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=keepdims)


def emulated(model: Model, folder: Path) -> np.ndarray:
    groups = find_groups(model)
    bank = WeightBank.write(model, folder)
    written_out = with_rounding_steps(GroupedModel(model, groups))
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16)
    path = Emulator(written_out, bank).write(plan, folder / "emulated.onnx")
    onnx.checker.check_model(path, full_check=True)
    (values,) = run(path, {"x": X}).values()
    switching = Emulator(written_out, bank)
    path = switching.write_switched(folder / "switched.onnx", [g.id for g in groups])
    feeds = {"x": X, **{name: np.array(True) for name in switching.switches[Precision.FP16].values()}}
    np.testing.assert_array_equal(run(path, feeds)["y"], values)
    return values


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_a_convolution_is_rounded_before_its_bias_and_behind_it(tmp_path: Path, opset: int) -> None:
    alone = save(tmp_path / "alone.onnx", [helper.make_node("Conv", ["x", "w"], ["y"])], [2, 4, 3, 3], opset)
    biased = save(tmp_path / "biased.onnx", [helper.make_node("Conv", ["x", "w", "b"], ["y"])], [2, 4, 3, 3], opset)
    without = emulated(alone, tmp_path)
    np.testing.assert_array_equal(without, half(without))
    np.testing.assert_array_equal(emulated(biased, tmp_path), half(without + half(B)[:, None, None]))


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_a_mean_over_the_last_axes_is_rounded_before_it_is_divided(tmp_path: Path, opset: int, keepdims: int) -> None:
    model = save(tmp_path / "m.onnx", [mean(opset, keepdims=keepdims)], [2, 3, 1, 1] if keepdims else [2, 3], opset)
    total = half(half(X).sum(axis=(2, 3), keepdims=bool(keepdims), dtype=np.float64).astype(np.float32))
    np.testing.assert_array_equal(emulated(model, tmp_path), half(total / np.float32(25)))


def normalised(
    path: Path, *, biased: bool, outputs: tuple[str, ...] = Y, dtype: type = np.float32, spread: float = 30.0
) -> Path:
    """A convolution and a BatchNormalization, and what ONNX Runtime folds them in."""
    rng = np.random.default_rng(1)
    constants = {
        "w": W,
        "scale": rng.uniform(0.3, 2, 4),
        "offset": B,
        "mean": B * 2,
        "variance": rng.uniform(0.01, spread, 4),
    }
    constants |= {"b": rng.normal(size=4)} if biased else {}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"][: 2 + biased], ["t"]),
        helper.make_node("BatchNormalization", ["t", "scale", "offset", "mean", "variance"], ["u"], epsilon=1e-3),
        helper.make_node("Relu", ["u"], ["y"]),
    ]
    type_code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", type_code, X.shape)],
        [helper.make_tensor_value_info(name, type_code, [2, 4, 3, 3]) for name in outputs],
        [numpy_helper.from_array(np.asarray(value, dtype), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("biased", [False, True])
def test_a_batch_norm_is_folded_as_onnx_runtime_folds_it(tmp_path: Path, biased: bool) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    typed = normalised(tmp_path / "typed.onnx", biased=biased, dtype=np.float16)
    onnxruntime.InferenceSession(str(typed), options, providers=["CPUExecutionProvider"])
    folded = [numpy_helper.to_array(t) for t in onnx.load(tmp_path / "optimised.onnx").graph.initializer]
    weights, bias = sorted((values.astype(np.float32) for values in folded), key=lambda values: -values.ndim)
    conv = helper.make_node("Conv", ["x", "w"], ["y"])
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4, 3, 3])
    graph = helper.make_graph([conv], "g", [info], [out], [numpy_helper.from_array(weights, "w")])
    plain = tmp_path / "plain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), plain)
    wanted = half(half(run(plain, {"x": half(X)})["y"]) + bias[:, None, None])
    model = load_model(normalised(tmp_path / "m.onnx", biased=biased))
    np.testing.assert_array_equal(emulated(model, tmp_path), np.maximum(wanted, 0))


def test_variances_beyond_fp16_are_rescaled_before_they_are_folded(tmp_path: Path) -> None:
    path = normalised(tmp_path / "m.onnx", biased=False, spread=1e6)
    exact = run(path, {"x": X})["y"]
    assert relative_l2(emulated(load_model(path), tmp_path), exact) < 1e-3


def test_a_convolution_whose_result_others_read_is_not_folded(tmp_path: Path) -> None:
    model = load_model(normalised(tmp_path / "m.onnx", biased=False, outputs=("y", "t")))
    grouped = GroupedModel(model, find_groups(model))
    assert not folded_norms(grouped, facts_of(model))
    alone = load_model(normalised(tmp_path / "alone.onnx", biased=False))
    apart = tuple(LayerGroup(n.name, n.name, "conv", (n.name,), {}) for n in alone.nodes)
    assert folded_norms(GroupedModel(alone, find_groups(alone)), facts_of(alone))
    assert not folded_norms(GroupedModel(alone, apart), facts_of(alone)), "a plan may put a Cast in between"


GELU_STEPS = [
    ("Div", ["x", "root"], "a"),
    ("Erf", ["a"], "b"),
    ("Add", ["b", "one"], "c"),
    ("Mul", ["x", "c"], "d"),
    ("Mul", ["d", "half"], "y"),
]


def gelu(path: Path, divisor: float = 2.0**0.5, outputs: tuple[str, ...] = Y) -> Model:
    numbers = {"root": divisor, "one": 1.0, "half": 0.5}
    constants = [numpy_helper.from_array(np.array(number, np.float32), name) for name, number in numbers.items()]
    nodes = [helper.make_node(op, inputs, [out]) for op, inputs, out in GELU_STEPS]
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)
    found = [helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape) for name in outputs]
    graph = helper.make_graph(nodes, "g", [info], found, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return load_model(path)


def gelu_in_fp16(factor: float) -> np.ndarray:
    """Each step rounded."""
    from scipy.special import erf

    x = half(X).astype(np.float64)
    distribution = half(1.0 + half(erf(half(x * factor))))
    return half(half(x * distribution) * 0.5)


def test_a_gelu_multiplies_by_the_root_of_one_half(tmp_path: Path) -> None:
    values = emulated(gelu(tmp_path / "gelu.onnx"), tmp_path)
    kernel, division = (gelu_in_fp16(f) for f in (float(np.float16(0.5**0.5)), 1.0 / float(np.float16(2.0**0.5))))
    assert np.mean(values == kernel) > 0.99, "FP32's Erf is not the double one's here and there"
    assert np.mean(values == division) < 0.95


def test_other_divisions_and_gelus_that_are_read_inside_stay_as_they_are(tmp_path: Path) -> None:
    for number, model in enumerate(
        (gelu(tmp_path / "2.onnx", divisor=2.0), gelu(tmp_path / "read.onnx", outputs=("y", "a")))
    ):
        written_out = with_rounding_steps(GroupedModel(model, find_groups(model))).model
        assert [node.op_type for node in written_out.nodes].count("Div") == 1, number


@pytest.mark.parametrize("axes", [[1], [0, 1], [0, 1, 2, 3]])
def test_other_means_stay_as_they_are(tmp_path: Path, axes: list[int]) -> None:
    shape = list(X.mean(axis=tuple(axes)).shape)
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=axes, keepdims=0)
    model = save(tmp_path / "m.onnx", [node], shape, 13)
    written_out = with_rounding_steps(GroupedModel(model, find_groups(model))).model
    assert [n.op_type for n in written_out.nodes] == [n.op_type for n in model.nodes]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_in_fp32_it_computes_the_same(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    groups = find_groups(model)
    written_out = with_rounding_steps(GroupedModel(model, groups))
    emulator = Emulator(written_out, WeightBank.write(model, tmp_path))
    feed = feeds(model)
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP32)
    expected = run(path, feed)
    limit = 1e-3 if path.stem == "qdq" else 1e-5  # where a quantiser rounds, a last bit can become a step
    for name, values in run(emulator.write(plan, tmp_path / "emulated.onnx"), feed).items():
        assert relative_l2(values, expected[name]) < limit


def product(path: Path, steps: list[tuple[str, str, str]], results: tuple[str, ...] = Y) -> Model:
    """``x @ v`` with scales: each step is an operator and two operands; ``c``, ``d`` and ``e`` are constant numbers."""
    outs = [*(f"t{k}" for k in range(len(steps) - 1)), "y"]
    nodes = [helper.make_node(op, [a, b] if b else [a], [out]) for (op, a, b), out in zip(steps, outs, strict=True)]
    shapes = {"x": [16, 16], **dict.fromkeys(results)}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    values = {"v": V, "c": np.float32(0.3), "d": np.array([0.7], np.float32), "e": np.full((1, 1, 1), 0.9, np.float32)}
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return load_model(path)


@pytest.mark.parametrize(
    ("steps", "results", "merged"),
    [
        pytest.param([("MatMul", "x", "v"), ("Mul", "t0", "c")], Y, "MatMul", id="behind"),
        pytest.param([("MatMul", "x", "v"), ("Div", "t0", "d")], Y, "MatMul", id="divided"),
        pytest.param([("MatMul", "x", "v"), ("Mul", "c", "t0"), ("Div", "t1", "d")], Y, "MatMul Mul", id="two"),
        pytest.param([("Mul", "x", "c"), ("MatMul", "t0", "v")], Y, "Mul", id="in front"),
        pytest.param([("Mul", "x", "c"), ("Div", "t0", "d"), ("MatMul", "t1", "v")], Y, "Mul Div", id="before"),
        pytest.param([("MatMul", "x", "v"), ("Mul", "t0", "c")], ("y", "t0"), "", id="a result in between"),
        pytest.param([("MatMul", "x", "v"), ("Mul", "t0", "t0")], Y, "", id="a square"),
        pytest.param([("MatMul", "x", "v"), ("Div", "c", "t0")], Y, "", id="a reciprocal"),
        pytest.param([("MatMul", "x", "v"), ("Mul", "t0", "v")], Y, "", id="no number"),
        pytest.param([("MatMul", "x", "v"), ("Mul", "t0", "e")], Y, "", id="a rank more"),
        pytest.param([("MatMul", "x", "v"), ("Add", "t0", "c")], Y, "", id="a sum"),
        pytest.param([("Relu", "x", ""), ("Mul", "t0", "c")], Y, "", id="no product"),
    ],
)
def test_a_product_and_its_scales_are_one_step(
    steps: list[tuple[str, str, str]], results: tuple[str, ...], merged: str, tmp_path: Path
) -> None:
    model = product(tmp_path / "m.onnx", steps, results)
    together = (LayerGroup("g", "all", "matmul", tuple(n.name for n in model.nodes), {}),)
    names = merged_with_scales(GroupedModel(model, together))
    assert [n.op_type for n in model.nodes if n.name in names] == merged.split()
    apart = tuple(replace(together[0], id=n.name, nodes=(n.name,)) for n in model.nodes)
    assert not merged_with_scales(GroupedModel(model, apart)), "a plan may put a Cast in between"


def test_a_scaled_product_is_rounded_once(tmp_path: Path) -> None:
    model = product(tmp_path / "m.onnx", [("MatMul", "x", "v"), ("Mul", "t0", "c"), ("Mul", "t1", "d")])
    groups = find_groups(model)
    assert len(groups) == 1
    bank = WeightBank.write(model, tmp_path)
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16)
    x = RNG.normal(size=(16, 16)).astype(np.float32)
    found = {}
    grouped = GroupedModel(model, groups)
    for name, computed in {"one": with_rounding_steps(grouped), "each": grouped}.items():
        path = Emulator(computed, bank).write(plan, tmp_path / f"{name}.onnx")
        found[name] = run(path, {"x": x})["y"]
    scale = half(np.float32(0.3)) * half(np.float32(0.7))
    exact = half(x).astype(np.float64) @ half(V).astype(np.float64)
    assert np.mean(found["one"] == half((exact * scale).astype(np.float32))) > 0.98
    assert np.mean(found["one"] == found["each"]) < 0.8


FP16, BF16 = Precision.FP16, Precision.BF16
OF_SIGMOIDS = {
    "sigmoid": "rounded once",
    "x times its sigmoid (SiLU)": "each step of the sigmoid rounded",
    "x times the sigmoid of 1.702 x": "each step of the sigmoid rounded",
    "x times the sigmoid of x times 1": "each step of the sigmoid rounded",
    "another value times a sigmoid": "sigmoid rounded",
}
OF_ATTRIBUTES = {
    "HardSigmoid": "alpha rounded",
    "x times its HardSigmoid": "steps and alpha rounded",
    "LeakyRelu": "alpha rounded",
}
IN_STEPS = {"sigmoid": "each step rounded", "another value times a sigmoid": "each step of the sigmoid rounded"}
Step = tuple[str, list[str], str, dict[str, Any]]
"""Operator, inputs, output and attributes."""


def rounded(precision: Precision, values: np.ndarray | float) -> np.ndarray:
    """The precision's nearest values, in double precision."""
    if precision is FP16:
        return np.asarray(values).astype(np.float16).astype(np.float64)
    return from_stored(to_stored(np.asarray(values, np.float32), BF16)).astype(np.float64)


def activations(
    precision: Precision, x: np.ndarray
) -> dict[str, tuple[list[Step], dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Nodes from ``x`` to ``y``, their constants, and the values that formulas give."""
    r = partial(rounded, precision)

    def in_steps(values: np.ndarray) -> np.ndarray:
        """As ONNX Runtime's kernel (``OP_Sigmoid``) computes it, with each of its operations rounded."""
        large = r(1.0 / r(1.0 + r(np.exp(-np.abs(values)))))
        return np.where(values > 0, large, r(1.0 - large))

    alpha, bias, sixth = r(1.702), r(np.random.default_rng(1).normal(size=16)), float(np.float32(1 / 6))
    hard_sigmoid = np.clip(r(x * r(sixth) + 0.5), 0.0, 1.0)
    sigmoid: Step = ("Sigmoid", ["x"], "t", {})
    hard: Step = ("HardSigmoid", ["x"], "t", {"alpha": sixth, "beta": 0.5})
    of_scaled: list[Step] = [
        ("Mul", ["x", "alpha"], "s", {}),
        ("Sigmoid", ["s"], "t", {}),
        ("Mul", ["x", "t"], "y", {}),
    ]
    return {
        "sigmoid": (
            [("Sigmoid", ["x"], "y", {})],
            {},
            {"rounded once": r(expit(x)), "each step rounded": in_steps(x)},
        ),
        "x times its sigmoid (SiLU)": (
            [sigmoid, ("Mul", ["x", "t"], "y", {})],
            {},
            {"each step of the sigmoid rounded": r(x * in_steps(x))},
        ),
        "x times the sigmoid of 1.702 x": (
            of_scaled,
            {"alpha": alpha},
            {"each step of the sigmoid rounded": r(x * in_steps(r(x * alpha)))},
        ),
        "x times the sigmoid of x times 1": (
            of_scaled,
            {"alpha": r([1.0])},
            {"each step of the sigmoid rounded": r(x * in_steps(x))},
        ),
        "another value times a sigmoid": (
            [("Add", ["x", "bias"], "a", {}), sigmoid, ("Mul", ["a", "t"], "y", {})],
            {"bias": bias},
            {
                "sigmoid rounded": r(r(x + bias) * r(expit(x))),
                "each step of the sigmoid rounded": r(r(x + bias) * in_steps(x)),
            },
        ),
        "HardSigmoid": ([(*hard[:2], "y", hard[3])], {}, {"alpha rounded": hard_sigmoid}),
        "x times its HardSigmoid": (
            [hard, ("Mul", ["x", "t"], "y", {})],
            {},
            {"steps and alpha rounded": r(x * hard_sigmoid)},
        ),
        "LeakyRelu": (
            [("LeakyRelu", ["x"], "y", {"alpha": 0.2})],
            {},
            {"alpha rounded": r(np.where(x > 0, x, r(0.2) * x))},
        ),
    }


@pytest.mark.parametrize(
    ("name", "formula", "precision", "opset"),
    [
        *((*case, FP16, opset) for case in OF_SIGMOIDS.items() for opset in (12, 14, 17)),
        *((*case, BF16, 17) for case in (OF_SIGMOIDS | IN_STEPS).items()),
        *((*case, FP16, 17) for case in OF_ATTRIBUTES.items()),
    ],
)
def test_activations_are_rounded_as_the_cuda_provider_rounds_them(
    name: str, formula: str, precision: Precision, opset: int, tmp_path: Path
) -> None:
    """On an H100 the provider's values are these: 100 % of them, 99.7 % of single sigmoids in FP16."""
    x = rounded(precision, np.random.default_rng(0).normal(size=(512, 16)) * 3.0)
    steps, numbers, formulas = activations(precision, x)[name]
    wanted = formulas[formula]
    nodes = [helper.make_node(op, inputs, [out], **more) for op, inputs, out, more in steps]
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)
    constants = [numpy_helper.from_array(np.asarray(number, np.float32), key) for key, number in numbers.items()]
    graph = helper.make_graph(nodes, "g", [info], [out], constants)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    model = load_model(path)
    groups = find_groups(model)
    bank = WeightBank.write(model, tmp_path, precisions=REDUCED)
    written_out = with_rounding_steps(GroupedModel(model, groups), precisions=[precision])
    emulator = Emulator(written_out, bank)
    feed = {"x": x.astype(np.float32)}
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], precision)
    values = run(emulator.write(plan, tmp_path / "emulated.onnx"), feed)["y"]
    assert (values == wanted).mean() > 0.995
    exact = run(emulator.write(plan.replace(dict.fromkeys(plan.precision, Precision.FP32)), tmp_path / "e.onnx"), feed)
    np.testing.assert_array_equal(exact["y"], run(path, feed)["y"])
    switching = Emulator(written_out, bank)
    switched = switching.write_switched(tmp_path / "switched.onnx", [g.id for g in groups], precisions=REDUCED)
    on = {one: np.array(p is precision) for p, of in switching.switches.items() for one in of.values()}
    np.testing.assert_array_equal(run(switched, {**feed, **on})["y"], values)
