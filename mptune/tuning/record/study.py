"""The Optuna study of a run: create it, open it again, open it to read; one study per metric."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import uuid
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from mptune.data.metrics.tasks import script_sha256
from mptune.errors import RunError
from mptune.identity import PROFILE, SPACE, TARGET, differences
from mptune.settings import Granularity
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.record.attributes import EVALUATION, objectives
from mptune.tuning.record.owner import Heartbeats, is_dead
from mptune.tuning.record.record import IDENTITY, StudyRecord
from mptune.tuning.record.storage import open_storage, storing, without_secrets
from mptune.tuning.sampler.precision import derive_seed, make_sampler
from mptune.tuning.space import SearchSpace

Study: TypeAlias = optuna.Study

BUDGET_NOTE = "budget"
"""Under which the study keeps the budget of the last search, for workers whose run.json is a copy."""

START_NOTE = "started"
"""Under which the study keeps when that search began, in seconds since the epoch: its workers share the time limit."""

_NAME = re.compile(r"((.*#)(?:[0-9a-f]{8}\.)?)(?:[0-9a-f]{8})?")
"""RUN#HASH, or RUN#DIGITS.HASH of a study that was to be new; the hash is of its identity, once that is known."""

_METRIC = "metric:"
"""Before the name of a metric of the user's: the note that says which script or function it was."""

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
) -> StudyRecord:
    """Create the study of a run, or open the one that is there.

    Each metric has a study of its own, since the values that samplers see are the metric's. A new one takes over
    what the others of the same run know, where the statistics stored there hold the metric.

    The caller holds the lock of the run directory or, where the journal ``is_shared``, shares it. The identity is what
    a study of this run must have been made with.

    Raises:
        RunError: the storage cannot be opened or written, or holds another run under this name.
        SettingsError: there is no such sampler.
    """
    with _quiet():
        storage = open_storage(url, journal, is_locked=not is_shared)
        where = str(journal) if url is None else without_secrets(url)
        with storing(where):
            siblings = [other for other in optuna.get_all_study_names(storage) if other.startswith(f"{name}/")]
            mine = f"{name}/{metric}"
            # Loaded where it is there: creating would write, and a finished run is only read.
            open_one = optuna.load_study if mine in siblings else _create_study
            study = open_one(study_name=mine, storage=storage, sampler=make_sampler(sampler, seed))
            _check_identity(study, identity, where)
            others = [optuna.load_study(study_name=sibling, storage=storage) for sibling in siblings if sibling != mine]
            record = StudyRecord(study, storage, space, metric, where, exclusive=url is None and not is_shared)
            for other in others:
                _adopt(study, other, record.states(), metric)
        study.sampler = make_sampler(sampler, derive_seed(seed, len(record.trials.every())))
    return record


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
    """Open the study of a run to read it only: nothing is written, so no lock is needed."""
    if url is None and not journal.exists():
        raise RunError(f"{journal} is missing: the run holds no study yet", "let `mptune search` go on with it first")
    storage = open_storage(url, journal, is_locked=False)
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
    """Whether any study of a run, of whatever metric, holds a plan that was evaluated, or that failed.

    In a database a plan that another process has in work counts, too.
    """
    where = str(journal) if url is None else without_secrets(url)
    storage = open_storage(url, journal, is_locked=False)
    done = (TrialState.COMPLETE, TrialState.PRUNED)
    with storing(where):
        for study in storage.get_all_studies():
            if not study.study_name.startswith(f"{name}/"):
                continue
            if storage.get_all_trials(study._study_id, False, done):
                return True
            running = storage.get_all_trials(study._study_id, False, (TrialState.RUNNING,)) if url is not None else ()
            stale = Heartbeats(storage, study._study_id).stale() if running else set()
            if any(not is_dead(trial, stale, _STALE_S) for trial in running):
                return True
    return False


def copy_to_memory(*, name: str, metric: str, journal: Path, url: str | None = None) -> Study:
    """Copy the study of a run into memory: what is done to the copy changes nothing in the run."""
    record = read_study(model_sha256="", name=name, metric=metric, journal=journal, url=url)
    record.close()
    memory = optuna.storages.InMemoryStorage()
    with _quiet():
        storage = open_storage(url, journal, is_locked=False)
        optuna.copy_study(from_study_name=f"{name}/{metric}", from_storage=storage, to_storage=memory)
        return optuna.load_study(study_name=f"{name}/{metric}", storage=memory)


_quiet_lock = threading.Lock()

_quiet_before: list[int] = []
"""Optuna's verbosity before, once for each thread and block that is quiet: it is one for the whole process."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Optuna logs of studies that are created, loaded and copied."""
    with _quiet_lock:
        _quiet_before.append(_quiet_before[0] if _quiet_before else optuna.logging.get_verbosity())
        optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        with _quiet_lock:
            verbosity = _quiet_before.pop()
            if not _quiet_before:
                optuna.logging.set_verbosity(verbosity)


def copy_study(name: str, url: str, journal: Path) -> None:
    """Copy what a database holds of a run, every metric's study, into a journal file of its own."""
    where = without_secrets(url)
    with _quiet():
        source = open_storage(url, journal)
        target = open_storage(None, journal)
        with storing(where):
            studies = [study for study in optuna.get_all_study_names(source) if study.startswith(f"{name}/")]
            for study in studies:
                optuna.copy_study(from_study_name=study, from_storage=source, to_storage=target)
    if not studies:
        raise RunError(f"{where} holds no study {name}/...", "let `mptune search` go on with it first")


def study_name(begun: str, *, is_new: bool = False) -> str:
    """How the study of a run begins in a database that others may use: as ``settle_study`` takes it."""
    parts = _NAME.fullmatch(begun)
    if parts is not None:
        return parts[1]
    return f"{begun}#{uuid.uuid4().hex[:8]}." if is_new else f"{begun}#"


def settle_study(name: str, identity: Mapping[str, Any], url: str) -> str:
    """The study of a run in a database: the latest one with its name and its identity, else a new one.

    A hash of the identity ends the name, so hosts that begin at the same time share a study only if theirs are equal.

    Raises:
        RunError: studies with outcomes have this name and another identity; or the storage cannot be read.
    """
    begun = study_name(name)
    if not begun.endswith("."):
        kept = kept_identities(begun, url)
        equal = next((other for other, made_with in kept if made_with == identity), None)
        if equal is not None:
            return equal
        for other, made_with in kept:
            if has_outcome(name=other, journal=Path(), url=url):
                changed = differences(made_with, identity, "there", "here")
                raise _other_study(begun.removesuffix("#"), without_secrets(url), changed)
    return begun + hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]


def kept_identities(name: str, url: str) -> list[tuple[str, dict[str, Any]]]:
    """The studies in a database whose names begin so, without their metrics, and their identities; the latest first."""
    storage = open_storage(url, Path())
    with storing(without_secrets(url)):
        studies = sorted(storage.get_all_studies(), key=lambda study: -study._study_id)
    storage.remove_session()
    named = [(study.study_name.partition("/")[0], study.user_attrs.get(IDENTITY, {})) for study in studies]
    return [(other, made_with) for other, made_with in named if (p := _NAME.fullmatch(other)) and p[2] == name]


def shared_granularity(run: str, url: str | None, model_sha256: str, space_sha256: str) -> Granularity | None:
    """What ``auto`` came to in the study in a database that a run of this name shares; None where there is none."""
    same = {"model": model_sha256, SPACE: space_sha256}.items()
    kept = () if url is None else kept_identities(study_name(run), url)
    return next((identity["granularity"] for _, identity in kept if same <= identity.items()), None)


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


def _check_identity(study: optuna.Study, identity: Mapping[str, Any], where: str) -> None:
    kept = study.user_attrs.get(IDENTITY, {})
    changed = differences(kept, identity, "there", "here")
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        changed = {name: values for name, values in changed.items() if name not in (TARGET, PROFILE)}
    if changed:
        raise _other_study(study.study_name, where, changed)
    if not kept or differences(kept, identity, "there", "here"):
        study.set_user_attr(IDENTITY, dict(identity))


def _other_study(name: str, where: str, changed: Mapping[str, str]) -> RunError:
    others = ", ".join(f"another {key}{values}" for key, values in changed.items())
    return RunError(
        f"the study {name!r} in {where} was made with {others}",
        f"go on with the same {', '.join(changed)}, give this run another name with --out DIR, or start a study of its "
        "own with --fresh (nothing is deleted)",
    )


def _adopt(study: optuna.Study, other: optuna.Study, plans: Collection[str], metric: str) -> None:
    """Add the finished trials of ``other`` to ``study``, and the notes that it does not have."""
    done = other.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    missing = [trial for trial in done if trial.user_attrs.get("fingerprint") not in plans]
    study.add_trials([t for t in (_translate(trial, metric) for trial in missing) if t is not None])
    present = study.user_attrs
    for key, value in other.user_attrs.items():
        if key not in present:
            study.set_user_attr(key, value)


def _translate(trial: FrozenTrial, metric: str) -> FrozenTrial | None:
    """The trial with the other metric's value; None where its statistics lack the metric: it needs a new build."""
    attrs, values = dict(trial.user_attrs), None
    if EVALUATION in attrs:
        evaluation = Evaluation.from_json(attrs[EVALUATION]).with_metric(metric)
        if not evaluation.has_metric:
            return None
        attrs[EVALUATION] = evaluation.to_json()
        values = objectives(evaluation) if evaluation.is_finite else None
    return create_trial(
        state=TrialState.PRUNED if values is None else TrialState.COMPLETE,
        values=values,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=attrs,
        system_attrs={k: v for k, v in trial.system_attrs.items() if k.startswith("constraints")},
    )
