"""A study in a journal file: what kills, power cuts and full disks leave, and several processes on one file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.tuning.bench import Stop
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.storage import cut_torn_tail
from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.sampler.trials import EHVI_ATTR
from mptune.tuning.space import SearchSpace
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import evaluation_of, make_toolchain, tune


def trials(journal: Path) -> list[FrozenTrial]:
    """Those of the only study, as Optuna's own storage reads the file."""
    storage = JournalStorage(JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal))))
    (study,) = storage.get_all_studies()
    return storage.get_all_trials(study._study_id)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def test_a_plan_takes_few_syncs_and_a_power_cut_no_outcome(
    record: StudyRecord, space: SearchSpace, journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, syncs = tmp_path / "left.journal", []

    def sync(number: int) -> None:
        syncs.append(number)
        shutil.copyfile(journal, left)

    monkeypatch.setattr(os, "fsync", sync)
    proposal = record.ask()
    record.tell_evaluation(proposal, evaluation_of(proposal, make_toolchain(space)))
    assert len(syncs) <= 5  # not one for each group
    record.tell_failure(record.ask(), Failure(Stage.BUILD, FailureKind.ERROR, "no kernel"))
    record.tell_duplicate(record.ask())
    assert trials(left) == trials(journal)
    assert [trial.state for trial in trials(left)] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]


def test_what_the_sampler_proposes_is_one_record_and_what_optuna_would_ask_for(
    open_record: OpenRecord, journal: Path, tmp_path: Path
) -> None:
    tune(open_record(), budget=6)
    copy, seen = tmp_path / "copy.journal", len(journal.read_bytes().splitlines())
    shutil.copyfile(journal, copy)
    sampler, record = PrecisionSampler(seed=3), open_record()
    proposal = record.ask(sampler)
    assert len(journal.read_bytes().splitlines()) == seen + 1
    other = open_record(journal=copy)
    other._study.sampler = sampler
    assert other.ask().plan == proposal.plan
    asked, drawn = (each.trials()[-1] for each in (other, record))
    assert (asked.params, asked.distributions) == (drawn.params, drawn.distributions)
    assert asked.user_attrs.keys() == drawn.user_attrs.keys() > {"owner", EHVI_ATTR}
    assert {**asked.user_attrs, "owner": ""} == {**drawn.user_attrs, "owner": ""}
    record.tell_evaluation(proposal, evaluation_of(proposal, make_toolchain(record.space)))
    assert open_record().spent == 7


def test_a_torn_tail_is_cut_before_the_next_record(open_record: OpenRecord, journal: Path) -> None:
    tune(open_record(), budget=6)
    whole = journal.read_bytes()
    before = {e.plan.fingerprint: e for e in open_record().evaluations()}
    last_line = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for cut in (1, 10, len(whole) - last_line - 1):
        journal.write_bytes(whole[:-cut])
        record = open_record()
        assert journal.read_bytes() == whole[:-cut], "to open it changes nothing"
        record.heal(is_first=True)
        assert {e.plan.fingerprint: e for e in record.evaluations()} == before
        tune(record, budget=8)
        assert open_record().spent == 8


def test_another_worker_goes_on_behind_a_torn_record(open_record: OpenRecord, journal: Path) -> None:
    """One is killed as it appends, or its disk is full, while others have the study open."""
    record = open_record()
    with journal.open("ab") as file:
        file.write(b'{"op_code":8,"worker_id":"w","trial_')
    record.set_note("after", 1)
    assert open_record().note("after") == 1
    assert all(line.endswith(b"}\n") for line in journal.read_bytes().splitlines(keepends=True))


@pytest.mark.parametrize("tail", [b"", b'{"b"', b'{"b": 2}', b"\0" * 100, b"\0" * 70_000 + b"\n", b'"text"\n'])
@pytest.mark.parametrize("whole", [b"", b'{"a": 1}\n', b'{"a": "' + b"x" * 200_000 + b'"}\n{"b": 2}\n'])
def test_what_follows_the_last_whole_record_is_cut(tmp_path: Path, whole: bytes, tail: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(whole + tail)
    with path.open("r+b") as file:
        cut_torn_tail(file)
        assert file.tell() == len(whole)
    assert path.read_bytes() == whole


def test_a_stale_lock_does_not_stall(open_record: OpenRecord, journal: Path) -> None:
    open_record()
    Path(f"{journal}.lock").touch()
    Path(f"{journal}.lock1234.rename").touch()
    assert tune(open_record(), budget=3).stop is Stop.BUDGET
    assert [p.name for p in journal.parent.iterdir()] == ["study.journal"]
