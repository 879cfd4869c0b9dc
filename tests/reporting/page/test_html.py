"""The page: well formed, self-contained, escaped, and complete."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mptune.engines.environment import Environment
from mptune.errors import RunError
from mptune.graph.grouping.groups import LayerGroup
from mptune.reporting.page.html import render, write_report
from mptune.reporting.page.precision_map import precision_map
from mptune.reporting.page.scatter import scatter, ticks
from tests.reporting.conftest import Bench, make_error, predicted

MakeFront = Callable[..., tuple]

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Balance(HTMLParser):
    """Fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        for name, value in attributes:
            assert name not in {"src", "href", "onclick", "onload"}, f"{tag} fetches or runs {value}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def circles(svg: str, style: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(svg)
    return [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter("circle") if c.get("class") == style]


def test_the_page_is_well_formed_and_self_contained(
    make_front: MakeFront, bench: Bench, environment: Environment
) -> None:
    front, evaluations = make_front()
    page = render(front, evaluations, bench.groups, environment)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert not balance.seen & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|@import|url\(", page)
    assert "$" not in page
    assert "prefers-color-scheme: dark" in page


def test_the_page_shows_everything(make_front: MakeFront, bench: Bench, environment: Environment) -> None:
    front, evaluations = make_front()
    page = render(front, evaluations, bench.groups, environment)
    for point in front.points:
        assert point.plan.fingerprint in page
    for group in bench.groups:
        assert group.name in page
    for needed in (
        "latency measured",
        "error measured",
        "1.67x",
        "NVIDIA H200, 140 GiB",
        "the calibration data are random",
        "all-FP32",
        "all-FP16",
        bench.model.sha256,
        "max_abs",
    ):
        assert needed in page


def test_the_page_of_a_predicted_target_says_so(make_front: MakeFront, bench: Bench) -> None:
    front, _ = make_front()
    page = render(predicted(front), (), bench.groups)
    assert "latency predicted" in page
    assert "error emulated" in page
    assert "latency, ms (predicted for jetson-orin-nano-8gb)" in page
    assert "latency measured" not in page


def test_what_comes_from_outside_is_escaped(make_front: MakeFront) -> None:
    nasty = "<script>alert(1)</script>$title"
    front, evaluations = make_front(
        model_path=Path("m<b>.onnx"), target=nasty, engine=nasty, device=nasty, warnings=(nasty,), chosen_reason=nasty
    )
    groups = tuple(LayerGroup(g, nasty, nasty, (nasty,), {nasty: 1}, nasty) for g in front.chosen.plan.precision)
    page = render(front, evaluations, groups)
    assert "<script" not in page
    assert "m&lt;b&gt;.onnx" in page


def test_without_a_choice(make_front: MakeFront, bench: Bench) -> None:
    front, evaluations = make_front(chosen=None, points=(), chosen_reason="no plan is feasible", limits_met=False)
    page = render(front, evaluations, bench.groups)
    assert "no plan is feasible" in page
    assert "limits not met" in page


def test_writes_in_one_step(make_front: MakeFront, bench: Bench, run_dir: Path) -> None:
    front, evaluations = make_front()
    write_report(front, evaluations, bench.groups, run_dir / "report.html")
    write_report(front, evaluations, bench.groups, run_dir / "report.html")
    assert [p.name for p in run_dir.iterdir()] == ["report.html"]
    with pytest.raises(RunError, match="cannot write"):
        write_report(front, evaluations, bench.groups, run_dir / "nowhere" / "report.html")


def test_scatter_places_every_plan(make_front: MakeFront) -> None:
    front, evaluations = make_front()
    svg = scatter(front, evaluations)
    assert len(circles(svg, "front")) == 3
    ((chosen_x, chosen_y),) = circles(svg, "chosen")
    ((faint_x, faint_y),) = circles(svg, "faint")
    assert faint_x > chosen_x, "slower is further right"
    assert faint_y < chosen_y, "a larger error is further up"
    assert svg.count('class="broken"') == 1
    assert "not finite" in svg
    assert "0, exact" in svg
    for x, y in circles(svg, "front"):
        assert 0 < x < 1000
        assert 0 < y < 470


def test_scatter_of_one_plan(make_front: MakeFront) -> None:
    front, _ = make_front()
    alone = replace(front, points=(front.fp32,), fp16=None, chosen=front.fp32)
    assert len(circles(scatter(alone, ()), "chosen")) == 1


def test_scatter_of_errors_that_are_all_broken(make_front: MakeFront, bench: Bench) -> None:
    front, _ = make_front()
    broken = replace(bench.evaluation(6, 0.9, math.nan), error=make_error(math.nan, non_finite=1.0))
    ElementTree.fromstring(scatter(replace(front, points=(), chosen=None, fp16=broken), (broken,)))


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.93, 4.1) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    for low, high in ((0.0011, 0.0019), (12.0, 950.0), (0.0, 1.0)):
        found = ticks(low, high)
        assert 3 <= len(found) <= 12
        assert all(low <= t <= high * (1 + 1e-9) for t in found)


def test_precision_map_marks_plans_and_pins(make_front: MakeFront, bench: Bench) -> None:
    front, _ = make_front()
    groups = (replace(bench.groups[0], pinned="only FP32 <kernels>"), *bench.groups[1:])
    root = ElementTree.fromstring(precision_map(front, groups))
    styles = [rect.get("class") for rect in root.iter("rect")]
    assert styles.count("pinned") == len(front.points)
    assert styles.count("map-frame") == 1
    assert styles.count("hover") == len(groups)
    titles = [title.text or "" for title in root.iter("title")]
    assert "always FP32: only FP32 <kernels>" in titles[0]


def test_precision_map_thins_long_fronts_but_keeps_the_choice(make_front: MakeFront, bench: Bench) -> None:
    front, _ = make_front()
    many = tuple(replace(front.chosen, plan=replace(front.chosen.plan, model_sha256=str(n))) for n in range(100))
    chosen = many[37]
    root = ElementTree.fromstring(precision_map(replace(front, points=many, chosen=chosen), bench.groups))
    labels = list(root.iter("text"))
    assert len(labels) < 80
    assert [t for t in labels if t.get("class") == "map-chosen"]


def test_precision_map_of_nothing(make_front: MakeFront) -> None:
    front, _ = make_front()
    assert precision_map(front, ()) == ""
