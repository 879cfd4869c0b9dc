"""``mptune compare MODEL CANDIDATE`` names nodes by the effect that each has alone, and none that has hardly any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16

import mptune
from mptune.diagnosis.structure import constant_difference
from tests.graph.models import constant, model, node, save, value, weight
from tests.graph.test_rescaled import CHANNELS, batch_norm

ROWS = {"x": np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)}
MASKS = 12
VARIANCES = np.random.default_rng(1).uniform(1e7, 9.8e7, 8)
LIMITED = {"limited variances": (VARIANCES, "attribute-differs"), "limited masks": (np.full(8, 9e3), "")}
"""Variances of the norm -> the code that is right where a converter limits constants to 10000."""


def masked_and_normed(variances: np.ndarray = VARIANCES) -> onnx.ModelProto:
    """Masks of -1e9 before a softmax, which may as well be -1e4, and a norm of large values with a tiny mean."""
    mask = np.where(np.arange(16) > 13, -1e9, 0.0)
    nodes = [node("MatMul", ["x", "w"], "m0", "/fc")]
    nodes += [node("Add", [f"m{k}", f"mask{k}"], f"m{k + 1}", f"/mask{k}") for k in range(MASKS)]
    nodes += [
        node("Softmax", [f"m{MASKS}"], "s", "/softmax"),
        node("MatMul", ["s", "v"], "h", "/wide"),
        node("BatchNormalization", ["h", "gamma", "beta", "mean", "var"], "y", "/norm"),
    ]
    constants = [weight("w", 16, 16), *(constant(f"mask{k}", mask) for k in range(MASKS))]
    constants += [weight("v", 16, 8, scale=2e3), constant("gamma", np.linspace(0.5, 1.5, 8))]
    constants += [constant("beta", [1e-8] * 8), constant("mean", [2e-9] * 8), constant("var", variances)]
    return model(nodes, [value("x", ["batch", 16])], [value("y", ["batch", 8])], constants)


def converted(proto: onnx.ModelProto) -> onnx.ModelProto:
    """As the converter's defaults do it: no constant beyond 10000, and none nearer to 0 than 1e-7."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return convert_float_to_float16(copy, keep_io_types=True, max_finite_val=1e4, min_positive_val=1e-7)


def changed(proto: onnx.ModelProto, factors: dict[str, float]) -> onnx.ModelProto:
    """Constants times factors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for tensor in copy.graph.initializer:
        if tensor.name in factors:
            values = onnx.numpy_helper.to_array(tensor) * np.float32(factors[tensor.name])
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name))
    return copy


def test_of_many_changed_constants_the_one_that_matters_is_named(tmp_path: Path) -> None:
    proto = masked_and_normed()
    left, right = save(proto, tmp_path), save(converted(proto), tmp_path, "half.onnx")
    found = mptune.compare(left, right, data=ROWS, trace=True)
    assert found.verdict == "differs"
    (finding,) = [each for each in found.findings if each.code == "attribute-differs"]
    assert finding.where.nodes == ("/norm",)
    assert finding.evidence["what"] == "var"
    assert finding.evidence["alone"] == pytest.approx(finding.evidence["error"], rel=0.1)
    named = [each.where.nodes for each in found.findings if each.severity != "info"]
    assert set(named) <= {("/norm",)}, "the trace adds no rounding as a cause"


def test_changed_constants_that_do_not_matter_are_no_difference(tmp_path: Path) -> None:
    proto = masked_and_normed(LIMITED["limited masks"][0])
    left, right = save(proto, tmp_path), save(converted(proto), tmp_path, "half.onnx")
    found = mptune.compare(left, right, data=ROWS, trace=True)
    assert {each.code: each.severity for each in found.findings} == {"agrees": "info", "first-difference": "info"}


def with_epsilon(proto: onnx.ModelProto) -> onnx.ModelProto:
    (norm,) = [each for each in proto.graph.node if each.name == "/norm"]
    norm.attribute.append(onnx.helper.make_attribute("epsilon", 1e-3))
    return proto


def with_zero_added(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same with another node."""
    next(each for each in proto.graph.node if each.name == "/mask0").input[0] = "plus"
    proto.graph.node.insert(1, node("Add", ["m0", "nothing"], "plus", "/plus"))
    proto.graph.initializer.append(constant("nothing", [0.0]))
    return proto


def with_tanh(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Another operator in the norm's place."""
    del proto.graph.node[-1:]
    proto.graph.node.append(node("Tanh", ["h"], "y", "/norm"))
    return proto


LITTLE = {f"mask{k}": 1e-3 for k in range(MASKS)}


@pytest.mark.parametrize(
    ("factors", "change", "nodes"),
    [
        ({"v": 1.3, "gamma": 3.0, "w": 1.0001, **LITTLE}, lambda proto: proto, ("/norm", "/wide")),
        ({"v": 1.3}, with_epsilon, ("/wide",)),
        ({"v": 1.3}, with_zero_added, ("/wide",)),
        (LITTLE, with_tanh, ("/norm",)),
    ],
    ids=["the largest effect first", "no attribute without effect", "no structure without effect", "another structure"],
)
def test_what_has_an_effect_is_named(
    factors: dict[str, float],
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    nodes: tuple[str, ...],
    tmp_path: Path,
) -> None:
    proto = masked_and_normed(np.full(8, 4e7))
    other = save(change(changed(proto, factors)), tmp_path, "other.onnx")
    found = mptune.compare(save(proto, tmp_path), other, data=ROWS, trace=True)
    (finding,) = [each for each in found.findings if each.code == "attribute-differs"]
    assert finding.where.nodes == nodes
    assert [finding.text.index(name) for name in nodes] == sorted(finding.text.index(name) for name in nodes)


def test_where_none_makes_a_tenth_none_is_named(tmp_path: Path) -> None:
    """Every step of a long product has a little more."""
    count = 24
    nodes = [node("Mul", ["x" if not k else f"h{k}", f"c{k}"], f"h{k + 1}", f"/step{k}") for k in range(count)]
    constants = [constant(f"c{k}", [1.0] * 16) for k in range(count)]
    proto = model(nodes, [value("x", ["batch", 16])], [value(f"h{count}", ["batch", 16])], constants)
    other = changed(proto, {f"c{k}": 1.01 for k in range(count)})
    found = mptune.compare(save(proto, tmp_path), save(other, tmp_path, "other.onnx"), data=ROWS)
    (finding,) = [each for each in found.findings if each.code == "attribute-differs"]
    assert (found.verdict, finding.severity, finding.where.nodes) == ("differs", "warning", ())
    assert "none" in finding.text
    assert finding.evidence["together"] == pytest.approx(finding.evidence["error"], rel=0.01)


def test_constants_that_are_rescaled_to_fit_fp16_make_no_difference(tmp_path: Path) -> None:
    left = save(batch_norm(5e5), tmp_path)
    right = mptune.apply(left, None, tmp_path / "half.onnx")
    data = {"x": np.random.default_rng(0).standard_normal((8, CHANNELS, 8)).astype(np.float32)}
    found = mptune.compare(left, right, data=data, trace=True)
    assert found.verdict == "agrees"
    assert {each.severity for each in found.findings} == {"info"}


WEIGHT = np.random.default_rng(2).standard_normal((16, 16))


def replaced(array: np.ndarray, place: object, value: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("left", "right", "dtype", "text"),
    [
        ([3.0], [2.0], np.float32, "1 of 1 values differ"),
        ([0.1, 22000.0, -18000.0, 1e-9], [0.1, 1e4, -1e4, 0.0], np.float16, "2 of 4 values differ"),
        ([0.1, -1e9], [0.1, -np.inf], np.float16, "1 are NaN or Inf in the candidate"),
        (WEIGHT, replaced(WEIGHT, (3, slice(4)), np.nan), np.float32, "4 are NaN or Inf in the candidate"),
    ],
)
def test_how_a_constant_differs(left: object, right: object, dtype: type, text: str) -> None:
    difference = constant_difference(np.array(left, np.float32), np.array(right, np.float32).astype(dtype))
    assert difference is not None
    said, values, _ = difference
    assert text in said
    assert values is not None
    if dtype is np.float32:
        np.testing.assert_array_equal(values, np.array(right, np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_rounded_constant_is_the_same(dtype: type) -> None:
    rounded = np.array([0.1, 65504], np.float16).astype(dtype)
    assert constant_difference(np.array([0.1, 7e4], np.float32), rounded) is None
