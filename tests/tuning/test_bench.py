"""Whose fault a failure is: what comes from outside is no plan's, and teaches nothing. What ends a search early."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.engines.failures import machine_error
from mptune.errors import BaselineError, RunError
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.bench import FAULTS_IN_A_ROW, NEEDED_TRIES, Limits, Stop, run_job, run_needed_job, size_of
from mptune.tuning.dominance import pareto
from mptune.tuning.facts import observe
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.remeasure import remeasure, to_measure
from mptune.tuning.space import SearchSpace
from tests.fakes import Diary
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import find_sensitivity, make_bench, make_toolchain, tune


@pytest.mark.parametrize("number", [0, 1, 2, 11])
def test_one_kill_is_no_plans_fault(open_record: OpenRecord, number: int) -> None:
    record, toolchain, diary, _ = tune(open_record(sampler="precision"), killed={number})
    undisturbed = tune(open_record(sampler="precision", name="undisturbed")).record
    assert record.failures() == ()
    assert [e.plan for e in record.evaluations()] == [e.plan for e in undisturbed.evaluations()]
    assert sum("killed by SIGKILL" in text and "fresh process" in text for text in diary.warnings) == 1
    assert toolchain.restarts == 1


def test_a_plan_that_crashes_twice_is_blamed_once(open_record: OpenRecord) -> None:
    record, toolchain, _, _ = tune(open_record(), budget=15, crashes={"g002"})
    assert {failure.kind for _, _, failure in record.failures()} == {FailureKind.CRASH}
    assert all("g002" in plan.fp16_groups for plan, _, _ in record.failures())
    counts = Counter(toolchain.built)
    assert {counts[plan.fingerprint] for plan, _, _ in record.failures()} == {2}
    assert tune(open_record(), budget=15).toolchain.built == []


def test_where_nothing_runs_any_more_the_search_stops_and_resumes(open_record: OpenRecord, space: SearchSpace) -> None:
    record, toolchain = open_record(), make_toolchain(space, killed=lambda number: number >= 5)
    with pytest.raises(RunError, match="all-FP32, which ran before, fails now too") as caught:
        tune(record, toolchain, budget=20)
    assert "resumes" in caught.value.hint
    assert len(toolchain.calls) == 5 + FAULTS_IN_A_ROW + 1 + NEEDED_TRIES, "three plans twice, and all-FP32"
    assert len(record.failures()) == 2, "the third goes back into the queue"
    record, _, _, stop = tune(open_record(), budget=20)
    assert stop is Stop.BUDGET
    assert len(record.evaluations()) + 2 == record.spent == 20


def test_plans_that_crash_in_a_row_are_blamed_where_all_fp32_runs(record: StudyRecord, space: SearchSpace) -> None:
    toolchain = tune(record, budget=20, crashes=set(space.free[:6])).toolchain
    assert len(record.failures()) > FAULTS_IN_A_ROW
    assert toolchain.built.count(space.seeds[0].plan.fingerprint) > 1, "as a control"
    assert pareto(record.evaluations())


_CRASH = Failure(Stage.RUN, FailureKind.CRASH, "killed by SIGSEGV")
_TIMEOUT = Failure(Stage.RUN, FailureKind.TIMEOUT, "no result after 9 s")
_ERROR = Failure(Stage.BUILD, FailureKind.ERROR, "no kernel")
_LOST = Failure(Stage.RUN, FailureKind.DEVICE_LOST, "the device is gone")


@pytest.mark.parametrize(
    ("run", "outcomes", "calls", "expected"),
    [
        (run_job, (_CRASH, _TIMEOUT, "done"), 2, _TIMEOUT),
        (run_job, (_CRASH, "done"), 2, "done"),
        (run_job, (_ERROR, "done"), 1, _ERROR),  # what the job causes itself
        (run_needed_job, (_CRASH, _TIMEOUT, "done"), 3, "done"),
    ],
)
def test_a_job_that_fails_is_tried_once_more_and_one_that_all_depends_on_twice(
    space: SearchSpace, run: Callable[..., object], outcomes: Sequence[Failure | str], calls: int, expected: object
) -> None:
    left, toolchain = list(outcomes), make_toolchain(space)
    assert run(lambda: left.pop(0), toolchain, Diary(), "a job") == expected
    assert len(outcomes) - len(left) == calls
    assert toolchain.restarts == calls - 1


@pytest.mark.parametrize("number", range(3))
def test_a_kill_during_the_reference_or_the_ranges_does_not_end_the_search(space: SearchSpace, number: int) -> None:
    toolchain, diary = make_toolchain(space, killed={number}), Diary()
    observe(toolchain, diary)
    assert toolchain.restarts == 1
    assert "killed by SIGKILL" in diary.warnings[0]


def test_a_reference_that_fails_is_the_models_fault_unless_the_machine_prevents_it(space: SearchSpace) -> None:
    with pytest.raises(BaselineError, match=r"the original model does not run in FP32.*SIGSEGV"):
        observe(make_toolchain(space, report=_CRASH), Diary())
    with pytest.raises(RunError, match="the machine failed 3 times in a row: device lost") as caught:
        observe(make_toolchain(space, report=_LOST), Diary())
    assert "resumes" in caught.value.hint


def test_a_kill_during_emulation_teaches_no_overflow(space: SearchSpace, tmp_path: Path) -> None:
    toolchain = make_toolchain(space, killed={0, 1, 3})
    sensitivity = find_sensitivity(space, toolchain, tmp_path)
    assert sensitivity.errors == {g: pytest.approx(e, rel=1e-3) for g, e in toolchain.law.errors.items()}


def test_a_driver_that_is_too_old_has_a_hint_of_its_own() -> None:
    failure = Failure(Stage.BUILD, FailureKind.DRIVER, "CUDA initialization failure with error: 35")
    assert failure.is_machine_fault, "no plan is to blame"
    assert "driver too old" in machine_error(failure, 2).message
    assert "update the NVIDIA driver" in machine_error(failure, 2).hint


def test_the_size_of_a_run_counts_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "a").write_bytes(b"x" * 1000)
    os.link(tmp_path / "engines" / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to(tmp_path / "b")
    assert 1000 < size_of(tmp_path) < 1500


def test_a_search_stops_before_the_size_and_goes_on(record: StudyRecord, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def build(plan: PrecisionPlan) -> None:
        (folder / plan.fingerprint).write_bytes(b"x" * 100)

    settings, larger = SearchSettings(max_disk_bytes=450), SearchSettings(budget=6, max_disk_bytes=10_000)
    assert tune(record, settings=settings, limits=Limits(settings, folder), before=build).stop is Stop.DISK
    assert record.spent == 4, "another one of 100 bytes is more than 450"
    assert tune(record, settings=larger, limits=Limits(larger, folder), before=build).stop is Stop.BUDGET


def test_the_time_ends_a_confirmation_and_it_goes_on(record: StudyRecord, space: SearchSpace) -> None:
    settings, now, diary = SearchSettings(budget=8, timeout_s=100.0), [0.0], Diary()
    tune(record, settings=settings)
    points = len(to_measure(record, settings, 3))

    def take_40_seconds(plan: PrecisionPlan) -> None:
        now[0] += 40.0

    slow, limits = make_toolchain(space, before=take_40_seconds), Limits(settings, clock=lambda: now[0])
    remeasure(make_bench(record, slow, settings, diary, limits), 3)
    assert len(to_measure(record, settings, 3)) == points - 3
    assert "the time is over" in diary.stages[-1]
    remeasure(make_bench(record, make_toolchain(space), settings), 3)
    assert not to_measure(record, settings, 3)


def test_workers_share_the_start_of_the_time() -> None:
    now, settings = [7.0], SearchSettings(timeout_s=5.0)
    limits = Limits(settings, clock=lambda: now[0], elapsed_s=3.0)
    assert limits.reached() is None
    now[0] = 9.0
    assert limits.reached() is Stop.TIMEOUT
    assert Limits(settings, elapsed_s=-60.0, clock=lambda: 0.0).elapsed_s == 0.0, "one ahead gives no more time"
