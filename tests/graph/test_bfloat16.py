"""Roundings to BFLOAT16 and to split mantissas, held against ONNX Runtime's Cast and against the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from mptune.graph.loading.tensors import rounded
from mptune.graph.plan import PRECISIONS, REDUCED, Precision, add_precision
from mptune.graph.writing.rewrite import rounding_nodes
from tests.graph.helpers import run
from tests.graph.models import model, save, text, value

BF16_MAX = Precision.BF16.largest

RNG = np.random.default_rng(0)
EDGES = np.array([0.0, -0.0, np.inf, -np.inf, BF16_MAX, 3.4028235e38, -3.4028235e38, 1e-45, 9.2e-41, 1.0], np.float32)


def patterns(count: int) -> np.ndarray:
    """FP32 numbers of all bit patterns alike, subnormals, infinities and NaN among them."""
    return RNG.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("optimised", [False, True])
def test_rounds_as_onnx_runtime_does(optimised: bool, tmp_path: Path) -> None:
    """So a pair of Casts is a rounding: it is not optimised away, and ties go to even."""
    x = np.concatenate([EDGES, patterns(200_000)])
    last = "y = Cast<to = 1>(low)" if not optimised else "back = Cast<to = 1>(low) y = Neg(back)"
    graph = f"(float[n] x) => (float[n] y) {{ low = Cast<to = 16>(x) {last} }}"
    save(text(graph, opset=13), tmp_path, "m.onnx")
    y = run(tmp_path / "m.onnx", {"x": x})["y"]
    ours = rounded(x, Precision.BF16)
    np.testing.assert_array_equal(-y if optimised else y, ours)
    assert np.isnan(ours[np.isnan(x)]).all()


def test_keeps_shapes() -> None:
    assert rounded(np.float32(3.0), Precision.BF16).shape == ()
    assert rounded(np.zeros((2, 0, 3), np.float32), Precision.BF16).shape == (2, 0, 3)
    assert rounded(np.full((2, 3), 1e5, np.float32), Precision.BF16).tolist() == [[99840.0] * 3] * 2
    assert rounded(np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2], Precision.BF16).shape == (3, 2)


def test_a_mantissa_is_split_as_constants_are_rounded() -> None:
    """Of TF32, for which ONNX has no type."""
    tf32 = add_precision("tf32", "float", 10, (-126, 127), 4, "tf32_tflops")
    try:
        x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * np.float32(1e9)
        x[:4] = np.inf, np.nan, 0.0, 3e38
        split = model(rounding_nodes("x", "low", "y", tf32), [value("x", [10_000])], [value("y", [10_000])])
        with np.errstate(all="ignore"):
            (y,) = ReferenceEvaluator(split).run(None, {"x": x})
        np.testing.assert_array_equal(y[:4], x[:4])
        np.testing.assert_array_equal(y[4:], rounded(x, tf32)[4:])
        assert np.abs(y[4:] / x[4:] - 1).max() <= 2.0**-11
    finally:
        PRECISIONS.remove(tf32)
        REDUCED.remove(tf32)
