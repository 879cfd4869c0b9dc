"""Why groups stay FP32: each reason where it holds, figures of the law, and reading it again from the run alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.engines.base import Failure, FailureKind, Measurement, SampleSet, Stage
from mptune.finding import CODES, Finding, Where
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import Explanation, Reason
from mptune.tuning.fronts.dominance import pareto
from mptune.tuning.listener import Silent
from mptune.tuning.reasons.group_findings import in_order
from mptune.tuning.reasons.reasons import EXPLAIN_JSON, Grounds, explain, keep_grounds
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.space import Pin, SearchSpace
from mptune.tuning.steps.prior import make_prior
from mptune.tuning.steps.remeasure import confirm, confirmed_evaluations
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON
from mptune.tuning.steps.tuner import Tuner
from tests.fakes import FAST, Diary, FakeToolchain, Law
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import find_sensitivity, propose_with

GAINS = dict.fromkeys((f"g{i:03d}" for i in range(8)), 0.5)
ERRORS = dict.fromkeys((f"g{i:03d}" for i in range(8)), 1e-5)


def guided(
    record: StudyRecord, space: SearchSpace, toolchain: FakeToolchain, folder: Path, budget: int = 30
) -> tuple[Evaluation, ...]:
    """A search as a session does it; returns the front."""
    sensitivity = find_sensitivity(space, toolchain, "relative_l2", folder / SENSITIVITY_JSON, Diary())
    prior = make_prior(space, sensitivity, toolchain.latency_terms(), exact=toolchain.latency_source == "predicted")  # type: ignore[arg-type]
    keep_grounds(space, prior, folder)
    propose_with(record, prior)
    Tuner(record, space, toolchain, SearchSettings(budget=budget), Silent()).run()
    return pareto(record.evaluations())


def reasons_in(explanation: Explanation, evaluation: Evaluation) -> dict[str, Reason]:
    return {kept.group: kept.reason for kept in explanation.of(evaluation.plan.fingerprint)}


def found(code: str, *groups: str, text: str = "it is so", tensor: str = "t") -> Finding:
    return Finding(code, CODES[code].severity, "search", Where(groups=groups, tensors=(tensor,)), {}, text, "")


@pytest.mark.parametrize("source", ["measured", "predicted"])
def test_each_reason_where_it_holds(open_record: OpenRecord, tmp_path: Path, source: str) -> None:
    small = make_small_space(8)
    free = tuple(g.id for g in small.groups if g.id != "g000")
    pin = Pin(Precision.FP32, "m: a constant of 1e6 overflows")
    space = replace(small, free=free, pinned={"g000": pin}, seeds=(small.seeds[0],))
    law = Law(
        list(GAINS),
        boundary_ms=0.05,
        gains={**GAINS, "g006": -0.3, "g007": 0.02},
        errors={**ERRORS, "g002": 2e-2, "g007": 1e-8},
    )
    toolchain = FakeToolchain(law, non_finite={"g004"}, latency_source=source, noise=0.0)  # type: ignore[arg-type]
    record = open_record(space)
    front = guided(record, space, toolchain, tmp_path)
    findings = [
        found("spacing", "g000", "g002"),
        found("mask", "g000", text="value 'm' at node 'n': a constant of 1e6 overflows", tensor="m"),
        found("long-sum", "g004"),
        found("cancellation", "g006"),
    ]
    explanation = explain(record, tmp_path, front, [], front[0], findings)
    for point in front:
        kept = explanation.of(point.plan.fingerprint)
        assert sorted(k.group for k in kept) == list(point.plan.fp32_groups)
        errors = [-1.0 if k.one_group_error is None else k.one_group_error for k in kept]
        assert errors == sorted(errors, reverse=True), "the largest first, those that were not taken last"
        assert all(k.name and k.why for k in kept)
    middle = next(p for p in front if set(p.plan.fp16_groups) == {"g001", "g003", "g005"})
    kept_groups = {k.group: k for k in explanation.of(middle.plan.fingerprint)}
    assert {g: k.reason for g, k in kept_groups.items()} == {
        "g000": Reason.PINNED,
        "g002": Reason.ERROR,
        "g004": Reason.ERROR,
        "g006": Reason.BOUNDARIES,
        "g007": Reason.BOUNDARIES,
    }
    assert {g: k.finding for g, k in kept_groups.items()} == {
        "g000": "mask",  # whose words are the pin's, before those of other findings about the group
        "g002": "spacing",
        "g004": None,  # a sum that some engines accumulate in FP32 explains no NaN
        "g006": None,  # what the group would do to the error is not why it is FP32
        "g007": None,
    }
    assert [w.finding for w in explanation.groups if w.group in ("g000", "g006")] == ["cancellation", "mask"]
    assert kept_groups["g000"].why == pin.reason
    assert kept_groups["g002"].one_group_error == pytest.approx(2e-2)
    assert kept_groups["g002"].why.startswith("kept for its error: 2.0e-02 alone, and FP16 would save ")
    assert kept_groups["g004"].one_group_error == math.inf
    assert kept_groups["g006"].why == "FP16 saves nothing in it"
    assert "the Casts for it cost 0.05 ms" in kept_groups["g007"].why
    json.dumps(explanation.to_json("relative_l2"), allow_nan=False)


def test_figures_are_the_laws(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    """With predicted latencies the terms are known exactly."""
    toolchain = FakeToolchain(Law(list(space.free), boundary_ms=0.3), latency_source="predicted")
    record = open_record()
    front = guided(record, space, toolchain, tmp_path)
    explanation = explain(record, tmp_path, front, [], front[0])
    law = toolchain.law
    for point in front:
        for kept in explanation.of(point.plan.fingerprint):
            with_it = point.plan.replace({kept.group: Precision.FP16})
            assert kept.saves_ms == pytest.approx(law.latency_ms(point.plan) - law.latency_ms(with_it), abs=1e-3)
            assert kept.one_group_error == pytest.approx(math.hypot(law.errors[kept.group], law.fp32_error), rel=1e-3)
            if kept.reason is Reason.BOUNDARIES:
                assert kept.saves_ms < 0.0005 * law.base_ms
    assert explanation.gains_from == "the roofline"
    for worth in explanation.groups:
        inner = worth.group not in (space.free[0], space.free[-1])
        assert worth.gain_ms == pytest.approx(law.gains[worth.group], rel=1e-3)
        assert worth.casts_ms == pytest.approx(0.6 if inner else 0.3, rel=1e-3)
        assert worth.error_per_ms == pytest.approx(law.errors[worth.group] / law.gains[worth.group], rel=1e-2)
        assert worth.fp16_points == sum(worth.group in p.plan.fp16_groups for p in front)
        assert worth.verdict == "FP16" or worth.verdict.startswith("FP32: ")
    ratios = [worth.error_per_ms for worth in explanation.groups]
    assert ratios == sorted(ratios)


def test_gains_are_learned_from_builds(open_record: OpenRecord, tmp_path: Path) -> None:
    """The roofline is wrong by a factor; what was timed counts."""
    space = make_small_space(8)
    toolchain = FakeToolchain(Law(list(GAINS), gains=GAINS, boundary_ms=0.05), noise=0.0)
    record = open_record(space)
    sensitivity = find_sensitivity(space, toolchain, "relative_l2", tmp_path / SENSITIVITY_JSON, Diary())
    terms = toolchain.latency_terms()
    wrong = replace(terms, gains_ms={**dict.fromkeys(GAINS, 0.05), "g003": 0.4})  # type: ignore[type-var]
    prior = make_prior(space, sensitivity, wrong, exact=False)  # type: ignore[arg-type]
    keep_grounds(space, prior, tmp_path)
    propose_with(record, prior)
    Tuner(record, space, toolchain, SearchSettings(budget=40), Silent()).run()
    front = pareto(record.evaluations())
    explanation = explain(record, tmp_path, front, [], None)
    builds = len(record.evaluations())
    assert explanation.gains_from == f"the roofline and {builds} builds"
    for worth in explanation.groups:
        assert worth.gain_ms == pytest.approx(0.5, abs=0.15)
        assert worth.verdict == "no plan is chosen"


def test_failures_that_only_builds_show(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    toolchain = FakeToolchain(Law(list(space.free), gains=GAINS, errors=ERRORS), fails={"g005"}, noise=0.0)
    record = open_record()
    front = guided(record, space, toolchain, tmp_path)
    (kept,) = [k for k in explain(record, tmp_path, front, [], None).of(front[0].plan.fingerprint) if k.group == "g005"]
    assert kept.reason is Reason.FAILED, "a plan that gives no outputs shows no overflow"
    assert "with it in FP16 gave no outputs" in kept.why
    assert kept.one_group_error == pytest.approx(1e-5, rel=1e-2)


def test_a_group_whose_only_plan_failed_was_tried(
    open_record: OpenRecord, space: SearchSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All-FP16 fails, and nothing shows which of its groups is to blame: none of them was not tried."""
    toolchain = FakeToolchain(
        Law(list(space.free), gains=GAINS, errors=dict.fromkeys(ERRORS, 1e-9), fp32_error=0.0), noise=0.0
    )
    evaluate = toolchain.evaluate

    def fail(plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False) -> Measurement | Failure:
        whole = set(space.free) <= set(plan.fp16_groups)
        cause = Failure(Stage.BUILD, FailureKind.NO_TACTIC, "no kernel\nfor " + 400 * "x")
        return cause if whole else evaluate(plan, which, profile=profile)

    monkeypatch.setattr(toolchain, "evaluate", fail)
    record = open_record()
    guided(record, space, toolchain, tmp_path, budget=2)
    baseline = record.baseline()
    assert baseline is not None
    for kept in explain(record, tmp_path, [baseline], [], None).of(baseline.plan.fingerprint):
        assert kept.reason is Reason.FAILED
        assert kept.why.startswith("the one plan with it in FP16 gave no outputs (build, no tactic: no kernel for xxx")
        assert kept.why.endswith("...); whether it is to blame is open, and a larger budget may tell")
        assert len(kept.why) < 300


def test_a_group_that_breaks_the_held_out_samples_alone(
    open_record: OpenRecord, space: SearchSpace, tmp_path: Path
) -> None:
    """Its error on the search samples is not why no point has it."""
    law = Law(list(space.free), gains=GAINS, errors={**ERRORS, "g001": 1e-3})
    toolchain = FakeToolchain(law, non_finite_held_out={"g001"}, noise=0.0)
    record = open_record()
    guided(record, space, toolchain, tmp_path)
    confirm(record, toolchain, SearchSettings(budget=30), Silent(), rounds=1)
    points = confirmed_evaluations(record, 1, FAST)[0]
    assert {group for point in points for group in point.plan.reduced_groups} == set(space.free) - {"g001"}
    explanation = explain(record, tmp_path, points, [], None)
    for point in points:
        for kept in explanation.of(point.plan.fingerprint):
            assert ("met the held-out samples gave NaN or Inf there" in kept.why) == (kept.group == "g001")
            assert "is open" not in kept.why, "every other group is in a plan that is sound"


def test_groups_that_share_a_plan_that_breaks_on_held_out_samples_are_not_blamed(
    open_record: OpenRecord, space: SearchSpace, tmp_path: Path
) -> None:
    law = Law(list(space.free), gains=GAINS, errors=dict.fromkeys(ERRORS, 1e-9), fp32_error=0.0)
    toolchain = FakeToolchain(law, non_finite_held_out={"g001"}, noise=0.0)
    record = open_record()
    guided(record, space, toolchain, tmp_path, budget=2)
    confirm(record, toolchain, SearchSettings(budget=2), Silent(), rounds=1)
    points = confirmed_evaluations(record, 1, FAST)[0]
    for kept in explain(record, tmp_path, points, [], None).of(points[0].plan.fingerprint):
        assert kept.reason is Reason.FAILED
        assert kept.why.startswith("the one plan with it in FP16 that met the held-out samples gave NaN or Inf there; ")
        assert "whether it is to blame is open" in kept.why


def test_without_sensitivity_and_terms_nothing_is_made_up(
    open_record: OpenRecord, space: SearchSpace, tmp_path: Path
) -> None:
    record = open_record(sampler=None)
    toolchain = FakeToolchain(Law(list(space.free)), noise=0.0)
    keep_grounds(space, None, tmp_path)
    Tuner(record, space, toolchain, SearchSettings(budget=10, sampler="tpe"), Silent()).run()
    front = pareto(record.evaluations())
    explanation = explain(record, tmp_path, front, [], front[0])
    assert explanation.gains_from is None
    for point in front:
        for kept in explanation.of(point.plan.fingerprint):
            assert (kept.one_group_error, kept.saves_ms) == (None, None)
            assert kept.reason in (Reason.UNKNOWN, Reason.ERROR, Reason.BOUNDARIES)
    assert any(r is Reason.UNKNOWN for point in front for r in reasons_in(explanation, point).values())


def test_the_baseline_is_explained_where_a_group_is_pinned_to_fp16(open_record: OpenRecord, tmp_path: Path) -> None:
    small = make_small_space(3)
    space = replace(small, free=("g000", "g002"), pinned={"g001": Pin(Precision.FP16, "a test")})
    record = open_record(space)
    front = guided(record, space, FakeToolchain(Law(["g000", "g001", "g002"])), tmp_path)
    baseline = record.baseline()
    assert baseline is not None
    explanation = explain(record, tmp_path, front, [baseline], front[0])
    why = {k.group: k.why for k in explanation.of(baseline.plan.fingerprint)}
    assert "the baseline, whatever is pinned" in why["g001"]
    assert {w.group: w.verdict for w in explanation.groups}["g001"] == "pinned to FP16"


def test_grounds_survive_their_file(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    record = open_record()
    front = guided(record, space, FakeToolchain(Law(list(space.free))), tmp_path, budget=10)
    path = tmp_path / EXPLAIN_JSON
    known = Grounds.load(path)
    assert known.prior is not None
    assert [g.id for g in known.groups] == list(space.free)
    before = path.stat().st_mtime_ns
    keep_grounds(space, None, tmp_path)
    assert path.stat().st_mtime_ns == before, "a session without a toolchain writes nothing and loses nothing"
    first = explain(record, tmp_path, front, [], front[0])
    assert explain(open_record(), tmp_path, front, [], front[0]) == first
    path.write_text("{}")
    assert explain(record, tmp_path, front, [], front[0]) == Explanation()
    assert explain(record, tmp_path / "elsewhere", front, [], front[0]) == Explanation()


def test_what_breaks_is_listed_by_its_one_group_error() -> None:
    small, large, pinned = (found("cancellation", group) for group in ("g001", "g002", "g003"))
    first, other = found("vanishing-epsilon", "g004"), found("target-not-here")
    overflow = found("overflow", "g004")
    kept = replace(found("spacing", "g005"), severity="info")
    listed = in_order((other, small, kept, large, pinned, first, overflow), {"g001": 1e-4, "g002": 1e-2, "g005": 1.0})
    assert listed == (first, overflow, pinned, large, small, kept, other), "a group's own stay in the graph's order"
