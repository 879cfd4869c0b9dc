"""A Front in Python: table and records; taking one point; pickle and copy."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.choice import Choice
from mptune.errors import PlanError, SettingsError
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.front import front_records
from tests.tuning import factory
from tests.tuning.factory import make_evaluation

FP32 = make_evaluation(10.0, 1e-8, origin=ORIGIN_FP32)


make_front = partial(factory.make_front, fp32=FP32)


def staircase(count: int) -> tuple[Evaluation, ...]:
    """Points from fast and inexact to all-FP32."""
    middle = [make_evaluation(5 + 4 * k / count, 10 ** (-2 - 4 * k / count), number=k + 1) for k in range(count - 1)]
    return (*middle, FP32)


FRONT = make_front(staircase(5))


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
    front = make_front(
        points,
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
    front = make_front(staircase(5), fp16=None)
    assert pickle.loads(pickle.dumps(front)) == front
    assert copy.copy(front) == copy.deepcopy(front) == front
    with pytest.raises(FrozenInstanceError):
        front.target = "other"  # type: ignore[misc]
