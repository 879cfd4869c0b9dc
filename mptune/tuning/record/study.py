"""The Optuna study of a run: create it, open it again, open it to read, copy it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from mptune.data.metrics.table import script_sha256
from mptune.errors import RunError
from mptune.run_json import SPACE, RunFile, differences, identity_of
from mptune.rundir import RunDirectory
from mptune.settings import Granularity
from mptune.tuning.record.record import SETTLED, StudyRecord
from mptune.tuning.record.storage import close_storage, open_storage, same_storage, storage_url, without_secrets
from mptune.tuning.sampler.precision import derive_seed, make_sampler
from mptune.tuning.space import SearchSpace

Study: TypeAlias = optuna.Study

BUDGET_NOTE, START_NOTE = "budget", "started"
"""Notes of the budget of the last search, for workers whose run.json is a copy, and of when it began, in seconds since
the epoch: its workers share the time limit."""

_IDENTITY = "mptune"
"""Study attribute: what it was made with. Whoever creates a study writes it within milliseconds."""

_CREATION_S = 10.0
"""After this time without one the creator died before."""

for _storage in ("_rdb.storage", "journal._storage", "_in_memory"):  # A search says itself what it begins.
    logging.getLogger(f"optuna.storages.{_storage}").addFilter(
        lambda record: not record.getMessage().startswith("A new study created")
    )


def study_name(run: str, *, is_new: bool = False) -> str:
    """The name of the study of a run: the run's, with the time where it is to be a new one."""
    return f"{run} {datetime.now():%Y-%m-%d %H:%M:%S.%f}" if is_new else run


def open_study(
    space: SearchSpace,
    *,
    name: str,
    metric: str,
    identity: Mapping[str, Any],
    journal: Path,
    url: str | None = None,
    sampler: str | None = None,
    seed: int = 0,
    is_shared: bool = False,
) -> StudyRecord:
    """Create the study of a run, or open the one that is there.

    The caller holds the lock of the run directory or, where the journal ``is_shared``, shares it. The identity is what
    a study of this run must have been made with: where another one was, but holds no plan yet, a study of its own is
    begun, so the record's ``name`` may be another.

    Raises:
        RunError: the storage cannot be opened or written, or holds another run under this name.
        SettingsError: there is no such sampler.
    """
    storage, where = open_storage(url, journal, is_locked=not is_shared), _where(journal, url)
    study = _load_or_create(name, storage, identity)
    changed = differences(study.user_attrs.get(_IDENTITY, {}), identity, "there", "here")
    if changed and study.get_trials(deepcopy=False, states=(*SETTLED, TrialState.RUNNING)):
        close_storage(storage)
        others = ", ".join(f"another {key}{values}" for key, values in changed.items())
        raise RunError(
            f"the study {name!r} in {where} was made with {others}",
            f"go on with the same {', '.join(changed)}, give this run another name with --out DIR, or start a study of "
            "its own with --fresh (nothing is deleted)",
        )
    if changed:  # by a search that has not come to anything
        study = _load_or_create(study_name(name, is_new=True), storage, identity)
    study.sampler = make_sampler(sampler, derive_seed(seed, len(study.get_trials(deepcopy=False))))
    return StudyRecord(study, storage, space, metric, where, is_alone=url is None and not is_shared)


def _load_or_create(name: str, storage: BaseStorage, identity: Mapping[str, Any]) -> Study:
    """The study of a name. Only who creates it writes its identity: hosts that begin at the same time never mix."""
    if name not in optuna.get_all_study_names(storage):
        with suppress(DuplicatedStudyError):  # Another host was faster.
            study = optuna.create_study(storage=storage, study_name=name, directions=["minimize", "minimize"])
            study.set_user_attr(_IDENTITY, dict(identity))
            return study
    study, until_s = optuna.load_study(study_name=name, storage=storage), time.monotonic() + _CREATION_S
    while _IDENTITY not in study.user_attrs:
        if time.monotonic() > until_s:
            study.set_user_attr(_IDENTITY, dict(identity))
        time.sleep(0.1)
    return study


def read_study(*, model_sha256: str, name: str, metric: str, journal: Path, url: str | None = None) -> StudyRecord:
    """Open the study of a run to read it only: nothing is written, so no lock is needed."""
    where, hint = _where(journal, url), "continue it with `mptune search` first"
    if url is None and not journal.exists():
        raise RunError(f"{journal} is missing: the run holds no study yet", hint)
    storage = open_storage(url, journal, is_locked=False)
    if name not in optuna.get_all_study_names(storage):
        close_storage(storage)
        raise RunError(f"{where} holds no study {name}", hint)
    study = optuna.load_study(study_name=name, storage=storage)
    return StudyRecord(study, storage, SearchSpace(model_sha256, (), (), {}, ()), metric, where, is_alone=False)


def has_evaluation(run: RunDirectory, file: RunFile, given: str | None = None) -> bool:
    """Whether the study of a run holds a plan that was evaluated, or that failed; in a database also one in work.

    ``given`` is the storage that the caller names. True where the storage cannot be read.
    """
    try:
        url = storage_url(file.storage, same_storage(file.storage, given))
        made_with, trials = _look(file.study, run.journal, url)
    except RunError:
        return True
    states = SETTLED if url is None else (*SETTLED, TrialState.RUNNING)
    has_some = any(trial.state in states for trial in trials)
    return has_some and not differences(made_with, identity_of(file), "there", "here")


def shared_granularity(run: str, url: str | None, model_sha256: str, space_sha256: str) -> Granularity | None:
    """What ``auto`` came to in the study in a database that a run of this name shares; None where there is none."""
    identity = {} if url is None else _look(run, Path(), url)[0]
    is_same = identity.get("model") == model_sha256 and identity.get(SPACE) == space_sha256
    return identity["granularity"] if is_same else None


def _look(name: str, journal: Path, url: str | None) -> tuple[dict[str, Any], list[FrozenTrial]]:
    """What a study was made with, and its trials; nothing where there is no such study."""
    if url is None and not journal.exists():
        return {}, []
    storage = open_storage(url, journal, is_locked=False)
    try:
        if name not in optuna.get_all_study_names(storage):
            return {}, []
        study = optuna.load_study(study_name=name, storage=storage)
        return study.user_attrs.get(_IDENTITY, {}), study.get_trials(deepcopy=False)
    finally:
        close_storage(storage)


def copy_study(name: str, journal: Path, url: str | None, copy: Path | None = None) -> Study:
    """Copy the study of a run into a journal file, or into memory: changes of the copy are none of the run."""
    source = read_study(model_sha256="", name=name, metric="", journal=journal, url=url)
    target = optuna.storages.InMemoryStorage() if copy is None else open_storage(None, copy)
    optuna.copy_study(from_study_name=name, from_storage=source.storage, to_storage=target)
    source.close()
    return optuna.load_study(study_name=name, storage=target)


def check_metrics(record: StudyRecord, metrics: Sequence[str]) -> None:
    """Refuse a script under the name of one with another content; note new ones."""
    for metric in metrics:
        if (sha256 := compare_metric(record, metric, metric)) != record.note(f"metric:{metric}"):
            record.set_note(f"metric:{metric}", sha256)


def compare_metric(record: StudyRecord, recorded: str, metric: str) -> str | None:
    """Refuse a script that has another content than the one that a study has recorded under a name; gives its hash."""
    sha256, earlier = script_sha256(metric), record.note(f"metric:{recorded}")
    if sha256 is not None and earlier is not None and earlier != sha256:
        raise RunError(
            f"the metric {metric} is not what it was when the study was begun: the script's content differs",
            "give the same one; give the other one a name of its own; or start over with --fresh (nothing is deleted)",
        )
    return sha256


def _where(journal: Path, url: str | None) -> str:
    """The storage, for messages."""
    return str(journal) if url is None else without_secrets(url)
