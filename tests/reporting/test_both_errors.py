"""Metrics beside the error, and errors that are larger on the search samples, in every place that shows them."""

from __future__ import annotations

import csv
import io
import json
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
from tests.reporting.conftest import Bench, MakeFront, readme
from tests.reporting.conftest import front_text as printed
from tests.reporting.page.reading import plans_of

SCRIPT = "my metrics.py:text_differs"


def error_of(*values: float, **others: float) -> OutputError:
    """An error with these values of ``relative_l2``, and metrics with the same value on every sample."""
    metrics = {name.replace("script", SCRIPT): (value,) * len(values) for name, value in others.items()}
    return OutputError({"y": {"relative_l2": values, "non_finite": (0.0,) * len(values)}, "*": metrics})


def lucky(make_front: MakeFront) -> Front:
    """The chosen plan and all-FP16 have 5.4e-04 on the search samples, and 1.1e-05 on held-out ones."""
    front, _ = make_front()
    metrics = ({"map": 2.0, "map:value": 31.25, "script": 0.0278}, {"map": 1.0, "map:value": 32.5, "script": 0.0})
    errors = error_of(5.3e-4, 5.4e-4, 5.5e-4, **metrics[0]), error_of(1.1e-5, 1.2e-5, 1e-5, **metrics[1])
    fp16 = replace(front.fp16, error=errors[0], held_out=errors[1])
    chosen = replace(front.chosen, error=errors[0], held_out=errors[1])
    points = tuple({front.chosen.plan: chosen, fp16.plan: fp16}.get(point.plan, point) for point in front.points)
    return replace(front, fp16=fp16, chosen=chosen, points=points, reported_metrics=("map", SCRIPT))


@pytest.mark.parametrize("columns", [80, 130])
def test_no_view_gives_the_smaller_error_alone(
    make_front: MakeFront, bench: Bench, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    front = lucky(make_front)
    text = printed(front, monkeypatch, columns)
    views = (text, readme(front), repr(front), repr(front.chosen))
    for view in views:
        lines = [line for line in view.splitlines() if re.search(r"1\.1e-05", line)]
        assert lines, view
        assert all("4e-04" in line or "0.00054" in line for line in lines), view
    rows = [line for line in text.splitlines() if "1.1e-05 (5.4e-04)" in line]
    assert len(rows) == 2
    assert "in brackets: on the search samples" in text
    with pytest.raises(Exception, match="no plan has error") as caught:
        replace(front, points=(front.chosen,)).best(max_error=1e-6)
    assert "1.1e-05 on held-out samples, 5.4e-04 on the search samples" in caught.value.hint
    exact = replace(front.fp32, held_out=front.fp32.error)
    assert compared(front.chosen, exact).endswith("error from 0 to 5.4e-04")
    document = page_document(PageContent(front, front.points, bench.groups))
    shown = plans_of(document)
    assert [p["search_larger"] for p in shown.values() if p["held_out"] == pytest.approx(1.1e-5)] == [1, 1]
    assert [p["search_larger"] for p in shown.values() if p["held_out"] != pytest.approx(1.1e-5)].count(1) == 0


def test_an_error_is_larger_in_the_search_from_twice_on(make_front: MakeFront) -> None:
    plan = lucky(make_front).chosen
    for searched, held_out, larger in ((5.4e-4, 1.1e-5, True), (3e-4, 2e-4, False), (2e-4, 4e-4, False), (0, 0, False)):
        assert replace(plan, error=error_of(searched), held_out=error_of(held_out)).is_larger_in_search is larger
    assert not replace(plan, held_out=None).is_larger_in_search


def test_every_view_has_a_column_for_each_metric(
    make_front: MakeFront, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    front = lucky(make_front)
    text = printed(front, monkeypatch, 80)
    (header,) = (line for line in text.splitlines() if " plan " in line and "speedup" in line)
    assert {"map", "text_differs"} <= set(header.split())
    (row,) = (line for line in text.splitlines() if line.startswith("> ") and front.chosen.plan.fingerprint in line)
    assert "32.5 (31.25)" in row
    assert "0 (0.0278)" in row
    print_csv(front_records(front))
    rows = {row["plan"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    chosen = rows[front.chosen.plan.fingerprint]
    assert [float(chosen[k]) for k in ("map", "held_out_map", "text_differs", "held_out_text_differs")] == [
        31.25, 32.5, pytest.approx(0.0278), 0.0,
    ]  # fmt: skip
    assert "map              32.5 (31.25)" in readme(front)
    document = page_document(PageContent(front, front.points, bench.groups))
    assert document["metrics"] == ["map", "text_differs"]
    assert plans_of(document)[front.chosen.plan.fingerprint]["metrics"][0] == [31.25, 32.5, "32.5 (31.25)"]
    (point,) = (p for p in front.to_json()["points"] if p["plan"] == front.chosen.plan.fingerprint)
    assert json.loads(json.dumps(point["metrics"]))["text_differs"] == pytest.approx(
        {"search": 0.0278, "held_out": 0.0}
    )

    # An objective that is its own error has no second column.
    assert make_front()[0].metrics == {}
    by_map = [replace(e, metric="map") for e in lucky(make_front).points if "map" in e.error.per_output.get("*", {})]
    assert replace(make_front()[0], points=tuple(by_map), chosen=None, fp16=None, fp32=by_map[0]).metrics == {
        "map": "map"
    }


def test_a_limit_holds_on_the_search_samples_and_on_the_held_out_ones(make_front: MakeFront) -> None:
    plan = lucky(make_front).chosen
    for text, met in (("map>=31", True), ("map>=32", False), (f"{SCRIPT}<=0", False), (f"{SCRIPT}<=0.03", True)):
        limit = MetricLimit.parse(text, ("map", SCRIPT))
        assert (limit.excess(plan) == 1.0) is met, text
        turned = replace(plan, error=plan.held_out, held_out=plan.error)
        assert (limit.excess(turned) == 1.0) is met, text
    alone = replace(plan, error=plan.held_out, held_out=None)
    assert MetricLimit.parse("map>=32", ("map",)).excess(alone) == 1.0
    for evaluation in (plan, replace(plan, error=plan.held_out, held_out=plan.error)):
        for max_error, is_met in ((1e-4, False), (6e-4, True)):
            choice = choose([evaluation], Choice(max_error=max_error), ("relative_l2",))
            assert (choice.unmet is None) is is_met
