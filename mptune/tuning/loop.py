"""The loop of a search or of one of its workers: what proposes plans, and what evaluates them."""

from __future__ import annotations

from mptune.data.metrics.tasks import law_metric
from mptune.engines.base import Failure
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.identity import identity_of
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.tuning.fronts.searched_error import SearchedError
from mptune.tuning.listener import Listener
from mptune.tuning.reasons.reasons import keep_grounds
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import check_metrics, open_study
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.attempts import in_fresh_processes
from mptune.tuning.steps.emulated import PlanEmulator
from mptune.tuning.steps.guide import Guide
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, OneGroupErrors
from mptune.tuning.steps.shared_errors import SharedErrors
from mptune.tuning.steps.tuner import Tuner


def open_record(
    run: RunDirectory,
    file: RunFile,
    space: SearchSpace,
    settings: SearchSettings,
    url: str | None = None,
    *,
    is_shared: bool = False,
) -> StudyRecord:
    """Open the study of a run, or begin it. A script under the name of a metric must be what it was.

    Args:
        url: of its database; None for the journal in the run directory.
        is_shared: other processes write the journal, too.
    """
    record = open_study(
        space,
        name=file.study,
        metric=settings.metric,
        identity=identity_of(file),
        journal=run.journal,
        url=url,
        sampler=settings.sampler,
        seed=settings.seed,
        is_shared=is_shared,
    )
    check_metrics(record, (settings.metric, *settings.reported_metrics))
    return record


def make_tuner(
    run: RunDirectory,
    file: RunFile,
    record: StudyRecord,
    toolchain: Toolchain,
    settings: SearchSettings,
    listener: Listener,
    limits: Limits,
) -> Tuner:
    """The tuner of a study; its sampler is given one-group errors and the roofline's terms, unless only seeds come."""
    space = record.space
    emulator = guide = None
    if settings.sampler == "precision" and space.free and settings.budget > len(space.seeds):
        terms = in_fresh_processes(toolchain.latency_terms, toolchain, listener, "predicting latencies")
        if isinstance(terms, Failure):
            text = f"no latency can be predicted, so the search learns it from builds alone: {terms.message}"
            listener.warning(text)
        latency_terms = None if isinstance(terms, Failure) else terms
        has_labels = file.fixed_settings.labels_sha256 is not None
        law = law_metric(settings.metric, settings.metric_function, has_labels=has_labels)
        searched = SearchedError.of_settings(settings, law)
        shared, path = SharedErrors(record, searched.kept_key), run.data / SENSITIVITY_JSON
        errors = OneGroupErrors(space, toolchain, law, path, listener, shared, searched=searched, limits=limits)
        if toolchain.error_source == "measured" and toolchain.emulation_holds:
            emulator = PlanEmulator(space, toolchain, law, listener, limits=limits, searched=searched)
        guide = Guide(record, space, toolchain, settings, listener, errors, latency_terms, emulator, searched)
        keep_grounds(space, guide.prior, run.data, latency_terms)
    return Tuner(
        record,
        space,
        toolchain,
        settings,
        listener,
        emulated=None if emulator is None else emulator.recall,
        limits=limits,
        before_proposal=None if guide is None else guide.before_proposal,
        seeds_first=None if guide is None else guide.seeds_first,
    )
