"""From the record to the front: what search, report and pick all show."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mptune.choice import Choice
from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.data.samples import split_indices
from mptune.errors import PlanError, RunError
from mptune.finding import Finding, FindingOrigin
from mptune.findings.engine import NOTHING
from mptune.run_json import FixedSettings, RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings, Tolerance
from mptune.targets.findings import OUT_OF_REACH
from mptune.targets.target import EXPECTED_FACTOR
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.explanation import Explanation
from mptune.tuning.front import Front
from mptune.tuning.fronts.choosing import choose
from mptune.tuning.fronts.dominance import confirmed_front, hypervolume, reference_error_of
from mptune.tuning.fronts.limits import PlanLimits, check_tolerances, feasible
from mptune.tuning.reasons.advice import Outcome
from mptune.tuning.reasons.advice import findings as advice
from mptune.tuning.reasons.group_findings import in_order
from mptune.tuning.reasons.plan_findings import SampleIndices, plan_findings
from mptune.tuning.reasons.reasons import explain
from mptune.tuning.reasons.unconfirmed import Unconfirmed, unconfirmed_warnings
from mptune.tuning.record.attributes import plan_count
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.sessions import drift_warning
from mptune.tuning.record.storage import same_storage, storage_url
from mptune.tuning.record.study import has_outcome, read_study
from mptune.tuning.steps.baseline import ENGINE_CODE, held_out_baseline
from mptune.tuning.steps.remeasure import candidates, confirmed_evaluations, dropped_plans, rounds_needed


def front_of(
    run: RunDirectory, file: RunFile, record: StudyRecord, *, asked: Choice | None = None, is_again: bool = False
) -> Front:
    """The front of a run, from its run.json and its record, with the choice as run.json has it, or as it is asked for.

    Limits that no plan meets leave a choice that was made as it was. Whoever asks writes what comes of it
    (``mptune.reporting.run_files``). ``is_again``: the request is an earlier one: where its plan is not feasible any
    more, or not here, a plan is chosen by its limits.
    """
    made = file.choice
    try:
        front = build_front(run, file, record, asked or made, is_made=asked is not None or run.chosen.exists())
    except PlanError:
        if asked is None or not is_again:
            raise
        front = build_front(run, file, record, asked.model_copy(update={"plan": None}))
    choice = front.choice
    if asked is not None and choice.unmet is not None and made.chosen is not None:
        unmet = {"unmet": choice.unmet, "nearest": choice.nearest}
        return build_front(run, file, record, made.model_copy(update=unmet))
    if asked is not None and choice.chosen is not None and choice.replaced == choice.chosen:
        return replace(front, choice=choice.model_copy(update={"replaced": made.replaced}))
    return front


def read_record(run: RunDirectory, file: RunFile, storage: str | None = None) -> StudyRecord:
    """Open the study of a run to read it."""
    return read_study(
        model_sha256=file.model.sha256,
        name=file.study,
        metric=file.search.metric,
        journal=run.journal,
        url=storage_url(file.storage, storage),
    )


def has_evaluation(run: RunDirectory, file: RunFile, storage: str | None = None) -> bool:
    """Whether the run holds an evaluation, or a plan that failed; True where its storage cannot be read."""
    if file.storage is None and not run.journal.exists():
        return False
    try:
        url = storage_url(file.storage, same_storage(file.storage, storage))
        return has_outcome(name=file.study, journal=run.journal, url=url)
    except RunError:
        return True


def check_asked(
    choice: Choice, metrics: Sequence[str], outputs: Sequence[str], error: OutputError | None = None
) -> tuple[Tolerance, ...]:
    """Check that the limits of a choice mean something for a model; gives its tolerances."""
    tolerances = PlanLimits.of(choice, metrics).tolerances
    check_tolerances(tolerances, choice.ignore, metrics[0], outputs, error)
    return tolerances


def build_front(
    run: RunDirectory, file: RunFile, record: StudyRecord, choice: Choice, *, is_made: bool = True
) -> Front:
    """Put the front together: re-measured where it has been, else as the search left it.

    ``choice`` was made, or is a request; with ``is_made`` a choice is made of a request, else it is only proposed.
    """
    target, is_confirmation = file.target, file.confirms is not None
    baseline = record.baseline()
    if target is None or baseline is None:
        what = "" if target is None else " of all-FP32"
        more = "" if target is None else ", so there is nothing to compare with"
        raise RunError(
            f"{run.path} holds no evaluation{what} yet{more}",
            "let `mptune search` go on with it first, and give it more time if you set --timeout",
        )
    metrics = record.metric, *file.search.reported_metrics
    outputs = [name for name in baseline.error.per_output if name != ALL_OUTPUTS]
    tolerances = check_asked(choice, metrics, outputs, baseline.error)

    # Each plan as it was measured last. The plans that may be on the front are judged apart from the others, next to
    # which the place of any of them would be in doubt.
    settings = SearchSettings(**file.measured_settings)
    rounds = rounds_needed(settings, baseline.latency.source)
    searched = (*record.evaluations(), baseline)
    *every, baseline = (replace(e.ignoring(choice.ignore), confirmed=is_confirmation) for e in searched)
    sound = [e for e in every if e.is_finite]
    on_front = sound if is_confirmation else candidates(every, tolerances, dropped_plans(record, choice.ignore))
    shown = {e.plan for e in on_front}
    confirmed, unconfirmed = confirmed_evaluations(record, rounds, settings.latency, on_front)
    others, _ = confirmed_evaluations(record, rounds, settings.latency, [e for e in sound if e.plan not in shown])
    fp32 = next((e for e in confirmed if e.origin == ORIGIN_FP32), baseline)
    broken = [plan.evaluation for plan in unconfirmed if plan.failure is None]
    base_ms = fp32.latency.median_ms
    latest = {e.plan: e.with_baseline(base_ms) for e in (*every, *broken, *others)} | {e.plan: e for e in confirmed}
    evaluations = tuple(latest.values())
    points = confirmed_front(feasible(confirmed, tolerances))

    proposed = None
    if choice.chosen is None:
        made = choose(evaluations, choice, metrics)
        choice, proposed = (made, None) if is_made else (choice, made)
    by_name = {e.plan.fingerprint: e for e in evaluations}
    chosen = by_name.get(choice.chosen or "")

    findings = file.findings
    origin: FindingOrigin = "confirm" if is_confirmation else "search"
    if not any(finding.code == ENGINE_CODE for finding in findings):
        findings += held_out_baseline(fp32.counted_held_out, tf32=file.fixed_settings.tf32, origin=origin)
    fp16 = next((e for e in evaluations if e.origin == ORIGIN_FP16), None)
    explanation = explain(record, run.data, points, [e for e in (fp32, fp16) if e], chosen, findings)
    outcome = Outcome(
        points,
        fp32,
        evaluations,
        [failure for _, _, failure in record.failures()],
        explanation,
        is_given=is_confirmation,
        unreached=next((finding for finding in findings if finding.code == OUT_OF_REACH), None),
        limits=" and ".join(choice.tolerance),
        reduced=" or ".join(name.upper() for name in file.fixed_settings.precisions if name != "fp32"),
        is_cut_short=record.spent < file.search.budget,
        sampled_failures=sum(origin == ORIGIN_SAMPLER for _, origin, _ in record.failures()),
        plan_count=plan_count(record.trials.every()),
        is_untunable=any(finding.code == NOTHING for finding in findings),
        frees=_options_that_free(file.fixed_settings),
    )
    warnings = (
        *file.warnings,
        *fp32.latency.warnings,
        *drift_warning(record),
        *(() if chosen is None else chosen.timing_warnings),
        *unconfirmed_warnings(unconfirmed),
        *_limit_on_predictions(fp32, choice),
        *advice(outcome),
        *_not_measured_again(points, chosen, unconfirmed),
    )
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
        failures=len(record.trials.failed()),
        hypervolume=hypervolume(points, fp32, reference_error_of(record.metric, every)),
        warnings=tuple(dict.fromkeys(warnings)),
        findings=_shown_findings(run, file, findings, fp32, chosen, explanation),
        explanation=explanation,
        reported_metrics=file.search.reported_metrics,
        nearest=by_name.get(choice.nearest or ""),
        proposed=proposed,
    )


def _limit_on_predictions(fp32: Evaluation, choice: Choice) -> tuple[str, ...]:
    if choice.max_latency_ms is None or fp32.latency.source != "predicted":
        return ()
    return (
        f"the limit of {choice.max_latency_ms:g} ms is held against predictions; 87 % of published latencies "
        f"lie within a factor of {EXPECTED_FACTOR:g} of such: run `mptune confirm RUN` on the device",
    )


def _options_that_free(settings: FixedSettings) -> str:
    """What else a search could be asked for where values leave FP16's range."""
    if "bf16" not in settings.precisions:
        return "--precisions fp32,fp16,bf16"
    return '--space FILE, a file with granularity = "op"' if settings.granularity != "op" else ""


def _not_measured_again(
    points: Sequence[Evaluation], chosen: Evaluation | None, tried: Sequence[Unconfirmed]
) -> tuple[str, ...]:
    if chosen is None or chosen.held_out is not None or all(point.held_out is None for point in points):
        return ()
    if any(plan.evaluation.plan == chosen.plan for plan in tried):
        return ()  # another warning is about it
    return (
        f"the chosen plan {chosen.plan.fingerprint} was not measured again: `mptune search` with the limit that you "
        "want re-measures what it chooses",
    )


def _shown_findings(
    run: RunDirectory,
    file: RunFile,
    findings: Sequence[Finding],
    fp32: Evaluation,
    chosen: Evaluation | None,
    explanation: Explanation,
) -> tuple[Finding, ...]:
    """The findings of a run and of its chosen plan, as they stand under that plan, in the order of all views."""
    plan = (chosen or fp32).plan
    origin: FindingOrigin = "search" if file.confirms is None else "confirm"
    own = () if chosen is None else plan_findings(chosen, sample_indices(file), origin, shlex.quote(str(run.path)))
    errors = {g.group: g.one_group_error for g in explanation.groups if g.one_group_error is not None}
    return in_order((f.under_plan(plan.fp32_groups, plan.bf16_groups) for f in (*findings, *own)), errors)


def sample_indices(file: RunFile) -> SampleIndices:
    """Which of the user's samples are search samples, and which are held out; of sequences where each begins."""
    fixed = file.fixed_settings
    if file.data is None:
        return SampleIndices()
    steps = (fixed.steps or file.data.samples) if fixed.feedback else 1
    count = file.data.samples // steps
    split = split_indices(count, fixed.seed, fixed.held_out_fraction, fixed.max_search_samples)
    return SampleIndices(*(tuple(steps * k for k in part) for part in split))
