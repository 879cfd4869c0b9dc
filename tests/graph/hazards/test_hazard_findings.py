"""Hazards as findings: which have a code, what stands in them, and what is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.finding import Finding
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import ObservedValues, TensorRange, hazard_findings
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from tests.graph import models
from tests.graph.hazards.observed import magnitudes_of, ranges_on
from tests.graph.models import constant, text, weight


def findings(proto: onnx.ModelProto, folder: Path, ranges: dict[str, float] | None = None) -> tuple[Finding, ...]:
    model = load_model(models.save(proto, folder))
    return hazard_findings(
        find_hazards(GroupedModel(model, find_groups(model)), magnitudes_of(ranges or {})), "inspect"
    )


def codes(proto: onnx.ModelProto, folder: Path, ranges: dict[str, float] | None = None) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in findings(proto, folder, ranges)]


def chain(nodes: str, *constants: onnx.TensorProto, opset: int = 17) -> onnx.ModelProto:
    return text(f"(float[n,4] x) => (float[n,4] y) {{ {nodes} }}", *constants, opset=opset)


@pytest.mark.parametrize("make", [models.mlp, models.cnn, models.attention])
def test_sound_models_have_none(make: object, tmp_path: Path) -> None:
    assert findings(make(), tmp_path, {"x": 3.0}) == ()  # type: ignore[operator]


def test_a_value_seen_beyond_fp16_is_one_finding_with_all_its_places(tmp_path: Path) -> None:
    (finding,) = findings(models.mlp(), tmp_path, {"r": 7e4})
    assert (finding.code, finding.severity, finding.origin) == ("overflow", "warning", "inspect")
    assert finding.where.tensors == ("r",)
    assert finding.where.groups == ("g001", "g002")
    assert len(finding.where.nodes) == 2
    assert finding.evidence == {"absmax": 7e4, "fp16_max": 65504.0}
    assert "reached 7e+04" in finding.text
    assert finding.cure
    assert finding.under_plan(["g000", "g001"]) == finding, "one of its groups is FP16"
    assert finding.under_plan(["g001", "g002"]).severity == "info"
    (same,) = findings(models.mlp(), tmp_path, {"h": 7e4, "r": 7e4})
    assert set(same.where.tensors) == {"h", "r"}, "the value passes through a node that leaves it as it is"
    assert len(findings(models.mlp(), tmp_path, {"h": 8e4, "r": 7e4})) == 2
    assert findings(models.mlp(), tmp_path, {"h": 6e4, "r": 3e-5}) == (), "near the ends is not beyond them"


@pytest.mark.parametrize("end", ["Div(x, g)", "Reciprocal(g)", "Pow(g, minus)"])
def test_an_epsilon_guards_a_denominator(end: str, tmp_path: Path) -> None:
    def guarded(eps: float) -> onnx.ModelProto:
        return chain(f"[add] a = Add(x, eps) g = Sqrt(a) y = {end}", constant("eps", eps), constant("minus", -0.5))

    (finding,) = findings(guarded(1e-9), tmp_path)
    assert (finding.code, finding.severity, finding.where.nodes) == ("vanishing-epsilon", "warning", ("add",))
    assert finding.evidence["epsilon"] == pytest.approx(1e-9)
    assert codes(guarded(1e-5), tmp_path) == []


@pytest.mark.parametrize(
    ("guard", "lowest", "highest", "is_pinned"),
    [("Add", 0.0, 2.0, True), ("Add", -2.0, 2.0, False), ("Max", -2.0, 2.0, True), ("Add", 1e-6, 2.0, False)],
)
def test_an_epsilon_pins_its_group_where_the_denominator_reaches_0(
    guard: str, lowest: float, highest: float, is_pinned: bool, tmp_path: Path
) -> None:
    proto = chain(f"[add] a = {guard}(x, eps) y = Div(x, a)", constant("eps", 1e-9))
    model = load_model(models.save(proto, tmp_path))
    grouped = GroupedModel(model, find_groups(model))
    found = find_hazards(grouped, ObservedValues({"x": TensorRange(2.0, lowest=lowest, highest=highest)}))
    assert bool(pinned_by_hazards(found)) == is_pinned
    assert not pinned_by_hazards(found, Precision.BF16), "BF16 holds it"
    assert [each.code for each in found] == ["vanishing-epsilon"]


def test_a_small_number_that_guards_nothing_is_no_epsilon(tmp_path: Path) -> None:
    tiny = constant("tiny", 1e-9)
    assert codes(chain("m = Mul(x, tiny) y = Div(x, m)", tiny), tmp_path) == []
    assert codes(chain("m = Add(x, tiny) y = Div(m, x)", tiny), tmp_path) == [], "the numerator may be zero"


@pytest.mark.parametrize(("rms", "opset"), [(False, 17), (True, 23)])
def test_a_norm_written_out_names_the_opset(rms: bool, opset: int, tmp_path: Path) -> None:
    (finding,) = findings(models.decomposed_norm(rms=rms), tmp_path)
    assert (finding.code, finding.severity) == ("norm-written-out", "warning")
    assert finding.evidence == {"opset": 13, "operator_opset": opset}
    assert f"opset {opset}" in finding.cure
    (seen,) = findings(models.decomposed_norm(rms=rms), tmp_path, {"sq": 900.0})
    assert (seen.severity, seen.evidence["largest_square"]) == ("info", 900.0), "on these data nothing overflows"
    assert "the largest square was 900 on the calibration data" in seen.text
    beyond = codes(models.decomposed_norm(rms=rms), tmp_path, {"sq": 1e5})
    assert beyond == [("overflow", "warning"), ("norm-written-out", "info")]


def test_the_end_of_a_slice_behind_unsqueeze_and_concat_means_nothing(tmp_path: Path) -> None:
    ends = """s = Shape(x) n = Gather(s, zero) n1 = Unsqueeze(n, axis) e1 = Unsqueeze(end, axis)
        ends = Concat<axis = 0>(n1, e1)"""
    constants = [constant("zero", 0, np.int64), constant("axis", [0], np.int64)]
    constants += [constant("starts", [0, 1], np.int64), constant("end", 2**63 - 1, np.int64)]
    assert codes(chain(f"{ends} y = Slice(x, starts, ends)", *constants), tmp_path) == []
    gathered = text(f"(float[n,4] x) => (float[2,4] y) {{ {ends} y = Gather(x, ends) }}", *constants[:2], constants[3])
    assert codes(gathered, tmp_path) == [("int64-range", "warning")]


@pytest.mark.parametrize(("largest", "ruled_out"), [(200.0, set()), (1000.0, {"bf16"}), (3000.0, {"fp16", "bf16"})])
def test_what_becomes_an_index_is_kept_out_of_the_precisions_that_do_not_hold_it(
    largest: float, ruled_out: set[str], tmp_path: Path
) -> None:
    """A flat index of a row and a column: the product, the sum and the rounding, and not what the table is used for."""
    nodes = """row = Relu(x) [start] start = Mul(row, width) [sum] sum = Add(start, column) [at] at = Floor(sum)
        index = Cast<to = 7>(at) read = Gather(table, index) y = Exp(read)"""
    given = "float width = {50}, float column = {3}"
    proto = text(f"(float[n,4] x) => (float[n,4,2] y) <{given}> {{ {nodes} }}", weight("table", 4096, 2))
    model = load_model(models.save(proto, tmp_path))
    grouped = GroupedModel(model, find_groups(model, "op"))
    rows, precisions = np.arange(largest / 50.0, dtype=np.float32).reshape(-1, 4), ("fp32", "fp16", "bf16")
    observed = ranges_on(model, [{"x": rows}], tmp_path, precisions=precisions)
    hazards = find_hazards(grouped, ObservedValues(observed), precisions)
    nodes_of = {group.id: group.nodes for group in grouped.groups}
    for precision in (Precision.FP16, Precision.BF16):
        pinned = {name for group in pinned_by_hazards(hazards, precision) for name in nodes_of[group]}
        assert pinned == ({"start", "sum", "at"} if str(precision) in ruled_out else set())
