"""Why groups stay FP32: each reason where it holds, figures of the law, and reading it again from the run alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.finding import CODES, Finding, Where
from mptune.graph.groups import FOLDED
from mptune.graph.plan import Precision
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.dominance import pareto
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import EXPLAIN_JSON, Explanation, Grounds, explain, keep_grounds
from mptune.tuning.knowledge import make_prior
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.space import Pin, SearchSpace
from tests.fakes import FakeToolchain, Law
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import find_sensitivity, make_toolchain, propose_with, tune

GAINS = dict.fromkeys((f"g{i:03d}" for i in range(11)), 0.5)


def guided(
    record: StudyRecord, toolchain: FakeToolchain, folder: Path, budget: int = 30, terms: LatencyTerms | None = None
) -> tuple[Evaluation, ...]:
    """A search as a session does it, which knows these terms or those of the law; returns the front."""
    sensitivity = find_sensitivity(record.space, toolchain, folder)
    is_exact = toolchain.latency_source == "predicted"
    prior = make_prior(record.space, sensitivity, terms or toolchain.latency_terms(), exact=is_exact)
    keep_grounds(record.space, prior, folder)
    propose_with(record, prior)
    tune(record, toolchain, budget=budget)
    return pareto(record.evaluations())


def about(code: str, *groups: str) -> Finding:
    return Finding(code, CODES[code].severity, "search", Where(groups=groups, tensors=("t",)), {}, "it is so", "")


@pytest.mark.parametrize("source", ["measured", "predicted"])
def test_each_reason_where_it_holds(open_record: OpenRecord, tmp_path: Path, source: str) -> None:
    pins = {
        "g000": Pin(Precision.FP32, "m: a constant of 1e6 overflows", "mask"),
        "g008": Pin(Precision.FP32, "CUDA has no FP16 kernel for GridSample", "no-fp16-kernel"),
        "g009": Pin(Precision.FP32, "pinned to fp32 by 'op:Add' of my.toml"),
        "g010": Pin(Precision.FP16, "pinned to fp16 by 'op:Mul' of my.toml"),
        "g011": Pin(Precision.FP32, FOLDED),
    }
    small = make_small_space(12)
    free = tuple(g.id for g in small.groups if g.id not in pins)
    space = replace(small, free=free, pinned=pins, seeds=(small.seeds[0],))
    errors, gains = {**dict.fromkeys(GAINS, 1e-5), "g002": 2e-2, "g007": 1e-8}, {**GAINS, "g006": -0.3, "g007": 0.02}
    law = Law(list(GAINS), boundary_ms=0.05, gains=gains, errors=errors)
    record, toolchain = open_record(space), FakeToolchain(law, non_finite={"g004"}, latency_source=source, noise=0.0)
    front = guided(record, toolchain, tmp_path)
    baseline = record.baseline()
    findings = [about("spacing", "g000", "g002"), about("long-sum", "g004"), about("cancellation", "g006")]
    explanation = explain(record, tmp_path, front, [baseline], findings)
    for point in front:
        kept = explanation.fp32_groups(point.plan.fingerprint)
        assert sorted(k.worth.group for k in kept) == list(point.plan.fp32_groups)
        errors = [-1.0 if k.worth.one_group_error is None else k.worth.one_group_error for k in kept]
        assert errors == sorted(errors, reverse=True), "the largest first, those that were not taken last"
    middle = next(p for p in front if {"g001", "g003", "g005"} == set(p.plan.fp16_groups) - {"g010"})
    groups = {k.worth.group: k for k in explanation.fp32_groups(middle.plan.fingerprint)}
    assert {group: (k.reason, k.finding) for group, k in groups.items()} == {
        "g000": ("finding", "mask"),  # the one that pins it, whatever else is about it
        "g002": ("error", "spacing"),
        "g004": ("error", None),  # a sum that some engines accumulate in FP32 explains no NaN
        "g006": ("casts", None),  # what it would do to the error is not why it is FP32
        "g007": ("casts", None),
        "g008": ("no-kernel", "no-fp16-kernel"),
        "g009": ("not-tried", None),
        "g011": ("casts", None),
    }
    assert groups["g000"].because == "mask: m: a constant of 1e6 overflows"
    assert groups["g002"].because.startswith("spacing: 2.0e-02 alone, would save ")
    assert groups["g004"].because.startswith("error: NaN or Inf alone, would save ")
    of_baseline = {k.worth.group: k.reason for k in explanation.fp32_groups(baseline.plan.fingerprint)}
    assert of_baseline["g010"] == "not-tried", "all-FP32 is the baseline, whatever is pinned"
    assert [w.group for w in explanation.groups][-len(pins) :] == list(pins)
    json.dumps(explanation.to_json("relative_l2"), allow_nan=False)


def test_figures_are_the_laws(record: StudyRecord, space: SearchSpace, tmp_path: Path) -> None:
    """With predicted latencies the terms are known exactly."""
    toolchain = FakeToolchain(Law(list(space.free), boundary_ms=0.3), latency_source="predicted")
    front, law = guided(record, toolchain, tmp_path), toolchain.law
    explanation = explain(record, tmp_path, front)
    for point in front:
        for kept in explanation.fp32_groups(point.plan.fingerprint):
            group, error = kept.worth.group, kept.worth.one_group_error
            with_it = point.plan.replace({group: Precision.FP16})
            assert kept.saves_ms == pytest.approx(law.latency_ms(point.plan) - law.latency_ms(with_it), abs=1e-3)
            assert error == pytest.approx(math.hypot(law.errors[group], law.fp32_error), rel=1e-3)
            if kept.reason == "casts":
                assert kept.saves_ms < 0.0005 * law.base_ms
    assert explanation.gains_from == "the roofline"
    for worth in explanation.groups:
        inner = worth.group not in (space.free[0], space.free[-1])
        assert worth.gain_ms == pytest.approx(law.gains[worth.group], rel=1e-3)
        assert worth.casts_ms == pytest.approx(0.6 if inner else 0.3, rel=1e-3)
        assert worth.fp16_points == sum(worth.group in p.plan.fp16_groups for p in front)
    ratios = [(worth.one_group_error or 0.0) / (worth.gain_ms or 0.0) for worth in explanation.groups]
    assert ratios == sorted(ratios)


@pytest.mark.usefixtures("spends_budget")
def test_gains_are_learned_from_builds(record: StudyRecord, space: SearchSpace, tmp_path: Path) -> None:
    """The roofline is wrong by a factor; what was timed counts."""
    toolchain = FakeToolchain(Law(list(space.free), gains=GAINS, boundary_ms=0.05), noise=0.0)
    wrong = replace(toolchain.latency_terms(), gains_ms={**dict.fromkeys(GAINS, 0.05), "g003": 0.4})
    explanation = explain(record, tmp_path, guided(record, toolchain, tmp_path, 40, wrong))
    assert explanation.gains_from == f"the roofline and {len(record.evaluations())} builds"
    assert [worth.gain_ms for worth in explanation.groups] == [pytest.approx(0.5, abs=0.15)] * 8


def test_without_sensitivity_and_terms_nothing_is_made_up(record: StudyRecord, tmp_path: Path) -> None:
    keep_grounds(record.space, None, tmp_path)
    tune(record, budget=10)
    front = pareto(record.evaluations())
    explanation = explain(record, tmp_path, front)
    assert explanation.gains_from is None
    assert {k.because for point in front for k in explanation.fp32_groups(point.plan.fingerprint)} == {"not-tried"}


def test_grounds_survive_their_file(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    record, path = open_record(), tmp_path / EXPLAIN_JSON
    front = guided(record, make_toolchain(space), tmp_path, budget=10)
    assert Grounds.load(path).prior is not None
    before = path.stat().st_mtime_ns
    keep_grounds(space, None, tmp_path)
    assert path.stat().st_mtime_ns == before, "a session without a toolchain writes nothing and loses nothing"
    assert explain(open_record(), tmp_path, front) == explain(record, tmp_path, front) != Explanation()
    document = json.loads(path.read_text())
    for name in ("groups", "gains_ms"):  # a damaged file: one is missing
        path.write_text(json.dumps(document | {"prior": document["prior"] | {name: document["prior"][name][1:]}}))
        damaged = explain(record, tmp_path, front)
        assert (damaged.gains_from, len(damaged.groups)) == (None, len(space.groups))
    path.write_text("{}")
    assert explain(record, tmp_path, front) == Explanation()
    assert explain(record, tmp_path / "elsewhere", front) == Explanation()
