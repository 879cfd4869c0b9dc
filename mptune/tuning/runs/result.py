"""From the record to the front: what search, report and pick all show."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mptune.choice import Choice, ChoiceKind
from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.data.samples import split_indices
from mptune.engines.base import Failure
from mptune.errors import PlanError, RunError
from mptune.finding import Finding, FindingOrigin, by_severity
from mptune.findings.wording import listed
from mptune.identity import identity_of
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings, Tolerance
from mptune.targets.target import EXPECTED_FACTOR
from mptune.tuning.evaluation import (
    ORIGIN_FP16,
    ORIGIN_FP32,
    ORIGIN_SAMPLER,
    Evaluation,
    Origin,
)
from mptune.tuning.explanation import Explanation
from mptune.tuning.failures import describe
from mptune.tuning.front import Front, choose, confirmed_front, hypervolume, knee, pareto, reference_error_of
from mptune.tuning.fronts.dominance import neighbours
from mptune.tuning.fronts.limits import (
    MetricLimit,
    check_tolerances,
    error_text,
    feasible,
)
from mptune.tuning.fronts.table import compared, latency_text
from mptune.tuning.reasons.plan_findings import SampleIndices, plan_findings
from mptune.tuning.reasons.reasons import explain
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.sessions import drift_warning
from mptune.tuning.record.storage import same_storage, storage_url
from mptune.tuning.record.study import has_outcome, read_study
from mptune.tuning.steps.baseline import ENGINE_CODE, held_out_baseline
from mptune.tuning.steps.remeasure import candidates, confirmed_evaluations, dropped_plans, rounds_needed

NOISY = 0.05
"""Half the width of the baseline's 95 % interval, as a share of its median, past which fronts lose points to noise."""

_NAMED = 3
"""Plans that are named in one warning."""


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
    (``mptune.reporting.run_files``). ``is_again``: the request is an earlier one: where its plan is not feasible any
    more, or not here, the knee is chosen.
    """
    made, is_made = file.choice, asked is not None or run.chosen.exists()
    try:
        front = build_front(run, file, record, asked or made, is_made=is_made)
    except PlanError:
        if asked is None or not is_again:
            raise
        front = build_front(run, file, record, asked.model_copy(update={"plan": None}))
    choice = front.choice
    kept = made.chosen or choice.chosen
    if asked is not None and choice.unmet and kept:
        held = "holds it" if kept == choice.nearest else f"still holds {kept}"
        update = {"unmet": f"{choice.unmet}; chosen/ {held}", "nearest": choice.nearest}
        if made.chosen is not None:
            front, choice = build_front(run, file, record, made), made
        choice = choice.model_copy(update=update)
    elif choice.chosen is not None and choice.replaced == choice.chosen:
        choice = choice.model_copy(update={"replaced": made.replaced})
    return replace(front, choice=choice)


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


def build_front(
    run: RunDirectory, file: RunFile, record: StudyRecord, choice: Choice, *, is_made: bool = True
) -> Front:
    """Put the front together: re-measured where it has been, else as the search left it.

    ``choice`` was made, or is a request; with ``is_made`` a choice is made of a request, else none is made yet, and the
    reason says which it would be.
    """
    target, is_confirmation = file.target, file.confirms is not None
    if target is None:
        raise RunError(f"{run.path} holds no evaluation yet", "let `mptune search` go on with it first")
    baseline = record.baseline()
    if baseline is None:
        raise RunError(
            f"{run.path} holds no evaluation of all-FP32 yet, so there is nothing to compare with",
            "let `mptune search` go on with it, and give it more time if you set --timeout",
        )
    metrics = record.metric, *file.search.reported_metrics
    outputs = [name for name in baseline.error.per_output if name != ALL_OUTPUTS]
    tolerances, limits = parsed_limits(choice, metrics, outputs, baseline.error)
    plans = _read_plans(file, record, choice, baseline, tolerances)
    points, fp32 = plans.points, plans.fp32
    is_random = file.data is not None and file.data.is_random
    chosen, choice = _chosen(plans, choice, tolerances, limits, is_made=is_made, is_random=is_random)
    findings = file.findings
    if not any(finding.code == ENGINE_CODE for finding in findings):
        origin: FindingOrigin = "confirm" if is_confirmation else "search"
        findings += held_out_baseline(fp32.counted_held_out, tf32=file.fixed_settings.tf32, origin=origin)
    explanation = explain(record, run.data, points, [e for e in (fp32, plans.fp16, chosen) if e], findings)
    return Front(
        run_dir=run.path,
        model_path=Path(file.model.path),
        model_sha256=file.model.sha256,
        target=target.name,
        engine=target.engine,
        device=target.device,
        metric=record.metric,
        fp32=fp32,
        fp16=plans.fp16,
        points=points,
        chosen=chosen,
        choice=choice,
        hint=_hint_of_exactness(points, chosen, choice.kind, run.path),
        evaluations=record.spent,
        failures=len(record.failed()),
        hypervolume=hypervolume(points, fp32, reference_error_of(record.metric, plans.every)),
        warnings=_warnings(file, record, plans, chosen, choice, explanation),
        findings=_shown_findings(run, file, findings, chosen, fp32),
        explanation=explanation,
        reported_metrics=file.search.reported_metrics,
    )


@dataclass(frozen=True)
class _Plans:
    """The evaluations of a run as a front shows them, with speed-ups against its baseline."""

    fp32: Evaluation
    fp16: Evaluation | None
    every: tuple[Evaluation, ...]
    """As the search left them."""
    latest: tuple[Evaluation, ...]
    """Each plan once, as it was measured last."""
    points: tuple[Evaluation, ...]
    unconfirmed: tuple[tuple[Evaluation, Failure | None], ...]


def _read_plans(
    file: RunFile, record: StudyRecord, choice: Choice, baseline: Evaluation, tolerances: Sequence[Tolerance]
) -> _Plans:
    is_confirmation, settings = file.confirms is not None, SearchSettings(**file.measured_settings)
    searched = [
        replace(e.ignoring(choice.ignore), confirmed=is_confirmation) for e in (*record.evaluations(), baseline)
    ]
    every, baseline = tuple(searched[:-1]), searched[-1]
    sound = [e for e in every if e.is_finite]
    read = sound if is_confirmation else candidates(every, tolerances, dropped_plans(record, choice.ignore))
    rounds = rounds_needed(settings, baseline.latency.source)
    confirmed, unconfirmed = confirmed_evaluations(record, rounds, settings.latency, read)
    fp32 = _of_origin(confirmed, ORIGIN_FP32) or baseline
    # A plan that was picked may be off the front, and measured again all the same.
    picked = choice.chosen or choice.plan
    off = [e for e in sound if picked and e.plan.fingerprint.startswith(picked) and e not in read]
    again, _ = confirmed_evaluations(record, rounds, settings.latency, off)
    every, again = (tuple(e.with_baseline(fp32.latency.median_ms) for e in group) for group in (every, again))
    broken = [evaluation for evaluation, failure in unconfirmed if failure is None]
    latest = tuple({e.plan: e for e in (*every, *broken, *confirmed, *again)}.values())
    points = confirmed_front(feasible(confirmed, tolerances))
    return _Plans(fp32, _of_origin(latest, ORIGIN_FP16), every, latest, points, unconfirmed)


def _chosen(
    plans: _Plans,
    choice: Choice,
    tolerances: Sequence[Tolerance],
    limits: Sequence[MetricLimit],
    *,
    is_made: bool,
    is_random: bool,
) -> tuple[Evaluation | None, Choice]:
    """The plan of a choice that was made, or what a request comes to."""
    if choice.chosen is not None:
        return next((e for e in plans.latest if e.plan.fingerprint == choice.chosen), None), choice
    chosen, choice = _made(plans.points, plans.latest, choice, tolerances, limits, is_random=is_random)
    if is_made:
        return chosen, choice
    would_be = "none" if chosen is None else f"{chosen.plan.fingerprint}, {choice.reason}"
    reason = f"nothing is in chosen/ yet; as the search stands it would be {would_be}"
    return None, choice.model_copy(update={"chosen": None, "reason": reason, "unmet": ""})


def _warnings(
    file: RunFile,
    record: StudyRecord,
    plans: _Plans,
    chosen: Evaluation | None,
    choice: Choice,
    explanation: Explanation,
) -> tuple[str, ...]:
    warnings = (
        *file.warnings,
        *plans.fp32.latency.warnings,
        *drift_warning(record),
        *(() if chosen is None else chosen.timing_warnings),
        *_not_remeasured(plans.unconfirmed),
        *_limit_on_predictions(plans.fp32, choice),
        *_about_search(file, record, plans, explanation),
        *_unconfirmed(plans.points, chosen, plans.unconfirmed),
    )
    return tuple(dict.fromkeys(warnings))


def _about_search(file: RunFile, record: StudyRecord, plans: _Plans, explanation: Explanation) -> Iterator[str]:
    """What makes the front less than a user may take it for: failures, plans that were not searched, noise."""
    failures, evaluations = record.failures(), record.evaluations()
    if failures:
        first = failures[0][2]
        log = "" if first.log_path is None else f" (log: {first.log_path})"
        tried = len(failures) + len(evaluations)
        yield f"{len(failures)} of {tried} plans failed and are not judged; the first with: {describe(first)}{log}"
    groups = explanation.groups
    if groups and all(group.pinned is not None for group in groups):
        yield (
            "every layer group is pinned, so there was nothing to search: `mptune report RUN --explain` says why each"
            " is, and --space takes a file that pins less"
        )
    origins = [*(evaluation.origin for evaluation in evaluations), *(origin for _, origin, _ in failures)]
    size = record.plan_count or math.inf
    if file.confirms is None and ORIGIN_SAMPLER not in origins and len(origins) < size:
        more = "the same command" if record.spent < file.search.budget else "the same command with a larger --budget"
        yield f"only the baseline and the seeds were evaluated, and nothing was searched: {more} goes on"
    (low, high), base_ms = plans.fp32.latency.ci95_ms, plans.fp32.latency.median_ms
    spread = (high - low) / 2 / base_ms if base_ms > 0 else 0.0
    if NOISY < spread < math.inf:
        yield (
            f"the baseline's latency is known to +-{spread:.0%} only, and plans that are closer cannot be"
            " distinguished: the front shows those that can"
        )


def _not_remeasured(unconfirmed: Sequence[tuple[Evaluation, Failure | None]]) -> Iterator[str]:
    """A line for the plans that failed when they were measured again, and one for those that gave NaN or Inf."""
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


def _limit_on_predictions(fp32: Evaluation, choice: Choice) -> tuple[str, ...]:
    if choice.max_latency_ms is None or fp32.latency.source != "predicted":
        return ()
    return (
        f"the limit of {choice.max_latency_ms:g} ms is held against predictions; 87 % of published latencies "
        f"lie within a factor of {EXPECTED_FACTOR:g} of such: run `mptune confirm RUN` on the device",
    )


def parsed_limits(
    choice: Choice, metrics: Sequence[str], outputs: Sequence[str], error: OutputError | None = None
) -> tuple[tuple[Tolerance, ...], tuple[MetricLimit, ...]]:
    """The limits of a choice."""
    tolerances = tuple(map(Tolerance.parse, choice.tolerance))
    check_tolerances(tolerances, choice.ignore, metrics[0], outputs, error)
    return tolerances, tuple(MetricLimit.parse(text, metrics) for text in choice.limits)


def _unconfirmed(
    points: Sequence[Evaluation],
    chosen: Evaluation | None,
    tried: Sequence[tuple[Evaluation, Failure | None]],
) -> tuple[str, ...]:
    if chosen is None or chosen.held_out is not None or all(point.held_out is None for point in points):
        return ()
    if any(evaluation.plan == chosen.plan for evaluation, _ in tried):
        return ()  # said before
    return (
        f"the chosen plan {chosen.plan.fingerprint} was not measured again: `mptune search` with the limit that you "
        "want re-measures what it chooses",
    )


def _of_origin(evaluations: Sequence[Evaluation], origin: Origin) -> Evaluation | None:
    return next((e for e in evaluations if e.origin == origin), None)


def _made(
    points: Sequence[Evaluation],
    evaluations: Sequence[Evaluation],
    choice: Choice,
    tolerances: Sequence[Tolerance],
    limits: Sequence[MetricLimit],
    *,
    is_random: bool,
) -> tuple[Evaluation | None, Choice]:
    """What a request comes to."""
    if choice.plan is not None:
        chosen: Evaluation | None = find_plan(evaluations, choice.plan)
        reason, is_met = "picked by its id", True
    else:
        chosen, reason, is_met = _choose(points, evaluations, choice, tolerances, limits, is_random=is_random)
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
    evaluations: Sequence[Evaluation],
    choice: Choice,
    tolerances: Sequence[Tolerance],
    limits: Sequence[MetricLimit],
    *,
    is_random: bool,
) -> tuple[Evaluation | None, str, bool]:
    bounds = choice.max_error, choice.max_latency_ms, choice.max_memory_bytes, tolerances, limits
    points = _fitting(evaluations, choice.max_memory_bytes, tolerances) or points
    point, reason, is_met = choose(points, *bounds, wants_knee=choice.knee, is_random=is_random)
    if is_met:
        return point, reason, is_met
    # Within noise a plan on the front is no worse than others, and yet they may keep to the limits.
    sound = [e for e in evaluations if e.is_finite]
    meeting = [e for e in sound if choose([e], *bounds)[2]]
    meeting = [e for e in meeting if e.remeasured] or (meeting if limits else [])
    if meeting:
        point, reason, is_met = choose(meeting, *bounds, wants_knee=choice.knee)
        return point, f"{reason}; it is not on the front, where none has that", is_met
    off_front = sound if limits or choice.max_memory_bytes is not None else [e for e in sound if e.remeasured]
    return choose([*points, *off_front], *bounds)


def _fitting(
    evaluations: Sequence[Evaluation], limit: int | None, tolerances: Sequence[Tolerance]
) -> tuple[Evaluation, ...]:
    """The front of the plans that keep to a limit of memory: those of the whole front may all be above it."""
    if limit is None:
        return ()
    first = {e.plan: e for e in reversed(evaluations)}
    fitting = [e for e in first.values() if e.memory is not None and e.memory.total_bytes <= limit]
    return pareto(feasible(fitting, tolerances))


def _kind(choice: Choice, points: Sequence[Evaluation], chosen: Evaluation | None) -> ChoiceKind:
    """How the plan was chosen."""
    if choice.plan is not None:
        return "plan"
    if choice.has_limits:
        return "limits"
    is_fastest = chosen is not None and all(chosen.latency.median_ms <= p.latency.median_ms for p in points)
    return "fastest" if is_fastest else "knee" if chosen is knee(points) else "middle"


def find_plan(evaluations: Sequence[Evaluation], fingerprint: str) -> Evaluation:
    """The first evaluation whose plan's fingerprint begins with ``fingerprint``."""
    matching = {
        e.plan.fingerprint: e
        for e in reversed(evaluations)
        if fingerprint and e.plan.fingerprint.startswith(fingerprint)
    }
    if not matching:
        close = difflib.get_close_matches(fingerprint, [e.plan.fingerprint for e in evaluations], n=3)
        hint = f"did you mean {' or '.join(dict.fromkeys(close))}?" if close else "`mptune report RUN` lists the plans"
        raise PlanError(f"no plan {fingerprint!r} was evaluated in this run", hint)
    if len(matching) > 1:
        raise PlanError(
            f"{fingerprint!r} means several plans: {', '.join(sorted(matching))}", "give more of its digits"
        )
    (evaluation,) = matching.values()
    if not evaluation.is_finite:
        raise PlanError(
            f"plan {evaluation.plan.fingerprint} is not feasible: its outputs are not finite",
            "`mptune report RUN` lists the plans that are",
        )
    return evaluation


def sample_indices(file: RunFile) -> SampleIndices:
    """Which of the user's samples are search samples, and which are held out; of sequences where each begins."""
    fixed = file.fixed_settings
    if file.data is None:
        return SampleIndices()
    steps = (fixed.steps or file.data.samples) if fixed.feedback else 1
    count = file.data.samples // steps
    split = split_indices(count, fixed.seed, fixed.held_out_fraction, fixed.max_search_samples)
    return SampleIndices(*(tuple(steps * k for k in part) for part in split))


def _hint_of_exactness(points: Sequence[Evaluation], chosen: Evaluation | None, kind: ChoiceKind, run_dir: Path) -> str:
    """What is added to why a plan was chosen where a neighbour is much more exact for little latency; else empty.

    Where limits or a plan were asked for nothing is added.
    """
    if chosen is None or kind not in ("knee", "fastest", "middle"):
        return ""
    cheap = next((beside.evaluation for beside in neighbours(points, chosen) if beside.is_cheap), None)
    if cheap is None:
        return ""
    pick = f"`mptune pick {shlex.quote(str(run_dir))} --plan {cheap.plan.fingerprint[:4]}`"
    return f"; for {compared(cheap, chosen)}: {pick}"


def _shown_findings(
    run: RunDirectory,
    file: RunFile,
    findings: Sequence[Finding],
    chosen: Evaluation | None,
    fp32: Evaluation,
) -> tuple[Finding, ...]:
    """The findings of a run and of its chosen plan, as they stand under that plan, in the order of all views."""
    plan = (chosen or fp32).plan
    origin: FindingOrigin = "search" if file.confirms is None else "confirm"
    own = () if chosen is None else plan_findings(chosen, sample_indices(file), origin, shlex.quote(str(run.path)))
    return by_severity(f.under_plan(plan.fp32_groups, plan.bf16_groups) for f in (*findings, *own))
