"""The loop: budget, resuming, duplicates, failures, faults of the machine, exhaustion."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, FailureKind, Measurement, Stage
from mptune.errors import BaselineError, SettingsError
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings, Tolerance
from mptune.tuning.bench import HOPELESS, Limits, Stop
from mptune.tuning.dominance import pareto
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32
from mptune.tuning.knowledge import Knowledge
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import Tuner
from tests.fakes import Diary, FakeToolchain, Law
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import make_bench


def make_tuner(
    record: StudyRecord, space: SearchSpace, toolchain: FakeToolchain, listener: Diary | None = None, **settings: object
) -> Tuner:
    wanted = SearchSettings(**{"budget": 12, **settings})  # type: ignore[arg-type]
    return Tuner(make_bench(record, toolchain, wanted, listener))


def make_toolchain(space: SearchSpace, **options: object) -> FakeToolchain:
    return FakeToolchain(Law([g.id for g in space.groups]), **options)  # type: ignore[arg-type]


class Tuned(NamedTuple):
    """A search, and why it stopped."""

    record: StudyRecord
    toolchain: FakeToolchain
    diary: Diary
    stop: Stop


def tune(record: StudyRecord, toolchain: FakeToolchain | None = None, budget: int = 12, **options: object) -> Tuned:
    """Search on a toolchain, or on one with these options."""
    toolchain, diary = toolchain or make_toolchain(record.space, **options), Diary()
    return Tuned(record, toolchain, diary, make_tuner(record, record.space, toolchain, diary, budget=budget).run())


@pytest.mark.parametrize("sampler", ["precision", "tpe"])
def test_a_budget_counts_seeds_and_no_plan_comes_twice(open_record: OpenRecord, sampler: str) -> None:
    record, toolchain, diary, stop = tune(open_record(sampler=sampler), budget=20)
    assert (stop, record.spent) == (Stop.BUDGET, 20)
    assert len(toolchain.built) == len(set(toolchain.built)) == 20
    assert toolchain.built[:2] == [seed.plan.fingerprint for seed in record.space.seeds]
    assert diary.counts == [(i, 20) for i in range(1, 21)]
    assert [e.origin for e in record.evaluations()[:2]] == [ORIGIN_FP32, ORIGIN_FP16]


def tune_judging(record: StudyRecord, toolchain: FakeToolchain) -> Diary:
    """Search 12 plans, and hold measured errors against those of emulation, which are the law's."""
    known = SimpleNamespace(recall=lambda plan: (toolchain.law.error(plan), 9), sampler=lambda: None)
    diary = Diary()
    Tuner(make_bench(record, toolchain, SearchSettings(budget=12), diary), cast("Knowledge", known)).run()
    return diary


def test_an_error_that_a_process_made_is_measured_again(open_record: OpenRecord, space: SearchSpace) -> None:
    record, seed = open_record(), space.seeds[1].plan
    toolchain = make_toolchain(space, errs_at_first=[seed.fingerprint])
    diary = tune_judging(record, toolchain)
    assert (toolchain.restarts, toolchain.built.count(seed.fingerprint), record.spent) == (1, 2, 12)
    (evaluation,) = (e for e in record.evaluations() if e.plan == seed)
    assert evaluation.error_value == pytest.approx(toolchain.law.error(seed))
    assert not evaluation.disagrees
    assert sum("in a fresh process" in text for text in diary.warnings) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_outputs_that_a_process_made_nan_are_too(open_record: OpenRecord, number: int) -> None:
    """All-FP32, whose NaN would end the search, and all-FP16, whose NaN would cost its groups."""
    record, toolchain, diary, _ = tune(open_record(), budget=8, non_finite_calls={number})
    assert (record.spent, len(toolchain.calls)) == (8, 9)
    assert all(e.is_finite for e in record.evaluations())
    assert sum("in a fresh process: only the second measurement counts" in text for text in diary.warnings) == 1


def test_errors_that_are_what_they_are_are_measured_again_once(open_record: OpenRecord, space: SearchSpace) -> None:
    record, toolchain = open_record(), make_toolchain(space, error_factor=2.0)
    tune_judging(record, toolchain)
    assert (toolchain.restarts, len(toolchain.calls)) == (1, 12 + 1)
    assert sum(e.disagrees for e in record.evaluations()) == 11


def test_a_failed_plan_is_pruned_and_spends_budget(open_record: OpenRecord) -> None:
    record, _, diary, _ = tune(open_record(), budget=15, fails={"g001"}, crashes={"g002"})
    assert record.spent == 15
    assert len(record.failed()) == len(diary.failures) == len(record.failures()) > 0
    assert {f.kind for _, f in diary.failures if isinstance(f, Failure)} <= {FailureKind.ERROR, FailureKind.CRASH}
    for plan, _, failure in record.failures():
        assert {"g001", "g002"} & set(plan.fp16_groups)
        assert failure.message in {"no kernel for this", "segmentation fault"}
    assert pareto(record.evaluations())


def test_a_search_in_which_nothing_runs_ends_early(open_record: OpenRecord, space: SearchSpace) -> None:
    record, broken = open_record(), make_toolchain(space, fails=space.free)
    for times in (1, 2):
        assert tune(record, broken, budget=60).stop is Stop.HOPELESS
        assert len(record.failures()) == times * HOPELESS
    mended = tune(record, budget=60)
    assert mended.stop in (Stop.BUDGET, Stop.CONVERGED)
    assert mended.toolchain.built


def test_a_plan_that_is_not_finite_is_kept_but_not_on_the_front(open_record: OpenRecord) -> None:
    record, _, diary, _ = tune(open_record(), non_finite={"g003"})
    spoilt = [e for e in record.evaluations() if not e.is_finite]
    assert len(record.failed()) == len(spoilt) > 0
    assert all("g003" not in e.plan.fp16_groups for e in pareto(record.evaluations()))
    assert diary.failures[0][1] == "6 values are NaN or Inf where the reference has none"


def test_a_fault_of_the_machine_is_retried_and_costs_no_budget(open_record: OpenRecord) -> None:
    record, toolchain, _, _ = tune(open_record(), budget=4)
    toolchain.faults = 3
    diary = tune(record, toolchain).diary
    assert (record.spent, record.failures()) == (12, ())
    assert len(set(toolchain.built[4:8])) == 1, "twice, then again from the queue"
    assert sum("device lost" in text and "trying again" in text for text in diary.warnings) == 2


def test_a_plan_that_alone_loses_the_device_is_at_fault(open_record: OpenRecord, space: SearchSpace) -> None:
    class Losing(FakeToolchain):
        def evaluate(self, plan: PrecisionPlan, *args: Any, **options: Any) -> Measurement | Failure:
            result = super().evaluate(plan, *args, **options)
            lost = Failure(Stage.RUN, FailureKind.DEVICE_LOST, "the device is gone")
            return lost if plan.fingerprint == space.seeds[1].plan.fingerprint else result

    record, _, _, stop = tune(open_record(), Losing(Law(space.free)))
    assert stop is Stop.BUDGET
    assert [plan for plan, _, _ in record.failures()] == [space.seeds[1].plan]


def test_the_time_is_over(open_record: OpenRecord, space: SearchSpace) -> None:
    record, settings, now = open_record(), SearchSettings(budget=50, timeout_s=8.5), iter(range(1000))
    limits = Limits(settings, clock=lambda: float(next(now)))
    assert Tuner(make_bench(record, make_toolchain(space), settings, limits=limits)).run() is Stop.TIMEOUT
    assert record.spent == 4, "it is asked before a plan is proposed, and before it is built"


def test_a_baseline_that_fails_stops_everything_and_is_tried_anew(open_record: OpenRecord, space: SearchSpace) -> None:
    record, toolchain = open_record(), make_toolchain(space)
    toolchain.law.fp32_error = 0.2
    with pytest.raises(BaselineError, match="precision is not the problem"):
        tune(record, toolchain)
    assert record.spent == 0
    assert tune(open_record(), budget=3).toolchain.built[0] == space.seeds[0].plan.fingerprint


def test_a_baseline_that_does_not_build_is_told_as_such(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    with pytest.raises(BaselineError, match=r"the all-FP32 engine failed .*on fire") as caught:
        tune(record, faults=1, fault_kind=FailureKind.UNSUPPORTED)
    assert "--engine" in caught.value.hint
    assert record.spent == len(record.failed()) == 0
    assert record.waiting() == {space.seeds[0].plan.fingerprint}


def test_drift_is_taken_against_the_first_baseline_of_all_sessions(open_record: OpenRecord, space: SearchSpace) -> None:
    tune(open_record(), budget=4, noise=0.0)
    slow = make_toolchain(space, noise=0.0)
    slow.law = replace(
        slow.law, base_ms=20.0, gains={g: 2 * gain for g, gain in slow.law.gains.items()}, boundary_ms=0.04
    )
    record = tune(open_record(), slow, budget=8).record
    true = make_toolchain(space).law
    for evaluation in record.evaluations():
        assert evaluation.latency.median_ms == pytest.approx(true.latency_ms(evaluation.plan))


class NoObjective(FakeToolchain):
    """Whose objective has no value, although outputs are finite."""

    def _output_error(self, plan: PrecisionPlan, factor: float) -> OutputError:
        error = super()._output_error(plan, factor)
        return OutputError({**error.per_output, "*": {"mine.py:metric": (math.nan, math.nan)}})


def test_a_tolerance_for_a_column_that_is_not_there_stops_early(open_record: OpenRecord, space: SearchSpace) -> None:
    record, toolchain, tolerance = open_record(), make_toolchain(space), (Tolerance.parse("y[7]=1"),)
    with pytest.raises(SettingsError, match=r"y\[7\]"):
        make_tuner(record, space, toolchain, tolerance=tolerance).run()
    assert (len(toolchain.built), record.spent) == (1, 0)
    make_tuner(record, space, toolchain, budget=2).run()
    before = len(toolchain.built)
    with pytest.raises(SettingsError, match=r"y\[7\]"):
        make_tuner(record, space, toolchain, budget=9, tolerance=tolerance).run()
    assert len(toolchain.built) == before


def test_a_metric_without_a_value_for_all_fp32_stops_at_once(open_record: OpenRecord, space: SearchSpace) -> None:
    record, toolchain = open_record(metric="mine.py:metric"), NoObjective(Law(space.free))
    with pytest.raises(BaselineError, match="is nan for all-FP32, whose outputs are finite"):
        make_tuner(record, space, toolchain, metric="mine.py:metric").run()
    assert len(toolchain.calls) == 1
    assert record.spent == 0
