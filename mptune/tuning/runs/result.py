"""From the record to the front: what search, report and pick all show."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mptune.errors import PlanError, RunError
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings, Tolerance
from mptune.targets.unsearched import OUT_OF_REACH
from mptune.targets.unsearched.nothing import NOTHING
from mptune.tuning.evaluation import (
    ORIGIN_FP16,
    ORIGIN_FP32,
    ORIGIN_SAMPLER,
    Evaluation,
    Origin,
    disagreements,
)
from mptune.tuning.explanation import Explanation
from mptune.tuning.front import Front, choose, confirmed_front, hypervolume, knee, pareto, reference_error_of
from mptune.tuning.fronts.content import ChoiceKind, origin_fields
from mptune.tuning.fronts.kept import RunStamp, keep_front
from mptune.tuning.fronts.metric_limits import MetricLimit, check_metric_limits
from mptune.tuning.fronts.run_facts import Facts, facts_of, hint_of_exactness, other_devices, shown_findings
from mptune.tuning.fronts.tolerances import check_tolerances, feasible, known_outputs
from mptune.tuning.reasons.advice import Outcome, findings
from mptune.tuning.reasons.reasons import explain
from mptune.tuning.reasons.unconfirmed import Unconfirmed, unconfirmed_warnings
from mptune.tuning.record.attributes import plan_count
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.sessions import drift_warning
from mptune.tuning.record.storage_urls import same_storage, storage_url
from mptune.tuning.record.study import has_outcome, read_study
from mptune.tuning.steps.baseline import ENGINE_CODE, held_out_baseline
from mptune.tuning.steps.remeasure import candidates, confirmed_evaluations, dropped_plans, rounds_needed


@dataclass(frozen=True)
class Choice:
    """How one plan is taken from the front.

    Attributes:
        max_error: the fastest whose error is at most this.
        max_latency_ms: the most exact that is at most this slow.
        max_memory_bytes: among those whose engine takes at most so much.
        plan: this one, by fingerprint; wins over limits. With nothing given, the knee.
        limits: on the metrics' own values (``mptune.tuning.fronts.metric_limits``); with these alone, the fastest.
        tolerance: largest errors of outputs, or of columns of them; the front holds what is within them.
        ignore: outputs whose errors do not count.
        knee: the knee of the plans within ``limits``, not the fastest.
    """

    max_error: float | None = None
    max_latency_ms: float | None = None
    max_memory_bytes: int | None = None
    plan: str | None = None
    limits: tuple[MetricLimit, ...] = ()
    tolerance: tuple[Tolerance, ...] = ()
    ignore: tuple[str, ...] = ()
    knee: bool = False

    @property
    def has_limits(self) -> bool:
        """Whether limits are asked for."""
        limits = (self.max_error, self.max_latency_ms, self.max_memory_bytes)
        return any(limit is not None for limit in limits) or bool(self.tolerance) or bool(self.limits)


def front_of(run: RunDirectory, file: RunFile, record: StudyRecord, *, keep: bool = False) -> Front:
    """The front of a run, from its run.json and its record.

    Args:
        run: the run directory.
        file: its run.json.
        record: its study.
        keep: keep the front for ``report`` (``mptune.tuning.fronts.kept``): the caller holds the run's lock.

    Raises:
        RunError: nothing has been evaluated yet, or what is to be kept cannot be written.
        PlanError: the chosen plan was never evaluated, or is not feasible.
    """
    before = RunStamp.of(run, file) if keep else None
    facts = facts_of(run, file)
    fixed = file.fixed_settings
    settings = SearchSettings(
        confirm_rounds=file.search.confirm_rounds, latency=fixed.latency.settings(), tf32=fixed.tf32
    )
    taken = file.choice
    limits = check_metric_limits(taken.limits, (file.search.metric, *file.search.reported_metrics))
    choice = Choice(
        taken.max_error,
        taken.max_latency_ms,
        taken.max_memory_bytes,
        taken.plan,
        limits,
        tuple(map(Tolerance.parse, taken.tolerance)),
        taken.ignore,
        taken.knee,
    )
    front = build_front(record, facts, choice, settings, every=file.confirms is not None)
    if before is not None:
        keep_front(run, file, front, before)
    return replace(front, other_devices=other_devices(run))


def read_record(run: RunDirectory, file: RunFile, storage: str | None = None) -> StudyRecord:
    """Open the study of a run to read it.

    Args:
        run: the run directory.
        file: its run.json.
        storage: URL of the storage where the run is kept in one; None takes that of ``MPTUNE_STORAGE``.

    Raises:
        RunError: there is none, or the storage cannot be opened, or was not named by the caller.
    """
    return read_study(
        model_sha256=file.model.sha256,
        name=file.study,
        metric=file.search.metric,
        journal=run.journal,
        url=storage_url(file.storage, storage),
    )


def has_evaluation(run: RunDirectory, file: RunFile, storage: str | None = None) -> bool:
    """Whether the run holds an evaluation, or a plan that failed; True where its storage cannot be read.

    Args:
        run: the run directory.
        file: its run.json.
        storage: of the search that asks, which may be another one.
    """
    if file.storage is None and not run.journal.exists():
        return False
    try:
        url = storage_url(file.storage, same_storage(file.storage, storage))
        return has_outcome(name=file.study, journal=run.journal, url=url)
    except RunError:
        return True


def build_front(
    record: StudyRecord, facts: Facts, choice: Choice, settings: SearchSettings, *, every: bool = False
) -> Front:
    """Put the front together: re-measured where it has been, else as the search left it.

    Args:
        record: the study.
        facts: of the run.
        choice: which plan to take.
        settings: how many rounds of re-measuring there are, and how latencies are summed up.
        every: a device confirmed every evaluation.

    Raises:
        RunError: not even all-FP32 has been evaluated.
        PlanError: the chosen plan was never evaluated, or is not feasible.
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
    check_tolerances(choice.tolerance, choice.ignore, record.metric, outputs, searched.error)
    rounds = rounds_needed(settings, searched.latency.source)
    sound = [e for e in evaluations if e.is_finite]
    read = sound if every else candidates(evaluations, choice.tolerance, dropped_plans(record, choice.ignore))
    confirmed, unconfirmed = confirmed_evaluations(record, rounds, settings.latency, read)
    fp32 = _of_origin(confirmed, ORIGIN_FP32) or searched
    if not any(finding.code == ENGINE_CODE for finding in facts.findings):
        about = held_out_baseline(fp32.counted_held_out, tf32=settings.tf32, origin="confirm" if every else "search")
        facts = replace(facts, findings=(*facts.findings, *about))
    broken = [plan.evaluation for plan in unconfirmed if plan.failure is None]
    evaluations = tuple(e.with_baseline(fp32.latency.median_ms) for e in evaluations)
    latest = tuple({e.plan: e for e in (*evaluations, *broken, *confirmed)}.values())
    fp16 = _of_origin(latest, ORIGIN_FP16)
    points = confirmed_front(feasible(confirmed, choice.tolerance))
    chosen, reason, met = _choose(points, latest, choice)
    kind = _kind(choice, points, chosen)
    reason += hint_of_exactness(points, chosen, kind, facts.run_dir)
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
                limits=" and ".join(map(str, choice.tolerance)),
                reduced=facts.reduced,
                is_cut_short=record.spent < facts.budget,
                sampled_failures=sum(origin == ORIGIN_SAMPLER for _, origin, _ in failures),
                plan_count=plan_count(record.trials.every(), has_failed=record.failed > 0),
                is_untunable=any(NOTHING in text for text in facts.warnings),
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
        chosen_reason=reason,
        choice_kind=kind,
        limits_met=met,
        evaluations=record.spent,
        failures=record.failed,
        hypervolume=hypervolume(points, fp32, reference_error_of(record.metric, evaluations)),
        warnings=tuple(dict.fromkeys(warnings)),
        findings=shown_findings(facts, chosen, fp32, explanation, is_confirmation=every),
        explanation=explanation,
        reported_metrics=facts.reported_metrics,
    )


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


def _choose(
    points: Sequence[Evaluation], known: Sequence[Evaluation], choice: Choice
) -> tuple[Evaluation | None, str, bool]:
    if choice.plan is not None:
        return find_plan(known, choice.plan), "picked by its id", True
    fitting = _fitting(known, choice)
    points = fitting or points
    bounds = choice.max_error, choice.max_latency_ms, choice.max_memory_bytes, choice.tolerance
    if not choice.limits:
        point, reason, met = choose(points, *bounds)
        others = () if met else [e for e in known if e.is_finite and choose([e], *bounds)[2]]
        if not others:  # A plan off the front may take less memory.
            if choice.max_memory_bytes is not None and not met and not fitting:
                reason = reason.replace("the nearest", "the nearest point of the front")
            return point, reason, met
        # Within noise a plan on the front is no worse than these, and yet it does not keep to the limits.
        measured_again = [e for e in others if e.remeasured]
        if not measured_again:
            return point, reason.replace("no plan", "no point of the front", 1), False
        point, reason, met = choose(measured_again, *bounds)
        return point, f"{reason}; it is not on the front, where none has that", met

    def meeting(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
        return [e for e in evaluations if e.is_finite and all(limit.is_met(e) for limit in choice.limits)]

    wanted = " and ".join(limit.text for limit in choice.limits)
    found = meeting(points) or meeting(known)
    if not found:
        nearest, _, _ = choose(points, *bounds)
        return nearest, f"no plan has {wanted}; this one was chosen without that limit", False
    if choice.knee:
        return knee(found), f"the knee of the points with {wanted}", True
    if bounds == (None, None, None, ()):
        return min(found, key=lambda e: e.latency.median_ms), f"the fastest with {wanted}", True
    point, reason, met = choose(found, *bounds)
    return point, f"{reason}, and {wanted}", met


def _fitting(known: Sequence[Evaluation], choice: Choice) -> tuple[Evaluation, ...]:
    """The front of the plans that keep to a limit of memory: those of the whole front may all be above it."""
    limit = choice.max_memory_bytes
    if limit is None:
        return ()
    first = {e.plan: e for e in reversed(known)}
    fitting = [e for e in first.values() if e.memory is not None and e.memory.total_bytes <= limit]
    return pareto(feasible(fitting, choice.tolerance))


def _kind(choice: Choice, points: Sequence[Evaluation], chosen: Evaluation | None) -> ChoiceKind:
    """How the plan was chosen."""
    if choice.plan is not None:
        return "plan"
    if choice.has_limits:
        return "limits"
    is_fastest = chosen is not None and all(chosen.latency.median_ms <= p.latency.median_ms for p in points)
    return "fastest" if is_fastest else "knee"


def find_plan(known: Sequence[Evaluation], fingerprint: str) -> Evaluation:
    """The first evaluation whose plan's fingerprint begins with ``fingerprint``.

    Raises:
        PlanError: there is none, there are several, or it is not feasible.
    """
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
