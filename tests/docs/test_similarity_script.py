"""The page on metrics has a script for PSNR, SSIM and cosine similarity: its values, against known ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import blocks_of, read

IMAGE = np.random.default_rng(1).uniform(size=(2, 3, 24, 24)).astype(np.float32)
IMAGE.reshape(-1)[:2] = 0.0, 1.0  # so that the peak is 1
Function = Callable[..., float]


@pytest.fixture(scope="module")
def functions() -> dict[str, Function]:
    (script,) = (block for block in blocks_of(read("docs/guide/metrics.md")) if block.title == "similarity.py")
    names: dict[str, Any] = {}
    exec(compile(script.body, "similarity.py", "exec"), names)
    return names


@pytest.mark.parametrize(("name", "best"), [("psnr", 120.0), ("ssim", 1.0), ("cosine", 1.0)])
def test_equal_images_have_the_best_value_and_labels_take_the_references_place(
    functions: dict[str, Function], name: str, best: float
) -> None:
    image, other = {"clean": IMAGE}, {"clean": IMAGE[::-1]}
    assert functions[name](image, image, {}, {}) == functions[name](image, other, {}, image) == pytest.approx(best)
    assert functions[name](image, other, {}, {}) < 0.9 * best


def test_known_values(functions: dict[str, Function]) -> None:
    assert functions["psnr"]({"clean": IMAGE + 0.1}, {"clean": IMAGE}, {}, {}) == pytest.approx(20.0, abs=1e-3)
    assert functions["cosine"]({"clean": -2 * IMAGE}, {"clean": IMAGE}, {}, {}) == pytest.approx(-1.0)
    # Equation 13 of Wang et al. far from the two outliers, where variances and covariance are zero.
    flat = np.full((1, 1, 64, 64), 0.5)
    flat[..., 0, 0], flat[..., 0, 1] = 0.0, 1.0
    expected = (2 * 0.7 * 0.5 + 1e-4) / (0.74 + 1e-4)
    assert functions["ssim"]({"clean": flat + 0.2}, {"clean": flat}, {}, {}) == pytest.approx(expected, abs=1e-2)
