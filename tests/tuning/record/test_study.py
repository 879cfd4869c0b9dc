"""The record: what survives a kill, orphaned trials, several workers, what a study was made with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import optuna
import pytest
from sqlalchemy import text

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.errors import RunError
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.bench import Stop
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_SAMPLER, Origin
from mptune.tuning.record import database
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import read_study
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import Tuner
from tests.fakes import SHA, make_plan
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import evaluation_of, make_bench, make_toolchain, tune

MINE = Origin("seed", "mine")


@pytest.fixture
def two(open_record: OpenRecord, tmp_path: Path) -> tuple[StudyRecord, StudyRecord]:
    """Two workers of one database."""
    return tuple(open_record(url=f"sqlite:///{tmp_path / 'study.db'}", sampler=None) for _ in range(2))


def test_an_evaluation_that_was_written_but_not_told_is_not_lost(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    record.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    proposal = record.ask()
    evaluation = evaluation_of(proposal, make_toolchain(space))
    with mock.patch.object(StudyRecord, "_finish"):  # the process dies right before it
        record.tell_evaluation(proposal, evaluation)
    again = open_record()
    assert again.evaluations() == ()
    assert again.heal(is_first=True) == 1
    assert again.evaluations() == (evaluation,)
    assert again.baseline() == evaluation
    assert again.spent == 1


@pytest.mark.smoke
def test_a_plan_in_work_is_taken_up_again_and_a_failure_survives(open_record: OpenRecord) -> None:
    record, plan = open_record(), make_plan("01010101")
    record.enqueue(plan, MINE)
    lost, failed = [record.ask(), record.ask()], record.ask()
    failure = Failure(Stage.BUILD, FailureKind.TIMEOUT, "took too long", Path("x.log"))
    record.tell_failure(failed, failure)
    again = open_record()
    assert again.failures() == ((failed.plan, ORIGIN_SAMPLER, failure),)
    assert again.heal(is_first=True) == 2
    assert again.waiting() == {p.plan.fingerprint for p in lost}
    first = again.ask()
    assert (first.plan, first.origin) == (plan, MINE)
    assert again.ask().origin == ORIGIN_SAMPLER
    assert again.heal(is_first=True) == 2, "healing twice must not enqueue a plan twice"
    assert len(again.waiting()) == 2


def test_a_living_worker_keeps_its_trial(two: tuple[StudyRecord, StudyRecord], space: SearchSpace) -> None:
    one, other = two
    proposal = one.ask()
    assert other.heal(is_first=True) == 0
    assert proposal.plan.fingerprint in other.started()
    toolchain = make_toolchain(space)

    def finish_the_other(seconds: float) -> None:  # The last of the budget is in work: it is waited for.
        assert len(toolchain.built) == 3
        one.tell_evaluation(proposal, evaluation_of(proposal, make_toolchain(space)))

    assert Tuner(make_bench(other, toolchain, SearchSettings(budget=4)), sleep=finish_the_other).run() is Stop.BUDGET
    assert proposal.plan.fingerprint not in toolchain.built
    assert other.spent == 4


def test_a_worker_is_dead_when_its_heartbeat_stops(two: tuple[StudyRecord, StudyRecord], space: SearchSpace) -> None:
    one, other = two
    proposal = one.ask()
    with one.storage._database.engine.begin() as connection:
        connection.execute(text("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00.000000'"))
    assert other.heal() == 1
    assert other.waiting() == {proposal.plan.fingerprint}
    one.tell_evaluation(proposal, evaluation_of(proposal, make_toolchain(space)))  # It was only stopped for a while.
    assert one.spent == 0


def test_all_plans_that_wait_in_a_worker_are_kept_alive(
    two: tuple[StudyRecord, StudyRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr(database, "HEARTBEAT_S", 0.05)
    numbers = {one.ask().number for _ in range(3)}
    with one.storage._database.engine.begin() as connection:
        connection.execute(text("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00.000000'"))
    end = time.monotonic() + 20.0
    while other.storage._get_stale_trial_ids(other._study._study_id) and time.monotonic() < end:
        time.sleep(0.1)
    assert other.heal() == 0
    assert {trial.number for trial in other.running()} == numbers


def test_a_dead_process_loses_its_trial_in_a_journal(open_record: OpenRecord, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from mptune.tuning.record.study import open_study
from tests.tuning.conftest import make_small_space
record = open_study(make_small_space(8), name="shared", metric="relative_l2", identity={{}},
                    journal=Path({str(tmp_path / "j")!r}), is_shared=True)
print(record.ask().plan.fingerprint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    record = open_record(name="shared", identity={}, journal=tmp_path / "j", is_shared=True)
    mine = record.ask()
    assert record.heal(is_first=True) == 1
    assert record.waiting() == {done.stdout.strip()}
    assert [trial.number for trial in record.running()] == [mine.number]


def test_a_trial_that_names_no_owner_is_orphaned_after_a_while(
    record: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    record._study.ask()  # The process dies right behind it.
    assert record.heal() == 0
    monkeypatch.setattr("mptune.tuning.record.record._NAMELESS", timedelta(0))
    assert record.heal() == 1
    assert record.running() == []


def test_a_plan_that_another_has_in_work_is_seen(two: tuple[StudyRecord, StudyRecord]) -> None:
    plan, proposals = make_plan("01010101"), []
    for record in two:  # Both thought at the same time.
        record.enqueue(plan, MINE)
        proposals.append(record.ask())
    assert [p.plan for p in proposals] == [plan, plan]
    assert plan.fingerprint in two[1].started(but=proposals[1].number)
    two[1].tell_duplicate(proposals[1])
    assert plan.fingerprint not in two[0].started(but=proposals[0].number)
    assert (two[0].spent, two[0].failures()) == (0, ())


def test_while_another_builds_the_baseline_the_seeds_are_built(
    two: tuple[StudyRecord, StudyRecord], space: SearchSpace
) -> None:
    other, record = two
    other.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    other.ask()
    toolchain = make_toolchain(space)

    def give_up(seconds: float) -> None:  # The baseline is the last of the budget, and still in work.
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Tuner(make_bench(record, toolchain, SearchSettings(budget=2)), sleep=give_up).run()
    assert toolchain.built == [space.seeds[1].plan.fingerprint]


def test_optunas_own_tools_read_it(record: StudyRecord, space: SearchSpace, tmp_path: Path) -> None:
    tune(record, budget=4)
    command = [sys.executable, "-c", "import sys; from optuna.cli import main; sys.exit(main())", "best-trials"]
    command += ["--study-name", "test", "-f", "json"]
    command += ["--storage", str(tmp_path / "study.journal"), "--storage-class", "JournalFileBackend"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(trial["params"].keys() == set(space.free) for trial in json.loads(done.stdout))


def test_reading_writes_nothing(record: StudyRecord, tmp_path: Path) -> None:
    tune(record, budget=5)
    journal = tmp_path / "study.journal"
    journal.write_bytes(journal.read_bytes()[:-3])
    (tmp_path / "study.journal.lock").touch()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    study = {"model_sha256": SHA, "name": "test", "metric": "relative_l2", "journal": journal}
    assert len(read_study(**study).evaluations()) == 4
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    for change, message in (({"name": "other"}, "no study other"), ({"journal": tmp_path / "no.journal"}, "missing")):
        with pytest.raises(RunError, match=message):
            read_study(**study | change)


def test_what_was_made_with_something_else_is_refused(open_record: OpenRecord) -> None:
    open_record(identity={"seed": 0})
    record = open_record(identity={"seed": 1})  # Nothing has been evaluated yet.
    assert record.name.startswith("test 2"), "a study of its own, named with the time"
    tune(record, budget=2)
    with pytest.raises(RunError, match=r"another seed \(1 there, 2 here\)") as refused:
        open_record(identity={"seed": 2}, name=record.name)
    assert "--fresh" in refused.value.hint
    assert open_record(identity={"seed": 1}, name=record.name).spent == 2


def test_hosts_that_begin_at_the_same_time_never_mix(open_record: OpenRecord, tmp_path: Path) -> None:
    database = {"name": "shared", "url": f"sqlite:///{tmp_path / 'study.db'}"}
    records = [open_record(identity={"seed": seed}, **database) for seed in (0, 1, 0)]
    names = [record.name for record in records]
    assert names[0] == names[2] == "shared" != names[1]
    records[2].ask()
    with pytest.raises(RunError, match="another seed"):
        open_record(identity={"seed": 2}, **database)


def test_a_resumed_sampler_does_not_repeat_itself(open_record: OpenRecord) -> None:
    space = make_small_space(10)
    assert len({open_record(space, sampler=None).ask().plan for _ in range(6)}) == 6


EARLY, LATE, AROUND = 20, 70, 10


def test_the_work_and_the_lines_of_a_plan_do_not_grow(open_record: OpenRecord, tmp_path: Path) -> None:
    record = open_record(make_small_space(40))
    record._study.sampler = optuna.samplers.RandomSampler(seed=1)
    calls, lines = [0], []  # of Python functions between one evaluation and the next; of the journal

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[-1] += event == "call"

    def begin_next(plan: PrecisionPlan) -> None:
        sys.setprofile(None)
        lines.append((tmp_path / "study.journal").read_bytes().count(b"\n"))
        calls.append(0)
        if any(at - AROUND <= len(lines) < at for at in (EARLY, LATE)):
            sys.setprofile(count)

    try:
        tune(record, budget=LATE, before=begin_next)
    finally:
        sys.setprofile(None)
    early, late = (median(calls[at - AROUND : at]) for at in (EARLY, LATE))
    assert 0 < late < 1.2 * early
    assert len(set(np.diff(lines)[EARLY:])) == 1
