"""What rounding does at single nodes: counters that stand still, differences, decisions and poles, and sound twins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.finding import CODES
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard, hazard_findings
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from tests.graph.hazards.observed import hazards_on
from tests.graph.models import constant, text


@pytest.mark.parametrize(
    ("start", "output", "is_named"), [(3000.0, "count_out", True), (30.0, "count_out", False), (3000.0, "other", False)]
)
def test_a_counter_that_stands_still(start: float, output: str, is_named: bool, tmp_path: Path) -> None:
    inputs, outputs = "float[n,4] x, float[n,1] count", f"float[n,4] y, float[n,1] {output}"
    nodes = f"[next] {output} = Add(count, one) y = Div(x, {output})"
    proto = text(f"({inputs}) => ({outputs}) <float one = {{1}}> {{ {nodes} }}")
    feed = {"x": np.ones((4, 4), np.float32), "count": np.float32([[start], [start + 2], [start + 4], [start + 6]])}
    found = hazards_on(proto, feed, tmp_path)
    assert [hazard.place.node for hazard in found if hazard.code == "stagnation"] == (["next"] if is_named else [])


def test_the_groups_that_compute_what_cancels_are_named_too(tmp_path: Path) -> None:
    graph = """(float[n,8] x) => (float[n,8] y) <int64[2] shape = {-1, 8}> {
        [first] a = MatMul(x, v) [second] b = MatMul(x, w) [view] r = Reshape(b, shape) [distance] d = Sub(a, r)
        [head] y = MatMul(d, u)
    }"""
    rng = np.random.default_rng(0)
    one = rng.uniform(1, 2, (8, 8)).astype(np.float32)
    proto = text(graph, constant("v", one), constant("w", one + 1e-4), constant("u", np.eye(8)))
    feed = {"x": rng.uniform(1, 2, (4, 8)).astype(np.float32)}
    hazards = [hazard for hazard in hazards_on(proto, feed, tmp_path) if hazard.code == "cancellation"]
    model = load_model(tmp_path / "model.onnx")
    owners = GroupedModel(model, find_groups(model)).owners
    assert {hazard.place.group for hazard in hazards} == {owners[n] for n in ("first", "second", "view", "distance")}
    (finding,) = hazard_findings(hazards, "inspect")
    assert finding.where.nodes == ("distance",)
    assert "at node 'distance'" in finding.text


RNG = np.random.default_rng(0)
SPREAD = RNG.uniform(0, 1, (64, 8))
EDGES = np.sort(RNG.uniform(0, 600, (1, 128, 4)))
WARP = np.stack(np.meshgrid(np.linspace(-1, 1, 1920), np.linspace(-1, 1, 4)), -1)[None]
IDS = np.arange(3000.0, 3512).reshape(64, 8)
ROWS = {
    # code: graph, data that show it, sound data; the node is called "it"
    "cancellation of a steep logarithm": ("[it] y = Log(x)", 1 + 1e-3 * SPREAD, 1 + SPREAD),
    "cancellation at the end of an arc cosine": ("[it] y = Acos(x)", 1 - 1e-6 * SPREAD, 1 - SPREAD),
    "cancellation in a norm": ("[it] y = LayerNormalization<axis = -1>(x, one)", 300 + 0.3 * SPREAD, 3 + SPREAD),
    "stagnation before a logarithm": ("e = Exp(x) [it] s = Add(one, e) y = Log(s)", -9 - SPREAD, SPREAD),
    "spacing of what is equal": (
        "m = ReduceMax<axes = [-1]>(x) [it] e = Equal(x, m) y = Cast<to = 1>(e)", 1 - 2e-4 * SPREAD, SPREAD
    ),
    "spacing of an output": ("m = Mul(x, w) [it] a = Add(m, level) y = Identity(a)", 20 * SPREAD, 3000 * SPREAD),
    "index-in-float of fractions": ("[it] f = Floor(x) i = Cast<to = 7>(f) y = Gather(table, i)", 600 * SPREAD, SPREAD),
    "index-in-float of a count": (
        "[it] c = Ceil(x) n = CumSum(c, axis) l = Less(id, n) y = Cast<to = 1>(l)", 200 * SPREAD, 4 + 0 * SPREAD
    ),
    "index-in-float of a difference": (
        "m = ReduceMin(x) s = Sub(x, m) a = Abs(s) [it] l = Less(a, half) y = Cast<to = 1>(l)", IDS, IDS - 3000
    ),
    "overflow of squares": ("[it] n = ReduceL2<axes = [-1]>(x) y = Div(x, n)", 200 + SPREAD, SPREAD),
    "long-sum of a CumSum": ("[it] c = CumSum(x, axis) y = Tanh(c)", np.ones((1, 3000)), np.ones((1, 300))),
    "spacing of a warp": ("[it] y = GridSample(image, x)", WARP, WARP[:, :, ::8]),
    "spacing of boxes": ("[it] k = NonMaxSuppression(x, scores, most) y = Cast<to = 1>(k)", EDGES + 5e4, EDGES),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.smoke
def test_a_row_of_the_table_names_the_node_and_is_silent_of_sound_values(name: str, tmp_path: Path) -> None:
    nodes, shown, sound = ROWS[name]
    for x, expected in ((shown, [(name.split()[0], "it")]), (sound, [])):
        constants = {
            "one": np.ones(8),
            "w": np.ones(8),
            "level": 3e4,
            "id": 3257.0,
            "half": 0.5,
            "table": np.ones((600, 2)),
        }
        constants |= {"image": np.ones((1, 1, *x.shape[1:-1])), "scores": np.ones((1, 1, 128))}
        given = [constant(key, value) for key, value in constants.items()]
        given += [constant(key, value, np.int64) for key, value in {"axis": 1, "most": [9]}.items()]
        given_axes, axes = "nabc"[: x.ndim], "opqr"[: x.ndim + ("Gather" in nodes) - ("NonMax" in nodes)]
        ends = f"(float[{','.join(given_axes)}] x) => (float[{','.join(axes)}] y)"
        proto = text(f"{ends} {{ {nodes} }}", *given)
        found = hazards_on(proto, {"x": x.astype(np.float32)}, tmp_path)
        named = {(hazard.code, hazard.place.node) for hazard in found if hazard.place.node and not hazard.is_note}
        assert sorted(named) == expected
        assert all(hazard.reason != CODES[hazard.code].meaning for hazard in found)


def test_a_single_number_is_judged_too(tmp_path: Path) -> None:
    proto = text("(float x) => (float y) <float level = {3e4}> { [it] y = Add(x, level) }")
    assert [h.code for h in hazards_on(proto, {"x": np.array(1, np.float32)}, tmp_path) if not h.is_note] == []


def test_the_mean_that_a_norm_takes_out_is_no_step(tmp_path: Path) -> None:
    nodes = """m = ReduceMean<axes = [-1]>(x) [centre] d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes = [-1]>(q)
        e = Add(v, eps) r = Sqrt(e) y = Div(d, r)"""
    proto = text(f"(float[n,8] x) => (float[n,8] y) <float eps = {{1e-5}}> {{ {nodes} }}", opset=13)
    x = np.concatenate([1 + SPREAD[:, :4], -1 - SPREAD[:, :4] + 1e-4], -1).astype(np.float32)
    assert [h.place.node for h in hazards_on(proto, {"x": x}, tmp_path) if h.code == "stagnation"] == []


def test_infinite_values_are_as_good_to_what_saturates(tmp_path: Path) -> None:
    for reader, is_pinned in (("Tanh", False), ("Relu", True)):
        proto = text(f"(float[n,8] x) => (float[n,8] y) <float k = {{3e4}}> {{ h = Mul(x, k) y = {reader}(h) }}")
        found = hazards_on(proto, {"x": np.full((4, 8), 9, np.float32)}, tmp_path, "op")
        assert {h.severity for h in found if h.place.tensor == "h"} == {"error" if is_pinned else "info"}
        assert bool(pinned_by_hazards(found)) == is_pinned


FREQUENCIES = constant("frequencies", [[1.0, 0.3, 0.1, 0.03]])
TRACED = {
    "positions that FP16 has": (2000, "a = Mul(p, frequencies)", ("angle", "join", "turn")),
    "positions that it lacks": (8000, "a = Mul(p, frequencies)", ("count", "angle", "join", "turn")),
    "a product of matrices": (2000, "a = MatMul(p, frequencies)", ("angle", "join", "turn")),
    "a step and an origin": (2000, "a = Add(p, x)", ("angle", "join", "turn")),
    "less than 1/50 of a period": (120, "a = Add(p, x)", ()),
    "whole numbers, which it has": (2000, "a = Max(p, x)", ()),
    "small angles": (100, "a = Mul(p, frequencies)", ()),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_large_angle_is_pinned_from_where_its_digits_are_lost(name: str, tmp_path: Path) -> None:
    last, computed, pinned = TRACED[name]
    graph = f"""(float[n,1] frames, float[n,4] x) => (float[n,8] y) {{
        [count] p = Round(frames) [angle] {computed} [join] c = Concat<axis = 1>(a, a) [turn] y = Sin(c)
    }}"""
    rng = np.random.default_rng(0)
    feed = {"frames": rng.uniform(0, last, (64, 1)), "x": rng.uniform(0, 1, (64, 4))}
    feed = {name: values.astype(np.float32) for name, values in feed.items()}
    hazards = hazards_on(text(graph, FREQUENCIES), feed, tmp_path, "op")
    model = load_model(tmp_path / "model.onnx")
    groups = GroupedModel(model, find_groups(model, "op")).groups
    pins = pinned_by_hazards(hazards)
    assert [node for group in groups if group.id in pins for node in group.nodes] == [*pinned]
    assert all(f"from node {pinned[0]!r} on" in reason for reason in pins.values())


# -- poles -----------------------------------------------------------------------------------------------------------

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


def squares(name: str, epsilon: str = "eps") -> str:
    return f"q = Mul(x, x) e = Add(q, {epsilon}) [pole] y = {name}(e)"


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
        (squares("Log"), logits(3.0) * 1e-3),  # and an epsilon that FP16 holds
        (squares("Reciprocal", "half"), logits(3.0) * 1e-5),
        ("[pole] y = Sqrt(x)", np.zeros((4, COLUMNS), np.float32)),  # zero in FP32 already
        ("[pole] y = Log(x)", np.zeros((0, COLUMNS), np.float32)),
    ],
)
def test_a_sound_twin_is_silent(nodes: str, x: np.ndarray, tmp_path: Path) -> None:
    assert poles(nodes, x, tmp_path) == []


def test_rows_of_zeros_are_the_epsilons_finding_alone(tmp_path: Path) -> None:
    x = logits(1.0) * np.float32([[0], [1], [1], [1]])
    assert poles(squares("Log", "tiny"), np.where(abs(x) < 0.05, 0, x).astype(np.float32), tmp_path) == []


def test_values_that_all_vanish_before_a_root_are_named(tmp_path: Path) -> None:
    """A root of zero is none that is Inf; nothing is left of the values."""
    (hazard,) = poles("q = Mul(x, x) [pole] y = Sqrt(q)", np.float32(2e-5) + abs(logits(1e-6)), tmp_path)
    assert (hazard.code, hazard.severity, hazard.evidence["zero_share"]) == ("vanishing-values", "warning", 1.0)


def test_the_group_that_computes_the_values_is_pinned_too(tmp_path: Path) -> None:
    nodes = "[fc] m = MatMul(x, w) r = Relu(m) [pole] l = Log(r) y = MatMul(l, w)"
    w = constant("w", np.eye(COLUMNS))
    proto = text(f"(float[n,{COLUMNS}] x) => (float[n,{COLUMNS}] y) {{ {nodes} }}", w)
    found = hazards_on(proto, {"x": np.full((4, COLUMNS), 1e-9, np.float32)}, tmp_path)
    model = load_model(tmp_path / "model.onnx")
    owners = GroupedModel(model, find_groups(model)).owners
    assert set(pinned_by_hazards(found)) == {owners["fc"], owners["pole"]}
