"""The record: what survives a kill, a torn journal, a full disk, another metric; databases."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import optuna
import pytest
from sqlalchemy import text

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.errors import RunError, SettingsError
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_SAMPLER, Origin
from mptune.tuning.listener import Silent
from mptune.tuning.record.attributes import OWNER
from mptune.tuning.record.backends.journal import cut_torn_tail
from mptune.tuning.record.backends.patience import PatientStorage
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import _quiet, open_study, read_study
from mptune.tuning.sampler.precision import derive_seed, make_sampler
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.remeasure import announce
from mptune.tuning.steps.tuner import Stop, Tuner
from tests.fakes import SHA, FakeToolchain, make_plan
from tests.test_joining import until
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import evaluation_of
from tests.tuning.steps.test_tuner import make_toolchain


def run(record: StudyRecord, space: SearchSpace, toolchain: FakeToolchain, **settings: object) -> Stop:
    return Tuner(record, space, toolchain, SearchSettings(**settings), Silent()).run()  # type: ignore[arg-type]


def test_optuna_is_quiet_until_the_last_of_several_searches_is_done() -> None:
    before, first, second = optuna.logging.get_verbosity(), ExitStack(), ExitStack()
    first.enter_context(_quiet())
    second.enter_context(_quiet())
    first.close()
    assert optuna.logging.get_verbosity() == optuna.logging.ERROR
    second.close()
    assert optuna.logging.get_verbosity() == before


def test_a_budget_beyond_all_plans_takes_no_longer_than_all_plans(open_record: OpenRecord, space: SearchSpace) -> None:
    left: list[int] = []

    class Counting(Silent):
        def remaining(self, done: int, count: int) -> None:
            left.append(count)

    record = open_record()
    run(record, space, make_toolchain(space), budget=3)
    announce(Counting(), record, SearchSettings(budget=10**9))
    assert space.size // 2 < left[-1] < 2 * space.size


def test_an_evaluation_that_was_written_but_not_told_is_not_lost(
    open_record: OpenRecord, space: SearchSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, toolchain = open_record(), make_toolchain(space)
    record.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    proposal = record.ask()
    evaluation = evaluation_of(proposal, toolchain)
    with monkeypatch.context() as patch:
        patch.setattr(StudyRecord, "_finish", lambda *_: None)  # the process dies right here
        record.tell_evaluation(proposal, evaluation)
    again = open_record()
    assert again.evaluations() == ()
    assert again.heal(stale_after_s=0) == 1
    assert again.evaluations() == (evaluation,)
    assert again.baseline() == evaluation
    assert again.spent == 1


def test_a_plan_in_work_is_taken_up_again(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    record.enqueue(make_plan("01010101"), Origin("seed", "mine"), attempt=1)
    lost = [record.ask(), record.ask()]
    again = open_record()
    assert again.heal(stale_after_s=0) == 2
    assert again.trials.waiting() == {p.plan.fingerprint for p in lost}
    first = again.ask()
    assert (first.plan, first.origin, first.attempt) == (make_plan("01010101"), Origin("seed", "mine"), 1)
    assert again.ask().origin == ORIGIN_SAMPLER
    assert again.heal(stale_after_s=0) == 2, "healing twice must not enqueue a plan twice"
    assert len(again.trials.waiting()) == 2


@pytest.mark.smoke
def test_a_failure_survives(open_record: OpenRecord, space: SearchSpace) -> None:
    record = open_record()
    proposal = record.ask()
    failure = Failure(Stage.BUILD, FailureKind.TIMEOUT, "took too long", Path("x.log"))
    record.tell_failure(proposal, failure)
    assert open_record().failures() == ((proposal.plan, ORIGIN_SAMPLER, failure),)


def open_shared(folder: Path, space: SearchSpace) -> StudyRecord:
    url = f"sqlite:///{folder / 'study.db'}"
    journal = folder / "unused"
    return open_study(space, name="shared", metric="relative_l2", identity={}, journal=journal, url=url)


def test_a_living_process_keeps_its_trials_in_a_shared_database(tmp_path: Path, space: SearchSpace) -> None:
    one, two = open_shared(tmp_path, space), open_shared(tmp_path, space)
    proposal = one.ask()
    assert two.heal(stale_after_s=1e9) == 0
    assert proposal.plan.fingerprint in two.states()
    toolchain = make_toolchain(space)
    settings = SearchSettings(budget=7)

    def finish_the_other(seconds: float) -> None:  # The last of the budget is in work: it is waited for.
        assert len(toolchain.built) == 6
        one.tell_evaluation(proposal, evaluation_of(proposal, make_toolchain(space)))

    assert Tuner(two, space, toolchain, settings, Silent(), sleep=finish_the_other).run() is Stop.BUDGET
    assert proposal.plan.fingerprint not in toolchain.built
    assert two.spent == 7
    assert not (tmp_path / "unused").exists()
    one.close()
    two.close()


def test_a_worker_proposes_when_the_turn_of_another_is_over(tmp_path: Path, space: SearchSpace) -> None:
    one, two = open_shared(tmp_path, space), open_shared(tmp_path, space)
    order: list[str] = []

    def propose() -> None:
        two.release(two.ask())
        order.append("proposed")

    proposing = threading.Thread(target=propose)
    with one.turn():
        proposing.start()
        until(lambda: len(one.trials.running()) == 2)
        time.sleep(0.2)
        order.append("turn is over")
    proposing.join()
    assert order == ["turn is over", "proposed"]
    assert (one.spent, one.failures(), one.trials.failed(), one.trials.running()) == (0, (), [], [])
    for record in (one, two):
        record.close()


def test_a_worker_of_another_host_is_dead_when_its_heartbeat_stops(tmp_path: Path, space: SearchSpace) -> None:
    one, two = open_shared(tmp_path, space), open_shared(tmp_path, space)
    proposal = one.ask()
    (running,) = one.trials.running()
    proposal.trial.set_user_attr(OWNER, {**running.user_attrs[OWNER], "host": "elsewhere"})
    assert two.heal(stale_after_s=0) == 0, "however long it runs, its heart beats"
    one._heartbeats.stop()
    assert isinstance(one._storage, PatientStorage)
    with one._storage._database.engine.begin() as connection:
        connection.execute(text("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00.000000'"))
    assert two.heal(stale_after_s=1e9) == 1
    assert two.trials.waiting() == {proposal.plan.fingerprint}
    one.tell_evaluation(proposal, evaluation_of(proposal, make_toolchain(space)))  # It was only stopped for a while.
    assert one.spent == 0
    for record in (one, two):
        record.close()


def test_a_dead_process_loses_its_trials_in_a_shared_database(tmp_path: Path, space: SearchSpace) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    code = f"""
from pathlib import Path
from tests.tuning.conftest import make_small_space
from tests.tuning.steps.test_tuner import make_toolchain
from mptune.tuning.record.study import open_study
record = open_study(make_small_space(8), name="shared", metric="relative_l2", identity={{}},
                       journal=Path("unused"), url={url!r})
print(record.ask().plan.fingerprint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    record = open_shared(tmp_path, space)
    assert record.heal(stale_after_s=1e9) == 1
    assert record.trials.waiting() == {done.stdout.strip()}
    record.close()


def test_a_torn_tail_is_cut_before_the_next_record(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    journal = tmp_path / "study.journal"
    run(open_record(), space, make_toolchain(space), budget=6)
    whole = journal.read_bytes()
    known = {e.plan.fingerprint: e for e in open_record().evaluations()}
    last_line = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for cut in (1, 10, len(whole) - last_line - 1):
        journal.write_bytes(whole[:-cut])
        record = open_record()
        assert journal.read_bytes() == whole[:-cut], "to open it changes nothing"
        record.heal(stale_after_s=0)
        assert {e.plan.fingerprint: e for e in record.evaluations()} == known
        run(record, space, make_toolchain(space), budget=8)
        assert open_record().spent == 8


def test_another_worker_goes_on_behind_a_torn_record(
    open_record: OpenRecord, space: SearchSpace, tmp_path: Path
) -> None:
    """One is killed as it appends, or its disk is full, while others have the study open."""
    journal = tmp_path / "study.journal"
    record = open_record()
    run(record, space, make_toolchain(space), budget=3)
    with journal.open("ab") as file:
        file.write(b'{"op_code":8,"worker_id":"w","trial_')
    record.set_note("after", 1)
    assert open_record().note("after") == 1
    assert all(line.endswith(b"}\n") for line in journal.read_bytes().splitlines(keepends=True))


@pytest.mark.parametrize("content", [b"", b'{"a": 1}\n', b'{"a": "' + b"x" * 200_000 + b'"}\n{"b": 2}\n'])
def test_a_whole_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    journal = tmp_path / "j"
    journal.write_bytes(content)
    cut_torn_tail(journal)
    assert journal.read_bytes() == content


@pytest.mark.parametrize("tail", [b'{"b"', b'{"b": 2}', b"\0" * 100, b"\0" * 70_000 + b"\n", b'"text"\n'])
@pytest.mark.parametrize("before", [b"", b'{"a": 1}\n'])
def test_a_torn_tail_is_cut(tmp_path: Path, before: bytes, tail: bytes) -> None:
    journal = tmp_path / "j"
    journal.write_bytes(before + tail)
    cut_torn_tail(journal)
    assert journal.read_bytes() == before


def test_a_stale_lock_does_not_stall(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    open_record()
    (tmp_path / "study.journal.lock").touch()
    (tmp_path / "study.journal.lock1234.rename").touch()
    record = open_record()
    assert run(record, space, make_toolchain(space), budget=3) is Stop.BUDGET
    assert [p.name for p in tmp_path.iterdir()] == ["study.journal"]


def test_a_metric_that_was_not_taken_needs_new_builds(open_record: OpenRecord, space: SearchSpace) -> None:
    run(open_record(), space, make_toolchain(space), budget=5)
    record = open_record(metric="mine.py:score")
    assert record.spent == 0


def test_reading_writes_nothing(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    run(open_record(), space, make_toolchain(space), budget=5)
    journal = tmp_path / "study.journal"
    journal.write_bytes(journal.read_bytes()[:-3])
    (tmp_path / "study.journal.lock").touch()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    record = read_study(model_sha256=SHA, name="test", metric="relative_l2", journal=journal)
    assert len(record.evaluations()) == 4
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_reading_what_is_not_there(tmp_path: Path, open_record: OpenRecord) -> None:
    with pytest.raises(RunError, match="missing"):
        read_study(model_sha256=SHA, name="test", metric="relative_l2", journal=tmp_path / "no.journal")
    open_record()
    with pytest.raises(RunError, match="no study test/max_abs"):
        read_study(model_sha256=SHA, name="test", metric="max_abs", journal=tmp_path / "study.journal")


def test_another_model_under_the_same_name_is_refused(open_record: OpenRecord) -> None:
    open_record()
    with pytest.raises(RunError, match="another model"):
        open_record(identity={"model": "1" * 64})


def test_notes(open_record: OpenRecord) -> None:
    record = open_record()
    record.set_note("a:1", {"x": [1, 2]})
    record.set_note("b", 3)
    again = open_record()
    assert again.note("b") == 3
    assert again.note("c") is None
    assert again.notes("a:") == {"a:1": {"x": [1, 2]}}


def test_samplers() -> None:
    with pytest.raises(SettingsError, match="no sampler 'bayes'") as caught:
        make_sampler("bayes", 0)
    assert "tpe" in caught.value.hint
    assert len({derive_seed(seed, trials) for seed in range(5) for trials in range(5)}) == 25


def test_a_resumed_sampler_does_not_repeat_itself(open_record: OpenRecord) -> None:
    space = make_small_space(10)
    proposals = [open_record(space, sampler=None).ask().plan for _ in range(6)]
    assert len(set(proposals)) == 6
