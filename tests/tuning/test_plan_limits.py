"""Limits: their syntax, which plans keep to them, what cannot be meant; what the sampler sees under tolerances."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mptune.choice import Choice
from mptune.data.metrics.accuracy import OutputError, Reference, compare_outputs
from mptune.errors import SettingsError
from mptune.finding import OutputColumns
from mptune.settings import SearchSettings, Tolerance
from mptune.tuning import plan_limits
from mptune.tuning.choosing import choose
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.knowledge import Sensitivity, make_prior
from mptune.tuning.plan_limits import PlanLimits, excess, searched_error, stored, suffices
from tests.tuning.conftest import make_small_space
from tests.tuning.factory import make_evaluation


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


SCRIPT = "my metrics.py:f1:max"


@pytest.mark.parametrize("name", [SCRIPT, "my metrics.py:f1"])
def test_a_limit_names_a_function_with_or_without_its_direction(name: str) -> None:
    limit = plan_limits.MetricLimit.parse(f"{name}>=0.9", ("relative_l2", SCRIPT))
    assert (limit.metric, limit.at_least, limit.bound) == (SCRIPT, True, 0.9)


def detections(score_error: float, box_error: float = 0.1) -> OutputError:
    """``d`` [1, 40, 5]: boxes and a score, off by these errors everywhere."""
    scales, rng = np.array([300.0, 300.0, 80.0, 80.0, 0.2]), np.random.default_rng(0)
    reference = [scales * rng.standard_normal((1, 40, 5)) for _ in range(3)]
    apart = np.array([box_error] * 4 + [score_error])
    return compare_outputs([{"d": r + apart} for r in reference], Reference([{"d": r} for r in reference]))


def evaluated(error: OutputError, held_out: OutputError | None = None, metric: str = "worst_part") -> Evaluation:
    return replace(make_evaluation(1.0, 1e-3), error=error, held_out=held_out, metric=metric)


def test_the_excess_of_parts_of_columns_and_of_held_out_samples() -> None:
    error = detections(0.01)
    for text, least, most in (("d[4]=abs:0.01", 1.0, 1.0), ("d=abs:0.1", 1.0, 1.0), ("d[4]=0.05", 0.85, 1.15)):
        assert least - 1e-6 < excess(evaluated(error), Tolerance.parse(text)) < most + 1e-6
    assert excess(evaluated(error), Tolerance.parse("d[0:4]=0.05")) < 0.1
    assert excess(evaluated(error, detections(0.03)), Tolerance.parse("d[4]=abs:0.01")) == pytest.approx(3.0)
    assert excess(evaluated(OutputError(error.per_output)), Tolerance.parse("d[4]=abs:9")) == math.inf


def test_max_error_limits_the_rest() -> None:
    plan = evaluated(detections(0.05, box_error=0.01))
    assert plan_limits.rest_error(plan, ()) > 0.1
    assert plan_limits.rest_error(plan, (Tolerance.parse("d[4]=1"),)) < 1e-3
    for tolerance, is_met in (("d[4]=1", True), ("d[0]=1", False)):
        asked = Choice(max_error=1e-3, tolerance=(tolerance,))
        assert (choose((plan,), asked, ("worst_part",)).unmet is None) is is_met
        by_default = PlanLimits(Choice(tolerance=(tolerance,)), ("worst_part",)).excess(plan)
        assert by_default == 1.0 if is_met else by_default > 1.0


@pytest.mark.parametrize(
    ("tolerance", "ignore", "what"),
    [
        (("e=1",), (), "names 'e', which is no output"),
        (("d[5]=1",), (), "no column 5"),
        (("d=1",), ("d",), "names 'd', which has a tolerance"),
        ((), ("d",), "every output"),
        ((), ("x",), "names 'x', which is no output"),
    ],
)
def test_what_cannot_be_meant(tolerance: tuple[str, ...], ignore: tuple[str, ...], what: str) -> None:
    asked = Choice(tolerance=tolerance, ignore=ignore)
    with pytest.raises(SettingsError, match=what) as caught:
        plan_limits.check_columns(plan_limits.check_asked(asked, ("worst_part",), ["d"]), detections(0.1))
    assert caught.value.hint


def test_a_limit_is_the_sole_one_where_nothing_else_is_asked_for() -> None:
    for others in ({"tolerance": ("d=0.1",)}, {"limits": ("worst_part<=1",)}, {"max_memory_bytes": 1}, {"knee": True}):
        assert PlanLimits(Choice(**others), ("worst_part",)).sole_limit is None


def test_outputs_that_are_ignored_do_not_count() -> None:
    b = np.arange(8.0)[None]
    both = compare_outputs([{"a": np.ones((1, 8)), "b": b}], Reference([{"a": np.zeros((1, 8)), "b": b}]))
    plan = evaluated(both)
    assert plan.error_value == 1.0
    assert plan.ignoring(("a",)).error_value == 0.0
    assert str(plan.part) == "a"


def outputs(box: float = 0.2, score: float = 0.01, mask: float = 1e-4, rows: slice = slice(0, 6)) -> OutputError:
    """``boxes`` [1, 8, 5], of which the last column is a score, and ``mask`` [1, 8], with noise on both."""
    rng, scales = np.random.default_rng(0), np.array([200.0] * 4 + [1.0])
    exact = [{"boxes": rng.standard_normal((1, 8, 5)) * scales, "mask": rng.standard_normal((1, 8))} for _ in range(6)]
    noise = [{"boxes": rng.standard_normal((1, 8, 5)) * ([box] * 4 + [score]), "mask": mask} for _ in range(6)]
    noisy = [{name: each[name] + off[name] for name in each} for each, off in zip(exact, noise, strict=True)]
    return compare_outputs(noisy[rows], Reference(exact), start=rows.start)


ERROR = outputs()
MASK_ERROR = ERROR.by_part("worst_part")[OutputColumns("mask", None)]


def limited(*texts: str) -> SearchSettings:
    return SearchSettings(tolerance=tuple(map(Tolerance.parse, texts)))


@pytest.mark.parametrize("metric", ["worst_part", "relative_l2"])
@pytest.mark.parametrize(
    "text", ["boxes=0.05", "boxes=abs:2", "boxes[4]=0.05", "boxes[4]=abs:0.1", "boxes[0:4]=abs:2", "mask=abs:0.001"]
)
def test_at_a_limit_the_error_is_that_past_which_a_plan_is_worth_nothing(text: str, metric: str) -> None:
    settings = limited(text)
    ratio = excess(evaluated(ERROR, metric=metric), Tolerance.parse(text))
    parts = plan_limits.part_errors(ERROR, metric, settings)
    assert max(v for part, v in parts.items() if part.startswith(text)) == pytest.approx(ratio * 1e-2)
    # Columns and statistics of parts of the samples add up.
    first, second = (stored(outputs(rows=rows), metric, settings) for rows in (slice(0, 3), slice(3, 6)))
    both = OutputError.from_json(json.loads(json.dumps(first.with_samples_of(second).to_json())))
    assert suffices(both, metric, settings)
    assert searched_error(both, metric, settings) == pytest.approx(searched_error(ERROR, metric, settings), rel=2e-3)


def test_what_no_tolerance_is_about_stays_as_it_is() -> None:
    assert searched_error(ERROR, "worst_part", limited("boxes=1e6")) == pytest.approx(MASK_ERROR)
    assert searched_error(ERROR, "worst_part", SearchSettings(ignore=("boxes",))) == pytest.approx(MASK_ERROR)
    assert searched_error(ERROR, "worst_part", SearchSettings(max_error=1e-9)) == ERROR.value("worst_part")
    assert searched_error(outputs(*[math.nan] * 3), "worst_part", limited("boxes=1")) == math.inf
    whole = OutputError({"*": {"mine.py:f": (1.0, 3.0)}, "y": {"non_finite": (0.0, 0.0)}})
    assert plan_limits.part_errors(whole, "mine.py:f", SearchSettings()) == {"mine.py:f": 2.0}, "which sees all at once"


def test_what_the_file_lacks_is_taken_again() -> None:
    plain = stored(ERROR, "worst_part", limited())
    assert suffices(plain, "worst_part", limited("boxes=0.1", "boxes=abs:1"))
    assert not plain.columns, "which may be a thousand of each output"
    columns = limited("boxes[4]=abs:0.1")
    assert not suffices(plain, "worst_part", columns)
    lost = OutputError({**plain.per_output, "more": {"non_finite": (1.0,)}})
    assert suffices(lost, "worst_part", columns), "no tolerance is kept where a value is not finite"
    assert suffices(stored(ERROR, "worst_part", columns), "worst_part", columns)
    each = (limited(text) for text in ("boxes=0.1", "boxes=0.2", "boxes=abs:0.1"))
    assert len({plan_limits.searched_as("worst_part", settings) for settings in each}) == 3


def test_the_sampler_sees_each_group_against_the_limits() -> None:
    space, settings = make_small_space(2), limited("boxes[4]=abs:0.001", "boxes[0:4]=0.5")
    boxes, mask = outputs(mask=0.0), outputs(box=0.0, score=0.0)
    errors = dict(zip(space.free, (boxes, mask), strict=True))
    known = Sensitivity("worst_part", dict.fromkeys(space.free, 9.0), errors)
    prior = make_prior(space, known, None, exact=True, settings=settings)
    at_limit = 1e-2 * max(excess(evaluated(boxes), limit) for limit in settings.tolerance)
    assert np.exp(np.array(prior.log_square_errors) / 2) == pytest.approx([at_limit, mask.value("worst_part")])
    assert prior.part_shares is not None
