"""A precision that mptune does not have: TF32's rounding, stored as FLOAT, searched beside FP16 without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.graph.precision import Precision
from tests.graph.models import model, node, save, value, weight


@pytest.fixture
def tf32() -> Iterator[Precision]:
    row = Precision.add("tf32", "float", 10, (-126, 127), 4, "tf32_tflops", (8, 0))
    yield row
    Precision.remove(row)


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Four products; what the third computes is beyond FP16's range, and within TF32's."""
    scales = (1 / 16, 1 / 16, 1e4, 1e-4)
    nodes = [node("MatMul", [f"y{k}", f"w{k}"], f"y{k + 1}", f"matmul{k}") for k in range(4)]
    weights = [weight(f"w{k}", 1024, 1024, scale=scale) for k, scale in enumerate(scales)]
    np.savez(tmp_path / "x.npz", y0=np.random.default_rng(0).standard_normal((96, 1024)).astype("f"))
    return save(model(nodes, [value("y0", [32, 1024])], [value("y4", [32, 1024])], weights), tmp_path)


def test_a_new_precision_is_searched(tf32: Precision, network: Path, tmp_path: Path) -> None:
    run = mptune.search(
        network,
        data=tmp_path / "x.npz",
        out=tmp_path / "run",
        target="jetson-orin-nano-8gb",
        precisions=("fp32", "fp16", "tf32"),
        budget=12,
        progress=False,
    )
    plans = {tuple(point.plan.precision.values()): point for point in run.points}
    assert {*map(str, Precision)} - {"bf16"} == {name for plan in plans for name in plan}
    mixed = [point for names, point in plans.items() if {"fp16", "tf32"} <= {*names}]
    assert all(np.isfinite(point.error_value) for point in mixed)
    alone = next(point for names, point in plans.items() if {*names} == {"fp32", "tf32"})
    assert 1e-5 < alone.error_value < 2e-3
    written = onnx.load(mptune.export(tmp_path / "run", tmp_path / "out.onnx", plan=alone.id))
    assert all(node.op_type == "MatMul" for node in written.graph.node), "no Casts: it is stored as FP32"


def test_adding_it_takes_at_most_60_lines() -> None:
    assert len(Path(__file__).read_text().splitlines()) <= 60
