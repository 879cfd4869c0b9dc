"""Products whose operands are rounded as TF32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.loading.model import load_model
from mptune.graph.writing.variants import Rounding, write_tf32
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.helpers import run

UNIT = 2.0**-10
"""Of TF32, from 1 to 2."""


@pytest.mark.parametrize(("rounding", "x"), [("nearest", 1.0 + UNIT), ("truncated", 1.0)])
@pytest.mark.parametrize(("nodes", "bias"), [("y = MatMul(x, w)", 0.0), ("y = Gemm(x, w, b)", 1.0 + 0.75 * UNIT)])
def test_both_operands_of_a_product_keep_ten_bits_and_its_bias_keeps_all(
    nodes: str, bias: float, rounding: Rounding, x: float, tmp_path: Path
) -> None:
    constants = models.constant("w", [[1.0 + 0.25 * UNIT]]), models.constant("b", [1.0 + 0.75 * UNIT])
    proto = models.text(f"(float[1,1] x) => (float[1,1] y) {{ {nodes} }}", *constants)
    model = load_model(models.save(proto, tmp_path))
    bank = WeightBank.write(model, tmp_path / "weights")
    path = write_tf32(model, bank, tmp_path / "weights" / "tf32.onnx", rounding)
    given = np.full((1, 1), 1.0 + 0.75 * UNIT, np.float32)
    assert run(path, {"x": given})["y"].item() == x * 1.0 + bias
