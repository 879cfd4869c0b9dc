"""From the record to the front: what search, report and pick all show, also where a search ends without a front."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mptune.choice import Choice
from mptune.data.metrics.accuracy import ALL_OUTPUTS
from mptune.engines.base import DRIFT_TEXT, Failure
from mptune.engines.failures import describe
from mptune.errors import BaselineError, EndedEarlyError, PlanError, RunError
from mptune.files import write_json
from mptune.finding import FindingOrigin, by_severity
from mptune.findings import engine, wording
from mptune.json_form import decode_float
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.tuning import baseline, choosing, dominance, explanation, output_findings, plan_limits, remeasure
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.front import FRONT_FORMAT, Front
from mptune.tuning.record import storage, study
from mptune.tuning.record.record import UNPINNED_NOTE, FailedPlan, StudyRecord, drift_warning

_NAMED = 3
"""Plans that are named in one warning."""


def front_of(
    run: RunDirectory, file: RunFile, record: StudyRecord, *, asked: Choice | None = None, is_again: bool = False
) -> Front:
    """The front of a run, from its run.json and its record, with the choice as run.json has it, or as it is asked for.

    Limits that no plan meets leave a choice that was made as it was. Whoever asks writes what comes of it
    (``mptune.reporting.run_files``). ``is_again``: the request is an earlier one: where its plan is not feasible any
    more, or not here, a plan is chosen by its limits.
    """
    earlier = file.choice
    if asked is None:
        return build_front(run, file, record, earlier, is_made=run.chosen.exists())
    try:
        front = build_front(run, file, record, asked)
    except PlanError:
        if not is_again:
            raise
        front = build_front(run, file, record, asked.model_copy(update={"plan": None}))
    choice = front.choice
    if choice.unmet is not None and earlier.chosen is not None:
        unmet = {"unmet": choice.unmet, "nearest": choice.nearest}
        return build_front(run, file, record, earlier.model_copy(update=unmet))
    if choice.chosen is not None and choice.replaced == choice.chosen:
        return replace(front, choice=choice.model_copy(update={"replaced": earlier.replaced}))
    return front


def read_record(run: RunDirectory, file: RunFile, given: str | None = None) -> StudyRecord:
    """Open the study of a run to read it; ``given`` is the storage that the caller names."""
    url = storage.storage_url(file.storage, given)
    sha256, metric = file.model.sha256, file.search.metric
    return study.read_study(model_sha256=sha256, name=file.study, metric=metric, journal=run.journal, url=url)


def build_front(
    run: RunDirectory, file: RunFile, record: StudyRecord, choice: Choice, *, is_made: bool = True
) -> Front:
    """Put the front together: re-measured where it has been, else as the search left it.

    ``choice`` was made, or is a request; with ``is_made`` a choice is made of a request, else it is only proposed.
    """
    target, is_confirmation, recorded = file.target, file.confirms is not None, record.baseline()
    if target is None or recorded is None:
        hint = "continue it with `mptune search` first, and give it more time if you set --timeout"
        raise RunError(f"{run.path} holds no evaluation of all-FP32 yet, so there is nothing to compare with", hint)
    metrics = record.metric, *file.search.reported_metrics
    outputs = [name for name in recorded.error.per_output if name != ALL_OUTPUTS]
    tolerances = plan_limits.check_asked(choice, metrics, outputs)
    plan_limits.check_columns(tolerances, recorded.error)

    # Each plan as it was measured last. On the front are those alone that may have been re-measured.
    settings = SearchSettings(**file.measured_settings)
    rounds = remeasure.rounds_needed(settings, recorded.latency.source)
    every = [replace(e.ignoring(choice.ignore), confirmed=is_confirmation) for e in (*record.evaluations(), recorded)]
    recorded = every.pop()
    sound = [e for e in every if e.is_finite]
    latest, unconfirmed = remeasure.confirmed_evaluations(record, rounds, settings.latency, sound)
    fp32 = next((e for e in latest if e.origin == ORIGIN_FP32), recorded)
    base_ms = fp32.latency.median_ms
    broken = [evaluation for evaluation, failure in unconfirmed if failure is None]
    by_plan = {e.plan: e.with_baseline(base_ms) for e in (*every, *broken)} | {e.plan: e for e in latest}
    evaluations = tuple(by_plan.values())
    dropped = remeasure.dropped_plans(record, choice.ignore)
    on_front = {e.plan for e in (sound if is_confirmation else remeasure.candidates(every, tolerances, dropped))}
    points = dominance.confirmed_front(plan_limits.feasible([e for e in latest if e.plan in on_front], tolerances))

    tf32 = record.tf32()
    tf32 = None if tf32 is None else tf32.ignoring(choice.ignore).with_baseline(base_ms)
    unpinned, proposed = record.note(UNPINNED_NOTE), None
    if choice.chosen is None:
        proposal = choosing.choose(evaluations, choice, metrics, tf32)
        choice, proposed = (proposal, None) if is_made else (choice, proposal)
    by_name = {e.plan.fingerprint: e for e in evaluations}
    chosen = by_name.get(choice.chosen or "")

    findings = file.findings
    origin: FindingOrigin = "confirm" if is_confirmation else "search"
    if fp32.counted_held_out is not None and not any(f.code == baseline.ENGINE_CODE for f in findings):
        has_tf32 = file.fixed_settings.tf32
        findings += baseline.engine_findings(fp32.counted_held_out, origin, tf32=has_tf32, held_out=True)
    fp16 = next((e for e in evaluations if e.origin == ORIGIN_FP16), None)
    explained = explanation.explain(record, run.data, points, [e for e in (fp32, fp16, chosen) if e], findings)
    if chosen is not None:
        indices, path = output_findings.sample_indices(file), shlex.quote(str(run.path))
        findings += output_findings.plan_findings(chosen, indices, origin, path)
    shown = (chosen or fp32).plan
    # How far the baseline drifts stands once for all plans.
    timing = () if chosen is None else (text for text in chosen.warnings if not text.startswith(DRIFT_TEXT))
    warnings = [*file.warnings, *fp32.latency.warnings, *drift_warning(record), *timing]
    warnings += _warnings(file, record, unconfirmed)
    if choice.max_latency_ms is not None and fp32.latency.source == "predicted":
        held = f"the limit of {choice.max_latency_ms:g} ms is compared with predictions"
        warnings.append(f"{held}: run `mptune confirm RUN` on the device")
    is_told = any(finding.code == engine.NOTHING for finding in findings)
    if explained.groups and not is_told and all(group.pinned is not None for group in explained.groups):
        why = "`mptune report RUN --explain` says why each is, and --space takes a file that pins less"
        warnings.append(f"every layer group is pinned, so there was nothing to search: {why}")
    return Front(
        run_dir=run.path,
        model_path=Path(file.model.path),
        model_sha256=file.model.sha256,
        target=target.name,
        engine=target.engine,
        device=target.device,
        metric=record.metric,
        fp32=fp32,
        fp16=fp16,
        points=points,
        chosen=chosen,
        choice=choice,
        evaluations=record.spent,
        failures=len(record.failed()),
        hypervolume=dominance.hypervolume(points, fp32, dominance.reference_error_of(record.metric, every)),
        warnings=tuple(dict.fromkeys(warnings)),
        findings=by_severity(f.under_plan(shown.fp32_groups, shown.bf16_groups) for f in findings),
        explanation=explained,
        reported_metrics=file.search.reported_metrics,
        nearest=by_name.get(choice.nearest or ""),
        proposed=proposed,
        tf32=tf32,
        unpinned=None if unpinned is None else (unpinned[0], decode_float(unpinned[1])),
    )


def _warnings(
    file: RunFile, record: StudyRecord, unconfirmed: Sequence[tuple[Evaluation, Failure | None]]
) -> Iterator[str]:
    """What makes the front less than a user may take it for: failures, and plans that were not searched."""
    others = " and {others} more"
    again = [(evaluation.plan.fingerprint, failure) for evaluation, failure in unconfirmed if failure is not None]
    if again:
        (first, failure), plans = again[0], wording.listed([plan for plan, _ in again], _NAMED, others)
        text = f"failed when re-measured: {plans}; the figures are the search's, and the same command measures again"
        yield f"{text}; {first} with: {describe(failure)}"
    if broken := [evaluation.plan.fingerprint for evaluation, failure in unconfirmed if failure is None]:
        text = f"not finite on the held-out samples, and off the front: {wording.listed(broken, _NAMED, others)}"
        yield f"{text}; give more calibration samples, so that the search sees such values"
    failures, evaluations = record.failures(), record.evaluations()
    if failures:
        first_failure, tried = failures[0][2], len(failures) + len(evaluations)
        log = "" if first_failure.log_path is None else f" (log: {first_failure.log_path})"
        text = f"{len(failures)} of {tried} plans failed and are not judged; the first with"
        yield f"{text}: {describe(first_failure)}{log}"
    origins = [*(evaluation.origin for evaluation in evaluations), *(origin for _, origin, _ in failures)]
    plan_count = next((2 ** len(trial.params) for trial in record.settled()), math.inf)
    if file.confirms is None and ORIGIN_SAMPLER not in origins and len(origins) < plan_count:
        more = "the same command" if record.spent < file.search.budget else "the same command with a larger --budget"
        yield f"only the baseline and the seeds were evaluated, and nothing was searched: {more} continues"


@contextlib.contextmanager
def findings_kept(run: RunDirectory) -> Iterator[None]:
    """Keep the findings that stop a search in its run.json, and in front.json unless there is one already.

    That of a search that a limit ended has no points, either. The run directory is locked; errors are passed on.
    """
    try:
        yield
    except (EndedEarlyError, BaselineError) as error:
        file, findings = run.load(), getattr(error, "findings", ())
        if file is None or not (findings or isinstance(error, EndedEarlyError)):
            raise
        codes = {finding.code for finding in findings}
        others = (finding for finding in file.findings if finding.code not in codes)
        file = file.model_copy(update={"findings": output_findings.with_suspects((*others, *findings))})
        run.save(file)
        if not run.front_json.exists():
            write_json(run.front_json, stopped_document(file))
        raise


def stopped_document(file: RunFile) -> dict[str, Any]:
    """front.json of a search without a front: every key, no points, the findings."""
    target, fixed = file.target, file.fixed_settings
    asked = {"name": fixed.target, "engine": fixed.engine, "device": None}
    return {
        "format": FRONT_FORMAT,
        "model": {"path": file.model.path, "sha256": file.model.sha256},
        "target": {name: asked[name] if target is None else getattr(target, name) for name in asked},
        "metric": file.search.metric,
        "baseline": dict.fromkeys(("fp32", "fp16", "tf32")),
        "points": [],
        **dict.fromkeys(("chosen", "chosen_point", "choice", "hypervolume")),
        **dict.fromkeys(("evaluations", "failures"), 0),
        "findings": [finding.to_json() for finding in by_severity(file.findings)],
        "warnings": list(file.warnings),
    }


@dataclass(frozen=True)
class Progress:
    """How a search went.

    Attributes:
        hypervolume: after each evaluation, with errors past ``reference_error`` worth nothing.
        trials: evaluations and failed plans; ``trials_s`` is what they took together, ``builds_s`` the builds of it.
        span_s: from the start of the first to the end of the last, pauses counted in.
    """

    hypervolume: tuple[float, ...] = ()
    reference_error: float = 0.0
    trials: int = 0
    trials_s: float = 0.0
    builds_s: float = 0.0
    span_s: float = 0.0
    failures: tuple[FailedPlan, ...] = ()


def progress_of(record: StudyRecord, fp32: Evaluation, reference_error: float) -> Progress:
    """Read how a search went from its record; the reference error is that of the hypervolume."""
    evaluations = record.evaluations()
    times = [(t.datetime_start, t.datetime_complete) for t in record.settled()]
    spans = [(begin.timestamp(), end.timestamp()) for begin, end in times if begin and end]
    return Progress(
        dominance.hypervolumes(evaluations, fp32, reference_error),
        reference_error,
        trials=len(spans),
        trials_s=sum(max(end - begin, 0.0) for begin, end in spans),
        builds_s=sum(evaluation.build_s for evaluation in evaluations),
        span_s=max((end for _, end in spans), default=0.0) - min((begin for begin, _ in spans), default=0.0),
        failures=record.failures(),
    )
