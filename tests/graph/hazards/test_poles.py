"""Values that FP16 brings to zero, or below it, where zero gives Inf or NaN: named with the node that gives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard, hazard_findings
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from tests.graph.hazards.observed import hazards_on
from tests.graph.models import constant, text

COLUMNS = 8


PROBABILITY = "p = Softmax<axis = -1>(x) [pole] y = Log(p)"
COMPLEMENT = "s = Sigmoid(x) d = Sub(one, s)"
OVER_COMPLEMENT = f"{COMPLEMENT} [pole] y = Div(one, d)"
VARIANCE = """
    q = Mul(x, x) m2 = ReduceMean<axes = [1]>(q) m = ReduceMean<axes = [1]>(x) mm = Mul(m, m) v = Sub(m2, mm)
    e = Add(v, eps) [pole] y = Sqrt(e)
"""
ROOT = "[pole] y = Pow(x, half)"
INVERSE = "n = Constant<value_float = -1.0>() [pole] y = Pow(x, n)"


def squares(name: str, epsilon: str = "") -> str:
    return (
        f"q = Mul(x, x) e = Add(q, {epsilon}) [pole] y = {name}(e)"
        if epsilon
        else f"q = Mul(x, x) [pole] y = {name}(q)"
    )


def poles(nodes: str, x: np.ndarray, folder: Path) -> list[Hazard]:
    given = "float one = {1}, float half = {0.5}, float eps = {1e-5}, float tiny = {1e-10}"
    proto = text(f"(float[n,{COLUMNS}] x) => (float[n,m] y) <{given}> {{ {nodes} }}")
    found = hazards_on(proto, {"x": x}, folder)
    return [h for h in found if h.wording.startswith("pole") or (h.code == "vanishing-values" and not h.is_note)]


def logits(largest: float) -> np.ndarray:
    return np.linspace(-largest, largest, 4 * COLUMNS, dtype=np.float32).reshape(4, COLUMNS)


@pytest.mark.parametrize(
    ("nodes", "x", "code", "words"),
    [
        (PROBABILITY, logits(1.0) * np.float32([40] * COLUMNS), "vanishing-values", "where Log gives Inf or NaN"),
        (f"{COMPLEMENT} [pole] y = Log(d)", logits(12.0), "cancellation", "where Log gives Inf or NaN"),
        (OVER_COMPLEMENT, logits(10.0), "cancellation", "where Div gives Inf or NaN"),
        (VARIANCE, logits(0.1) + 40, "cancellation", "where Sqrt gives Inf or NaN"),
    ],
    ids=["log of a probability", "log of a complement", "one over it as Div", "root of a variance"],
)
def test_named_with_its_count(nodes: str, x: np.ndarray, code: str, words: str, tmp_path: Path) -> None:
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
        (PROBABILITY, logits(1.0)),
        (OVER_COMPLEMENT, logits(4.0)),
        (VARIANCE, logits(3.0)),
        (ROOT, np.where(logits(3.0) > 0, 1.0, 1e-5).astype(np.float32)),  # a root of a few tiny values
        (INVERSE, 1 + logits(0.5)),
        (squares("Log", "eps"), logits(3.0) * 1e-3),  # and an epsilon that FP16 holds
        (squares("Reciprocal", "half"), logits(3.0) * 1e-5),
        ("[pole] y = Sqrt(x)", np.zeros((4, COLUMNS), np.float32)),  # zero in FP32 already
        ("[pole] y = Log(x)", np.zeros((0, COLUMNS), np.float32)),
    ],
)
def test_a_sound_twin_is_silent(nodes: str, x: np.ndarray, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("nodes", [INVERSE, squares("Sqrt"), "[pole] y = Reciprocal(x)"])
def test_values_that_lose_digits_are_named_where_the_results_change(nodes: str, tmp_path: Path) -> None:
    """Largest where the operand is smallest; a root of values that are all tiny changes as much."""
    hazard, *_ = poles(nodes, np.float32(2e-5) + abs(logits(1e-6)), tmp_path)
    assert (hazard.code, hazard.severity) == ("vanishing-values", "warning")
    assert hazard.evidence["subnormal_share"] == (0.0 if "Sqrt" in nodes else 1.0)
    assert hazard.evidence["relative_error"] > 0.03  # type: ignore[operator]


def test_the_group_that_computes_the_values_is_pinned_too(tmp_path: Path) -> None:
    nodes = "[fc] m = MatMul(x, w) r = Relu(m) [pole] l = Log(r) y = MatMul(l, w)"
    w = constant("w", np.eye(COLUMNS))
    proto = text(f"(float[n,{COLUMNS}] x) => (float[n,{COLUMNS}] y) {{ {nodes} }}", w)
    found = hazards_on(proto, {"x": np.full((4, COLUMNS), 1e-9, np.float32)}, tmp_path)
    model = load_model(tmp_path / "model.onnx")
    owners = GroupedModel(model, find_groups(model)).owners
    assert set(pinned_by_hazards(found)) == {owners["fc"], owners["pole"]}
