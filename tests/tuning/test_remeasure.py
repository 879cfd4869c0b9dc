"""The confirmed front: rounds, held-out errors, pooled latencies, points that fail, resuming."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mptune.choice import Choice
from mptune.engines.base import Failure, Measurement, SampleSet
from mptune.errors import PlanError, RunError
from mptune.graph.plan import PrecisionPlan
from mptune.run_json import ModelSection, RunFile, SearchSection, TargetSection
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings, WorkerSettings
from mptune.tuning.choosing import find_plan
from mptune.tuning.dominance import pareto
from mptune.tuning.evaluation import ORIGIN_FP16
from mptune.tuning.front import Front
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import open_study
from mptune.tuning.remeasure import remeasure, rounds_needed, to_measure
from mptune.tuning.result import build_front
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import Tuner
from tests.fakes import FAST, SHA, Diary, FakeToolchain, Law
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import make_bench, make_evaluation, make_fixed_settings
from tests.tuning.test_tuner import make_toolchain

SETTINGS = SearchSettings(budget=15, data=Path("samples.npz"), latency=FAST, worker=WorkerSettings(retries=1))
RUN = RunDirectory(Path("m.mptune"))
FILE = RunFile(
    model=ModelSection(path="m.onnx", sha256=SHA),
    fixed_settings=make_fixed_settings(SearchSettings(target="cpu", latency=FAST)),
    search=SearchSection.from_settings(SearchSettings()).model_copy(update={"budget": 0}),
    study="m",
    target=TargetSection(
        name="cpu", engine="fake", device="Fake 1000", latency_source="measured", error_source="measured"
    ),
    warnings=("mind the gap",),
)


@pytest.fixture
def searched(open_record: OpenRecord, space: SearchSpace) -> StudyRecord:
    record = open_record()
    Tuner(make_bench(record, make_toolchain(space), SETTINGS)).run()
    return record


def front_of(record: StudyRecord, **choice: object) -> Front:
    return build_front(RUN, FILE, record, Choice(**choice))  # type: ignore[arg-type]


def test_what_cannot_become_the_choice_is_measured_once(searched: StudyRecord, space: SearchSpace) -> None:
    toolchain = make_toolchain(space)
    points = [p.plan.fingerprint for _, p in to_measure(searched, SETTINGS, 3)]
    remeasure(make_bench(searched, toolchain, SETTINGS), rounds=3)
    front = front_of(searched)
    chosen = front.chosen.plan.fingerprint
    assert toolchain.calls == [(p, "held_out", 1) for p in points] + [(chosen, "held_out", n) for n in (2, 3)]
    assert all(p.remeasured for p in front.points)


def test_the_confirmed_front(searched: StudyRecord, space: SearchSpace) -> None:
    remeasure(make_bench(searched, make_toolchain(space, held_out_factor=2.0), SETTINGS), rounds=3)
    front = front_of(searched)
    assert all(p.remeasured and p.held_out is not None for p in front.points)
    assert all(p.held_out_value == pytest.approx(2 * p.error_value) for p in front.points)
    assert all(len(p.latency.raw_ms) == (33 if p == front.chosen else 11) for p in front.points)
    assert front.points == pareto(front.points)
    assert front.fp32.remeasured
    assert front.fp16 is not None
    assert front.fp16.origin == ORIGIN_FP16
    assert front.fp16.remeasured
    assert all(p.speedup == pytest.approx(front.fp32.latency.median_ms / p.latency.median_ms) for p in front.points)
    assert front.chosen in front.points
    assert front.warnings[0] == "mind the gap"
    assert 0 < front.hypervolume < 1
    assert (front.evaluations, front.failures) == (15, 0)


def test_what_was_measured_is_not_repeated(searched: StudyRecord, space: SearchSpace) -> None:
    points = to_measure(searched, SETTINGS, 3)
    interrupted = make_toolchain(space, interrupt_after=len(points) + 1, session_spread=0.3)
    with pytest.raises(KeyboardInterrupt):
        remeasure(make_bench(searched, interrupted, SETTINGS), rounds=3)
    rest = make_toolchain(space, session_spread=0.3)
    remeasure(make_bench(searched, rest, SETTINGS), rounds=3)
    taken = Counter(plan for plan, _, _ in (*interrupted.calls, *rest.calls))
    assert set(taken.values()) <= {1, 2, 3}
    chosen = front_of(searched).chosen
    assert taken[chosen.plan.fingerprint] == 3
    again = make_toolchain(space)
    remeasure(make_bench(searched, again, SETTINGS), rounds=3)
    assert again.calls == []
    assert to_measure(searched, SETTINGS, 3) == []


def test_a_predicted_latency_is_never_confirmed(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    toolchain = make_toolchain(space, latency_source="predicted", error_source="emulated")
    Tuner(make_bench(record, toolchain, SETTINGS)).run()
    rounds = rounds_needed(SETTINGS, "predicted")
    assert rounds == 1
    remeasure(make_bench(record, toolchain, SETTINGS), rounds)
    front = front_of(record)
    assert all(p.held_out is not None and not p.remeasured for p in front.points)
    assert {p.latency.source for p in front.points} == {"predicted"}


def test_a_point_that_fails_is_tried_again_in_the_next_session(searched: StudyRecord, space: SearchSpace) -> None:
    fastest = pareto(searched.evaluations())[0]
    toolchain = make_toolchain(space, fails_fresh={fastest.plan.fingerprint})
    remeasure(make_bench(searched, toolchain, SETTINGS), rounds=3)
    assert sum(call[0] == fastest.plan.fingerprint for call in toolchain.calls) == 2, "once more in a fresh process"
    front = front_of(searched)
    (point,) = (p for p in front.points if p.plan == fastest.plan)
    assert not point.remeasured
    assert point.latency.median_ms == fastest.latency.median_ms
    assert point.held_out is None
    (warning,) = (w for w in front.warnings if fastest.plan.fingerprint in w and "segmentation fault" in w)
    assert warning.startswith("failed when re-measured: ")
    again = make_toolchain(space)
    remeasure(make_bench(searched, again, SETTINGS), rounds=3)
    assert {call[0] for call in again.calls} == {fastest.plan.fingerprint}
    front = front_of(searched)
    assert all(p.remeasured for p in front.points)
    assert not any("segmentation fault" in w for w in front.warnings)


def test_the_baseline_is_never_dropped(searched: StudyRecord, space: SearchSpace) -> None:
    fp32 = space.seeds[0].plan
    remeasure(make_bench(searched, make_toolchain(space, fails_fresh={fp32.fingerprint}), SETTINGS), rounds=2)
    front = front_of(searched)
    assert fp32 in [p.plan for p in front.points]
    assert front.fp32.plan == fp32
    assert not front.fp32.remeasured
    assert {p.plan for p in front.points if not p.remeasured} == {fp32}
    remeasure(make_bench(searched, make_toolchain(space), SETTINGS), rounds=3)
    assert front_of(searched).fp32.remeasured


class Erring(FakeToolchain):
    """Held-out errors are larger where ``factor`` says so, of a plan and of how often the worker was restarted."""

    factor: Callable[[PrecisionPlan, int], float]

    def evaluate(self, plan: PrecisionPlan, which: SampleSet, **options: bool) -> Measurement | Failure:
        found = super().evaluate(plan, which, **options)
        assert isinstance(found, Measurement)
        factor = self.factor(plan, self.restarts) if which == "held_out" else 1.0
        scaled = {
            output: {name: tuple(v * factor for v in values) for name, values in statistics.items()}
            for output, statistics in found.error.per_output.items()
        }
        return replace(found, error=replace(found.error, per_output=scaled))


def test_of_processes_that_differ_on_the_samples_the_worst_counts(searched: StudyRecord, space: SearchSpace) -> None:
    toolchain = Erring(Law([g.id for g in space.groups]))
    toolchain.factor = lambda plan, restarts: 1.0 if restarts == 1 else 5.0
    remeasure(make_bench(searched, toolchain, SETTINGS), rounds=3)
    front = front_of(searched)
    chosen = front.chosen
    assert chosen.held_out_value == pytest.approx(5.0 * chosen.error_value, rel=0.1), "that of the worst process"
    assert [finding.code for finding in front.findings] == ["held-out-differs"]


def test_an_fp32_engine_that_is_wrong_on_held_out_samples_is_told(searched: StudyRecord, space: SearchSpace) -> None:
    toolchain = Erring(Law([g.id for g in space.groups]))
    toolchain.factor = lambda plan, restarts: 1.0 if plan.fp16_groups else 1e4
    remeasure(make_bench(searched, toolchain, SETTINGS), rounds=1)
    front = front_of(searched)
    (found,) = [finding for finding in front.findings if finding.code == "engine-differs"]
    assert found.severity == "warning", "the search is over"
    assert found.text.startswith("on the held-out samples the all-FP32 engine is off by")


def test_what_is_dropped_on_held_out_samples_is_said_once(searched: StudyRecord, space: SearchSpace) -> None:
    every = {g.id for g in space.groups}
    remeasure(make_bench(searched, make_toolchain(space, non_finite_held_out=every), SETTINGS), rounds=1)
    front = front_of(searched)
    assert front.points == (front.fp32,)
    assert front.fp16 is not None
    assert not front.fp16.is_finite, "all-FP16 is not shown as if its outputs were finite"
    (dropped,) = (text for text in front.warnings if "not finite on the held-out samples, and off the front: " in text)
    finite = [e for e in searched.evaluations() if e.is_finite and e.plan.fp16_groups]
    assert f" and {len(finite) - 3} more" in dropped, "none is left that the broken ones had hidden"
    with pytest.raises(PlanError, match="not finite"):
        front_of(searched, plan=front.fp16.plan.fingerprint)


def test_a_plan_that_is_dropped_hides_no_sound_one(open_record: OpenRecord, space: SearchSpace) -> None:
    """All that holds the last group breaks on the held-out samples, and had dominated plans without it."""
    last = space.groups[-1].id
    law = {"gains": {last: 6.0}, "errors": {last: 0.0}, "boundary_ms": 0.0}
    record, groups = open_record(), [g.id for g in space.groups]
    Tuner(make_bench(record, FakeToolchain(Law(groups, **law)), SETTINGS)).run()  # type: ignore[arg-type]
    before = {e.plan for e in pareto(record.evaluations())}
    sound = {e.plan for e in pareto(e for e in record.evaluations() if last not in e.plan.fp16_groups)}
    assert sound - before, "some are dominated"
    broken = FakeToolchain(Law(groups, **law), non_finite_held_out={last})  # type: ignore[arg-type]
    remeasure(make_bench(record, broken, SETTINGS), rounds=1)
    front = front_of(record)
    assert {point.plan for point in front.points} == sound
    assert all(point.held_out is not None for point in front.points)


def test_a_baseline_that_drifts_is_told(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    Tuner(make_bench(record, make_toolchain(space, drifts=[1.0] * 8 + [1.5]), SETTINGS)).run()
    (drift,) = (text for text in front_of(record).warnings if "took 1.00 to 1.50 times its first latency" in text)
    assert "speed-ups hold better than milliseconds" in drift


def test_a_broken_machine_stops_the_confirmation(searched: StudyRecord, space: SearchSpace) -> None:
    with pytest.raises(RunError, match="8 times in a row"):
        remeasure(make_bench(searched, make_toolchain(space, faults=-1), SETTINGS), rounds=2)
    toolchain, diary = make_toolchain(space, faults=1), Diary()
    remeasure(make_bench(searched, toolchain, SETTINGS, diary), rounds=1)
    assert "trying again" in diary.warnings[0]


def test_finding_a_plan() -> None:
    known = [make_evaluation(1.0, math.nan if n == 3 else 1e-3, number=n) for n in range(300)]
    names = [e.plan.fingerprint for e in known]
    typo = names[7][:-1] + ("0" if names[7][-1] != "0" else "1")
    assert find_plan(known, names[7]) == known[7]
    for name, message in (
        ("zzz", "no plan 'zzz'"),
        ("", "no plan ''"),
        (typo, "no plan"),
        (names[0][0], "several"),
        (names[3], "not feasible"),
    ):
        with pytest.raises(PlanError, match=message):
            find_plan(known, name)


@pytest.fixture(scope="module")
def long_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a search of 120 evaluations over 16 groups: its front has more points than are confirmed."""
    space, journal = make_small_space(16), tmp_path_factory.mktemp("long") / "study.journal"
    settings = replace(SETTINGS, budget=120, sampler="tpe")
    record = open_study(space, name="test", metric="relative_l2", identity={"model": SHA}, journal=journal)
    Tuner(make_bench(record, make_toolchain(space), settings)).run()
    assert len(pareto(record.evaluations())) >= 9
    record.close()
    return journal


@pytest.fixture
def long(open_record: OpenRecord, long_journal: Path, tmp_path: Path) -> StudyRecord:
    """A copy of it."""
    shutil.copy(long_journal, tmp_path / "study.journal")
    return open_record(make_small_space(16), sampler=None)


CAPPED = replace(SETTINGS, confirm_points=7)


def test_a_long_front_is_confirmed_in_part(long: StudyRecord) -> None:
    toolchain, diary = make_toolchain(make_small_space(16)), Diary()
    remeasure(make_bench(long, toolchain, CAPPED, diary), rounds=3)
    front = pareto(long.evaluations())
    measured = {fingerprint for fingerprint, _, _ in toolchain.calls}
    every = len({e.plan.fingerprint for e in (*front, *long.evaluations()[:2])})
    assert len(measured) in (7, 8), "7, and one more where re-measuring changes the choice"
    assert {front[0].plan.fingerprint, front[-1].plan.fingerprint} <= measured
    assert {e.plan.fingerprint for e in long.evaluations()[:2]} <= measured, "both baselines"
    assert diary.stages[0] == "re-measuring 7 plans"
    assert every > 7
    reported = front_of(long)
    assert {p.plan.fingerprint for p in reported.points if p.remeasured} <= measured
    assert all(p.remeasured is (p.held_out is not None) for p in reported.points)
    assert len(reported.points) > len([p for p in reported.points if p.remeasured]) > 2
    assert reported.chosen.remeasured
    gaps = [a.latency.median_ms - b.latency.median_ms for b, a in pairwise(p for p in reported.points if p.remeasured)]
    width = reported.points[-1].latency.median_ms - reported.points[0].latency.median_ms
    assert max(gaps) < 0.6 * width, "spread over the front"


def test_a_limit_confirms_what_it_chooses_until_it_holds(long: StudyRecord) -> None:
    """Judged by held-out error the first choice misses the limit, and the next must be confirmed, too."""
    front = pareto(long.evaluations())
    limit = 1.05 * front[len(front) // 2].error_value
    wanted = replace(CAPPED, max_error=limit)
    remeasure(make_bench(long, make_toolchain(make_small_space(16), held_out_factor=1.3), wanted), rounds=3)
    chosen = front_of(long, max_error=limit).chosen
    assert chosen.remeasured
    assert chosen.held_out_value <= limit
    again = make_toolchain(make_small_space(16))
    remeasure(make_bench(long, again, wanted), rounds=3)
    assert again.calls == []


def test_no_baseline_no_front(open_record: OpenRecord) -> None:
    with pytest.raises(RunError, match="no evaluation of all-FP32"):
        front_of(open_record())
