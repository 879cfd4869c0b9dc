"""The Optuna study of a run: create it, open it again, open it to read, copy it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from mptune.data.metrics.tasks import script_sha256
from mptune.errors import RunError
from mptune.identity import SPACE, differences
from mptune.settings import Granularity
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.storage import close_storage, open_storage, storing, without_secrets
from mptune.tuning.sampler.precision import derive_seed, make_sampler
from mptune.tuning.space import SearchSpace

Study: TypeAlias = optuna.Study

BUDGET_NOTE = "budget"
"""Under which the study keeps the budget of the last search, for workers whose run.json is a copy."""

START_NOTE = "started"
"""Under which the study keeps when that search began, in seconds since the epoch: its workers share the time limit."""

_IDENTITY = "mptune"
"""Under which the study keeps what it was made with."""

_METRIC = "metric:"
"""Before the name of a metric of the user's: the note that says which script or function it was."""

_CREATION_S, _POLL_S = 10.0, 0.1
"""Whoever creates a study writes its identity within milliseconds; after this time the creator died before."""

_BEGUN = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)

for _storage in ("_rdb.storage", "journal._storage", "_in_memory"):  # A search says itself what it begins.
    logging.getLogger(f"optuna.storages.{_storage}").addFilter(
        lambda record: not record.getMessage().startswith("A new study created")
    )


def study_name(run: str, *, is_new: bool = False) -> str:
    """The name of the study of a run: the run's, with the time where it is to be a new one."""
    return f"{run} {datetime.now():%Y-%m-%d %H:%M:%S}" if is_new else run


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
    storage = open_storage(url, journal, is_locked=not is_shared)
    where = str(journal) if url is None else without_secrets(url)
    is_alone = url is None and not is_shared
    with storing(where):
        study = _load_or_create(name, storage, identity)
        changed = differences(study.user_attrs.get(_IDENTITY, {}), identity, "there", "here")
        if changed and any(trial.state in _BEGUN for trial in study.get_trials(deepcopy=False)):
            close_storage(storage)
            raise _other_study(name, where, changed)
        if changed:  # by a search that failed, or that has not come to anything yet
            study = _load_or_create(study_name(name, is_new=True), storage, identity)
        study.sampler = make_sampler(sampler, derive_seed(seed, len(study.get_trials(deepcopy=False))))
    return StudyRecord(study, storage, space, metric, where, is_alone=is_alone)


def _load_or_create(name: str, storage: BaseStorage, identity: Mapping[str, Any]) -> Study:
    """The study of a name. Only who creates it writes its identity: hosts that begin at the same time never mix."""
    try:
        storage.get_study_id_from_name(name)
    except KeyError:
        try:
            study = optuna.create_study(storage=storage, study_name=name, directions=["minimize", "minimize"])
            study.set_user_attr(_IDENTITY, dict(identity))
            return study
        except DuplicatedStudyError:  # Another host was faster.
            pass
    study = optuna.load_study(study_name=name, storage=storage)
    until_s = time.monotonic() + _CREATION_S
    while _IDENTITY not in study.user_attrs and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return study


def read_study(*, model_sha256: str, name: str, metric: str, journal: Path, url: str | None = None) -> StudyRecord:
    """Open the study of a run to read it only: nothing is written, so no lock is needed."""
    if url is None and not journal.exists():
        raise RunError(f"{journal} is missing: the run holds no study yet", "let `mptune search` go on with it first")
    storage = open_storage(url, journal, is_locked=False)
    where = str(journal) if url is None else without_secrets(url)
    with storing(where):
        try:
            study = optuna.load_study(study_name=name, storage=storage)
        except KeyError:
            raise RunError(f"{where} holds no study {name}", "let `mptune search` go on with it first") from None
    return StudyRecord(study, storage, SearchSpace(model_sha256, (), (), {}, ()), metric, where, is_alone=False)


def has_outcome(*, name: str, identity: Mapping[str, Any], journal: Path, url: str | None = None) -> bool:
    """Whether the study of a run holds a plan that was evaluated, or that failed; in a database also one in work."""
    storage = open_storage(url, journal, is_locked=False)
    states = _BEGUN if url is not None else (TrialState.COMPLETE, TrialState.PRUNED)
    with storing(str(journal) if url is None else without_secrets(url)):
        try:
            study_id = storage.get_study_id_from_name(name)
            made_with = storage.get_study_user_attrs(study_id).get(_IDENTITY, {})
            is_own = not differences(made_with, identity, "there", "here")
            return is_own and bool(storage.get_all_trials(study_id, False, states))
        except KeyError:
            return False
        finally:
            close_storage(storage)


def shared_granularity(run: str, url: str | None, model_sha256: str, space_sha256: str) -> Granularity | None:
    """What ``auto`` came to in the study in a database that a run of this name shares; None where there is none."""
    if url is None:
        return None
    storage = open_storage(url, Path())
    with storing(without_secrets(url)):
        try:
            identity = storage.get_study_user_attrs(storage.get_study_id_from_name(run)).get(_IDENTITY, {})
        except KeyError:
            return None
        finally:
            close_storage(storage)
    is_same = identity.get("model") == model_sha256 and identity.get(SPACE) == space_sha256
    return identity["granularity"] if is_same else None


def copy_to_memory(*, name: str, journal: Path, url: str | None = None) -> Study:
    """Copy the study of a run into memory: what is done to the copy changes nothing in the run."""
    memory = optuna.storages.InMemoryStorage()
    _copy(name, journal, url, memory)
    return optuna.load_study(study_name=name, storage=memory)


def copy_study(name: str, url: str, journal: Path) -> None:
    """Copy the study of a run in a database into a journal file of its own."""
    _copy(name, journal, url, open_storage(None, journal))


def _copy(name: str, journal: Path, url: str | None, storage: BaseStorage) -> None:
    record = read_study(model_sha256="", name=name, metric="", journal=journal, url=url)
    record.copy_to(storage)
    record.close()


def check_metrics(record: StudyRecord, metrics: Sequence[str]) -> None:
    """Refuse a script under the name of one with another content; note new ones."""
    for metric in metrics:
        compare_metric(record, metric, metric)
        sha256 = script_sha256(metric)
        if sha256 is not None and record.note(f"{_METRIC}{metric}") is None:
            record.set_note(f"{_METRIC}{metric}", sha256)


def compare_metric(record: StudyRecord, recorded: str, metric: str) -> None:
    """Refuse a script that has another content than the one that a study has recorded under a name; note nothing."""
    sha256, earlier = script_sha256(metric), record.note(f"{_METRIC}{recorded}")
    if sha256 is not None and earlier is not None and earlier != sha256:
        raise RunError(
            f"the metric {metric} is not what it was when the study was begun: the script's content differs",
            "give the same one; give the other one a name of its own; or start over with --fresh (nothing is deleted)",
        )


def _other_study(name: str, where: str, changed: Mapping[str, str]) -> RunError:
    others = ", ".join(f"another {key}{values}" for key, values in changed.items())
    return RunError(
        f"the study {name!r} in {where} was made with {others}",
        f"go on with the same {', '.join(changed)}, give this run another name with --out DIR, or start a study of its "
        "own with --fresh (nothing is deleted)",
    )
