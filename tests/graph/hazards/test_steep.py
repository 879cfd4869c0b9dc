"""Results that rounding the operands moves far: steep functions, norms of an offset, whole numbers, small columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from mptune.graph.hazards.hazard import Hazard
from tests.graph import models
from tests.graph.hazards.observed import hazards_on
from tests.graph.models import constant, node, value

COLUMNS = 8
RNG = np.random.default_rng(0)


def found(nodes: list[object], x: np.ndarray, folder: Path) -> list[Hazard]:
    constants = [
        constant("one", np.ones(COLUMNS, np.float32)),
        constant("zero", np.zeros(COLUMNS, np.float32)),
        constant("power", 400.0),
        constant("cell", 0.05),
        constant("table", np.arange(4096 * 3, dtype=np.float32).reshape(4096, 3)),
        constant("offset", np.float32([0.0] * (COLUMNS - 1) + [25.0])),
        constant("scale", np.float32([100.0] * (COLUMNS - 1) + [0.01])),
    ]
    outputs = [value("y", None)]
    proto = models.model(nodes, [value("x", ["batch", COLUMNS])], outputs, constants, 17)  # type: ignore[arg-type]
    return [hazard for hazard in hazards_on(proto, {"x": x}, folder) if hazard.node == "it"]


def norm() -> list[object]:
    return [node("LayerNormalization", ["x", "one", "zero"], "y", "it", axis=-1)]


def function(operator: str) -> list[object]:
    return [node(operator, ["x", *(["power"] if operator == "Pow" else [])], "y", "it")]


def index() -> list[object]:
    return [
        node("Div", ["x", "cell"], "c", "cells"),
        node("Floor", ["c"], "f", "it"),
        node("Cast", ["f"], "i", "to index", to=TensorProto.INT64),
        node("Gather", ["table", "i"], "y", "read"),
    ]


def lowered() -> list[object]:
    return [
        node("Mul", ["x", "scale"], "s", "scaled"),
        node("Add", ["s", "offset"], "a", "raised"),
        node("Sub", ["a", "offset"], "y", "it"),
    ]


def noise(deviation: float, offset: float = 0.0) -> np.ndarray:
    return (deviation * RNG.standard_normal((64, COLUMNS)) + offset).astype(np.float32)


NEAR_ONE = (1 - 2e-4 * RNG.uniform(0.1, 1, (64, COLUMNS))).astype(np.float32)
EVEN = RNG.uniform(0.1, 0.9, (64, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize(
    ("nodes", "broken", "sound", "code", "words"),
    [
        (norm(), noise(0.3, 300.0), noise(1.0, 3.0), "cancellation", "LayerNormalization changes by"),
        (function("Acos"), NEAR_ONE, EVEN, "spacing", "Acos changes by"),
        (function("Pow"), 1 - 20 * (1 - NEAR_ONE), None, "spacing", "Pow changes by"),
        (index(), 80 * EVEN, EVEN, "index-in-float", "of which Gather 'read' makes an index"),
        (lowered(), noise(1.0), None, "cancellation", "column 7 of its result by"),
    ],
    ids=["norm of an offset", "acos near 1", "large power", "floor to an index", "small column"],
)
def test_named_with_its_figure(
    nodes: list[object], broken: np.ndarray, sound: np.ndarray | None, code: str, words: str, tmp_path: Path
) -> None:
    hazard = next(hazard for hazard in found(nodes, broken, tmp_path) if hazard.code is not None)
    assert (hazard.code, hazard.severity) == (code, "warning")
    assert words in hazard.reason
    if sound is not None:
        assert [hazard.code for hazard in found(nodes, sound, tmp_path) if hazard.code] == []


def test_values_that_become_equal_are_counted_against_those_that_are(tmp_path: Path) -> None:
    nodes = [
        node("ReduceMax", ["x"], "m", "largest", axes=[-1], keepdims=1),
        node("Equal", ["x", "m"], "e", "it"),
        node("Cast", ["e"], "y", "as a number", to=TensorProto.FLOAT),
    ]
    (hazard,) = found(nodes, NEAR_ONE, tmp_path)
    assert hazard.code == "spacing"
    assert "of what Equal finds equal" in hazard.reason
    assert found(nodes, EVEN, tmp_path) == []


@pytest.mark.parametrize(("operator", "answer"), [("Atanh", "Atanh is Inf or NaN"), ("Acos", ""), ("Asin", "")])
def test_values_that_become_one(operator: str, answer: str, tmp_path: Path) -> None:
    poles = [hazard for hazard in found(function(operator), NEAR_ONE, tmp_path) if hazard.kind == "pole"]
    assert [hazard.code for hazard in poles] == (["spacing"] if answer else [])  # 1 is an answer to Acos
    assert all(answer in hazard.reason for hazard in poles)
