"""Opening a journal in fewer steps gives what Optuna's own storage gives, and writing it takes few syncs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from mptune.engines.base import Failure, FailureKind, Measurement, Stage
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.record.backends.folding import fold
from mptune.tuning.record.backends.journal_storage import BatchedStorage
from mptune.tuning.record.backends.lines import LineReader
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.space import SearchSpace
from tests.fakes import FakeToolchain, Law, make_plan
from tests.tuning.conftest import OpenRecord

OLD_RUNS = Path(__file__).parents[3] / "old_runs"


def plain(journal: Path) -> JournalStorage:
    """Optuna's own storage on the file."""
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal))))


def content(storage: BaseStorage) -> dict[str, tuple[dict[str, Any], dict[str, Any], list[FrozenTrial]]]:
    """Name of each study -> its attributes of both kinds and its trials."""
    return {
        study.study_name: (study.user_attrs, study.system_attrs, storage.get_all_trials(study._study_id))
        for study in storage.get_all_studies()
    }


def trials(journal: Path) -> list[FrozenTrial]:
    """Of the only study of a file."""
    ((_, _, found),) = content(plain(journal)).values()
    return found


def evaluate(record: StudyRecord, space: SearchSpace) -> None:
    """Ask for a plan and tell its evaluation."""
    proposal = record.ask()
    measurement = FakeToolchain(Law([g.id for g in space.groups])).evaluate(proposal.plan)
    assert isinstance(measurement, Measurement)
    evaluation = Evaluation.from_measurement(
        proposal.plan, measurement, number=proposal.number, origin=proposal.origin, metric="relative_l2", baseline_ms=10
    )
    record.tell_evaluation(proposal, evaluation)


@pytest.fixture
def journal(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> Path:
    """Of a study with evaluations, trials that wait, run or failed, and notes."""
    record = open_record()
    record.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    for _ in range(4):
        evaluate(record, space)
    record.set_note("mine", {"a": [1.5]})
    record.tell_duplicate(record.ask())
    record.release(record.ask())
    record.enqueue(make_plan("01010101"), ORIGIN_SAMPLER)
    record.ask()
    open_record(metric="max_abs").enqueue(make_plan("11010101"), ORIGIN_SAMPLER)
    return tmp_path / "study.journal"


def test_a_journal_opens_as_with_optuna(journal: Path) -> None:
    assert content(BatchedStorage(journal)) == content(plain(journal))
    states = {trial.state for _, _, trials in content(plain(journal)).values() for trial in trials}
    assert states >= {TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING}


@pytest.mark.parametrize(
    "run", sorted(path.parent.relative_to(OLD_RUNS) for path in OLD_RUNS.glob("*/*/study.journal"))
)
def test_journals_of_earlier_versions_open_as_with_optuna(run: Path, tmp_path: Path) -> None:
    journal = Path(shutil.copy(OLD_RUNS / run / "study.journal", tmp_path))
    assert content(BatchedStorage(journal)) == content(plain(journal)) != {}


def test_opening_takes_one_record_for_each_trial(journal: Path) -> None:
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    trials = sum(len(trials) for _, _, trials in content(plain(journal)).values())
    folded = list(fold(records))
    assert len(folded) < trials + 15 < len(records) / 3


def test_parameters_that_follow_each_other_are_not_decoded_one_by_one(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = journal.read_bytes().splitlines()
    setting = sum(line.startswith(b'{"op_code":5,') for line in lines)
    decoded: list[bytes] = []
    read = LineReader.read
    monkeypatch.setattr(LineReader, "read", lambda reader, line: decoded.append(line) or read(reader, line))
    BatchedStorage(journal)
    assert setting > 32
    assert len(decoded) < len(lines) - setting // 2


def append_trials(storage: BaseStorage) -> None:
    study = optuna.load_study(study_name="test/relative_l2", storage=storage, sampler=optuna.samplers.RandomSampler())
    running = next(t for t in study.get_trials() if t.state is TrialState.RUNNING)
    study.tell(running.number, [1.0, 2.0])
    trial = study.ask()
    trial.suggest_categorical("g000 layer0/matmul", ("fp32", "fp16"))
    study.tell(trial, [3.0, 4.0])
    study.enqueue_trial({"g000 layer0/matmul": "fp16"})


def test_several_storages_on_one_file_see_each_other(journal: Path) -> None:
    storages = [BatchedStorage(journal), plain(journal), BatchedStorage(journal)]
    for storage in storages:
        running = optuna.load_study(study_name="test/relative_l2", storage=storage).ask()
        running.set_user_attr("by", "one of them")
        append_trials(storage)
    found = [content(storage) for storage in (*storages, BatchedStorage(journal), plain(journal))]
    assert all(one == found[0] for one in found)


def test_a_torn_last_line_is_not_read(journal: Path) -> None:
    whole = journal.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    before = content(plain(journal))
    storage = BatchedStorage(journal)
    journal.write_bytes(whole + last[:-5])
    assert content(storage) == content(BatchedStorage(journal)) == before


def test_a_damaged_line_is_not_passed_over(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:20], b'{"op_code"\n', *lines[20:]]))
    with pytest.raises(ValueError):
        BatchedStorage(journal)


def test_a_plan_takes_few_syncs(open_record: OpenRecord, space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    record = open_record()
    record.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    evaluate(record, space)
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    evaluate(record, space)
    assert len(syncs) == 1


def test_a_power_cut_takes_no_outcome(
    open_record: OpenRecord, space: SearchSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = open_record()
    record.enqueue(space.seeds[0].plan, ORIGIN_FP32)
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
    record.ask()  # is asked for again
    assert len(trials(left)) == len(trials(journal)) - 1


def test_the_file_is_opened_only_where_something_was_appended(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, other = BatchedStorage(journal), plain(journal)
    (study, *_) = storage.get_all_studies()
    trials = storage.get_all_trials(study._study_id)
    opened: list[int] = []
    records = storage._folding._records

    def counted(start: int, *, joined: bool = False) -> Any:
        opened.append(start)
        return records(start, joined=joined)

    monkeypatch.setattr(storage._folding, "_records", counted)
    for _ in range(3):
        assert storage.get_all_trials(study._study_id) == trials
    assert not opened
    other.set_study_user_attr(study._study_id, "theirs", 1)
    assert storage.get_study_user_attrs(study._study_id)["theirs"] == 1
    with storage.batch():
        other.set_study_user_attr(study._study_id, "theirs", 2)
        storage.set_study_user_attr(study._study_id, "mine too", 3)
        assert storage.get_study_user_attrs(study._study_id)["theirs"] == 1
    assert len(opened) == 1
    assert storage.get_study_user_attrs(study._study_id).items() >= {"theirs": 2, "mine too": 3}.items()
    assert content(storage) == content(plain(journal))


def test_a_batch_that_fails_is_written(journal: Path) -> None:
    storage = BatchedStorage(journal)
    study = optuna.load_study(study_name="test/relative_l2", storage=storage)

    def interrupted() -> None:
        with storage.batch(), storage.batch():
            study.set_user_attr("a", 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    study.set_user_attr("b", 2)
    assert content(storage) == content(plain(journal))
    assert {"a", "b"} <= set(study.user_attrs)


_STEPS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "param": lambda trial, k: {
        "op_code": 5, "trial_id": trial, "param_name": f"p{k % 2}", "param_value_internal": k % 2,
        "distribution": json.dumps(
            {"name": "CategoricalDistribution", "attributes": {"choices": ["a", "b", *("c" if k > 7 else ())]}}
        ),
    },
    "user": lambda trial, k: {"op_code": 8, "trial_id": trial, "user_attr": {f"u{k % 3}": k}},
    "system": lambda trial, k: {"op_code": 9, "trial_id": trial, "system_attr": {f"s{k % 3}": [k]}},
    "step": lambda trial, k: {"op_code": 7, "trial_id": trial, "step": k % 3, "intermediate_value": float(k)},
    "state": lambda trial, k: {
        "op_code": 6, "trial_id": trial, "state": k % 5, "values": [1.0, float(k)] if k % 5 == 1 else None,
        "datetime_start": "2026-01-01T00:00:00.000000+00:00", "datetime_complete": "2026-01-02T00:00:00.000000+00:00",
    },
    "create": lambda trial, k: {
        "op_code": 4, "study_id": trial % 2, "datetime_start": "2025-01-01T00:00:00.000000+00:00",
        **({"state": 4, "value": None, "values": None, "user_attrs": {"w": k}} if k % 2 else {}),
    },
    "study": lambda trial, k: {"op_code": 2, "study_id": trial % 2, "user_attr": {f"n{k % 3}": k}},
    "delete": lambda trial, k: {"op_code": 1, "study_id": 1},
}  # fmt: skip


_KINDS = [*_STEPS, "create", "param", "param", "params", "params", "user"]


# In study 0 a parameter has had other choices than those with which study 1 has it, and then trial 2 of study 0.
@example([("create", 0, 0), ("create", 1, 0), ("param", 0, 0), ("param", 1, 8), ("create", 0, 0), ("params", 2, 7)])
@given(st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 5), st.integers(0, 9))))
def test_any_order_of_operations_opens_as_with_optuna(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    studies = [{"op_code": 0, "study_name": name, "directions": [1, 1]} for name in ("a", "b")]
    records = list(studies)
    for kind, trial, k in steps:  # a trial's parameters mostly follow each other
        several = [("param", k), ("param", k + 1), ("param", k)] if kind == "params" else [(kind, k)]
        records += [_STEPS[each](trial, number) for each, number in several]
    lines = [json.dumps({"op_code": r["op_code"], "worker_id": "w", **r}, separators=(",", ":")) for r in records]
    journal = tmp_path_factory.mktemp("journal") / "j"
    journal.write_text("".join(line + "\n" for line in lines))
    assert content(BatchedStorage(journal)) == content(plain(journal))
