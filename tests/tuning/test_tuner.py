"""The loop: budget, resuming, duplicates, failures, faults of the machine, exhaustion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, FailureKind, SampleSet, Stage
from mptune.errors import BaselineError, SettingsError
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings, Tolerance
from mptune.tuning.bench import HOPELESS, Limits, Stop
from mptune.tuning.dominance import pareto
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.space import SearchSpace
from tests.fakes import Diary, FakeToolchain
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import make_error, make_toolchain, tune


@pytest.mark.parametrize("sampler", ["precision", "tpe"])
@pytest.mark.usefixtures("spends_budget")
def test_a_budget_counts_seeds_and_no_plan_comes_twice(open_record: OpenRecord, sampler: str) -> None:
    record, toolchain, diary, stop = tune(open_record(sampler=sampler), budget=20)
    assert (stop, record.spent) == (Stop.BUDGET, 20)
    assert len(toolchain.built) == len(set(toolchain.built)) == 20
    assert toolchain.built[:2] == [seed.plan.fingerprint for seed in record.space.seeds]
    assert diary.counts == [(i, 20) for i in range(1, 21)]
    assert [e.origin for e in record.evaluations()[:2]] == [ORIGIN_FP32, ORIGIN_FP16]


@pytest.mark.usefixtures("spends_budget")
def test_plans_are_proposed_together_where_they_are_opened_together(open_record: OpenRecord) -> None:
    record, toolchain, _, stop = tune(open_record(), budget=20, most_ahead=6)
    assert (stop, record.spent) == (Stop.BUDGET, 20)
    together = toolchain.together
    assert [name for names in together for name in names] == toolchain.built
    assert len(set(toolchain.built)) == 20
    sizes = [len(names) for names in together]
    assert sizes[:2] == [1, len(record.space.seeds)], "all-FP32 alone, then the other seeds and one plan"
    assert sizes[2:4] == [2, 4], "few at first, as the sampler learns from each"
    assert max(sizes[2:]) == 6


@pytest.mark.usefixtures("spends_budget")
def test_the_next_plans_are_proposed_while_others_are_opened(open_record: OpenRecord) -> None:
    record = open_record()
    toolchain, running = make_toolchain(record.space, most_ahead=6, is_opening=True), list[int]()
    evaluate = toolchain.evaluate
    toolchain.evaluate = lambda *given, **named: running.append(len(record.running())) or evaluate(*given, **named)
    tune(record, toolchain, budget=40)
    assert (record.spent, len(set(toolchain.built)), record.running()) == (40, 40, [])
    assert [name for names in toolchain.together for name in names] == toolchain.built
    assert max(running[:9]) == 4, "not as long as the sampler has learnt from few"
    assert max(running) == 9


def test_plans_whose_turn_did_not_come_go_back_into_the_queue(open_record: OpenRecord) -> None:
    record = open_record()
    toolchain = make_toolchain(record.space, most_ahead=6, interrupt_after=10)
    with pytest.raises(KeyboardInterrupt):
        tune(record, toolchain, budget=20)
    assert (record.spent, record.running()) == (10, [])
    left = [name for name in toolchain.together[-1] if name not in toolchain.built]
    assert len(left) == len(record.waiting()) > 1
    again = tune(record, budget=20).toolchain
    assert (record.spent, len(again.built), again.built[: len(left)]) == (20, 10, left)


def test_an_interruption_while_plans_are_opened_loses_none(open_record: OpenRecord) -> None:
    record = open_record()
    toolchain = make_toolchain(record.space, most_ahead=6)
    opened = toolchain.open_ahead

    def interrupted(plans: Sequence[PrecisionPlan], which: SampleSet = "search") -> None:
        opened(plans, which)
        if len(toolchain.together) == 2:
            raise KeyboardInterrupt

    toolchain.open_ahead = interrupted
    with pytest.raises(KeyboardInterrupt):
        tune(record, toolchain, budget=20)
    assert (record.spent, record.running()) == (1, [])
    assert record.waiting() == set(toolchain.together[1])


def tune_judging(record: StudyRecord, toolchain: FakeToolchain) -> Diary:
    """Search 12 plans, and hold measured errors against those of emulation, which are the law's."""
    known = SimpleNamespace(
        recall=lambda plan: (toolchain.law.error(plan), 9), sampler=lambda: None, least_fp32=lambda: None
    )
    return tune(record, toolchain, knowledge=known).diary


def test_an_error_that_a_process_made_is_measured_again(record: StudyRecord, space: SearchSpace) -> None:
    seed = space.seeds[1].plan
    toolchain = make_toolchain(space, errs_at_first=[seed.fingerprint])
    diary = tune_judging(record, toolchain)
    assert (toolchain.restarts, toolchain.built.count(seed.fingerprint), record.spent) == (1, 2, 12)
    (evaluation,) = (e for e in record.evaluations() if e.plan == seed)
    assert evaluation.error_value == pytest.approx(toolchain.law.error(seed))
    assert not evaluation.disagrees
    assert sum("in another process" in text for text in diary.warnings) == 1


def test_a_process_that_was_wrong_is_ended_once_another_one_beside_it_is_right(open_record: OpenRecord) -> None:
    record = open_record()
    _, toolchain, diary, _ = tune(record, budget=8, most_ahead=4, non_finite_calls={1})
    assert (toolchain.restarts, record.spent, len(toolchain.calls)) == (1, 8, 9)
    assert sum("in another process" in text for text in diary.warnings) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_outputs_that_a_process_made_nan_are_too(record: StudyRecord, number: int) -> None:
    """All-FP32, whose NaN would end the search, and all-FP16, whose NaN would cost its groups."""
    _, toolchain, diary, _ = tune(record, budget=8, non_finite_calls={number})
    assert (record.spent, len(toolchain.calls)) == (8, 9)
    assert all(e.is_finite for e in record.evaluations())
    assert sum("in another process: only the second measurement counts" in text for text in diary.warnings) == 1


def test_errors_that_are_what_they_are_are_measured_again_once(record: StudyRecord, space: SearchSpace) -> None:
    toolchain = make_toolchain(space, error_factor=2.0)
    tune_judging(record, toolchain)
    assert (toolchain.restarts, len(toolchain.calls)) == (1, 12 + 1)
    assert sum(e.disagrees for e in record.evaluations()) == 11


def test_a_failed_plan_is_pruned_and_spends_budget(record: StudyRecord) -> None:
    diary = tune(record, budget=15, fails={"g001"}, crashes={"g002"}).diary
    assert record.spent == 15
    assert len(record.failed()) == len(diary.failures) == len(record.failures()) > 0
    assert {f.kind for _, f in diary.failures if isinstance(f, Failure)} <= {FailureKind.ERROR, FailureKind.CRASH}
    for plan, _, failure in record.failures():
        assert {"g001", "g002"} & set(plan.fp16_groups)
        assert failure.message in {"no kernel for this", "segmentation fault"}
    assert pareto(record.evaluations())


def test_a_search_in_which_nothing_runs_ends_early(record: StudyRecord, space: SearchSpace) -> None:
    broken = make_toolchain(space, fails=space.free)
    for times in (1, 2):
        assert tune(record, broken, budget=60).stop is Stop.HOPELESS
        assert len(record.failures()) == times * HOPELESS
    mended = tune(record, budget=45)
    assert mended.stop in (Stop.BUDGET, Stop.CONVERGED)
    assert mended.toolchain.built


def test_a_plan_that_is_not_finite_is_kept_but_not_on_the_front(record: StudyRecord) -> None:
    diary = tune(record, non_finite={"g003"}).diary
    assert len(record.failed()) == sum(not e.is_finite for e in record.evaluations()) > 0
    assert all("g003" not in e.plan.fp16_groups for e in pareto(record.evaluations()))
    assert diary.failures[0][1] == "6 values are NaN or Inf where the reference has none"


def test_a_fault_of_the_machine_is_retried_and_costs_no_budget(record: StudyRecord) -> None:
    toolchain = tune(record, budget=4).toolchain
    toolchain.faults = 3
    diary = tune(record, toolchain).diary
    assert (record.spent, record.failures()) == (12, ())
    assert len(set(toolchain.built[4:8])) == 1, "twice, then again from the queue"
    assert sum("device lost" in text and "trying again" in text for text in diary.warnings) == 2


def test_a_plan_that_alone_loses_the_device_is_at_fault(record: StudyRecord, space: SearchSpace) -> None:
    lost, fp16 = Failure(Stage.RUN, FailureKind.DEVICE_LOST, "the device is gone"), space.seeds[1].plan
    assert tune(record, before=lambda plan: lost if plan == fp16 else None).stop is Stop.BUDGET
    assert [plan for plan, _, _ in record.failures()] == [fp16]


def test_the_time_is_over(record: StudyRecord) -> None:
    settings, now = SearchSettings(budget=50, timeout_s=8.5), iter(range(1000))
    limits = Limits(settings, clock=lambda: float(next(now)))
    assert tune(record, settings=settings, limits=limits).stop is Stop.TIMEOUT
    assert record.spent == 4, "it is asked before a plan is proposed, and before it is built"


def test_a_baseline_that_is_not_sound_stops_everything_and_is_tried_anew(
    open_record: OpenRecord, space: SearchSpace
) -> None:
    record, wrong = open_record(), make_toolchain(space)
    wrong.law.fp32_error = 0.2
    with pytest.raises(BaselineError, match="precision is not the problem"):
        tune(record, wrong)
    assert record.spent == 0
    with pytest.raises(BaselineError, match=r"the all-FP32 engine failed .*on fire") as caught:
        tune(record, faults=1, fault_kind=FailureKind.UNSUPPORTED)
    assert "--engine" in caught.value.hint
    assert record.spent == len(record.failed()) == 0
    assert record.waiting() == {space.seeds[0].plan.fingerprint}
    assert tune(open_record(), budget=3).toolchain.built[0] == space.seeds[0].plan.fingerprint
    scripted, toolchain = open_record(metric="mine.py:metric", name="own"), make_toolchain(space)
    no_value = {**make_error(1e-7).per_output, "*": {"mine.py:metric": (math.nan, math.nan)}}
    toolchain._output_error = lambda plan, factor: OutputError(no_value)
    with pytest.raises(BaselineError, match="is nan for all-FP32, whose outputs are finite"):
        tune(scripted, toolchain, SearchSettings(metric="mine.py:metric"))
    assert (len(toolchain.calls), scripted.spent) == (1, 0)


def test_drift_is_taken_against_the_first_baseline_of_all_sessions(open_record: OpenRecord, space: SearchSpace) -> None:
    tune(open_record(), budget=4, noise=0.0)
    slow, true = make_toolchain(space, noise=0.0), make_toolchain(space).law
    twice = {group: 2 * gain for group, gain in true.gains.items()}
    slow.law = replace(true, base_ms=2 * true.base_ms, gains=twice, boundary_ms=2 * true.boundary_ms)
    for evaluation in tune(open_record(), slow, budget=8).record.evaluations():
        assert evaluation.latency.median_ms == pytest.approx(true.latency_ms(evaluation.plan))


def test_a_tolerance_for_a_column_that_is_not_there_stops_early(record: StudyRecord, space: SearchSpace) -> None:
    toolchain, tolerance = make_toolchain(space), (Tolerance.parse("y[7]=1"),)
    for built in (1, 2):
        with pytest.raises(SettingsError, match=r"y\[7\]"):
            tune(record, toolchain, SearchSettings(budget=9, tolerance=tolerance))
        assert len(toolchain.built) == built
        assert record.spent == built - 1
        tune(record, toolchain, budget=1)
