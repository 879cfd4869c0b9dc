"""The front as it is kept and shown: front.json, its repr, its records, one point by limits."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from mptune.choice import Choice
from mptune.errors import PlanError, SettingsError
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.explanation import Explanation, GroupWorth, Kept
from mptune.tuning.front import front_records
from tests.tuning.factory import make_evaluation, make_front, searches

FP32 = make_evaluation(10.0, 1e-7, origin=ORIGIN_FP32)
POINTS = (make_evaluation(5.0, 1e-3, held_out=2e-3, number=3), FP32)


KEYS = {
    "": "format model target metric baseline points chosen chosen_point choice evaluations failures hypervolume "
    "findings warnings",
    "model": "path sha256",
    "target": "name engine device",
    "choice": "reason limits limits_met nearest replaced neighbours",
    "baseline": "fp32 fp16 tf32",
}
POINT_KEYS = {
    "": "plan origin latency error speedup fp16_groups bf16_groups fp32_groups fp32 engine remeasured confirmed "
    "error_value held_out_value judged_error metrics engine_bytes context_bytes weight_bytes memory_source",
    "latency": "median_ms p90_ms p99_ms ci95_ms cv source",
    "error": "value metric source emulated held_out ci95 part per_output",
}


def test_front_json_has_every_key_and_is_standard_json() -> None:
    document = json.loads(json.dumps(make_front(POINTS, FP32).to_json(), allow_nan=False))
    baseline = document["baseline"]
    points = (*document["points"], baseline["fp32"], baseline["fp16"])
    for value, keys in ((document, KEYS), *((point, POINT_KEYS) for point in points)):
        assert {name: {*({"": value} | value)[name]} for name in keys} == {n: {*k.split()} for n, k in keys.items()}
    assert baseline["fp16"]["error"]["value"] == "nan"
    assert baseline["fp32"]["error"]["held_out"] is None
    first = points[0]
    assert first["error"]["held_out"] == pytest.approx(2e-3)
    same = ("error_value", "held_out_value", "judged_error")
    assert [first[name] for name in same] == [getattr(POINTS[0], name) for name in same], "as in Python"
    assert first["error"]["per_output"] == {"y": {"relative_l2": 1e-3, "non_finite": 0.0}}
    assert first["fp16_groups"] + first["fp32_groups"] == 10
    assert document["chosen"] == first["plan"]


def test_front_json_says_why_groups_are_fp32() -> None:
    kept = Kept(GroupWorth("g002", "norm", "norm", finding="overflow", pinned="it reached 1e6"), "finding", 0.25)
    explanation = Explanation({POINTS[0].plan.fingerprint: (kept,)})
    explained, other = make_front(POINTS, FP32, explanation=explanation).to_json()["points"]
    assert explained["fp32"] == [{"group": "g002", "reason": "finding", "finding": "overflow"}]
    assert other["fp32"] == [], "nothing is known of it"


@given(searches())
@settings(max_examples=30)
def test_an_evaluation_survives_its_json(evaluations: list[Evaluation]) -> None:
    for evaluation in evaluations:
        again = Evaluation.from_json(json.loads(json.dumps(evaluation.to_json(), allow_nan=False)))
        assert again.to_json() == evaluation.to_json()
        assert (again.plan, again.is_finite) == (evaluation.plan, evaluation.is_finite)


def staircase(count: int) -> tuple[Evaluation, ...]:
    """Points from fast and inexact to all-FP32."""
    middle = [make_evaluation(5 + 4 * k / count, 10 ** (-2 - 4 * k / count), number=k + 1) for k in range(count - 1)]
    return (*middle, FP32)


FRONT, LONG = make_front(staircase(5), FP32), staircase(200)
CHOSEN = FRONT.points[0].plan.fingerprint


def test_the_repr_shows_the_points_and_the_choice() -> None:
    lines = repr(FRONT).splitlines()
    assert lines[0] == "Front of model.onnx on cpu: 5 points from 40 plans, 3 failed"
    for point in FRONT.points:
        assert sum(point.plan.fingerprint in line for line in lines[:-1]) == 1
    (chosen,) = [line for line in lines if line.startswith(">  ")]
    assert CHOSEN in chosen
    assert "1.0e-02" in chosen
    by_default = "the fastest with an error within 1 % (default; --max-error sets another)"
    assert lines[-1] == f"chosen: {CHOSEN}, {by_default}"
    shown = "5 ms predicted, error 0.01 (relative_l2), groups: 1 FP16, 9 FP32, sampler"
    assert repr(FRONT.points[0]) == f"Evaluation({CHOSEN}: {shown})"
    assert "pred. ms" in repr(FRONT), "predicted latencies are never shown as measured ones"


@given(st.integers(0, 200), st.text(max_size=4000), st.text(max_size=300))
@example(134, 60 * "\U0001123f", "")  # each is ten characters once it is written out
@settings(max_examples=30)
def test_the_repr_is_short_whatever_the_front_holds(count: int, name: str, reason: str) -> None:
    names = {**dict.fromkeys(("target", "engine", "device", "metric"), name), "model_path": Path("m" + name)}
    choice = Choice(limits=(reason,), kind="limits")
    assert len(repr(make_front(LONG[200 - count :], FP32, choice=choice, **names))) < 2000


def test_best_takes_one_point_by_its_limits() -> None:
    points = FRONT.points
    assert FRONT.best(max_error=points[2].judged_error) is points[2]
    assert FRONT.best(max_latency_ms=points[1].latency.median_ms) is points[1]
    assert FRONT.best(max_error=1.0, max_latency_ms=100.0) is points[0]
    assert FRONT.best() is points[0], "within 1 %"
    with pytest.raises(PlanError, match="no plan has error <= 1e-12") as caught:
        FRONT.best(max_error=1e-12)
    assert FP32.plan.fingerprint in caught.value.hint
    with pytest.raises(SettingsError, match="max_error= is "):
        FRONT.best(max_error=0)


def test_the_records_have_a_row_for_each_point_and_baseline() -> None:
    records = front_records(FRONT)
    assert [record["plan"] for record in records] == [e.plan.fingerprint for e in (FRONT.fp16, *FRONT.points)]
    assert [record["on_front"] for record in records] == [False, True, True, True, True, True]
    assert [record["plan"] for record in records if record["chosen"]] == [CHOSEN]
    assert records[1]["latency_ms"] == FRONT.points[0].latency.median_ms
    assert records[1]["error"] == pytest.approx(1e-2)
    assert math.isnan(records[0]["error"])


def test_fronts_are_plain_frozen_records() -> None:
    front = make_front(staircase(5), FP32, fp16=None)
    assert pickle.loads(pickle.dumps(front)) == front
    assert copy.copy(front) == copy.deepcopy(front) == front
    with pytest.raises(FrozenInstanceError):
        front.target = "other"
