"""The Optuna study of a run: create it, open it again, open it to read; one study per metric."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from mptune.errors import RunError
from mptune.tuning.record.adoption import adopt
from mptune.tuning.record.owner import Heartbeats, is_dead
from mptune.tuning.record.record import IDENTITY, StudyRecord
from mptune.tuning.record.storage import open_storage, storing
from mptune.tuning.record.storage_urls import without_secrets
from mptune.tuning.sampler.stock import derive_seed, make_sampler
from mptune.tuning.space import SearchSpace

Study: TypeAlias = optuna.Study

_STALE_S = 3600.0
"""A trial of another host, without a heartbeat, that has run so long is taken for dead."""


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
) -> tuple[StudyRecord, tuple[str, ...]]:
    """Create the study of a run, or open the one that is there.

    Each metric has a study of its own, since the values that samplers see are the metric's. A new one takes over
    what the others of the same run know, where the statistics stored there hold the metric.

    Args:
        space: what may vary.
        name: of the run; only matters in a shared database.
        metric: the objective statistic.
        identity: what a study of this run must have been made with, such as the model's hash; JSON values.
        journal: path of the journal file, used where ``url`` is None; the caller holds the run directory's lock, or
            shares it.
        url: Optuna storage URL of a database.
        sampler: name of the sampler; None where all plans are enqueued.
        seed: the user's.
        is_shared: other processes may write the journal, too, so nothing in it is repaired.

    Returns:
        The record, and warnings about what had to be repaired.

    Raises:
        RunError: the storage cannot be opened or written, or holds another run under this name.
        SettingsError: there is no such sampler.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage, repaired = open_storage(url, journal, repair=not is_shared, packed=True)
        where = str(journal) if url is None else without_secrets(url)
        with storing(where):
            siblings = [other for other in optuna.get_all_study_names(storage) if other.startswith(f"{name}/")]
            mine = f"{name}/{metric}"
            # Loaded where it is there: creating would write, and a finished run is only read.
            open_one = optuna.load_study if mine in siblings else _create_study
            study = open_one(study_name=mine, storage=storage, sampler=make_sampler(sampler, seed))
            _check_identity(study, identity, where)
            others = [optuna.load_study(study_name=one, storage=storage) for one in siblings if one != mine]
            record = StudyRecord(
                study, storage, space, metric, where, exclusive=url is None and not is_shared, siblings=others
            )
            for other in others:
                adopt(study, other, record.known(), metric)
        study.sampler = make_sampler(sampler, derive_seed(seed, record.trial_count))
    finally:
        optuna.logging.set_verbosity(verbosity)
    return record, () if repaired is None else (repaired,)


def _create_study(*, study_name: str, storage: BaseStorage, sampler: BaseSampler) -> optuna.Study:
    study = optuna.create_study(
        storage=storage,
        study_name=study_name,
        directions=["minimize", "minimize"],
        load_if_exists=True,
        sampler=sampler,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(["latency (ms)", f"error ({study_name.partition('/')[2]})"])
    return study


def read_study(*, model_sha256: str, name: str, metric: str, journal: Path, url: str | None = None) -> StudyRecord:
    """Open the study of a run to read it only: nothing is repaired or written, so no lock is needed.

    Raises:
        RunError: there is none, or the storage cannot be opened.
    """
    if url is None and not journal.exists():
        raise RunError(f"{journal} is missing: the run holds no study yet", "let `mptune search` go on with it first")
    storage, _ = open_storage(url, journal, repair=False)
    where = str(journal) if url is None else without_secrets(url)
    with storing(where):
        try:
            study = optuna.load_study(study_name=f"{name}/{metric}", storage=storage)
        except KeyError:
            raise RunError(
                f"{where} holds no study {name}/{metric}", "let `mptune search` go on with it first"
            ) from None
    return StudyRecord(study, storage, SearchSpace(model_sha256, (), (), {}, ()), metric, where, exclusive=False)


def has_outcome(*, name: str, journal: Path, url: str | None = None) -> bool:
    """Whether any study of a run, of whatever metric or device, holds a plan that was evaluated, or that failed.

    In a database a plan that another process has in work counts, too.

    Raises:
        RunError: the storage cannot be opened or read.
    """
    where = str(journal) if url is None else without_secrets(url)
    storage, _ = open_storage(url, journal, repair=False)
    done = (TrialState.COMPLETE, TrialState.PRUNED)
    with storing(where):
        for study in storage.get_all_studies():
            if not study.study_name.startswith((f"{name}/", f"{name}@")):
                continue
            if storage.get_all_trials(study._study_id, False, done):
                return True
            running = storage.get_all_trials(study._study_id, False, (TrialState.RUNNING,)) if url is not None else ()
            stale = Heartbeats(storage, study._study_id).stale() if running else set()
            if any(not is_dead(trial, stale, _STALE_S) for trial in running):
                return True
    return False


def forget_studies(*, name: str, url: str) -> None:
    """Delete the studies of a run without an outcome from a database: the same name begins anew.

    Raises:
        RunError: the database cannot be opened or written.
    """
    storage, _ = open_storage(url, Path())
    with storing(without_secrets(url)):
        for study in storage.get_all_studies():
            if study.study_name.startswith((f"{name}/", f"{name}@")):
                storage.delete_study(study._study_id)
    storage.remove_session()


def copy_to_memory(*, name: str, metric: str, journal: Path, url: str | None = None) -> Study:
    """Copy the study of a run into memory: what is done to the copy changes nothing in the run.

    Raises:
        RunError: there is none, or the storage cannot be opened.
    """
    record = read_study(model_sha256="", name=name, metric=metric, journal=journal, url=url)
    record.close()
    memory = optuna.storages.InMemoryStorage()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage, _ = open_storage(url, journal, repair=False)
        optuna.copy_study(from_study_name=f"{name}/{metric}", from_storage=storage, to_storage=memory)
        return optuna.load_study(study_name=f"{name}/{metric}", storage=memory)
    finally:
        optuna.logging.set_verbosity(verbosity)


def copy_study(name: str, url: str, journal: Path) -> None:
    """Copy what a database holds of a run, every metric's study, into a journal file of its own.

    Args:
        name: of the run.
        url: Optuna storage URL of the database.
        journal: path of the file; there is none yet.

    Raises:
        RunError: the database cannot be read, holds no such run, or the file cannot be written.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        source, _ = open_storage(url, journal)
        where = without_secrets(url)
        target, _ = open_storage(None, journal)
        with storing(where):
            found = [one for one in optuna.get_all_study_names(source) if one.startswith(f"{name}/")]
            for one in found:
                optuna.copy_study(from_study_name=one, from_storage=source, to_storage=target)
    finally:
        optuna.logging.set_verbosity(verbosity)
    if not found:
        raise RunError(f"{where} holds no study {name}/...", "let `mptune search` go on with it first")


def _check_identity(study: optuna.Study, identity: Mapping[str, Any], where: str) -> None:
    known = study.user_attrs.get(IDENTITY)
    if known is None:
        study.set_user_attr(IDENTITY, dict(identity))
    elif known != dict(identity):
        key = next(k for k in {**known, **identity} if known.get(k) != identity.get(k))
        raise RunError(
            f"the study {study.study_name!r} in {where} was made with another {key.replace('_', ' ')}",
            "give this run another --out, or start over with --fresh",
        )
