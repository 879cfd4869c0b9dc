"""The front re-measured: its points measured again in fresh processes, their error taken on held-out samples.

A long front is re-measured in part: what may become the choice, and so much of the rest as shows that it holds. Every
point is measured in one fresh process, which gives its held-out error; after that only what may be chosen is measured
again, and points whose place is in doubt, until it is not.

Each measurement is a note in the study (``confirm:FINGERPRINT:ROUND``), written when it is taken: an interrupted
run goes on where it was, and the same command again measures nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mptune.choice import Choice
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, Measurement
from mptune.engines.timing.latency import Latency, pool_latencies
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.json_form import JsonForm
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


@dataclass(frozen=True)
class _Round(JsonForm):
    """What one fresh process measured of a point."""

    latency: Latency
    error: OutputError
    drift: float
    engine_path: str | None
    warnings: tuple[str, ...]


def _rounds(record: StudyRecord) -> dict[str, dict[int, _Round | Failure]]:
    """Fingerprint -> number of the round -> what came of it."""
    rounds: dict[str, dict[int, _Round | Failure]] = {}
    for key, note in sorted(record.notes(_PREFIX).items()):
        fingerprint, _, number = key.removeprefix(_PREFIX).partition(":")
        outcome = Failure.from_json(note["failure"]) if "failure" in note else _Round.from_json(note)
        rounds.setdefault(fingerprint, {})[int(number)] = outcome
    return rounds


def rounds_needed(settings: SearchSettings, latency_source: str) -> int:
    """How often each point is measured: once where latency is predicted, since it cannot differ."""
    return max(1, settings.confirm_rounds) if latency_source == "measured" else 1


def announce(listener: Listener, record: StudyRecord, settings: SearchSettings) -> None:
    """Say how much is left of a search: of its budget, and to confirm a front as long as that of now."""
    baseline, done = record.baseline(), record.spent
    if baseline is not None:
        points = min(sum(e.is_finite for e in record.evaluations()), settings.confirm_points)
        size = record.space.size + 1  # all-FP32 may be outside of it
        confirming = points * rounds_needed(settings, baseline.latency.source)
        count_down(listener, done, max(0, min(settings.budget, size) - done) + confirming)


# -- what to measure ----------------------------------------------------------------------------------------------


def candidates(
    evaluations: Sequence[Evaluation], tolerances: Sequence[Tolerance] = (), dropped: Collection[str] = ()
) -> tuple[Evaluation, ...]:
    """The front, all-FP32 and all-FP16, each once, in the order in which they are measured: the baseline first."""
    sound = [e for e in evaluations if e.plan.fingerprint not in dropped]
    seeds = [e for e in evaluations if e.origin in (ORIGIN_FP32, ORIGIN_FP16) and e.is_finite]
    off = [e for e in evaluations if e.plan.fingerprint in dropped and e.is_finite]
    return _in_turn((*seeds, *off, *pareto(feasible(sound, tolerances))))


def _in_turn(evaluations: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """Each plan once, in the order in which they are measured: the baseline first, then by latency."""
    unique = {e.plan.fingerprint: e for e in evaluations}
    return tuple(sorted(unique.values(), key=lambda e: (e.origin != ORIGIN_FP32, e.latency.median_ms)))


def _rivals(
    record: StudyRecord, settings: SearchSettings, rounds: int, points: Sequence[Evaluation]
) -> tuple[Evaluation, ...]:
    """The plans that may become the choice, whether they are among ``points`` or not (``could_be_chosen``)."""
    shown = {e.plan for e in points}
    off = [e.ignoring(settings.ignore) for e in record.evaluations() if e.plan not in shown]
    off = [e for e in off if e.is_finite]
    latest = [e for group in (points, off) for e in confirmed_evaluations(record, rounds, settings.latency, group)[0]]
    metrics = (record.metric, *settings.reported_metrics)
    named = {e.plan for e in could_be_chosen(latest, Choice.of(settings), metrics, record.tf32())}
    return tuple(e for e in (*points, *off) if e.plan in named)


def points_to_confirm(record: StudyRecord, settings: SearchSettings, rounds: int) -> tuple[Evaluation, ...]:
    """Which plans to measure again, in their order: at most ``settings.confirm_points``, or a few more.

    The baselines, both ends of the front and the plans that may become the choice always are, these also where they are
    not on the front, then what has been measured already, then evenly spread ones of the rest. Where re-measuring
    changes the choice, what may be chosen now comes in too.
    """
    evaluations = [e.ignoring(settings.ignore) for e in record.evaluations()]
    every = candidates(evaluations, settings.tolerance, dropped_plans(record, settings.ignore))
    rivals = _rivals(record, settings, rounds, every)
    every = _in_turn((*every, *rivals))
    if len(every) <= settings.confirm_points:
        return every
    front, measured = pareto(feasible(every, settings.tolerance)), _rounds(record)
    wanted = {e.plan.fingerprint for e in (*rivals, *front[:1], *front[-1:])}
    wanted |= {e.plan.fingerprint for e in every if e.origin in (ORIGIN_FP32, ORIGIN_FP16)}
    points = [e for e in every if e.plan.fingerprint in wanted | measured.keys()]
    rest = [e for e in every if e not in points]  # by latency
    count = min(max(settings.confirm_points - len(points), 0), len(rest))
    return _in_turn((*points, *(rest[int((number + 0.5) * len(rest) / count)] for number in range(count))))


def missing(record: StudyRecord, points: Iterable[Evaluation], rounds: int) -> list[tuple[int, Evaluation]]:
    """What has not been measured yet, or failed: round and point, interleaved."""
    measured, points = _rounds(record), list(points)
    every = ((number, point) for number in range(rounds) for point in points)
    return [(n, p) for n, p in every if not _holds(measured.get(p.plan.fingerprint, {}).get(n), p)]


def _holds(outcome: _Round | Failure | None, point: Evaluation) -> bool:
    """Whether it is a measurement whose statistics hold the point's metric."""
    return isinstance(outcome, _Round) and outcome.error.has(point.metric)


def to_measure(
    record: StudyRecord, settings: SearchSettings, rounds: int, failed: Collection[str] = ()
) -> list[tuple[int, Evaluation]]:
    """What a confirmation measures next, as ``missing`` lists it; empty where it is done.

    First every point once, then round by round, as far as ``rounds``, what may be chosen and those in doubt
    (``mptune.tuning.fronts.dominance.in_doubt``): a round is judged before the next one begins.
    """
    points = [p for p in points_to_confirm(record, settings, rounds) if p.plan.fingerprint not in failed]
    if todo := missing(record, points, 1):
        return todo
    confirmed, _ = confirmed_evaluations(record, rounds, settings.latency, points)
    again = {e.plan for e in in_doubt(feasible(confirmed, settings.tolerance), settings.max_latency_ms)}
    again |= {e.plan for e in _rivals(record, settings, rounds, points)}
    wanted = [point for point in points if point.plan in again]
    return next((todo for count in range(2, rounds + 1) if (todo := missing(record, wanted, count))), [])


# -- measuring ----------------------------------------------------------------------------------------------------


def confirm(
    record: StudyRecord,
    toolchain: Toolchain,
    settings: SearchSettings,
    listener: Listener,
    rounds: int,
    limits: Limits | None = None,
) -> None:
    """Measure what is missing (``to_measure``), each round of a plan in another process, until a limit is reached.

    Rounds are interleaved, so that a slow drift of the machine meets all points alike.
    """
    failed: set[str] = set()
    in_process: set[str] = set()
    toolchain.restart()  # none in the process that searched
    while todo := to_measure(record, settings, rounds, failed):
        if limits is not None and (limit := limits.reached()) is not None:
            listener.stage(f"stopped re-measuring: {limit.value}; the same command goes on with it")
            return
        plans = len({point.plan.fingerprint for _, point in todo})
        evaluations = [e.ignoring(settings.ignore) for e in record.evaluations()]
        every = len(candidates(evaluations, settings.tolerance, dropped_plans(record, settings.ignore)))
        of_all = f" of {every}" if every > max(plans, settings.confirm_points) else ""
        listener.stage(f"re-measuring {plans}{of_all} plan{'s' if plans > 1 or of_all else ''}")
        failed |= measure_again(todo, record, toolchain, settings, listener, limits, in_process)


def measure_again(
    todo: Sequence[tuple[int, Evaluation]],
    record: StudyRecord,
    toolchain: Toolchain,
    settings: SearchSettings,
    listener: Listener,
    limits: Limits | None = None,
    in_process: set[str] | None = None,
) -> set[str]:
    """Measure rounds of points, such as ``missing`` lists them, and write each down when it is taken.

    A process is started for the first one, and where the same plan comes again; ``in_process`` are the plans that the
    running process has measured, where the caller has started one.

    A point that fails is tried once more in a fresh process, then left for the next session. After five faults in a row
    all-FP32 is run, as a control.
    """
    failed: set[str] = set()
    faults, doubts = 0, True  # doubts: until a second measurement has confirmed that a plan is not finite
    if in_process is None:
        in_process = set()
        toolchain.restart()
    for index, (number, point) in enumerate(todo):
        count_down(listener, record.spent + index, len(todo) - index)
        if limits is not None and limits.reached() is not None:
            break
        fingerprint = point.plan.fingerprint
        if fingerprint in failed:
            continue
        if fingerprint in in_process:
            toolchain.restart()
            in_process.clear()
        in_process.add(fingerprint)
        job = partial(toolchain.evaluate, point.plan, "held_out")
        result = try_twice(job, toolchain, listener, f"re-measuring plan {fingerprint}")
        note = f"{_PREFIX}{fingerprint}:{number}"
        if isinstance(result, Failure):
            failed.add(fingerprint)
            record.set_note(note, {"failure": result.to_json()})
            faults += 2
            if faults >= FAULTS_IN_A_ROW and (baseline := record.baseline()) is not None:
                check_machine(partial(toolchain.evaluate, baseline.plan), toolchain, listener, faults)
                faults = 0
            continue
        faults = 0
        if doubts and _doubt(point, result):
            result = once_more(job, result, partial(_doubt, point), toolchain, listener)
            doubts = not _doubt(point, result)
        result = anchored(record, result)
        path = None if result.engine_path is None else str(result.engine_path)
        record.set_note(note, _Round(result.latency, result.error, result.drift, path, result.warnings).to_json())
    return failed


def _doubt(point: Evaluation, measurement: Measurement) -> str:
    """What speaks against a measurement on the held-out samples: a plan is finite in the search; else empty."""
    if measurement.error.without(point.ignored).non_finite == 0:
        return ""
    return f"plan {point.plan.fingerprint} gave NaN or Inf on the held-out samples, and gives none"


# -- reading it back ----------------------------------------------------------------------------------------------


def dropped_plans(record: StudyRecord, ignored: tuple[str, ...] = ()) -> dict[str, OutputError]:
    """Fingerprint -> error of the plans whose outputs are not finite on the held-out samples; ignored ones left out."""
    return {
        fingerprint: outcome.error
        for fingerprint, rounds in _rounds(record).items()
        for outcome in rounds.values()
        if isinstance(outcome, _Round) and outcome.error.without(ignored).non_finite
    }


def confirmed_evaluations(
    record: StudyRecord, rounds: int, latency: LatencySettings, points: Sequence[Evaluation] | None = None
) -> tuple[tuple[Evaluation, ...], tuple[tuple[Evaluation, Failure | None], ...]]:
    """What re-measuring has shown, read back from the record; and what was not confirmed, with why it failed.

    Where a plan did not fail, but is not finite on the held-out samples, that is None. ``remeasured`` is True only
    where latency was measured again, in all rounds or until its place was not in doubt.
    """
    measured, sessions = _rounds(record), Sessions(record)
    confirmed: list[Evaluation] = []
    unconfirmed: list[tuple[Evaluation, Failure | None]] = []
    taken_rounds: dict[str, int] = {}
    for point in candidates(record.evaluations()) if points is None else points:
        outcomes = [outcome for _, outcome in sorted(measured.get(point.plan.fingerprint, {}).items())]
        failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
        held = [each for each in outcomes if isinstance(each, _Round) and _holds(each, point)]
        taken_rounds[point.plan.fingerprint] = len(held)
        pooled = _pooled(point, held[:rounds], latency, sessions)
        if not pooled.is_finite:
            unconfirmed.append((pooled, None))
        elif failure is not None:
            unconfirmed.append((point, failure))
        if pooled.is_finite or point.origin == ORIGIN_FP32:
            confirmed.append(pooled if pooled.is_finite else point)
    for point in in_doubt(confirmed):
        if taken_rounds[point.plan.fingerprint] < rounds:
            confirmed[confirmed.index(point)] = replace(point, remeasured=False)
    baseline = next((p for p in confirmed if p.origin == ORIGIN_FP32), record.baseline())
    if baseline is not None:
        confirmed = [p.with_baseline(baseline.latency.median_ms) for p in confirmed]
    return tuple(confirmed), tuple(unconfirmed)


def _pooled(point: Evaluation, rounds: Sequence[_Round], settings: LatencySettings, sessions: Sessions) -> Evaluation:
    """A point over its rounds: latencies summed up again, with an interval that holds what differs between sessions.

    The held-out error is that of the worst round.
    """
    if not rounds:
        return replace(point, latency=sessions.corrected(point.latency))
    errors = [each.error.without(point.ignored) for each in rounds]
    values = [(error.non_finite, error.value(point.metric)) for error in errors]
    latency = pool_latencies([each.latency for each in rounds], settings)
    return replace(
        point,
        latency=sessions.corrected(latency, [each.latency.session for each in rounds]),
        held_out=rounds[max(range(len(rounds)), key=values.__getitem__)].error,
        engine_path=next((each.engine_path for each in reversed(rounds) if each.engine_path), point.engine_path),
        remeasured=latency.source == "measured",
        warnings=tuple(dict.fromkeys((*point.warnings, *(text for each in rounds for text in each.warnings)))),
    )
