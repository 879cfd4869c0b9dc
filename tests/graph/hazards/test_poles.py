"""Values that FP16 brings to zero, or below it, where zero gives Inf or NaN: named with the node that gives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.hazards.hazard import Hazard
from tests.graph import models
from tests.graph.hazards.observed import hazards_on
from tests.graph.models import constant, node, value

COLUMNS = 8


def probability(name: str) -> list[object]:
    return [node("Softmax", ["x"], "p", "softmax", axis=-1), node(name, ["p"], "y", "pole")]


def complement(name: str) -> list[object]:
    return [
        node("Sigmoid", ["x"], "s", "sigmoid"),
        node("Sub", ["one", "s"], "d", "complement"),
        *([node("Div", ["one", "d"], "y", "pole")] if name == "Div" else [node(name, ["d"], "y", "pole")]),
    ]


def variance() -> list[object]:
    return [
        node("Mul", ["x", "x"], "q", "squares"),
        node("ReduceMean", ["q"], "m2", "mean of squares", axes=[1]),
        node("ReduceMean", ["x"], "m", "mean", axes=[1]),
        node("Mul", ["m", "m"], "mm", "square of mean"),
        node("Sub", ["m2", "mm"], "v", "variance"),
        node("Add", ["v", "eps"], "e", "guard"),
        node("Sqrt", ["e"], "y", "pole"),
    ]


def poles(nodes: list[object], x: np.ndarray, folder: Path) -> list[Hazard]:
    constants = [constant("one", 1.0), constant("eps", 1e-5)]
    shape = ["batch", COLUMNS]
    proto = models.model(nodes, [value("x", shape)], [value("y", None)], constants)  # type: ignore[arg-type]
    return [hazard for hazard in hazards_on(proto, {"x": x}, folder) if hazard.kind == "pole"]


def logits(largest: float) -> np.ndarray:
    return np.linspace(-largest, largest, 4 * COLUMNS, dtype=np.float32).reshape(4, COLUMNS)


@pytest.mark.parametrize(
    ("nodes", "x", "code", "words"),
    [
        (probability("Log"), logits(1.0) * np.float32([40] * COLUMNS), "vanishing-epsilon", "Log is -Inf or NaN"),
        (probability("Reciprocal"), logits(40.0), "vanishing-epsilon", "Reciprocal is Inf"),
        (complement("Log"), logits(12.0), "cancellation", "zero or negative"),
        (complement("Div"), logits(12.0), "cancellation", "the division gives Inf or NaN"),
        (variance(), logits(0.1) + 40, "cancellation", "negative, and there Sqrt is NaN"),
    ],
    ids=["log of a probability", "one over it", "log of a complement", "one over it as Div", "root of a variance"],
)
def test_named_with_its_count(nodes: list[object], x: np.ndarray, code: str, words: str, tmp_path: Path) -> None:
    (hazard,) = poles(nodes, x, tmp_path)
    assert (hazard.code, hazard.node, hazard.severity) == (code, "pole", "warning")
    assert words in hazard.reason
    assert 0 < hazard.evidence["lost"] <= hazard.evidence["values"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("nodes", "x"),
    [
        (probability("Log"), logits(1.0)),
        (complement("Log"), logits(4.0)),
        (complement("Div"), logits(4.0)),
        (variance(), logits(3.0)),
        ([node("Sqrt", ["x"], "y", "pole")], np.zeros((4, COLUMNS), np.float32)),
        ([node("Log", ["x"], "y", "pole")], np.zeros((0, COLUMNS), np.float32)),
    ],
    ids=["probability", "complement", "division", "variance", "zero in FP32 already", "nothing"],
)
def test_a_sound_twin_is_silent(nodes: list[object], x: np.ndarray, tmp_path: Path) -> None:
    assert poles(nodes, x, tmp_path) == []
