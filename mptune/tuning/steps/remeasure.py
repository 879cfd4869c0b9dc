"""The front re-measured: its points measured again in fresh processes, their error taken on held-out samples.

A long front is re-measured in part: what a person takes from it, and so many of the others as show that it holds. Every
point is measured in one fresh process, which gives its held-out error; after that only the chosen one is measured
again, and those whose place is in doubt, until it is not.

Each measurement is a note in the study (``confirm:FINGERPRINT:ROUND``), written when it is taken: an interrupted
run goes on where it was, and the same command again measures nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mptune.choice import Choice
from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import belongs_to
from mptune.engines.base import Failure, Measurement
from mptune.engines.timing.latency import Latency, pool_latencies
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.plan import PrecisionPlan
from mptune.json_form import encode_float
from mptune.settings import LatencySettings, SearchSettings, Tolerance
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, Evaluation
from mptune.tuning.fronts.choosing import could_be_chosen
from mptune.tuning.fronts.dominance import in_doubt, pareto
from mptune.tuning.fronts.limits import feasible
from mptune.tuning.listener import Listener, count_down
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.sessions import Sessions, anchored
from mptune.tuning.steps.attempts import FAULTS_IN_A_ROW, check_machine, once_more, try_twice
from mptune.tuning.steps.limits import Limits

_PREFIX = "confirm:"


def candidates(
    evaluations: Sequence[Evaluation], tolerances: Sequence[Tolerance] = (), dropped: Collection[str] = ()
) -> tuple[Evaluation, ...]:
    """The front, all-FP32 and all-FP16, each once, in the order in which they are measured: the baseline first."""
    sound = [e for e in evaluations if e.plan.fingerprint not in dropped]
    seeds = [e for e in evaluations if e.origin in (ORIGIN_FP32, ORIGIN_FP16) and e.is_finite]
    off = [e for e in evaluations if e.plan.fingerprint in dropped and e.is_finite]
    unique = {e.plan.fingerprint: e for e in (*seeds, *off, *pareto(feasible(sound, tolerances)))}
    return _in_turn(unique.values())


def _in_turn(evaluations: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """In the order in which they are measured: the baseline first, then by latency."""
    return tuple(sorted(evaluations, key=lambda e: (e.origin != ORIGIN_FP32, e.latency.median_ms)))


def _rivals(
    record: StudyRecord, settings: SearchSettings, rounds: int, every: Sequence[Evaluation]
) -> tuple[Evaluation, ...]:
    """The plans that may become the choice, whether they are on the front or not (``could_be_chosen``)."""
    shown = {e.plan for e in every}
    off = [e for e in _counted(record, settings) if e.is_finite and e.plan not in shown]
    latest = [e for group in (every, off) for e in confirmed_evaluations(record, rounds, settings.latency, group)[0]]
    metrics = (record.metric, *settings.reported_metrics)
    named = {e.plan for e in could_be_chosen(latest, Choice.of(settings), metrics)}
    return tuple(e for e in (*every, *off) if e.plan in named)


def points_to_confirm(record: StudyRecord, settings: SearchSettings, rounds: int) -> tuple[Evaluation, ...]:
    """Which of the candidates to measure again, in their order: at most ``settings.confirm_points``, or a few more.

    The baselines, both ends of the front and the plans that may become the choice always are, these also where they are
    not on the front, then what has been measured already, then evenly spread ones of the rest. Where re-measuring
    changes the choice, what may be chosen now comes in too.
    """
    evaluations, dropped = _counted(record, settings), dropped_plans(record, settings.ignore)
    every = candidates(evaluations, settings.tolerance, dropped)
    rivals = _rivals(record, settings, rounds, every)
    every = _in_turn([*every, *(e for e in rivals if e not in every)])
    if len(every) <= settings.confirm_points:
        return every
    sound = [e for e in evaluations if e.plan.fingerprint not in dropped]
    front = pareto(feasible(sound, settings.tolerance))
    notes = record.notes(_PREFIX)
    wanted = {e.plan.fingerprint for e in (*rivals, *front[:1], *front[-1:])}
    wanted |= {e.plan.fingerprint for e in every if e.origin in (ORIGIN_FP32, ORIGIN_FP16)}
    wanted |= {e.plan.fingerprint for e in every if _rounds_of(notes, e.plan)}
    points = [e for e in every if e.plan.fingerprint in wanted]
    rest = [e for e in every if e.plan.fingerprint not in wanted]  # by latency
    count = min(max(settings.confirm_points - len(points), 0), len(rest))
    points += [rest[int((number + 0.5) * len(rest) / count)] for number in range(count)]
    kept = {e.plan.fingerprint for e in points}
    return tuple(e for e in every if e.plan.fingerprint in kept)


def dropped_plans(record: StudyRecord, ignored: tuple[str, ...] = ()) -> dict[str, OutputError]:
    """Fingerprint -> error of the plans whose outputs are not finite on the held-out samples; ignored ones left out."""
    return {
        key.split(":")[1]: OutputError.from_json(note["error"])
        for key, note in record.notes(_PREFIX).items()
        if "error" in note and not _is_finite(OutputError.from_json(note["error"]), ignored)
    }


def _counted(record: StudyRecord, settings: SearchSettings) -> tuple[Evaluation, ...]:
    """All evaluations, judged without the outputs that are ignored."""
    return tuple(evaluation.ignoring(settings.ignore) for evaluation in record.evaluations())


def rounds_needed(settings: SearchSettings, latency_source: str) -> int:
    """How often each point is measured: once where latency is predicted, since it cannot differ."""
    return max(1, settings.confirm_rounds) if latency_source == "measured" else 1


def announce(listener: Listener, record: StudyRecord, settings: SearchSettings) -> None:
    """Say how much is left of a search: of its budget, and to confirm a front as long as that of now."""
    baseline, done = record.baseline(), record.spent
    if baseline is not None:
        failed = len(record.failed())
        points = min(done - failed, settings.confirm_points)
        size = record.space.size + 1  # all-FP32 may be outside of it
        confirming = points * rounds_needed(settings, baseline.latency.source)
        count_down(listener, done, max(0, min(settings.budget, size) - done) + confirming)


def missing(record: StudyRecord, points: Iterable[Evaluation], rounds: int) -> list[tuple[int, Evaluation]]:
    """What has not been measured yet, or failed: round and point, interleaved."""
    notes = record.notes(_PREFIX)
    points = list(points)
    return [
        (number, point)
        for number in range(rounds)
        for point in points
        if not _holds(notes.get(_key(point.plan, number)), point.metric)
    ]


def to_measure(
    record: StudyRecord, settings: SearchSettings, rounds: int, failed: Collection[str] = ()
) -> list[tuple[int, Evaluation]]:
    """What a confirmation measures next, as ``missing`` lists it; empty where it is done.

    First every point once, then round by round, as far as ``rounds``, the chosen point and those in doubt
    (``mptune.tuning.fronts.dominance.in_doubt``): a round is judged before the next one begins.
    """
    points = [p for p in points_to_confirm(record, settings, rounds) if p.plan.fingerprint not in failed]
    if todo := missing(record, points, 1):
        return todo
    kept, _ = confirmed_evaluations(record, rounds, settings.latency, points)
    again = {e.plan.fingerprint for e in in_doubt(feasible(kept, settings.tolerance), settings.max_latency_ms)}
    again |= {e.plan.fingerprint for e in _rivals(record, settings, rounds, points)}
    wanted = [point for point in points if point.plan.fingerprint in again]
    return next((todo for count in range(2, rounds + 1) if (todo := missing(record, wanted, count))), [])


def confirm(
    record: StudyRecord,
    toolchain: Toolchain,
    settings: SearchSettings,
    listener: Listener,
    rounds: int,
    limits: Limits | None = None,
) -> None:
    """Measure what is missing (``to_measure``), each round in a fresh process, until a limit is reached.

    Rounds are interleaved, so that a slow drift of the machine meets all points alike.
    """
    failed: set[str] = set()
    while todo := to_measure(record, settings, rounds, failed):
        if limits is not None and (limit := limits.reached()) is not None:
            listener.stage(f"stopped re-measuring: {limit.value}; the same command goes on with it")
            return
        plans = len({point.plan.fingerprint for _, point in todo})
        every = len(candidates(_counted(record, settings), settings.tolerance, dropped_plans(record, settings.ignore)))
        of_all = f" of {every}" if every > max(plans, settings.confirm_points) else ""
        listener.stage(f"re-measuring {plans}{of_all} plan{'s' if plans > 1 or of_all else ''}")
        failed |= measure_again(todo, record, toolchain, settings, listener, limits)


def measure_again(
    todo: Sequence[tuple[int, Evaluation]],
    record: StudyRecord,
    toolchain: Toolchain,
    settings: SearchSettings,
    listener: Listener,
    limits: Limits | None = None,
) -> set[str]:
    """Measure rounds of points, such as ``missing`` lists them, and write each down when it is taken.

    A point that fails is tried once more in a fresh process, then left for the next session. After five faults in a row
    all-FP32 is run, as a control.
    """
    failed: set[str] = set()
    faults, doubts = 0, True  # doubts: until a second measurement has confirmed that a plan is not finite
    last: int | None = None
    for index, (number, point) in enumerate(todo):
        count_down(listener, record.spent + index, len(todo) - index)
        if limits is not None and limits.reached() is not None:
            break
        if number != last:
            toolchain.restart()
            last = number
        if point.plan.fingerprint in failed:
            continue
        job = partial(toolchain.evaluate, point.plan, "held_out")
        what = f"re-measuring plan {point.plan.fingerprint}"
        result = try_twice(job, toolchain, listener, what)
        if isinstance(result, Failure):
            failed.add(point.plan.fingerprint)
            record.set_note(_key(point.plan, number), {"failure": result.to_json()})
            faults += 2
            if faults >= FAULTS_IN_A_ROW and (baseline := record.baseline()) is not None:
                check_machine(partial(toolchain.evaluate, baseline.plan), toolchain, listener, faults)
                faults = 0
            continue
        faults = 0
        if doubts and _doubt(point, result):
            result = once_more(job, result, partial(_doubt, point), toolchain, listener)
            doubts = not _doubt(point, result)
        record.set_note(_key(point.plan, number), _to_note(anchored(record, result)))
    return failed


def confirmed_evaluations(
    record: StudyRecord, rounds: int, latency: LatencySettings, points: Sequence[Evaluation] | None = None
) -> tuple[tuple[Evaluation, ...], tuple[tuple[Evaluation, Failure | None], ...]]:
    """What re-measuring has shown, read back from the record.

    The latency of a point is summed up again over its rounds, with an interval that holds what differs between sessions
    (``Sessions``), as all that was measured since shows it. The held-out error is that of the worst round.
    ``remeasured`` is True only where latency was measured again, in all rounds or until its place was not in doubt.

    Returns:
        The plans as they are now, and those that could not be re-measured: with the failure, and as the search left
        them; or with None where their outputs are not finite on the held-out samples.
    """
    notes, sessions = record.notes(_PREFIX), Sessions(record)
    kept: list[Evaluation] = []
    unconfirmed: list[tuple[Evaluation, Failure | None]] = []
    for point in candidates(record.evaluations()) if points is None else points:
        rounds_taken = _rounds_of(notes, point.plan)
        failure = next((Failure.from_json(n["failure"]) for n in rounds_taken if "failure" in n), None)
        pooled = _pooled(point, rounds_taken, rounds, latency, sessions)
        if not pooled.is_finite:
            unconfirmed.append((pooled, None))
        elif failure is not None:
            unconfirmed.append((point, failure))
        if pooled.is_finite:
            kept.append(pooled)
        elif point.origin == ORIGIN_FP32:
            kept.append(point)
    for point in in_doubt(kept):
        if len([n for n in _rounds_of(notes, point.plan) if _holds(n, point.metric)]) < rounds:
            kept[kept.index(point)] = replace(point, remeasured=False)
    baseline = next((p for p in kept if p.origin == ORIGIN_FP32), record.baseline())
    if baseline is not None:
        kept = [p.with_baseline(baseline.latency.median_ms) for p in kept]
    return tuple(kept), tuple(unconfirmed)


def _doubt(point: Evaluation, measurement: Measurement) -> str:
    """What speaks against a measurement on the held-out samples: a plan is finite in the search; else empty."""
    if _is_finite(measurement.error, point.ignored):
        return ""
    return f"plan {point.plan.fingerprint} gave NaN or Inf on the held-out samples, and gives none"


def _pooled(
    point: Evaluation,
    notes: Sequence[Mapping[str, Any]],
    rounds: int,
    settings: LatencySettings,
    sessions: Sessions,
) -> Evaluation:
    notes = [n for n in notes if _holds(n, point.metric)][:rounds]
    if not notes:
        return replace(point, latency=sessions.corrected(point.latency))
    latencies = [Latency.from_json(n["latency"]) for n in notes]
    errors = [OutputError.from_json(n["error"]) for n in notes]
    values = [(e.non_finite, e.value(point.metric)) for e in (error.without(point.ignored) for error in errors)]
    engines = [n["engine_path"] for n in notes if n["engine_path"] is not None]
    latency = pool_latencies(latencies, settings)
    return replace(
        point,
        latency=sessions.corrected(latency, [each.session for each in latencies]),
        held_out=errors[max(range(len(errors)), key=values.__getitem__)],
        held_out_least=min(value for _, value in values) if len(values) > 1 else None,
        engine_path=engines[-1] if engines else point.engine_path,
        remeasured=latency.source == "measured",
        warnings=tuple(dict.fromkeys((*point.warnings, *(w for n in notes for w in n["warnings"])))),
    )


def _is_finite(error: OutputError, ignored: tuple[str, ...]) -> bool:
    return error.without(ignored).non_finite == 0


def _key(plan: PrecisionPlan, number: int) -> str:
    return f"{_PREFIX}{plan.fingerprint}:{number}"


def _rounds_of(notes: Mapping[str, Any], plan: PrecisionPlan) -> list[Mapping[str, Any]]:
    prefix = f"{_PREFIX}{plan.fingerprint}:"
    by_number = {int(key.removeprefix(prefix)): note for key, note in notes.items() if key.startswith(prefix)}
    return [by_number[number] for number in sorted(by_number)]


def _holds(note: Mapping[str, Any] | None, metric: str) -> bool:
    """Whether a note is a measurement whose statistics hold the metric."""
    if note is None or "error" not in note:
        return False
    return any(belongs_to(name, metric) for statistics in note["error"]["per_output"].values() for name in statistics)


def _to_note(measurement: Measurement) -> dict[str, Any]:
    return {
        "latency": measurement.latency.to_json(),
        "error": measurement.error.to_json(),
        "drift": encode_float(measurement.drift),
        "build_s": encode_float(measurement.build_s),
        "engine_path": None if measurement.engine_path is None else str(measurement.engine_path),
        "warnings": list(measurement.warnings),
    }
