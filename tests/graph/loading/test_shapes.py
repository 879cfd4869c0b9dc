"""Shapes without running the model, against shapes of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.loading.model import load_model
from mptune.graph.loading.shapes import ASSUMED_SIZE, static_shapes
from tests.graph import models
from tests.graph.hazards.observed import ranges_on
from tests.graph.models import constant, node, value

EXPORTED = sorted((Path(__file__).parents[1] / "exported").glob("*.onnx"))


@pytest.mark.parametrize("path", EXPORTED, ids=lambda p: p.stem)
def test_inferred_shapes_are_those_of_a_run(path: Path, tmp_path: Path) -> None:
    """What torch's exporters write computes its shapes at run time, in places by Range, Where and Expand."""
    model = load_model(path)
    inferred = static_shapes(model, batch=2)
    assert inferred.unknown == 0
    rng = np.random.default_rng(0)
    feed = {
        i.name: rng.integers(0, 50, inferred.shapes[i.name])
        if i.dtype == "int64"
        else rng.standard_normal(inferred.shapes[i.name], np.float32)
        for i in model.inputs
    }
    ranges = ranges_on(model, [feed], tmp_path)
    assert {name: seen.shape for name, seen in ranges.items()} == {name: inferred.shapes[name] for name in ranges}


def test_says_what_it_assumed(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "z"], "y", "m")]
    inputs = [value("x", ["time", "batch", 8]), value("z", ["time", 8, None])]
    model = load_model(models.save(models.model(nodes, inputs, [value("y", None)]), tmp_path))
    inferred = static_shapes(model, batch=3)
    assert inferred.assumed == {"time": ASSUMED_SIZE, "batch": 3, "z[2]": ASSUMED_SIZE}
    assert inferred.shapes["y"] == (ASSUMED_SIZE, 3, ASSUMED_SIZE)
    assert inferred.unknown == 0


def test_what_depends_on_values_stays_unknown(tmp_path: Path) -> None:
    nodes = [node("NonZero", ["x"], "n"), node("Cast", ["n"], "f", to=1), node("Add", ["f", "one"], "y")]
    proto = models.model(nodes, [value("x", [4, 4])], [value("y", None)], [constant("one", 1.0)])
    inferred = static_shapes(load_model(models.save(proto, tmp_path)))
    assert inferred.unknown == 2
    assert "y" not in inferred.shapes
