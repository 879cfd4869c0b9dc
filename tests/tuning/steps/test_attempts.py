"""Whose fault a failure is: what comes from outside is no plan's fault, and teaches nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, FailureKind, ReferenceReport, SampleSet, Stage
from mptune.errors import BaselineError, RunError
from mptune.graph.hazards.observed_values import TensorRange
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.failures import did_not_run, machine_error
from mptune.tuning.front import pareto
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.attempts import FAULTS_IN_A_ROW, in_fresh_processes
from mptune.tuning.steps.prepare import observe
from mptune.tuning.steps.tuner import Stop
from tests.fakes import Diary, FakeToolchain, Law
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import find_sensitivity
from tests.tuning.steps.test_tuner import make_toolchain, make_tuner


@pytest.mark.parametrize("number", [0, 1, 2, 11])
def test_one_kill_is_no_plans_fault(open_record: OpenRecord, space: SearchSpace, number: int) -> None:
    record, diary = open_record(sampler="precision"), Diary()
    toolchain = make_toolchain(space, killed={number})
    make_tuner(record, space, toolchain, diary).run()
    undisturbed = open_record(sampler="precision", name="undisturbed")
    make_tuner(undisturbed, space, make_toolchain(space)).run()
    assert len(record.trials.failed()) == 0
    assert [e.plan for e in record.evaluations()] == [e.plan for e in undisturbed.evaluations()]
    assert sum("killed by SIGKILL" in text and "fresh process" in text for text in diary.warnings) == 1
    assert toolchain.restarts == 1


def test_where_every_fifth_job_is_killed_no_plan_is_dropped(open_record: OpenRecord, space: SearchSpace) -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        record = open_record(name=f"killed {seed}", sampler="tpe")
        toolchain = make_toolchain(space, killed=lambda number, rng=rng: bool(rng.random() < 0.2))
        assert make_tuner(record, space, toolchain, Diary(), budget=30).run() is Stop.BUDGET
        assert record.failures() == ()
        assert record.spent == len({e.plan for e in record.evaluations()}) == 30
        built = record.built_plans(space.free)
        assert (built.finite == 1.0).all()


def test_a_plan_that_was_blamed_is_tried_again_when_the_machine_turns_out_to_fail_often(
    open_record: OpenRecord, space: SearchSpace
) -> None:
    record = open_record()
    # The fourth plan is killed twice in a row, then another one once.
    toolchain = make_toolchain(space, killed={3, 4, 6})
    make_tuner(record, space, toolchain, Diary(), budget=8).run()
    assert record.failures() == ()
    assert record.spent == 8
    counts = Counter(toolchain.built)
    assert max(counts.values()) == 3
    assert sum(e.is_finite for e in record.evaluations()) == 8


@pytest.mark.parametrize("killed", [{3, 4}, {3, 4, 5, 6}])
def test_a_plan_that_fails_by_chance_several_times_in_a_row_is_not_blamed(
    open_record: OpenRecord, space: SearchSpace, killed: set[int]
) -> None:
    record = open_record()
    # The fourth plan is killed again and again, and nothing else ever fails.
    make_tuner(record, space, make_toolchain(space, killed=killed), Diary(), budget=8).run()
    assert record.failures() == ()
    assert record.spent == sum(e.is_finite for e in record.evaluations()) == 8


def test_a_plan_that_crashes_again_and_again_is_blamed_once(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    toolchain = make_toolchain(space, crashes={"g002"})
    make_tuner(record, space, toolchain, Diary(), budget=15).run()
    assert {failure.kind for _, _, failure in record.failures()} == {FailureKind.CRASH}
    assert all("g002" in plan.fp16_groups for plan, _, _ in record.failures())
    blamed = {plan.fingerprint for plan, _, _ in record.failures()}
    counts = Counter(toolchain.built)
    checked = sorted((counts[fingerprint] for fingerprint in blamed), reverse=True)
    assert checked == [6, 6, 6, *[2] * (len(blamed) - 3)], "the first three are checked"
    again = make_toolchain(space)
    make_tuner(open_record(), space, again, Diary(), budget=15).run()
    assert again.built == []


def test_a_machine_on_which_nothing_runs_any_more_is_not_the_plans_fault(
    open_record: OpenRecord, space: SearchSpace
) -> None:
    record, diary = open_record(), Diary()
    toolchain = make_toolchain(space, killed=lambda number: number >= 5)
    with pytest.raises(RunError, match="all-FP32, which ran before, fails now too") as caught:
        make_tuner(record, space, toolchain, diary, budget=20).run()
    assert "resumes" in caught.value.hint
    assert len(toolchain.calls) < 5 + 4 * FAULTS_IN_A_ROW
    repaired = make_toolchain(space)
    record = open_record()
    assert make_tuner(record, space, repaired, budget=20).run() is Stop.BUDGET
    assert record.failures() == ()
    assert len(record.evaluations()) == record.spent == 20


def test_plans_that_crash_in_a_row_are_blamed_where_all_fp32_still_runs(
    open_record: OpenRecord, space: SearchSpace
) -> None:
    record = open_record()
    toolchain = make_toolchain(space, crashes=set(space.free[:6]))
    make_tuner(record, space, toolchain, Diary(), budget=20).run()
    assert len(record.failures()) > FAULTS_IN_A_ROW
    assert pareto(record.evaluations())


@pytest.mark.parametrize("number", range(3))
def test_a_kill_during_the_reference_or_the_ranges_does_not_end_the_search(space: SearchSpace, number: int) -> None:
    toolchain, diary = make_toolchain(space, killed={number}), Diary()
    observe(toolchain, diary)
    assert toolchain.restarts == 1
    assert "killed by SIGKILL" in diary.warnings[0]


_CRASH = Failure(Stage.RUN, FailureKind.CRASH, "killed by SIGSEGV")
_TIMEOUT = Failure(Stage.RUN, FailureKind.TIMEOUT, "no result after 9 s")


@pytest.mark.parametrize(
    ("outcomes", "calls", "expected"),
    [
        ((_CRASH, _TIMEOUT, "done"), 3, "done"),  # one timeout, after a crash
        ((_TIMEOUT, _CRASH, _CRASH, "done"), 4, "done"),
        ((_TIMEOUT, _TIMEOUT, "done"), 2, _TIMEOUT),  # a hang is waited for twice
        ((_TIMEOUT, _CRASH, _TIMEOUT, "done"), 3, _TIMEOUT),
        ((_CRASH, _CRASH, _CRASH, _CRASH, "done"), 4, _CRASH),
    ],
)
def test_only_a_second_timeout_ends_the_attempts_early(
    space: SearchSpace, outcomes: Sequence[Failure | str], calls: int, expected: Failure | str
) -> None:
    left, toolchain = list(outcomes), make_toolchain(space)
    assert in_fresh_processes(lambda: left.pop(0), toolchain, Diary(), "taking the reference") == expected
    assert len(outcomes) - len(left) == calls
    assert toolchain.restarts == calls - 1


def test_a_model_that_does_not_run_is_still_told(space: SearchSpace) -> None:
    crash = Failure(Stage.RUN, FailureKind.CRASH, "segmentation fault")
    with pytest.raises(BaselineError) as caught:
        observe(make_toolchain(space, report=crash), Diary())
    assert str(caught.value) == str(did_not_run("the untouched model does not run in FP32", crash))


def test_a_kill_during_emulation_teaches_no_overflow(space: SearchSpace, tmp_path: Path) -> None:
    toolchain = make_toolchain(space, killed={0, 1, 3})
    found = find_sensitivity(space, toolchain, "relative_l2", tmp_path / "s.json", Diary())
    assert found.errors == {g: pytest.approx(e, rel=1e-3) for g, e in toolchain.law.errors.items()}


def test_a_kill_while_all_fp32_is_measured_ends_nothing(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    make_tuner(record, space, FakeToolchain(Law(space.free), killed={0, 1, 2})).run()
    assert record.spent == 12


class FaultyToolchain(FakeToolchain):
    """The device is lost in some jobs that are no evaluations, which are counted from 0."""

    lost: frozenset[int] = frozenset()
    asked = 0

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        return self._lose() or super().reference(which)

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        return self._lose() or super().observe(stage)

    def emulate(self, plans: Sequence[PrecisionPlan]) -> tuple[OutputError, ...] | Failure:
        return self._lose() or super().emulate(plans)

    def _lose(self) -> Failure | None:
        number, self.asked = self.asked, self.asked + 1
        return Failure(Stage.RUN, FailureKind.DEVICE_LOST, "the device is gone") if number in self.lost else None


def make_faulty(space: SearchSpace, *lost: int) -> FaultyToolchain:
    toolchain = FaultyToolchain(Law(space.free))
    toolchain.lost = frozenset(lost)
    return toolchain


def test_a_reference_that_only_the_machine_prevents_is_not_the_models_fault(space: SearchSpace) -> None:
    with pytest.raises(RunError, match="the machine failed 4 times in a row: device lost") as caught:
        observe(make_faulty(space, *range(9)), Diary())
    assert "resumes" in caught.value.hint


def test_a_fault_of_the_machine_during_emulation_ends_nothing(space: SearchSpace, tmp_path: Path) -> None:
    toolchain, diary = make_faulty(space, 0), Diary()
    found = find_sensitivity(space, toolchain, "relative_l2", tmp_path / "s.json", diary)
    assert found.errors == {g: pytest.approx(e, rel=1e-3) for g, e in toolchain.law.errors.items()}
    assert len(set(toolchain.emulated)) == len(toolchain.emulated), "the same job again, not one plan after the other"


def test_device_losses_count_as_faults_of_the_machine(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    full = make_toolchain(space, faults=1, fault_kind=FailureKind.DISK_FULL)
    make_tuner(record, space, full, Diary(), budget=4).run()
    assert not record.trials.has_faults(), "a full disk is no fault that comes now and then"
    make_tuner(record, space, make_toolchain(space, faults=2), Diary(), budget=6).run()
    assert record.trials.has_faults()
    assert open_record().trials.has_faults(), "the next session sees it"


def test_a_driver_that_is_too_old_has_a_hint_of_its_own() -> None:
    failure = Failure(Stage.BUILD, FailureKind.DRIVER, "CUDA initialization failure with error: 35")
    assert failure.is_machine_fault, "no plan is to blame"
    error = machine_error(failure, 2)
    assert "driver too old" in error.message
    assert "update the NVIDIA driver" in str(error.hint)
