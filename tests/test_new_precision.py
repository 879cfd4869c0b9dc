"""A precision that mptune does not have: TF32's rounding, stored as FLOAT, searched beside FP16 without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PRECISIONS, REDUCED, Precision, add_precision
from mptune.graph.writing.rewrite import rewrite
from tests.graph.models import model, node, save, value, weight


@pytest.fixture
def tf32() -> Iterator[Precision]:
    row = add_precision("tf32", "float", 10, (-126, 127), 4, "tf32_tflops", (8, 0))
    yield row
    PRECISIONS.remove(row)
    REDUCED.remove(row)


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Four products; what the third computes is beyond FP16's range, and within TF32's."""
    scales = (1 / 16, 1 / 16, 1e4, 1e-4)
    nodes = [node("MatMul", [f"y{k}", f"w{k}"], f"y{k + 1}", f"matmul{k}") for k in range(4)]
    weights = [weight(f"w{k}", 1024, 1024, scale=scale) for k, scale in enumerate(scales)]
    np.savez(tmp_path / "x.npz", y0=np.random.default_rng(0).standard_normal((384, 1024)).astype("f"))
    return save(model(nodes, [value("y0", [128, 1024])], [value("y4", [128, 1024])], weights), tmp_path)


@pytest.mark.smoke
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
    mixed = next(point for names, point in plans.items() if names == ("fp16", "fp16", "tf32", "tf32"))
    assert 1e-5 < mixed.error_value < 2e-3
    written = rewrite(load_model(network), mixed.plan)
    assert sum(each.op_type == "Cast" for each in written.graph.node) == 2, "one to FP16, and none to TF32"


def test_adding_it_takes_at_most_60_lines() -> None:
    assert len(Path(__file__).read_text().splitlines()) <= 60
