"""A study in a journal file: several processes read the same, a plan takes few syncs, and no outcome is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.tuning.evaluation import ORIGIN_FP32
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.storage import batch, open_storage
from mptune.tuning.space import SearchSpace
from tests.fakes import FakeToolchain, Law
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import evaluation_of


def plain(journal: Path) -> JournalStorage:
    """Optuna's own storage on the file."""
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal))))


def content(storage: BaseStorage) -> dict[str, tuple[dict[str, Any], list[FrozenTrial]]]:
    """Name of each study -> its attributes and its trials."""
    return {
        study.study_name: (study.user_attrs, storage.get_all_trials(study._study_id))
        for study in storage.get_all_studies()
    }


def trials(journal: Path) -> list[FrozenTrial]:
    """Of the only study of a file."""
    ((_, every),) = content(plain(journal)).values()
    return every


def evaluate(record: StudyRecord, space: SearchSpace) -> None:
    """Ask for a plan and tell its evaluation."""
    proposal = record.ask()
    record.tell_evaluation(proposal, evaluation_of(proposal, FakeToolchain(Law([g.id for g in space.groups]))))


@pytest.fixture
def record(open_record: OpenRecord, space: SearchSpace) -> StudyRecord:
    record = open_record()
    record.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    return record


def test_several_storages_on_one_file_see_each_other(record: StudyRecord, space: SearchSpace, tmp_path: Path) -> None:
    evaluate(record, space)
    journal = tmp_path / "study.journal"
    storages = [open_storage(None, journal, is_locked=False), plain(journal), open_storage(None, journal)]
    (name,) = content(storages[0])
    for number, storage in enumerate(storages):
        study = optuna.load_study(study_name=name, storage=storage, sampler=optuna.samplers.RandomSampler())
        study.ask().set_user_attr("by", number)
        study.set_user_attr(f"by {number}", number)
    every = [content(storage) for storage in (*storages, plain(journal))]
    assert all(one == every[0] for one in every)
    assert len(every[0][name][1]) == 4


def test_a_plan_takes_few_syncs(record: StudyRecord, space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(record, space)
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    evaluate(record, space)
    assert len(syncs) <= 5  # not one for each group


def test_a_power_cut_takes_no_outcome(
    record: StudyRecord, space: SearchSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, left = tmp_path / "study.journal", tmp_path / "left.journal"
    monkeypatch.setattr(os, "fsync", lambda number: shutil.copyfile(journal, left))
    evaluate(record, space)
    assert [t.state for t in trials(left)] == [TrialState.COMPLETE]
    assert trials(left) == trials(journal)
    record.tell_failure(record.ask(), Failure(Stage.BUILD, FailureKind.ERROR, "no kernel"))
    assert trials(left) == trials(journal)
    assert trials(left)[1].state is TrialState.PRUNED
    record.tell_duplicate(record.ask())
    assert trials(left)[2].state is TrialState.FAIL
    record.set_note("kept", 1)
    assert content(plain(left)) == content(plain(journal))


def test_a_batch_that_fails_is_written(record: StudyRecord, space: SearchSpace, tmp_path: Path) -> None:
    journal = tmp_path / "study.journal"
    storage = open_storage(None, journal)
    (name,) = content(storage)
    study = optuna.load_study(study_name=name, storage=storage)

    def interrupted() -> None:
        with batch(storage):
            study.set_user_attr("a", 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    study.set_user_attr("b", 2)
    assert content(storage) == content(plain(journal))
    assert {"a", "b"} <= set(study.user_attrs)
