"""From the record to the front: what search, report and pick all show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mptune.choice import Choice
from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.data.samples import split_indices
from mptune.engines.base import Failure
from mptune.engines.failures import describe
from mptune.errors import PlanError, RunError
from mptune.finding import FindingOrigin, by_severity
from mptune.findings.engine import NOTHING
from mptune.findings.wording import listed
from mptune.identity import identity_of
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings, Tolerance
from mptune.targets.target import EXPECTED_FACTOR
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.choosing import choose
from mptune.tuning.fronts.dominance import confirmed_front, hypervolume, reference_error_of
from mptune.tuning.fronts.limits import PlanLimits, check_tolerances, feasible
from mptune.tuning.reasons.plan_findings import SampleIndices, plan_findings
from mptune.tuning.reasons.reasons import explain
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.sessions import drift_warning
from mptune.tuning.record.storage import same_storage, storage_url
from mptune.tuning.record.study import has_outcome, read_study
from mptune.tuning.steps.baseline import ENGINE_CODE, engine_findings
from mptune.tuning.steps.remeasure import candidates, confirmed_evaluations, dropped_plans, rounds_needed

NOISY = 0.05
"""Half the width of the baseline's 95 % interval, as a share of its median, past which fronts lose points to noise."""

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
        return has_outcome(name=file.study, identity=identity_of(file), journal=run.journal, url=url)
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
    broken = [evaluation for evaluation, failure in unconfirmed if failure is None]
    base_ms = fp32.latency.median_ms
    latest = {e.plan: e.with_baseline(base_ms) for e in (*every, *broken, *others)} | {e.plan: e for e in confirmed}
    evaluations = tuple(latest.values())
    points = confirmed_front(feasible(confirmed, tolerances))

    tf32 = record.tf32()
    tf32 = None if tf32 is None else tf32.ignoring(choice.ignore).with_baseline(base_ms)
    proposed = None
    if choice.chosen is None:
        made = choose(evaluations, choice, metrics, tf32)
        choice, proposed = (made, None) if is_made else (choice, made)
    by_name = {e.plan.fingerprint: e for e in evaluations}
    chosen = by_name.get(choice.chosen or "")

    findings = file.findings
    origin: FindingOrigin = "confirm" if is_confirmation else "search"
    if fp32.counted_held_out is not None and not any(finding.code == ENGINE_CODE for finding in findings):
        findings += engine_findings(fp32.counted_held_out, origin, tf32=file.fixed_settings.tf32, held_out=True)
    fp16 = next((e for e in evaluations if e.origin == ORIGIN_FP16), None)
    explanation = explain(record, run.data, points, [e for e in (fp32, fp16, chosen) if e], findings)
    if chosen is not None:
        findings += plan_findings(chosen, sample_indices(file), origin, shlex.quote(str(run.path)))
    plan = (chosen or fp32).plan
    is_untold = all(finding.code != NOTHING for finding in findings)
    is_all_pinned = bool(explanation.groups) and all(group.pinned is not None for group in explanation.groups)
    warnings = (
        *file.warnings,
        *fp32.latency.warnings,
        *drift_warning(record),
        *(() if chosen is None else chosen.timing_warnings),
        *_about_remeasuring(points, chosen, unconfirmed),
        *_about_search(file, record, fp32, choice, is_all_pinned=is_all_pinned and is_untold),
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
        failures=len(record.failed()),
        hypervolume=hypervolume(points, fp32, reference_error_of(record.metric, every)),
        warnings=tuple(dict.fromkeys(warnings)),
        findings=by_severity(f.under_plan(plan.fp32_groups, plan.bf16_groups) for f in findings),
        explanation=explanation,
        reported_metrics=file.search.reported_metrics,
        nearest=by_name.get(choice.nearest or ""),
        proposed=proposed,
        tf32=tf32,
    )


def _about_search(
    file: RunFile, record: StudyRecord, fp32: Evaluation, choice: Choice, *, is_all_pinned: bool
) -> Iterator[str]:
    """What makes the front less than a user may take it for: failures, plans that were not searched, noise."""
    if choice.max_latency_ms is not None and fp32.latency.source == "predicted":
        yield (
            f"the limit of {choice.max_latency_ms:g} ms is held against predictions; 87 % of published latencies "
            f"lie within a factor of {EXPECTED_FACTOR:g} of such: run `mptune confirm RUN` on the device"
        )
    failures, evaluations = record.failures(), record.evaluations()
    if failures:
        first = failures[0][2]
        log = "" if first.log_path is None else f" (log: {first.log_path})"
        tried = len(failures) + len(evaluations)
        yield f"{len(failures)} of {tried} plans failed and are not judged; the first with: {describe(first)}{log}"
    if is_all_pinned:
        yield (
            "every layer group is pinned, so there was nothing to search: `mptune report RUN --explain` says why each"
            " is, and --space takes a file that pins less"
        )
    origins = [*(evaluation.origin for evaluation in evaluations), *(origin for _, origin, _ in failures)]
    if file.confirms is None and ORIGIN_SAMPLER not in origins and len(origins) < (record.plan_count or math.inf):
        more = "the same command" if record.spent < file.search.budget else "the same command with a larger --budget"
        yield f"only the baseline and the seeds were evaluated, and nothing was searched: {more} goes on"
    (low, high), base_ms = fp32.latency.ci95_ms, fp32.latency.median_ms
    spread = (high - low) / 2 / base_ms if base_ms > 0 else 0.0
    if NOISY < spread < math.inf:
        yield (
            f"the baseline's latency is known to +-{spread:.0%} only, and plans that are closer cannot be"
            " distinguished: the front shows those that can"
        )


def _about_remeasuring(
    points: Sequence[Evaluation], chosen: Evaluation | None, unconfirmed: Sequence[tuple[Evaluation, Failure | None]]
) -> Iterator[str]:
    """A line for plans that failed when re-measured, for those that gave NaN or Inf, and for a choice that is new."""
    failed = [(evaluation, failure) for evaluation, failure in unconfirmed if failure is not None]
    if failed:
        plans = listed([evaluation.plan.fingerprint for evaluation, _ in failed], _NAMED, " and {others} more")
        yield (
            f"failed when re-measured: {plans}; the figures are the search's, and the same command measures again;"
            f" {failed[0][0].plan.fingerprint} with: {describe(failed[0][1])}"
        )
    broken = [evaluation.plan.fingerprint for evaluation, failure in unconfirmed if failure is None]
    if broken:
        yield (
            f"not finite on the held-out samples, and off the front: {listed(broken, _NAMED, ' and {others} more')};"
            " give more calibration samples, so that the search sees such values"
        )
    is_new = chosen is not None and chosen.held_out is None and any(point.held_out is not None for point in points)
    if chosen is not None and is_new and all(evaluation.plan != chosen.plan for evaluation, _ in unconfirmed):
        yield (
            f"the chosen plan {chosen.plan.fingerprint} was not measured again: `mptune search` with the limit that you"
            " want re-measures what it chooses"
        )


def sample_indices(file: RunFile) -> SampleIndices:
    """Which of the user's samples are search samples, and which are held out; of sequences where each begins."""
    fixed = file.fixed_settings
    if file.data is None:
        return SampleIndices()
    steps = (fixed.steps or file.data.samples) if fixed.feedback else 1
    count = file.data.samples // steps
    split = split_indices(count, fixed.seed, fixed.held_out_fraction, fixed.max_search_samples)
    return SampleIndices(*(tuple(steps * k for k in part) for part in split))
