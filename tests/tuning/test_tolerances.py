"""Tolerances of outputs and columns, and limits on metrics: their syntax, what is feasible, what cannot be meant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mptune.choice import Choice
from mptune.data.metrics.accuracy import OutputError, Reference, compare_outputs
from mptune.errors import SettingsError
from mptune.settings import Tolerance
from mptune.tuning.choosing import choose
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.plan_limits import MetricLimit, PlanLimits, check_asked, check_columns, excess, rest_error
from tests.tuning.factory import make_evaluation

SCALES = np.array([300.0, 300.0, 80.0, 80.0, 0.2])


def detections(score_error: float, box_error: float = 0.1) -> OutputError:
    rng = np.random.default_rng(0)
    reference = [SCALES * rng.standard_normal((1, 40, 5)) for _ in range(3)]
    apart = np.array([box_error] * 4 + [score_error])
    return compare_outputs([{"d": r + apart} for r in reference], Reference([{"d": r} for r in reference]))


def evaluated(ms: float, score_error: float, box_error: float = 0.1, held_out: float | None = None) -> Evaluation:
    bits = int(ms * 100) or 1
    later = None if held_out is None else detections(held_out)
    error = detections(score_error, box_error)
    return replace(make_evaluation(ms, 1e-3, bits=bits), error=error, held_out=later, metric="worst_part")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("y=1e-3", Tolerance("y", None, 1e-3)),
        ("y[4]=abs:0.005", Tolerance("y", (4,), 0.005, True)),
        ("y[0:4]=0.5", Tolerance("y", (0, 1, 2, 3), 0.5)),
        ("y[0,2,5]=1", Tolerance("y", (0, 2, 5), 1.0)),
        ("a=b[1]=2", Tolerance("a=b", (1,), 2.0)),
        ("a[x][1]=2", Tolerance("a[x]", (1,), 2.0)),
        ("a[0].b=2", Tolerance("a[0].b", None, 2.0)),
    ],
)
def test_syntax(text: str, wanted: Tolerance) -> None:
    assert Tolerance.parse(text) == wanted
    assert Tolerance.parse(str(wanted)) == wanted


@pytest.mark.parametrize(
    "text", ["y", "=1", "y=", "y=x", "y=0", "y=-1", "y=nan", "y=inf", "y[]=1", "y[4:4]=1", "y[a]=1", "y[-1]=1", "[1]=1"]
)
def test_what_is_no_tolerance(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Tolerance.parse(text)
    assert caught.value.hint


def test_the_excess_of_parts_of_columns_and_of_held_out_samples() -> None:
    one = evaluated(1.0, 0.01)
    assert excess(one, Tolerance.parse("d[4]=abs:0.01")) == pytest.approx(1.0)
    assert excess(one, Tolerance.parse("d=abs:0.1")) == pytest.approx(1.0)
    assert excess(one, Tolerance.parse("d[4]=0.05")) == pytest.approx(1.0, rel=0.15)
    assert excess(one, Tolerance.parse("d[0:4]=0.05")) < 0.1
    assert excess(evaluated(1.0, 0.01, held_out=0.03), Tolerance.parse("d[4]=abs:0.01")) == pytest.approx(3.0)
    assert excess(replace(one, error=OutputError(one.error.per_output)), Tolerance.parse("d[4]=abs:9")) == np.inf


def test_max_error_limits_the_rest() -> None:
    one = evaluated(1.0, 0.05, box_error=0.01)
    assert rest_error(one, ()) > 0.1
    assert rest_error(one, (Tolerance.parse("d[4]=1"),)) < 1e-3
    for tolerance, is_met in (("d[4]=1", True), ("d[0]=1", False)):
        asked = Choice(max_error=1e-3, tolerance=(tolerance,))
        assert (choose((one,), asked, ("worst_part",)).unmet is None) is is_met
    assert PlanLimits(Choice(tolerance=("d[4]=1",)), ("worst_part",)).excess(one) == 1.0, "the default for the rest"
    assert PlanLimits(Choice(tolerance=("d[0]=1",)), ("worst_part",)).excess(one) > 1.0


@pytest.mark.parametrize(
    ("tolerance", "ignore", "what"),
    [
        ("e=1", (), "names 'e', which is no output"),
        ("d[5]=1", (), "no column 5"),
        ("d=1", ("d",), "names 'd', which has a tolerance"),
        (None, ("d",), "every output"),
        (None, ("x",), "names 'x', which is no output"),
    ],
)
def test_what_cannot_be_meant(tolerance: str | None, ignore: tuple[str, ...], what: str) -> None:
    asked = Choice(tolerance=() if tolerance is None else (tolerance,), ignore=ignore)
    with pytest.raises(SettingsError, match=what) as caught:
        check_columns(check_asked(asked, ("worst_part",), ["d"]), detections(0.1))
    assert caught.value.hint


def test_outputs_that_are_ignored_do_not_count() -> None:
    b = np.arange(8.0)[None]
    both = compare_outputs([{"a": np.ones((1, 8)), "b": b}], Reference([{"a": np.zeros((1, 8)), "b": b}]))
    one = replace(make_evaluation(1.0, 1e-3), error=both, metric="worst_part")
    assert one.error_value == 1.0
    assert one.ignoring(("a",)).error_value == 0.0
    assert str(one.part) == "a"


SCRIPT = "my metrics.py:f1:max"


@pytest.mark.parametrize("name", [SCRIPT, "my metrics.py:f1"])
def test_a_limit_names_a_function_with_or_without_its_direction(name: str) -> None:
    limit = MetricLimit.parse(f"{name}>=0.9", ("relative_l2", SCRIPT))
    assert (limit.metric, limit.at_least, limit.bound) == (SCRIPT, True, 0.9)
