"""The front: dominance beyond noise, the hypervolume, front.json."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.choice import Choice
from mptune.errors import PlanError, SettingsError
from mptune.tuning.dominance import faster_beyond_noise, hypervolume, pareto
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.explanation import Explanation, GroupWorth, Kept
from mptune.tuning.front import front_records
from tests.tuning import factory
from tests.tuning.factory import make_evaluation

FP32 = make_evaluation(10.0, 1e-7, origin=ORIGIN_FP32)


def positive(least: float, largest: float) -> st.SearchStrategy[float]:
    """Of nine digits: what differs in the last bit alone is smaller by one rule, and equal by another."""
    return st.floats(least, largest).map(lambda value: float(f"{value:.8e}"))


@st.composite
def evaluation_lists(draw: st.DrawFn) -> list[Evaluation]:
    rows = draw(
        st.lists(
            st.tuples(
                st.floats(0.1, 20.0),
                st.one_of(positive(1e-9, 1.0), st.sampled_from([1e-4, 1e-3, math.nan, math.inf])),
                st.sampled_from([0.0, 0.01, 0.1, 1.0]),
                st.one_of(st.none(), positive(1e-9, 1.0)),
            ),
            max_size=12,
        )
    )
    return [
        make_evaluation(ms, error, width=width, held_out=held_out, number=i)
        for i, (ms, error, width, held_out) in enumerate(rows)
    ]


@given(evaluation_lists(), st.randoms())
def test_nothing_on_the_front_is_dominated_and_all_else_is(evaluations: list[Evaluation], random: Random) -> None:
    front = pareto(evaluations)
    assert all(point.is_finite for point in front)
    for faster, slower in pairwise(front):
        assert faster.latency.median_ms < slower.latency.median_ms
        assert faster.judged_error > slower.judged_error
        assert faster_beyond_noise(faster, slower)
    for plan in (e for e in evaluations if e.is_finite and e not in front):
        assert any(p.judged_error <= plan.judged_error and not faster_beyond_noise(plan, p) for p in front)
    assert pareto(front) == front
    assert pareto(random.sample(evaluations, len(evaluations))) == front


def test_a_dropped_point_drops_no_other() -> None:
    a = make_evaluation(1.0, 3e-3, width=0.4, number=1)
    b = make_evaluation(1.7, 2e-3, width=0.4, number=2)
    c = make_evaluation(2.4, 1e-3, width=0.4, number=3)
    assert pareto([a, b, c]) == (a, c), "b is not faster than c beyond noise; a is"


@given(evaluation_lists(), st.floats(0.1, 9.9), st.floats(1e-7, 1e-2))
def test_another_point_never_lowers_the_hypervolume(evaluations: list[Evaluation], ms: float, error: float) -> None:
    more = [*evaluations, make_evaluation(ms, error, number=99)]
    assert hypervolume(more, FP32) >= hypervolume(evaluations, FP32) - 1e-12


def test_hypervolume_by_hand() -> None:
    assert hypervolume([FP32], FP32) == 0.0
    assert hypervolume([make_evaluation(5.0, 1e-7)], FP32) == pytest.approx(0.5)
    middle = math.sqrt(3e-2 * 1e-7)
    assert hypervolume([make_evaluation(5.0, middle)], FP32) == pytest.approx(0.25)
    both = [make_evaluation(5.0, 1e-7, number=1), make_evaluation(2.5, middle, number=2)]
    assert hypervolume(both, FP32) == pytest.approx(0.5 + 0.25 * 0.5)
    assert hypervolume([make_evaluation(1.0, 4e-2), make_evaluation(12.0, 1e-7)], FP32) == 0.0
    assert hypervolume([make_evaluation(5.0, 1e-9)], FP32) == pytest.approx(0.5), "nothing is more exact than FP32"
    assert hypervolume([make_evaluation(5.0, 1e-3)], make_evaluation(10.0, 5e-2)) == 0.0


make_front = partial(factory.make_front, points=(make_evaluation(5.0, 1e-3, held_out=2e-3, number=3), FP32), fp32=FP32)


def test_front_json_has_every_key_and_is_standard_json() -> None:
    document = json.loads(json.dumps(make_front().to_json(), allow_nan=False))
    assert set(document) == {
        "format", "model", "target", "metric", "baseline", "points", "chosen", "chosen_point", "choice",
        "evaluations", "failures", "hypervolume", "findings", "warnings",
    }  # fmt: skip
    assert set(document["model"]) == {"path", "sha256"}
    assert set(document["target"]) == {"name", "engine", "device"}
    assert set(document["choice"]) == {"reason", "limits", "limits_met", "nearest", "replaced", "neighbours"}
    baseline = document["baseline"]
    assert set(baseline) == {"fp32", "fp16", "tf32"}
    for point in (*document["points"], baseline["fp32"], baseline["fp16"]):
        assert set(point) == {
            "plan", "origin", "latency", "error", "speedup", "fp16_groups", "bf16_groups", "fp32_groups", "fp32",
            "engine", "remeasured", "confirmed", "engine_bytes", "context_bytes", "weight_bytes", "memory_source",
            "metrics",
        }  # fmt: skip
        assert set(point["latency"]) == {"median_ms", "p90_ms", "p99_ms", "ci95_ms", "cv", "source"}
        keys = {"value", "metric", "source", "emulated", "held_out", "ci95", "part", "per_output"}
        assert set(point["error"]) == keys
    assert baseline["fp16"]["error"]["value"] == "nan"
    assert baseline["fp32"]["error"]["held_out"] is None
    first = document["points"][0]
    assert first["error"]["held_out"] == pytest.approx(2e-3)
    assert first["error"]["per_output"] == {"y": {"relative_l2": 1e-3, "non_finite": 0.0}}
    assert first["fp16_groups"] + first["fp32_groups"] == 10
    assert document["chosen"] == first["plan"]


def test_front_json_says_why_groups_are_fp32() -> None:
    kept = Kept(GroupWorth("g002", "norm", "norm", finding="overflow", pinned="it reached 1e6"), "finding", 0.25)
    plan = make_front().points[0].plan.fingerprint
    document = make_front(explanation=Explanation({plan: (kept,)})).to_json()
    assert document["points"][0]["fp32"] == [{"group": "g002", "reason": "finding", "finding": "overflow"}]
    assert document["points"][1]["fp32"] == [], "nothing is known of it"


@given(evaluation_lists())
def test_an_evaluation_survives_its_json(evaluations: list[Evaluation]) -> None:
    for evaluation in evaluations:
        text = json.dumps(evaluation.to_json(), allow_nan=False)
        again = Evaluation.from_json(json.loads(text))
        assert again.to_json() == evaluation.to_json()
        assert again.plan == evaluation.plan
        assert again.is_finite == evaluation.is_finite


def staircase(count: int) -> tuple[Evaluation, ...]:
    """Points from fast and inexact to all-FP32."""
    middle = [make_evaluation(5 + 4 * k / count, 10 ** (-2 - 4 * k / count), number=k + 1) for k in range(count - 1)]
    return (*middle, FP32)


FRONT = factory.make_front(staircase(5), FP32)


def test_the_repr_shows_the_points_and_the_choice() -> None:
    lines = repr(FRONT).splitlines()
    assert lines[0] == "Front of model.onnx on cpu: 5 points from 40 plans, 3 failed"
    for point in FRONT.points:
        assert sum(point.plan.fingerprint in line for line in lines[:-1]) == 1
    (chosen,) = [line for line in lines if line.startswith(">  ")]
    assert FRONT.points[0].plan.fingerprint in chosen
    assert "1.0e-02" in chosen
    chosen = f"chosen: {FRONT.points[0].plan.fingerprint}, the fastest with an error within 1 %, the default;"
    assert lines[-1] == f"{chosen} --max-error sets another"
    assert "pred. ms" in repr(FRONT), "predicted latencies are never shown as measured ones"


@given(st.integers(0, 200), st.text(max_size=4000), st.text(max_size=300))
def test_the_repr_is_short_whatever_the_front_holds(count: int, name: str, reason: str) -> None:
    points = staircase(count) if count else ()
    front = factory.make_front(
        points,
        FP32,
        target=name,
        engine=name,
        device=name,
        metric=name,
        choice=Choice(limits=(reason,), kind="limits"),
        model_path=Path("m" + name),
    )
    assert len(repr(front)) < 2000


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


def test_one_point_prints_in_a_line() -> None:
    text = repr(FRONT.best(max_error=1.0, max_latency_ms=100.0))
    assert text == (
        f"Evaluation({FRONT.points[0].plan.fingerprint}: 5 ms predicted, error 0.01 (relative_l2),"
        " groups: 1 FP16, 9 FP32, sampler)"
    )


def test_the_records_have_a_row_for_each_point_and_baseline() -> None:
    records = front_records(FRONT)
    assert [record["plan"] for record in records] == [e.plan.fingerprint for e in (FRONT.fp16, *FRONT.points) if e]
    assert [record["on_front"] for record in records] == [False, True, True, True, True, True]
    assert [record["plan"] for record in records if record["chosen"]] == [FRONT.points[0].plan.fingerprint]
    assert records[1]["latency_ms"] == FRONT.points[0].latency.median_ms
    assert records[1]["error"] == pytest.approx(1e-2)
    assert math.isnan(records[0]["error"])


def test_fronts_are_plain_frozen_records() -> None:
    front = factory.make_front(staircase(5), FP32, fp16=None)
    assert pickle.loads(pickle.dumps(front)) == front
    assert copy.copy(front) == copy.deepcopy(front) == front
    with pytest.raises(FrozenInstanceError):
        front.target = "other"  # type: ignore[misc]
