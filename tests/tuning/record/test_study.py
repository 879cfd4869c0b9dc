"""The record: what survives a kill, orphaned trials, several workers, what a study was made with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.errors import RunError
from mptune.settings import SearchSettings
from mptune.tuning.bench import Stop
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_SAMPLER, Origin
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import open_study, read_study
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import Tuner
from tests.fakes import SHA, FakeToolchain, make_plan
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import evaluation_of, make_bench
from tests.tuning.test_tuner import make_toolchain


def run(record: StudyRecord, space: SearchSpace, toolchain: FakeToolchain, **settings: object) -> Stop:
    return Tuner(make_bench(record, toolchain, SearchSettings(**settings))).run()  # type: ignore[arg-type]


def open_database(folder: Path, space: SearchSpace, seed: int = 0) -> StudyRecord:
    made_with = {"metric": "relative_l2", "identity": {"seed": seed}, "journal": folder / "unused"}
    return open_study(space, name="shared", url=f"sqlite:///{folder / 'study.db'}", **made_with)  # type: ignore[arg-type]


@pytest.fixture
def two(tmp_path: Path, space: SearchSpace) -> Iterator[tuple[StudyRecord, StudyRecord]]:
    """Two workers of one database."""
    records = open_database(tmp_path, space), open_database(tmp_path, space)
    yield records
    for record in records:
        record.close()


def test_an_evaluation_that_was_written_but_not_told_is_not_lost(open_record: OpenRecord, space: SearchSpace) -> None:
    record, toolchain = open_record(), make_toolchain(space)
    record.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    proposal = record.ask()
    evaluation = evaluation_of(proposal, toolchain)
    record.tell_evaluation(proposal, evaluation, is_final=False)  # The process dies right behind it.
    again = open_record()
    assert again.evaluations() == ()
    assert again.heal(is_first=True) == 1
    assert again.evaluations() == (evaluation,)
    assert again.baseline() == evaluation
    assert again.spent == 1


@pytest.mark.smoke
def test_a_plan_in_work_is_taken_up_again_and_a_failure_survives(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    record.enqueue(make_plan("01010101"), Origin("seed", "mine"))
    lost, failed = [record.ask(), record.ask()], record.ask()
    failure = Failure(Stage.BUILD, FailureKind.TIMEOUT, "took too long", Path("x.log"))
    record.tell_failure(failed, failure)
    again = open_record()
    assert again.failures() == ((failed.plan, ORIGIN_SAMPLER, failure),)
    assert again.heal(is_first=True) == 2
    assert again.waiting() == {p.plan.fingerprint for p in lost}
    first = again.ask()
    assert (first.plan, first.origin) == (make_plan("01010101"), Origin("seed", "mine"))
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
        assert len(toolchain.built) == 6
        one.tell_evaluation(proposal, evaluation_of(proposal, make_toolchain(space)))

    assert Tuner(make_bench(other, toolchain, SearchSettings(budget=7)), sleep=finish_the_other).run() is (Stop.BUDGET)
    assert proposal.plan.fingerprint not in toolchain.built
    assert other.spent == 7


def test_a_worker_is_dead_when_its_heartbeat_stops(two: tuple[StudyRecord, StudyRecord], space: SearchSpace) -> None:
    one, other = two
    proposal = one.ask()
    with one.storage._database.engine.begin() as connection:  # type: ignore[attr-defined]
        connection.execute(text("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00.000000'"))
    assert other.heal() == 1
    assert other.waiting() == {proposal.plan.fingerprint}
    one.tell_evaluation(proposal, evaluation_of(proposal, make_toolchain(space)))  # It was only stopped for a while.
    assert one.spent == 0


def test_a_dead_process_loses_its_trial_in_a_journal(tmp_path: Path, space: SearchSpace) -> None:
    code = f"""
from pathlib import Path
from mptune.tuning.record.study import open_study
from tests.tuning.conftest import make_small_space
record = open_study(make_small_space(8), name="shared", metric="relative_l2", identity={{}},
                    journal=Path({str(tmp_path / "j")!r}), is_shared=True)
print(record.ask().plan.fingerprint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shared = {"metric": "relative_l2", "identity": {}, "journal": tmp_path / "j", "is_shared": True}
    record = open_study(space, name="shared", **shared)  # type: ignore[arg-type]
    mine = record.ask()
    assert record.heal(is_first=True) == 1
    assert record.waiting() == {done.stdout.strip()}
    assert [trial.number for trial in record.running()] == [mine.number]


def test_a_trial_that_names_no_owner_is_orphaned_after_a_while(
    open_record: OpenRecord, space: SearchSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = open_record()
    record._study.ask()  # The process dies right behind it.
    assert record.heal() == 0
    monkeypatch.setattr("mptune.tuning.record.record._NAMELESS", timedelta(0))
    assert record.heal() == 1
    assert record.running() == []


def test_a_plan_that_another_has_in_work_is_seen(two: tuple[StudyRecord, StudyRecord]) -> None:
    plan, proposals = make_plan("01010101"), []
    for record in two:  # Both thought at the same time.
        record.enqueue(plan, Origin("seed", "mine"))
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
    assert toolchain.built[0] == space.seeds[1].plan.fingerprint
    assert space.seeds[0].plan.fingerprint not in toolchain.built


def test_optunas_own_tools_read_it(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    run(open_record(), space, make_toolchain(space), budget=4)
    journal = str(tmp_path / "study.journal")
    command = [sys.executable, "-c", "import sys; from optuna.cli import main; sys.exit(main())", "best-trials"]
    command += ["--study-name", "test", "-f", "json", "--storage", journal, "--storage-class", "JournalFileBackend"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(trial["params"].keys() == set(space.free) for trial in json.loads(done.stdout))


def test_reading_writes_nothing(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    run(open_record(), space, make_toolchain(space), budget=5)
    journal = tmp_path / "study.journal"
    journal.write_bytes(journal.read_bytes()[:-3])
    (tmp_path / "study.journal.lock").touch()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    record = read_study(model_sha256=SHA, name="test", metric="relative_l2", journal=journal)
    assert len(record.evaluations()) == 4
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    with pytest.raises(RunError, match="no study other"):
        read_study(model_sha256=SHA, name="other", metric="relative_l2", journal=journal)
    with pytest.raises(RunError, match="missing"):
        read_study(model_sha256=SHA, name="test", metric="relative_l2", journal=tmp_path / "no.journal")


def test_what_was_made_with_something_else_is_refused(open_record: OpenRecord, space: SearchSpace) -> None:
    open_record(identity={"seed": 0})
    record = open_record(identity={"seed": 1})  # Nothing has been evaluated yet.
    assert record.name.startswith("test 2"), "a study of its own, named with the time"
    run(record, space, make_toolchain(space), budget=2)
    with pytest.raises(RunError, match=r"another seed \(1 there, 2 here\)") as refused:
        open_record(identity={"seed": 2}, name=record.name)
    assert "--fresh" in refused.value.hint
    assert open_record(identity={"seed": 1}, name=record.name).spent == 2


def test_hosts_that_begin_at_the_same_time_never_mix(tmp_path: Path, space: SearchSpace) -> None:
    records = [open_database(tmp_path, space, seed) for seed in (0, 1, 0)]
    names = [record.name for record in records]
    assert names[0] == names[2] == "shared" != names[1]
    records[2].ask()
    with pytest.raises(RunError, match="another seed"):
        open_database(tmp_path, space, 2)
    for record in records:
        record.close()


def test_a_resumed_sampler_does_not_repeat_itself(open_record: OpenRecord) -> None:
    space = make_small_space(10)
    proposals = [open_record(space, sampler=None).ask().plan for _ in range(6)]
    assert len(set(proposals)) == 6
