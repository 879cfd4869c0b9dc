"""Metrics beside the error, and errors that are larger on the search samples, in every place that shows them."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest

from mptune.choice import Choice
from mptune.commands.common import print_csv
from mptune.data.metrics.accuracy import OutputError
from mptune.reporting.page import PageContent, page_document
from mptune.tuning.choosing import choose
from mptune.tuning.front import Front, front_records
from mptune.tuning.plan_limits import MetricLimit
from mptune.tuning.texts import compared
from tests.reporting.conftest import Bench, printed, readme
from tests.reporting.page.reading import plans_of

SCRIPT = "my metrics.py:text_differs"


def error_of(*values: float, **others: float) -> OutputError:
    """An error with these values of ``relative_l2``, and metrics with the same value on every sample."""
    metrics = {name.replace("script", SCRIPT): (value,) * len(values) for name, value in others.items()}
    return OutputError({"y": {"relative_l2": values, "non_finite": (0.0,) * len(values)}, "*": metrics})


@pytest.fixture
def lucky(front: Front) -> Front:
    """The chosen plan and all-FP16 have 5.4e-04 on the search samples, and 1.1e-05 on held-out ones."""
    metrics = ({"map": 2.0, "map:value": 31.25, "script": 0.0278}, {"map": 1.0, "map:value": 32.5, "script": 0.0})
    errors = error_of(5.3e-4, 5.4e-4, 5.5e-4, **metrics[0]), error_of(1.1e-5, 1.2e-5, 1e-5, **metrics[1])
    fp16 = replace(front.fp16, error=errors[0], held_out=errors[1])
    chosen = replace(front.chosen, error=errors[0], held_out=errors[1])
    points = tuple({front.chosen.plan: chosen, fp16.plan: fp16}.get(point.plan, point) for point in front.points)
    return replace(front, fp16=fp16, chosen=chosen, points=points, reported_metrics=("map", SCRIPT))


@pytest.mark.parametrize("columns", [80, 130])
def test_no_view_gives_the_smaller_error_alone(lucky: Front, bench: Bench, columns: int) -> None:
    text = printed(lucky, columns)
    views = (text, readme(lucky), repr(lucky), repr(lucky.chosen))
    for view in views:
        lines = [line for line in view.splitlines() if re.search(r"1\.1e-05", line)]
        assert lines, view
        assert all("4e-04" in line or "0.00054" in line for line in lines), view
    assert sum("1.1e-05 (5.4e-04)" in line for line in text.splitlines()) == 2
    assert "in brackets: on the search samples" in text
    with pytest.raises(Exception, match="no plan has error") as caught:
        replace(lucky, points=(lucky.chosen,)).best(max_error=1e-6)
    assert "1.1e-05 on held-out samples, 5.4e-04 on the search samples" in caught.value.hint
    exact = replace(lucky.fp32, held_out=lucky.fp32.error)
    assert compared(lucky.chosen, exact).endswith("error from 0 to 5.4e-04")
    shown = plans_of(page_document(PageContent(lucky, lucky.points, bench.groups))).values()
    assert [p["held_out"] for p in shown if p["search_larger"]] == pytest.approx([1.1e-5] * 2)


def test_an_error_is_larger_in_the_search_from_twice_on(lucky: Front) -> None:
    plan = lucky.chosen
    for searched, held_out, larger in ((5.4e-4, 1.1e-5, True), (3e-4, 2e-4, False), (2e-4, 4e-4, False), (0, 0, False)):
        assert replace(plan, error=error_of(searched), held_out=error_of(held_out)).is_larger_in_search is larger
    assert not replace(plan, held_out=None).is_larger_in_search


def test_every_view_has_a_column_for_each_metric(lucky: Front, front: Front, bench: Bench, capsys) -> None:
    text = printed(lucky, 80)
    (header,) = (line for line in text.splitlines() if " plan " in line and "speedup" in line)
    assert {"map", "text_differs"} <= set(header.split())
    (row,) = (line for line in text.splitlines() if line.startswith("> ") and lucky.chosen.plan.fingerprint in line)
    assert "32.5 (31.25)" in row
    assert "0 (0.0278)" in row
    print_csv(front_records(lucky))
    rows = {row["plan"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    chosen = rows[lucky.chosen.plan.fingerprint]
    figures = [float(chosen[k]) for k in ("map", "held_out_map", "text_differs", "held_out_text_differs")]
    assert figures == pytest.approx([31.25, 32.5, 0.0278, 0.0])
    assert "map              32.5 (31.25)" in readme(lucky)
    document = page_document(PageContent(lucky, lucky.points, bench.groups))
    assert document["metrics"] == ["map", "text_differs"]
    assert plans_of(document)[lucky.chosen.plan.fingerprint]["metrics"][0] == [31.25, 32.5, "32.5 (31.25)"]
    (point,) = (p for p in lucky.to_json()["points"] if p["plan"] == lucky.chosen.plan.fingerprint)
    assert point["metrics"]["text_differs"] == pytest.approx({"search": 0.0278, "held_out": 0.0})
    # An objective that is its own error has no second column.
    assert front.metrics == {}
    by_map = [replace(e, metric="map") for e in lucky.points if "map" in e.error.per_output.get("*", {})]
    assert replace(front, points=tuple(by_map), chosen=None, fp16=None, fp32=by_map[0]).metrics == {"map": "map"}


def test_a_limit_holds_on_the_search_samples_and_on_the_held_out_ones(lucky: Front) -> None:
    plan = lucky.chosen
    turned = replace(plan, error=plan.held_out, held_out=plan.error)
    for text, met in (("map>=31", True), ("map>=32", False), (f"{SCRIPT}<=0", False), (f"{SCRIPT}<=0.03", True)):
        limit = MetricLimit.parse(text, ("map", SCRIPT))
        for evaluation in (plan, turned):
            assert (limit.excess(evaluation) == 1.0) is met, text
    alone = replace(plan, error=plan.held_out, held_out=None)
    assert MetricLimit.parse("map>=32", ("map",)).excess(alone) == 1.0
    for evaluation in (plan, turned):
        for max_error, is_met in ((1e-4, False), (6e-4, True)):
            choice = choose([evaluation], Choice(max_error=max_error), ("relative_l2",))
            assert (choice.unmet is None) is is_met
