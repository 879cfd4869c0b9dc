"""The confirmed front: rounds, held-out errors, pooled latencies, points that fail, resuming."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from mptune.choice import Choice
from mptune.engines.base import Measurement, SampleSet
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
from tests.fakes import FAST, SHA, Diary, FakeToolchain
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import make_bench, make_evaluation, make_fixed_settings, make_toolchain, tune

SETTINGS = SearchSettings(budget=15, data=Path("samples.npz"), latency=FAST, worker=WorkerSettings(retries=1))
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


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The journals of searches, by their number of groups."""
    paths = {groups: tmp_path_factory.mktemp("searched") / "study.journal" for groups in (8, 16)}
    for groups, journal in paths.items():
        study = {"name": "test", "metric": "relative_l2", "identity": {"model": SHA}, "journal": journal}
        record = open_study(make_small_space(groups), **study)
        tune(record, settings=replace(SETTINGS, budget=15 if groups == 8 else 90, sampler="tpe"))
        record.close()
    return paths


@pytest.fixture
def searched(journals: dict[int, Path], open_record: OpenRecord, tmp_path: Path) -> StudyRecord:
    shutil.copy(journals[8], tmp_path / "study.journal")
    return open_record()


def front_of(record: StudyRecord, **choice: object) -> Front:
    return build_front(RunDirectory(Path("m.mptune")), FILE, record, Choice(**choice))


def confirm(
    record: StudyRecord, toolchain: FakeToolchain, rounds: int = 3, settings: SearchSettings = SETTINGS
) -> Front:
    remeasure(make_bench(record, toolchain, settings), rounds)
    return front_of(record, max_error=settings.max_error)


def test_what_cannot_become_the_choice_is_measured_once(searched: StudyRecord, space: SearchSpace) -> None:
    toolchain = make_toolchain(space)
    points = [p.plan.fingerprint for _, p in to_measure(searched, SETTINGS, 3)]
    front = confirm(searched, toolchain)
    chosen = front.chosen.plan.fingerprint
    assert toolchain.calls == [(p, "held_out", 1) for p in points] + [(chosen, "held_out", n) for n in (2, 3)]
    assert toolchain.ahead == ["next"] * 2, "while the first round and the second are measured"
    assert all(p.remeasured for p in front.points)


def test_processes_that_the_first_round_leaves_take_the_later_ones(searched: StudyRecord, space: SearchSpace) -> None:
    points = [p.plan.fingerprint for _, p in to_measure(searched, SETTINGS, 3)]
    toolchain = make_toolchain(space, most_ahead=4)
    chosen = confirm(searched, toolchain).chosen.plan.fingerprint
    assert 4 < len(points) <= 6
    assert toolchain.together == [points[:4], [*points[4:], chosen, chosen]]
    assert toolchain.calls == [(p, "held_out", 1) for p in [*points, chosen, chosen]], "in processes that had others"
    assert to_measure(searched, SETTINGS, 3) == []


def test_few_plans_of_the_first_round_take_those_of_later_ones_along(searched: StudyRecord, space: SearchSpace) -> None:
    points = [p.plan.fingerprint for _, p in to_measure(searched, SETTINGS, 3)]
    todo = [(number, p.plan.fingerprint) for number, p in to_measure(searched, SETTINGS, 3, beside=len(points) + 1)]
    assert todo[: len(points)] == [(0, name) for name in points]
    later = todo[len(points) :]
    assert {number for number, _ in later} == {1, 2}
    assert confirm(searched, make_toolchain(space)).chosen.plan.fingerprint in {name for _, name in later}
    assert len(to_measure(searched, SETTINGS, 3, beside=2)) == 0


def test_the_confirmed_front(searched: StudyRecord, space: SearchSpace) -> None:
    front = confirm(searched, make_toolchain(space, held_out_factor=2.0))
    for p in front.points:
        assert p.remeasured
        assert p.held_out_value == pytest.approx(2 * p.error_value)
        assert len(p.latency.raw_ms) == (33 if p == front.chosen else 11)
        assert p.speedup == pytest.approx(front.fp32.latency.median_ms / p.latency.median_ms)
    assert front.points == pareto(front.points)
    assert front.fp16.origin == ORIGIN_FP16
    assert front.fp32.remeasured
    assert front.fp16.remeasured
    assert front.chosen in front.points
    assert front.warnings[0] == "mind the gap"
    assert 0 < front.hypervolume < 1
    assert (front.evaluations, front.failures) == (15, 0)


def test_what_was_measured_is_not_repeated(searched: StudyRecord, space: SearchSpace) -> None:
    points = to_measure(searched, SETTINGS, 3)
    interrupted = make_toolchain(space, interrupt_after=len(points) + 1, session_spread=0.3)
    with pytest.raises(KeyboardInterrupt):
        confirm(searched, interrupted)
    rest, again = make_toolchain(space, session_spread=0.3), make_toolchain(space)
    chosen = confirm(searched, rest).chosen
    counts = Counter(plan for plan, _, _ in (*interrupted.calls, *rest.calls))
    assert set(counts.values()) <= {1, 2, 3}
    assert counts[chosen.plan.fingerprint] == 3
    confirm(searched, again)
    assert again.calls == []
    assert to_measure(searched, SETTINGS, 3) == []


def test_a_predicted_latency_is_never_confirmed(record: StudyRecord, space: SearchSpace) -> None:
    toolchain = make_toolchain(space, latency_source="predicted", error_source="emulated")
    tune(record, toolchain, SETTINGS)
    assert rounds_needed(SETTINGS, "predicted") == 1
    front = confirm(record, toolchain, 1)
    assert all(p.held_out is not None and not p.remeasured for p in front.points)
    assert {p.latency.source for p in front.points} == {"predicted"}


def test_a_point_that_fails_is_tried_again_in_the_next_session(searched: StudyRecord, space: SearchSpace) -> None:
    fastest = pareto(searched.evaluations())[0]
    toolchain, again = make_toolchain(space, fails_fresh={fastest.plan.fingerprint}), make_toolchain(space)
    front = confirm(searched, toolchain)
    assert sum(call[0] == fastest.plan.fingerprint for call in toolchain.calls) == 2, "once more in a fresh process"
    (point,) = (p for p in front.points if p.plan == fastest.plan)
    assert (point.remeasured, point.held_out) == (False, None)
    assert point.latency.median_ms == fastest.latency.median_ms
    (warning,) = (w for w in front.warnings if fastest.plan.fingerprint in w and "segmentation fault" in w)
    assert warning.startswith("failed when re-measured: ")
    front = confirm(searched, again)
    assert {call[0] for call in again.calls} == {fastest.plan.fingerprint}
    assert all(p.remeasured for p in front.points)
    assert not any("segmentation fault" in w for w in front.warnings)


def test_the_baseline_is_never_dropped(searched: StudyRecord, space: SearchSpace) -> None:
    fp32 = space.seeds[0].plan
    front = confirm(searched, make_toolchain(space, fails_fresh={fp32.fingerprint}), 2)
    assert front.fp32.plan == fp32
    assert {p.plan for p in front.points if not p.remeasured} == {fp32}
    assert confirm(searched, make_toolchain(space)).fp32.remeasured


@dataclass
class Erring(FakeToolchain):
    """Held-out errors are larger by a factor, of a plan and of how often the worker was restarted."""

    factor: Callable[[PrecisionPlan, int], float] = lambda plan, restarts: 1.0

    def _measurement(self, plan: PrecisionPlan, which: SampleSet) -> Measurement:
        self.held_out_factor = self.factor(plan, self.restarts)
        return super()._measurement(plan, which)


def test_of_processes_that_differ_on_the_samples_the_worst_counts(searched: StudyRecord, space: SearchSpace) -> None:
    front = confirm(searched, make_toolchain(space, Erring, factor=lambda plan, restarts: 1.0 if restarts == 1 else 5))
    assert front.chosen.held_out_value == pytest.approx(5.0 * front.chosen.error_value, rel=0.1)
    assert [finding.code for finding in front.findings] == ["held-out-differs"]


def test_an_fp32_engine_that_is_wrong_on_held_out_samples_is_told(searched: StudyRecord, space: SearchSpace) -> None:
    toolchain = make_toolchain(space, Erring, factor=lambda plan, restarts: 1.0 if plan.fp16_groups else 1e4)
    (finding,) = (f for f in confirm(searched, toolchain, 1).findings if f.code == "engine-differs")
    assert finding.severity == "warning", "the search is over"
    assert finding.text.startswith("on the held-out samples the all-FP32 engine is off by")


def test_what_is_dropped_on_held_out_samples_is_said_once(searched: StudyRecord, space: SearchSpace) -> None:
    front = confirm(searched, make_toolchain(space, non_finite_held_out={g.id for g in space.groups}), 1)
    assert front.points == (front.fp32,)
    assert not front.fp16.is_finite, "all-FP16 is not shown as if its outputs were finite"
    (dropped,) = (text for text in front.warnings if "not finite on the held-out samples, and off the front: " in text)
    finite = [e for e in searched.evaluations() if e.is_finite and e.plan.fp16_groups]
    assert f" and {len(finite) - 3} more" in dropped, "none is left that the broken ones had hidden"
    with pytest.raises(PlanError, match="not finite"):
        front_of(searched, plan=front.fp16.plan.fingerprint)


def test_a_plan_that_is_dropped_hides_no_sound_one(record: StudyRecord, space: SearchSpace) -> None:
    """All that holds the last group breaks on the held-out samples, and had dominated plans without it."""
    last, toolchain = space.groups[-1].id, make_toolchain(space)
    toolchain.law = replace(toolchain.law, gains={last: 6.0}, errors={last: 0.0}, boundary_ms=0.0)
    tune(record, toolchain, SETTINGS)
    before = {e.plan for e in pareto(record.evaluations())}
    sound = {e.plan for e in pareto(e for e in record.evaluations() if last not in e.plan.fp16_groups)}
    assert sound - before, "some are dominated"
    front = confirm(record, replace(toolchain, non_finite_held_out={last}), 1)
    assert {point.plan for point in front.points} == sound
    assert all(point.held_out is not None for point in front.points)


def test_a_baseline_that_drifts_is_told(record: StudyRecord) -> None:
    tune(record, settings=SETTINGS, drifts=[1.0] * 8 + [1.5])
    (drift,) = (text for text in front_of(record).warnings if "took 1.00 to 1.50 times its first latency" in text)
    assert "speedups are more reliable than milliseconds" in drift


def test_a_broken_machine_stops_the_confirmation(searched: StudyRecord, space: SearchSpace) -> None:
    with pytest.raises(RunError, match="8 times in a row"):
        confirm(searched, make_toolchain(space, faults=-1), 2)
    diary = Diary()
    remeasure(make_bench(searched, make_toolchain(space, faults=1), SETTINGS, diary), rounds=1)
    assert "trying again" in diary.warnings[0]


def test_finding_a_plan() -> None:
    known = [make_evaluation(1.0, math.nan if n == 3 else 1e-3, number=n) for n in range(300)]
    names = [e.plan.fingerprint for e in known]
    typo, several = names[7][:-1] + ("0" if names[7][-1] != "0" else "1"), names[0][0]
    assert find_plan(known, names[7]) == known[7]
    errors = {"zzz": "no plan 'zzz'", "": "no plan ''", typo: "no plan", several: "several", names[3]: "not feasible"}
    for name, message in errors.items():
        with pytest.raises(PlanError, match=message):
            find_plan(known, name)


LONG = make_small_space(16)
CAPPED = replace(SETTINGS, confirm_points=7)


@pytest.fixture
def long(journals: dict[int, Path], open_record: OpenRecord, tmp_path: Path) -> StudyRecord:
    """Of a search whose front has more points than are confirmed."""
    shutil.copy(journals[16], tmp_path / "study.journal")
    record = open_record(LONG, sampler=None)
    assert len(pareto(record.evaluations())) >= 9
    return record


def test_a_long_front_is_confirmed_in_part(long: StudyRecord) -> None:
    toolchain, diary, seeds = make_toolchain(LONG), Diary(), long.evaluations()[:2]
    remeasure(make_bench(long, toolchain, CAPPED, diary), rounds=3)
    front = pareto(long.evaluations())
    measured = {fingerprint for fingerprint, _, _ in toolchain.calls}
    assert len(measured) in (7, 8), "7, and one more where re-measuring changes the choice"
    assert {e.plan.fingerprint for e in (front[0], front[-1], *seeds)} <= measured, "both ends and both baselines"
    assert len({e.plan.fingerprint for e in (*front, *seeds)}) > 7
    assert diary.stages[0] == "re-measuring 7 plans"
    reported = front_of(long)
    confirmed = [p for p in reported.points if p.remeasured]
    assert {p.plan.fingerprint for p in confirmed} <= measured
    assert all(p.remeasured is (p.held_out is not None) for p in reported.points)
    assert len(reported.points) > len(confirmed) > 2
    assert reported.chosen.remeasured
    gaps = [a.latency.median_ms - b.latency.median_ms for b, a in pairwise(confirmed)]
    width = reported.points[-1].latency.median_ms - reported.points[0].latency.median_ms
    assert max(gaps) < 0.6 * width, "spread over the front"


def test_a_limit_confirms_what_it_chooses_until_it_holds(long: StudyRecord) -> None:
    """Judged by held-out error the first choice misses the limit, and the next must be confirmed, too."""
    front, again = pareto(long.evaluations()), make_toolchain(LONG)
    limited = replace(CAPPED, max_error=1.05 * front[len(front) // 2].error_value)
    chosen = confirm(long, make_toolchain(LONG, held_out_factor=1.3), settings=limited).chosen
    assert chosen.remeasured
    assert chosen.held_out_value <= limited.max_error
    confirm(long, again, settings=limited)
    assert again.calls == []


def test_no_baseline_no_front(record: StudyRecord) -> None:
    with pytest.raises(RunError, match="no evaluation of all-FP32"):
        front_of(record)
