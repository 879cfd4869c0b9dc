"""``mptune compare`` names a constant that a converter has limited where that changes an output, and only there.

onnxconverter-common holds constants at ±10000 and away from 0 by 1e-7; ONNX Runtime's copy of it takes both as options.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16

import mptune
from mptune.diagnosis.pairs.structure import constant_difference
from tests.graph.models import constant, model, node, save, value, weight

ROWS = {"x": np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)}


def scaled(unit: float) -> onnx.ModelProto:
    """A result in physical units, and back."""
    return model(
        [
            node("MatMul", ["x", "w"], "h", "/fc"),
            node("Mul", ["h", "unit"], "u", "/to_units"),
            node("Mul", ["u", "last"], "y", "/back"),
        ],
        [value("x", ["batch", 16])],
        [value("y", ["batch", 8])],
        [weight("w", 16, 8), constant("unit", [unit] * 8), constant("last", 1e-4)],
    )


def masked(epsilon: float = 1e-5) -> onnx.ModelProto:
    """A softmax of what a mask of -1e9 leaves, and a norm."""
    mask = np.where(np.arange(8) > 5, -1e9, 0.0)
    return model(
        [
            node("MatMul", ["x", "w"], "h", "/fc"),
            node("Add", ["h", "mask"], "m", "/mask"),
            node("Softmax", ["m"], "s", "/softmax"),
            node("LayerNormalization", ["s", "g", "b"], "y", "/norm", epsilon=epsilon),
        ],
        [value("x", ["batch", 16])],
        [value("y", ["batch", 8])],
        [weight("w", 16, 8), constant("mask", mask), weight("g", 8), constant("b", [3e-9] + [0.0] * 7)],
    )


def pair(proto: onnx.ModelProto, folder: Path) -> tuple[Path, Path]:
    half = convert_float_to_float16(proto, keep_io_types=True, max_finite_val=1e4, min_positive_val=1e-7)
    return save(proto, folder), save(half, folder, "half.onnx")


def test_a_limited_constant_is_named(tmp_path: Path) -> None:
    found = mptune.compare(*pair(scaled(25000.0), tmp_path), data=ROWS)
    (finding,) = [each for each in found.findings if each.code == "attribute-differs"]
    assert found.verdict == "differs"
    assert finding.where.nodes == ("/to_units",)
    assert finding.evidence["limited_to"] == 1e4
    assert "8 of 8" in finding.text
    assert finding.evidence["alone"] == pytest.approx(finding.evidence["error"], rel=0.05)
    assert "max_finite_val" in finding.cure


def test_a_limited_constant_that_changes_nothing_is_no_difference(tmp_path: Path) -> None:
    found = mptune.compare(*pair(masked(), tmp_path), data=ROWS)
    assert [(each.code, each.severity) for each in found.findings] == [("agrees", "info")]
    assert found.verdict == "agrees"


def test_of_several_differences_the_first_that_changes_an_output_is_named(tmp_path: Path) -> None:
    other = masked(epsilon=1e-2)
    mask = next(tensor for tensor in other.graph.initializer if tensor.name == "mask")
    mask.CopyFrom(onnx.numpy_helper.from_array(np.maximum(onnx.numpy_helper.to_array(mask), -1e4), "mask"))
    found = mptune.compare(save(masked(), tmp_path), save(other, tmp_path, "other.onnx"), data=ROWS)
    (finding,) = [each for each in found.findings if each.code == "attribute-differs"]
    assert finding.where.nodes == ("/norm",)
    assert finding.evidence["differences"] == 1


WEIGHT = np.random.default_rng(2).standard_normal((16, 16))
KERNEL = np.random.default_rng(2).standard_normal((32, 4, 3, 3))


def replaced(array: np.ndarray, place: object, value: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("left", "right", "dtype", "limit", "text"),
    [
        ([3.0], [2.0], np.float32, None, "1 of 1 values differ"),
        ([3e4], [1e4], np.float16, 1e4, "1 of 1 values differ"),
        ([3.0, -4.0, 1.0], [2.0, -2.0, 1.0], np.float32, 2.0, "2 of 3 values differ"),
        ([0.1, 22000.0, -18000.0, 1e-9], [0.1, 1e4, -1e4, 0.0], np.float16, 1e4, "2 of 4 values differ"),
        (WEIGHT, replaced(WEIGHT, (3, slice(4)), np.nan), np.float32, None, "4 of 256 values are NaN or Inf"),
        (KERNEL, replaced(KERNEL, 5, 0.0), np.float32, None, ": these are zero in the candidate"),
    ],
)
def test_how_a_constant_differs(left: object, right: object, dtype: type, limit: float | None, text: str) -> None:
    difference = constant_difference(np.array(left, np.float32), np.array(right, np.float32).astype(dtype))
    assert difference is not None
    assert difference.limit == limit
    assert text in difference.text
    assert difference.values is not None
    if dtype is np.float32:
        np.testing.assert_array_equal(difference.values, np.array(right, np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_rounded_constant_is_the_same(dtype: type) -> None:
    rounded = np.array([0.1, 65504], np.float16).astype(dtype)
    assert constant_difference(np.array([0.1, 7e4], np.float32), rounded) is None
