"""Whose fault a failure is: what comes from outside is no plan's fault, and teaches nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from mptune.engines.base import Failure, FailureKind, ReferenceReport, SampleSet, Stage
from mptune.engines.failures import did_not_run, machine_error
from mptune.errors import BaselineError, RunError
from mptune.tuning.bench import FAULTS_IN_A_ROW, NEEDED_TRIES, Stop, run_job, run_needed_job
from mptune.tuning.dominance import pareto
from mptune.tuning.facts import observe
from mptune.tuning.space import SearchSpace
from tests.fakes import Diary, FakeToolchain, Law
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import find_sensitivity
from tests.tuning.test_tuner import make_toolchain, make_tuner


@pytest.mark.parametrize("number", [0, 1, 2, 11])
def test_one_kill_is_no_plans_fault(open_record: OpenRecord, space: SearchSpace, number: int) -> None:
    record, diary = open_record(sampler="precision"), Diary()
    toolchain = make_toolchain(space, killed={number})
    make_tuner(record, space, toolchain, diary).run()
    undisturbed = open_record(sampler="precision", name="undisturbed")
    make_tuner(undisturbed, space, make_toolchain(space)).run()
    assert record.failures() == ()
    assert [e.plan for e in record.evaluations()] == [e.plan for e in undisturbed.evaluations()]
    assert sum("killed by SIGKILL" in text and "fresh process" in text for text in diary.warnings) == 1
    assert toolchain.restarts == 1


def test_a_plan_that_crashes_twice_is_blamed_once(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    toolchain = make_toolchain(space, crashes={"g002"})
    make_tuner(record, space, toolchain, Diary(), budget=15).run()
    assert {failure.kind for _, _, failure in record.failures()} == {FailureKind.CRASH}
    assert all("g002" in plan.fp16_groups for plan, _, _ in record.failures())
    counts = Counter(toolchain.built)
    assert {counts[plan.fingerprint] for plan, _, _ in record.failures()} == {2}
    again = make_toolchain(space)
    make_tuner(open_record(), space, again, Diary(), budget=15).run()
    assert again.built == []


def test_where_nothing_runs_any_more_the_search_stops_and_can_be_resumed(
    open_record: OpenRecord, space: SearchSpace
) -> None:
    record, diary = open_record(), Diary()
    toolchain = make_toolchain(space, killed=lambda number: number >= 5)
    with pytest.raises(RunError, match="all-FP32, which ran before, fails now too") as caught:
        make_tuner(record, space, toolchain, diary, budget=20).run()
    assert "resumes" in caught.value.hint
    assert len(toolchain.calls) == 5 + FAULTS_IN_A_ROW + 1 + NEEDED_TRIES, "three plans twice, and all-FP32"
    assert len(record.failures()) == 2, "the third goes back into the queue"
    record = open_record()
    assert make_tuner(record, space, make_toolchain(space), budget=20).run() is Stop.BUDGET
    assert len(record.evaluations()) + 2 == record.spent == 20


def test_plans_that_crash_in_a_row_are_blamed_where_all_fp32_still_runs(
    open_record: OpenRecord, space: SearchSpace
) -> None:
    record, fp32 = open_record(), space.seeds[0].plan.fingerprint
    toolchain = make_toolchain(space, crashes=set(space.free[:6]))
    make_tuner(record, space, toolchain, Diary(), budget=20).run()
    assert len(record.failures()) > FAULTS_IN_A_ROW
    assert toolchain.built.count(fp32) > 1, "as a control"
    assert pareto(record.evaluations())


@pytest.mark.parametrize("number", range(3))
def test_a_kill_during_the_reference_or_the_ranges_does_not_end_the_search(space: SearchSpace, number: int) -> None:
    toolchain, diary = make_toolchain(space, killed={number}), Diary()
    observe(toolchain, diary)
    assert toolchain.restarts == 1
    assert "killed by SIGKILL" in diary.warnings[0]


_CRASH = Failure(Stage.RUN, FailureKind.CRASH, "killed by SIGSEGV")
_TIMEOUT = Failure(Stage.RUN, FailureKind.TIMEOUT, "no result after 9 s")
_ERROR = Failure(Stage.BUILD, FailureKind.ERROR, "no kernel")


@pytest.mark.parametrize(
    ("outcomes", "calls", "expected"),
    [
        ((_CRASH, _TIMEOUT, "done"), 2, _TIMEOUT),
        ((_CRASH, "done"), 2, "done"),
        ((_ERROR, "done"), 1, _ERROR),  # what the job causes itself
    ],
)
def test_a_job_that_fails_is_tried_once_more(
    space: SearchSpace, outcomes: Sequence[Failure | str], calls: int, expected: Failure | str
) -> None:
    left, toolchain = list(outcomes), make_toolchain(space)
    assert run_job(lambda: left.pop(0), toolchain, Diary(), "a job") == expected
    assert len(outcomes) - len(left) == calls
    assert toolchain.restarts == calls - 1


def test_a_job_that_all_depends_on_is_tried_three_times(space: SearchSpace) -> None:
    left, toolchain = [_CRASH, _TIMEOUT, "done"], make_toolchain(space)
    assert run_needed_job(lambda: left.pop(0), toolchain, Diary(), "taking the reference") == "done"
    assert toolchain.restarts == 2


def test_a_model_that_does_not_run_is_still_told(space: SearchSpace) -> None:
    crash = Failure(Stage.RUN, FailureKind.CRASH, "segmentation fault")
    with pytest.raises(BaselineError) as caught:
        observe(make_toolchain(space, report=crash), Diary())
    assert str(caught.value) == str(did_not_run("the untouched model does not run in FP32", crash))


def test_a_kill_during_emulation_teaches_no_overflow(space: SearchSpace, tmp_path: Path) -> None:
    toolchain = make_toolchain(space, killed={0, 1, 3})
    sensitivity = find_sensitivity(space, toolchain, "relative_l2", tmp_path / "s.json", Diary())
    assert sensitivity.errors == {g: pytest.approx(e, rel=1e-3) for g, e in toolchain.law.errors.items()}


class Lost(FakeToolchain):
    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        return Failure(Stage.RUN, FailureKind.DEVICE_LOST, "the device is gone")


def test_a_reference_that_only_the_machine_prevents_is_not_the_models_fault(space: SearchSpace) -> None:
    with pytest.raises(RunError, match="the machine failed 3 times in a row: device lost") as caught:
        observe(Lost(Law(space.free)), Diary())
    assert "resumes" in caught.value.hint


def test_a_driver_that_is_too_old_has_a_hint_of_its_own() -> None:
    failure = Failure(Stage.BUILD, FailureKind.DRIVER, "CUDA initialization failure with error: 35")
    assert failure.is_machine_fault, "no plan is to blame"
    error = machine_error(failure, 2)
    assert "driver too old" in error.message
    assert "update the NVIDIA driver" in str(error.hint)
