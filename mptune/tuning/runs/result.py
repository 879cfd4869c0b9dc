"""From the record to the front: what search, report and pick all show."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from mptune.choice import Choice, ChoiceKind
from mptune.data.metrics.accuracy import OutputError
from mptune.errors import PlanError, RunError
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings, Tolerance
from mptune.targets.unsearched import NOTHING, OUT_OF_REACH
from mptune.tuning.evaluation import (
    ORIGIN_FP16,
    ORIGIN_FP32,
    ORIGIN_SAMPLER,
    Evaluation,
    Origin,
    disagreements,
)
from mptune.tuning.explanation import Explanation
from mptune.tuning.front import Front, choose, confirmed_front, hypervolume, pareto, reference_error_of
from mptune.tuning.fronts.content import origin_fields
from mptune.tuning.fronts.limits import (
    MetricLimit,
    check_metric_limits,
    check_tolerances,
    error_text,
    feasible,
    known_outputs,
)
from mptune.tuning.fronts.run_facts import Facts, facts_of, hint_of_exactness, other_devices, shown_findings
from mptune.tuning.fronts.table import latency_text
from mptune.tuning.reasons.advice import Outcome, findings
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
    run: RunDirectory,
    file: RunFile,
    record: StudyRecord,
    *,
    asked: Choice | None = None,
    is_again: bool = False,
) -> Front:
    """The front of a run, from its run.json and its record, with the choice as run.json has it, or as it is asked for.

    Limits that no plan meets leave a choice that was made as it was. Whoever asks writes what comes of it
    (``mptune.reporting.run_files``).

    Args:
        run: the run directory.
        file: its run.json.
        record: its study.
        asked: a request; None reads the choice that was made.
        is_again: the request is an earlier one: where its plan is not feasible any more, or here, the knee is chosen.
    """
    facts = facts_of(run, file)
    fixed, search = file.fixed_settings, file.search
    settings = SearchSettings(
        confirm_rounds=search.confirm_rounds,
        latency=fixed.latency,
        tf32=fixed.tf32,
        reported_metrics=search.reported_metrics,
    )

    def built(choice: Choice) -> Front:
        is_made = asked is not None or run.chosen.exists()
        return build_front(record, facts, choice, settings, every=file.confirms is not None, is_made=is_made)

    made = file.choice
    try:
        front = built(asked or made)
    except PlanError:
        if asked is None or not is_again:
            raise
        front = built(asked.model_copy(update={"plan": None}))
    choice = front.choice
    kept = made.chosen or choice.chosen
    if asked is not None and choice.unmet and kept:
        held = "holds it" if kept == choice.nearest else f"still holds {kept}"
        update = {"unmet": f"{choice.unmet}; chosen/ {held}", "nearest": choice.nearest}
        if made.chosen is not None:
            front, choice = built(made), made
        choice = choice.model_copy(update=update)
    elif choice.chosen is not None and choice.replaced == choice.chosen:
        choice = choice.model_copy(update={"replaced": made.replaced})
    return replace(front, choice=choice, other_devices=other_devices(run))


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


def build_front(
    record: StudyRecord,
    facts: Facts,
    choice: Choice,
    settings: SearchSettings,
    *,
    every: bool = False,
    is_made: bool = True,
) -> Front:
    """Put the front together: re-measured where it has been, else as the search left it.

    Args:
        record: the study.
        facts: of the run.
        choice: that was made, or a request.
        settings: how many rounds of re-measuring there are, how latencies are summed up, and the reported metrics.
        every: a device confirmed every evaluation.
        is_made: make a choice of a request; else none is made yet, and the reason says which it would be.
    """
    evaluations = tuple(replace(e.ignoring(choice.ignore), confirmed=every) for e in record.evaluations())
    baseline = record.baseline()
    searched = None if baseline is None else replace(baseline.ignoring(choice.ignore), confirmed=every)
    if searched is None:
        raise RunError(
            f"{facts.run_dir} holds no evaluation of all-FP32 yet, so there is nothing to compare with",
            "let `mptune search` go on with it, and give it more time if you set --timeout",
        )
    outputs = known_outputs(searched.error)
    tolerances, limits = parsed_limits(choice, (record.metric, *settings.reported_metrics), outputs, searched.error)
    rounds = rounds_needed(settings, searched.latency.source)
    sound = [e for e in evaluations if e.is_finite]
    read = sound if every else candidates(evaluations, tolerances, dropped_plans(record, choice.ignore))
    confirmed, unconfirmed = confirmed_evaluations(record, rounds, settings.latency, read)
    fp32 = _of_origin(confirmed, ORIGIN_FP32) or searched
    if not any(finding.code == ENGINE_CODE for finding in facts.findings):
        about = held_out_baseline(fp32.counted_held_out, tf32=settings.tf32, origin="confirm" if every else "search")
        facts = replace(facts, findings=(*facts.findings, *about))
    broken = [plan.evaluation for plan in unconfirmed if plan.failure is None]
    evaluations = tuple(e.with_baseline(fp32.latency.median_ms) for e in evaluations)
    # A plan that was picked may be off the front, and measured again all the same.
    picked = choice.chosen or choice.plan
    off = [e for e in sound if picked and e.plan.fingerprint.startswith(picked) and e not in read]
    again, _ = confirmed_evaluations(record, rounds, settings.latency, off)
    again = tuple(e.with_baseline(fp32.latency.median_ms) for e in again)
    latest = tuple({e.plan: e for e in (*evaluations, *broken, *confirmed, *again)}.values())
    fp16 = _of_origin(latest, ORIGIN_FP16)
    points = confirmed_front(feasible(confirmed, tolerances))
    if choice.chosen is not None:
        chosen = next((e for e in latest if e.plan.fingerprint == choice.chosen), None)
    else:
        chosen, choice = _made(points, latest, choice, tolerances, limits)
        if not is_made:
            would_be = "none" if chosen is None else f"{chosen.plan.fingerprint}, {choice.reason}"
            reason = f"nothing is in chosen/ yet; as the search stands it would be {would_be}"
            chosen, choice = None, choice.model_copy(update={"chosen": None, "reason": reason, "unmet": ""})
    hint = hint_of_exactness(points, chosen, choice.kind, facts.run_dir)
    explanation = Explanation()
    if facts.data_dir is not None:
        baselines = [fp32] if fp16 is None else [fp32, fp16]
        explanation = explain(record, facts.data_dir, points, baselines, chosen, facts.findings)
    failures = record.failures()
    unreached = next((finding for finding in facts.findings if finding.code == OUT_OF_REACH), None)
    warnings = (
        *facts.warnings,
        *fp32.latency.warnings,
        *drift_warning(record),
        *(() if chosen is None else chosen.timing_warnings),
        *unconfirmed_warnings(unconfirmed),
        *disagreements(evaluations),
        *findings(
            Outcome(
                points,
                fp32,
                latest,
                [failure for _, _, failure in failures],
                explanation,
                is_given=every,
                unreached=unreached,
                limits=" and ".join(choice.tolerance),
                reduced=facts.reduced,
                is_cut_short=record.spent < facts.budget,
                sampled_failures=sum(origin == ORIGIN_SAMPLER for _, origin, _ in failures),
                plan_count=plan_count(record.trials.every(), has_failed=bool(record.trials.failed())),
                is_untunable=any(finding.code == NOTHING for finding in facts.findings),
            )
        ),
        *_unconfirmed(points, chosen, unconfirmed),
    )
    return Front(
        **origin_fields(facts),
        metric=record.metric,
        fp32=fp32,
        fp16=fp16,
        points=points,
        chosen=chosen,
        choice=choice,
        hint=hint,
        evaluations=record.spent,
        failures=len(record.trials.failed()),
        hypervolume=hypervolume(points, fp32, reference_error_of(record.metric, evaluations)),
        warnings=tuple(dict.fromkeys(warnings)),
        findings=shown_findings(facts, chosen, fp32, explanation, is_confirmation=every),
        explanation=explanation,
        reported_metrics=facts.reported_metrics,
    )


def parsed_limits(
    choice: Choice, metrics: Sequence[str], outputs: Sequence[str], error: OutputError | None = None
) -> tuple[tuple[Tolerance, ...], tuple[MetricLimit, ...]]:
    """The limits of a choice."""
    tolerances = tuple(map(Tolerance.parse, choice.tolerance))
    check_tolerances(tolerances, choice.ignore, metrics[0], outputs, error)
    return tolerances, check_metric_limits(choice.limits, metrics)


def _unconfirmed(
    points: Sequence[Evaluation], chosen: Evaluation | None, tried: Sequence[Unconfirmed]
) -> tuple[str, ...]:
    confirmed = sum(point.held_out is not None for point in points)
    if chosen is None or chosen.held_out is not None or not confirmed:
        return ()
    if any(plan.evaluation.plan == chosen.plan for plan in tried):
        return ()  # said before
    were = f"{confirmed} point{'s' * (confirmed > 1)} of the front {'were' if confirmed > 1 else 'was'}"
    return (
        f"the chosen plan {chosen.plan.fingerprint} was not measured again ({were}): "
        "`mptune search` with the limit that you want re-measures what it chooses",
    )


def _of_origin(evaluations: Sequence[Evaluation], origin: Origin) -> Evaluation | None:
    return next((e for e in evaluations if e.origin == origin), None)


def _made(
    points: Sequence[Evaluation],
    known: Sequence[Evaluation],
    choice: Choice,
    tolerances: Sequence[Tolerance],
    limits: Sequence[MetricLimit],
) -> tuple[Evaluation | None, Choice]:
    """What a request comes to."""
    if choice.plan is not None:
        chosen: Evaluation | None = find_plan(known, choice.plan)
        reason, is_met = "picked by its id", True
    else:
        chosen, reason, is_met = _choose(points, known, choice, tolerances, limits)
    fingerprint, unmet = None, reason.partition(";")[0]
    if chosen is not None:
        fingerprint = chosen.plan.fingerprint
        reason = reason if is_met else f"the nearest: {unmet}"
        figures = f"{latency_text(chosen)} ms, error {error_text(chosen)}"
        unmet = "" if is_met else f"{unmet}; the nearest is {fingerprint} ({figures})"
    return chosen, choice.model_copy(
        update={
            "plan": choice.plan and fingerprint,
            "chosen": fingerprint,
            "kind": _kind(choice, points, chosen),
            "reason": reason,
            "unmet": unmet,
            "nearest": None if is_met else fingerprint,
        }
    )


def _choose(
    points: Sequence[Evaluation],
    known: Sequence[Evaluation],
    choice: Choice,
    tolerances: Sequence[Tolerance],
    limits: Sequence[MetricLimit],
) -> tuple[Evaluation | None, str, bool]:
    bounds = choice.max_error, choice.max_latency_ms, choice.max_memory_bytes, tolerances, limits
    points = _fitting(known, choice.max_memory_bytes, tolerances) or points
    point, reason, is_met = choose(points, *bounds, wants_knee=choice.knee)
    if is_met:
        return point, reason, is_met
    # Within noise a plan on the front is no worse than others, and yet they may keep to the limits.
    sound = [e for e in known if e.is_finite]
    meeting = [e for e in sound if choose([e], *bounds)[2]]
    meeting = [e for e in meeting if e.remeasured] or (meeting if limits else [])
    if meeting:
        point, reason, is_met = choose(meeting, *bounds, wants_knee=choice.knee)
        return point, f"{reason}; it is not on the front, where none has that", is_met
    off_front = sound if limits or choice.max_memory_bytes is not None else [e for e in sound if e.remeasured]
    return choose([*points, *off_front], *bounds)


def _fitting(known: Sequence[Evaluation], limit: int | None, tolerances: Sequence[Tolerance]) -> tuple[Evaluation, ...]:
    """The front of the plans that keep to a limit of memory: those of the whole front may all be above it."""
    if limit is None:
        return ()
    first = {e.plan: e for e in reversed(known)}
    fitting = [e for e in first.values() if e.memory is not None and e.memory.total_bytes <= limit]
    return pareto(feasible(fitting, tolerances))


def _kind(choice: Choice, points: Sequence[Evaluation], chosen: Evaluation | None) -> ChoiceKind:
    """How the plan was chosen."""
    if choice.plan is not None:
        return "plan"
    if choice.has_limits:
        return "limits"
    is_fastest = chosen is not None and all(chosen.latency.median_ms <= p.latency.median_ms for p in points)
    return "fastest" if is_fastest else "knee"


def find_plan(known: Sequence[Evaluation], fingerprint: str) -> Evaluation:
    """The first evaluation whose plan's fingerprint begins with ``fingerprint``."""
    found = {
        e.plan.fingerprint: e for e in reversed(known) if fingerprint and e.plan.fingerprint.startswith(fingerprint)
    }
    if not found:
        close = difflib.get_close_matches(fingerprint, [e.plan.fingerprint for e in known], n=3)
        hint = f"did you mean {' or '.join(dict.fromkeys(close))}?" if close else "`mptune report RUN` lists the plans"
        raise PlanError(f"no plan {fingerprint!r} was evaluated in this run", hint)
    if len(found) > 1:
        raise PlanError(f"{fingerprint!r} means several plans: {', '.join(sorted(found))}", "give more of its digits")
    (evaluation,) = found.values()
    if not evaluation.is_finite:
        raise PlanError(
            f"plan {evaluation.plan.fingerprint} is not feasible: its outputs are not finite",
            "`mptune report RUN` lists the plans that are",
        )
    return evaluation
