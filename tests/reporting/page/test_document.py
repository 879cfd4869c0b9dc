"""The page: its data are complete, printable and small, and its text says what the run holds."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.choice import Choice, ChoiceLimits
from mptune.engines.base import Failure, FailureKind, Stage
from mptune.finding import BREAKING_CODES, CODES, FP16_CODES, Finding, Where
from mptune.reporting.page import PageContent, page_document, recommended, render
from mptune.reporting.text import TF32_SIZE
from mptune.tuning.confirmation import Confirmation
from mptune.tuning.evaluation import Origin
from mptune.tuning.explanation import Explanation, GroupWorth, Kept
from mptune.tuning.front import Front, front_records
from mptune.tuning.result import Progress
from mptune.tuning.texts import latency_text
from tests.reporting.conftest import Bench, Evaluations, make_error, make_latency, predicted
from tests.reporting.page.reading import plans_of


def test_the_data_hold_everything(front: Front, evaluations: Evaluations, bench: Bench, content: PageContent) -> None:
    document = page_document(content)
    plans = plans_of(document)
    assert {e.plan.fingerprint for e in evaluations} == set(plans)
    assert [group["id"] for group in document["groups"]] == [group.id for group in bench.groups]
    for evaluation in evaluations:
        shown = plans[evaluation.plan.fingerprint]
        halves = [g.id for g, letter in zip(bench.groups, shown["bits"], strict=True) if letter == "h"]
        assert halves == list(evaluation.plan.fp16_groups)
        assert shown["ms"] == pytest.approx(evaluation.latency.median_ms)
        assert bool(shown["finite"]) == evaluation.is_finite
    assert [document["plans"][k][0] for k in document["front"]] == [p.plan.fingerprint for p in front.points]
    assert document["plans"][document["chosen"]][0] == front.chosen.plan.fingerprint
    assert document["latency_is"] == "measured"
    assert document["statistics"][str(document["fp32"])][0][1]["max_abs"] == 0.0
    page = render(content)
    for text in ("NVIDIA H200, 140 GiB", bench.model.sha256, *front.warnings, "latency measured", "error measured"):
        assert text in page, text
    page = render(PageContent(predicted(front), (), bench.groups))
    for text in ("latency predicted", "error emulated", "PREDICTED for jetson-orin-nano-8gb"):
        assert text in page


def test_the_fronts_own_evaluation_stands_for_that_of_the_search(content: PageContent) -> None:
    earlier = [replace(e, held_out=None, remeasured=False) for e in content.evaluations]
    plans = plans_of(page_document(replace(content, evaluations=earlier))).values()
    shown = [(plan["search"], plan["held_out"]) for plan in plans if plan["held_out"] is not None]
    assert shown == [(3e-4, 4e-4)]


def test_without_a_choice(front: Front, content: PageContent) -> None:
    choice = Choice(unmet=ChoiceLimits(max_error=1e-9))
    front = replace(front, chosen=None, points=(), choice=choice)
    content = replace(content, front=front)
    document = page_document(content)
    assert (document["chosen"], document["front"]) == (None, [])
    assert "No plan is chosen: no plan is feasible." in render(content)
    assert [roles for _, roles in recommended(front)] == [["all-FP16"], ["all-FP32"]]


def test_numbers_that_are_not_finite_are_texts(front: Front, bench: Bench) -> None:
    broken = replace(bench.evaluation(6, 0.9, math.nan), error=make_error(math.nan, non_finite=1.0))
    document = page_document(PageContent(replace(front, points=(), chosen=None, fp16=broken), (broken,), bench.groups))
    json.dumps(document, allow_nan=False)
    assert plans_of(document)[broken.plan.fingerprint]["search"] == "nan"


def test_pinned_groups_are_named_whoever_pins_them(front: Front, bench: Bench) -> None:
    first, second, third = (group.id for group in bench.groups[:3])
    worth = GroupWorth(second, "n", "norm", pinned="the space says so")
    groups = (replace(bench.groups[0], pinned="only FP32 <kernels>"), *bench.groups[1:])
    explained = replace(front, explanation=Explanation(groups=(worth,)))
    pinned = {group["id"]: group["pinned"] for group in page_document(PageContent(explained, (), groups))["groups"]}
    assert [pinned[group] for group in (first, second, third)] == ["only FP32 <kernels>", "the space says so", None]


def test_reasons_stand_once(front: Front, evaluations: Evaluations, bench: Bench) -> None:
    worth = GroupWorth(bench.groups[-1].id, "n", "conv", pinned="too large", finding="overflow")
    explanation = Explanation({point.plan.fingerprint: (Kept(worth, "finding"),) for point in front.points})
    document = page_document(PageContent(replace(front, explanation=explanation), evaluations, bench.groups))
    assert document["reasons"]["texts"] == ["overflow: too large"]
    assert document["fp32"] not in {int(plan) for plan in document["reasons"]["plans"]}
    assert document["reasons"]["plans"][str(document["chosen"])] == [[len(bench.groups) - 1, 0]]


def test_findings_are_sorted_by_what_they_are_about(front: Front, bench: Bench) -> None:
    findings = tuple(
        Finding(code, "warning", "search", Where(nodes=("a\nb",)), {"x": 1.0}, f"the text of {code}", "")
        for code in ("random-data", "overflow")
    )
    page = render(PageContent(replace(front, findings=findings), (), bench.groups))
    _, breaks, warnings = re.split('<section id="(?:breaks|warnings)"', page)
    assert "the text of overflow" in breaks
    assert "a\\nb" in breaks, "on one line"
    assert "the text of random-data" in warnings
    assert set(CODES) >= FP16_CODES >= set(BREAKING_CODES)


def test_failures_name_their_log(front: Front, bench: Bench, tmp_path: Path) -> None:
    failure = Failure(Stage.BUILD, FailureKind.NO_TACTIC, "no tactic for <Conv>", tmp_path / "0007.log")
    progress = Progress(failures=((bench.plan(2), Origin("seed", "half"), failure),))
    page = render(PageContent(front, (), bench.groups, progress=progress))
    for text in ("logs/0007.log", "<td>build: no tactic</td>", "<td>half</td>", "no tactic for &lt;Conv&gt;"):
        assert text in page


def test_the_run_is_named_without_its_folders(front: Front, bench: Bench, tmp_path: Path) -> None:
    for run_dir in (tmp_path / "my model.mptune", Path("my model.mptune")):
        front = replace(front, run_dir=run_dir)
        assert shlex.split(page_document(PageContent(front, (), bench.groups))["run"]) == ["my model.mptune"]


def test_a_confirmation_has_both_figures(confirmation: Confirmation, bench: Bench) -> None:
    page = render(PageContent(confirmation.front, (), bench.groups, confirmation=confirmation))
    section = page.partition('<section id="confirmation"')[2].partition("</section>")[0]
    assert "its outputs are &lt;not&gt; finite" in section
    assert "the predicted ranking held" in section
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr.*?</tr>", section)[1:]]
    assert [row[-2] for row in rows].count("chosen") == 1
    searched = [plan.searched for plan in confirmation.plans]
    assert [row[:2] for row in rows] == [[each.plan.fingerprint, latency_text(each)] for each in searched]


TF32_PAGES = ("glossary", "tensorrt-11", "troubleshooting", "tutorial")


def test_tf32_stands_beside_the_other_baselines(front: Front, evaluations: Evaluations, bench: Bench) -> None:
    tf32 = replace(front.fp32, latency=make_latency(1.6), error=make_error(5e-4), speedup=1.25)
    content = PageContent(replace(front, tf32=tf32), evaluations, bench.groups)
    document = page_document(content)
    assert dict(zip(document["plan_fields"], document["tf32"], strict=True))["ms"] == 1.6
    assert len(document["plans"]) == len(evaluations), "its plan is that of all-FP32"
    page = render(content)
    assert "<span>all-FP32 in TF32</span>" in page
    assert re.search(r"^-  -  .* 1\.600 .* \*5.0e-04 .* all-FP32 in TF32$", repr(content.front), re.MULTILINE)
    assert front_records(content.front) == front_records(front), "it is no plan"
    files = [file.read_text() for name in TF32_PAGES for file in Path("docs").glob(f"*/{name}.md")]
    assert len(files) == len(TF32_PAGES)
    assert all(TF32_SIZE in each for each in (page, *files))


def test_the_chosen_plan_its_neighbours_and_the_baselines_are_recommended(front: Front) -> None:
    rows = {e.latency.median_ms: roles for e, roles in recommended(front)}
    assert rows == {0.9: ["all-FP16", "faster"], 1.2: ["chosen"], 1.7: ["more exact"], 2.0: ["all-FP32"]}
