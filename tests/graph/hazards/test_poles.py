"""Values that FP16 brings to zero, or below it, where zero gives Inf or NaN: named with the node that gives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.find import pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard, hazard_findings
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
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


def power(exponent: float) -> list[object]:
    return [node("Constant", [], "n", value_float=exponent), node("Pow", ["x", "n"], "y", "pole")]


def squares(name: str, epsilon: str = "") -> list[object]:
    guarded = [node("Add", ["q", epsilon], "e", "guard")] if epsilon else []
    return [node("Mul", ["x", "x"], "q", "squares"), *guarded, node(name, ["e" if epsilon else "q"], "y", "pole")]


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
    constants = [constant("one", 1.0), constant("half", 0.5), constant("eps", 1e-5), constant("tiny", 1e-10)]
    shape = ["batch", COLUMNS]
    proto = models.model(nodes, [value("x", shape)], [value("y", None)], constants)  # type: ignore[arg-type]
    found = hazards_on(proto, {"x": x}, folder)
    return [h for h in found if h.wording.startswith("pole") or (h.code == "vanishing-values" and not h.is_note)]


def logits(largest: float) -> np.ndarray:
    return np.linspace(-largest, largest, 4 * COLUMNS, dtype=np.float32).reshape(4, COLUMNS)


@pytest.mark.parametrize(
    ("nodes", "x", "code", "words"),
    [
        (probability("Log"), logits(1.0) * np.float32([40] * COLUMNS), "vanishing-values", "Log is -Inf or NaN"),
        (complement("Log"), logits(12.0), "cancellation", "zero or negative"),
        (complement("Div"), logits(10.0), "cancellation", "the division gives Inf or NaN"),
        (variance(), logits(0.1) + 40, "cancellation", "negative, and there Sqrt is NaN"),
    ],
    ids=["log of a probability", "log of a complement", "one over it as Div", "root of a variance"],
)
def test_named_with_its_count(nodes: list[object], x: np.ndarray, code: str, words: str, tmp_path: Path) -> None:
    hazard, *of_operands = poles(nodes, x, tmp_path)
    severity = "error" if code == "vanishing-values" else "warning"
    assert (hazard.code, hazard.place.node, hazard.severity) == (code, "pole", severity)
    assert [(other.code, other.severity) for other in of_operands] in ([], [(code, severity)])
    assert hazard.rules_out(Precision.FP16) == (severity == "error")
    assert not hazard.rules_out(Precision.BF16)
    assert words in hazard.reason
    assert 0 < hazard.evidence["lost"] <= hazard.evidence["values"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("nodes", "x"),
    [
        (probability("Log"), logits(1.0)),
        (complement("Div"), logits(4.0)),
        (variance(), logits(3.0)),
        (power(0.5), np.where(logits(3.0) > 0, 1.0, 1e-5).astype(np.float32)),  # a root of a few tiny values
        (power(-1.0), 1 + logits(0.5)),
        (squares("Log", "eps"), logits(3.0) * 1e-3),  # and an epsilon that FP16 holds
        (squares("Reciprocal", "half"), logits(3.0) * 1e-5),
        ([node("Sqrt", ["x"], "y", "pole")], np.zeros((4, COLUMNS), np.float32)),  # zero in FP32 already
        ([node("Log", ["x"], "y", "pole")], np.zeros((0, COLUMNS), np.float32)),
    ],
)
def test_a_sound_twin_is_silent(nodes: list[object], x: np.ndarray, tmp_path: Path) -> None:
    assert poles(nodes, x, tmp_path) == []


def test_squares_that_vanish_before_a_logarithm_are_named_beside_the_epsilon_that_does(tmp_path: Path) -> None:
    x = logits(1.0) * np.logspace(-6, 0, COLUMNS, dtype=np.float32)
    (hazard,) = poles(squares("Log", "tiny"), x, tmp_path)
    (finding,) = hazard_findings([hazard], "inspect")
    exact = x.astype(np.float64) ** 2
    assert finding.evidence["zero_share"] == np.mean(exact < 2**-25)
    assert finding.evidence["subnormal_share"] == np.mean((exact >= 2**-25) & (exact < 2**-14))
    assert "of the values that Log reads, 43.8% are so small that FP16 makes them zero" in finding.text
    assert (finding.severity, hazard.severity) == ("warning", "error")


def test_rows_of_zeros_are_the_epsilons_finding_alone(tmp_path: Path) -> None:
    x = logits(1.0) * np.float32([[0], [1], [1], [1]])
    assert poles(squares("Log", "tiny"), np.where(abs(x) < 0.05, 0, x).astype(np.float32), tmp_path) == []


@pytest.mark.parametrize("nodes", [power(-1.0), squares("Sqrt"), [node("Reciprocal", ["x"], "y", "pole")]])
def test_values_that_lose_digits_are_named_where_the_results_change(nodes: list[object], tmp_path: Path) -> None:
    """Largest where the operand is smallest; a root of values that are all tiny changes as much."""
    hazard, *_ = poles(nodes, np.float32(2e-5) + abs(logits(1e-6)), tmp_path)
    assert (hazard.code, hazard.severity) == ("vanishing-values", "warning")
    assert hazard.evidence["subnormal_share"] == (0.0 if nodes[-1].op_type == "Sqrt" else 1.0)  # type: ignore[attr-defined]
    assert hazard.evidence["relative_error"] > 0.03  # type: ignore[operator]


def test_the_group_that_computes_the_values_is_pinned_too(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], "m", "fc"), node("Relu", ["m"], "r", "relu"), node("Log", ["r"], "l", "pole")]
    nodes.append(node("MatMul", ["l", "w"], "y", "head"))
    w = constant("w", np.eye(COLUMNS, dtype=np.float32))
    proto = models.model(nodes, [value("x", ["batch", COLUMNS])], [value("y", None)], [w])
    found = hazards_on(proto, {"x": np.full((4, COLUMNS), 1e-9, np.float32)}, tmp_path)
    model = load_model(tmp_path / "model.onnx")
    owners = GroupedModel(model, find_groups(model)).owners
    assert set(pinned_by_hazards(found)) == {owners["fc"], owners["pole"]}
