"""The front re-measured: its points measured again in fresh processes, their error taken on held-out samples.

Every point is measured in a fresh process, which gives its held-out error; of a long front what may become the choice,
and so much of the rest as shows that it holds. After that whatever may become the choice is measured again, round by
round, until the choice stands.

Each measurement is a note in the study (``confirm:FINGERPRINT:ROUND``), written when it is taken: an interrupted
run goes on where it was, and the same command again measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mptune.choice import Choice
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, Measurement
from mptune.engines.failures import describe
from mptune.engines.latency import Latency, pool_latencies
from mptune.json_form import JsonForm, encode_float
from mptune.settings import LatencySettings, SearchSettings, Tolerance
from mptune.tuning.bench import Bench, count_down
from mptune.tuning.choosing import could_be_chosen
from mptune.tuning.dominance import pareto
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, ORIGIN_TF32, Evaluation
from mptune.tuning.plan_limits import feasible
from mptune.tuning.record.record import CONFIRM_NOTE, UNPINNED_NOTE, Sessions, StudyRecord, anchored

_BASELINES = (ORIGIN_FP32, ORIGIN_FP16)


@dataclass(frozen=True)
class _Round(JsonForm):
    """What one fresh process measured of a point."""

    latency: Latency
    error: OutputError
    drift: float
    engine_path: str | None
    warnings: tuple[str, ...]


_Rounds = dict[str, dict[int, _Round | Failure]]
"""Fingerprint -> number of the round -> what came of it."""


def _rounds(record: StudyRecord) -> _Rounds:
    rounds: _Rounds = {}
    for key, note in sorted(record.notes(CONFIRM_NOTE).items()):
        fingerprint, _, number = key.removeprefix(CONFIRM_NOTE).partition(":")
        outcome = Failure.from_json(note["failure"]) if "failure" in note else _Round.from_json(note)
        rounds.setdefault(fingerprint, {})[int(number)] = outcome
    return rounds


def evaluate_tf32(bench: Bench) -> None:
    """Evaluate all-FP32 with TF32 once in a study: the default of TensorRT and of ONNX Runtime's CUDA provider."""
    record, fp32 = bench.record, bench.record.baseline()
    if fp32 is None or record.tf32() is not None:
        return
    measured = bench.toolchain.evaluate_tf32()
    if isinstance(measured, Failure):
        bench.listener.warning(f"all-FP32 with TF32 was not evaluated: {describe(measured)}")
    elif measured is not None:
        measured = anchored(record, measured)
        measured = replace(measured, latency=Sessions(record).corrected(measured.latency))
        evaluation = Evaluation.from_measurement(
            fp32.plan,
            measured,
            number=fp32.number,
            origin=ORIGIN_TF32,
            metric=fp32.metric,
            baseline_ms=fp32.latency.median_ms,
        )
        record.keep_tf32(evaluation)


def rounds_needed(settings: SearchSettings, latency_source: str) -> int:
    """How often a plan is measured at most: once where latency is predicted, since it cannot differ."""
    return max(1, settings.confirm_rounds) if latency_source == "measured" else 1


def candidates(
    evaluations: Sequence[Evaluation], tolerances: Sequence[Tolerance] = (), dropped: Collection[str] = ()
) -> tuple[Evaluation, ...]:
    """The front, all-FP32 and all-FP16, each once, in the order in which they are measured: the baseline first."""
    sound = [e for e in evaluations if e.plan.fingerprint not in dropped]
    seeds = [e for e in evaluations if e.origin in _BASELINES and e.is_finite]
    off = [e for e in evaluations if e.plan.fingerprint in dropped and e.is_finite]
    return _in_turn((*seeds, *off, *pareto(feasible(sound, tolerances))))


def _in_turn(evaluations: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """Each plan once, in the order in which they are measured: the baseline first, then by latency."""
    unique = {e.plan.fingerprint: e for e in evaluations}
    return tuple(sorted(unique.values(), key=lambda e: (e.origin != ORIGIN_FP32, e.latency.median_ms)))


def to_measure(
    record: StudyRecord,
    settings: SearchSettings,
    rounds: int,
    failed: Collection[str] = (),
    *,
    all_plans: bool = False,
    beside: int = 1,
) -> list[tuple[int, Evaluation]]:
    """What is measured next, round and plan; empty where all is done.

    First every point once: the front, the baselines and, on it or not, what may become the choice
    (``could_be_chosen``). Where these are more than ``settings.confirm_points``: the choice's, the baselines, both ends
    of the front and what has been measured already, then evenly spread ones of the rest. Then round by round, as far as
    ``rounds``, what may become the choice: a round is judged before the next one begins. ``all_plans``: every plan has
    all rounds. ``beside``: processes that open plans at once; with several the rounds after the first are one, which
    comes along where the first has fewer plans than there are processes.
    """
    evaluations, measured = [e.ignoring(settings.ignore) for e in record.evaluations()], _rounds(record)
    points = rivals = _in_turn(e for e in evaluations if e.is_finite)
    if not all_plans:
        front = candidates(evaluations, settings.tolerance, dropped_plans(record, settings.ignore, measured))
        every = _in_turn((*rivals, *front))
        latest, _ = confirmed_evaluations(record, rounds, settings.latency, every, measured)
        metrics = (record.metric, *settings.reported_metrics)
        named = {e.plan for e in could_be_chosen(latest, Choice.from_settings(settings), metrics, record.tf32())}
        rivals = tuple(e for e in every if e.plan in named)
        points = _in_turn((*front, *rivals))
        if len(points) > settings.confirm_points:
            shown = pareto(feasible(points, settings.tolerance))
            wanted = {e.plan for e in (*rivals, *shown[:1], *shown[-1:])}
            wanted |= {e.plan for e in points if e.origin in _BASELINES or e.plan.fingerprint in measured}
            rest = [e for e in points if e.plan not in wanted]  # by latency
            count = min(max(settings.confirm_points - (len(points) - len(rest)), 0), len(rest))
            wanted |= {rest[int((number + 0.5) * len(rest) / count)].plan for number in range(count)}
            points = tuple(e for e in points if e.plan in wanted)

    todo: list[tuple[int, Evaluation]] = []
    for numbers in [range(k, k + 1) for k in range(rounds)] if beside == 1 else [range(1), range(1, rounds)]:
        of_round = [p for p in (points if 0 in numbers else rivals) if p.plan.fingerprint not in failed]
        pairs = [(number, point) for number in numbers for point in of_round]
        todo += [(n, p) for n, p in pairs if not _holds(measured.get(p.plan.fingerprint, {}).get(n), p)]
        if len(todo) >= beside:
            break
    return todo


def _holds(outcome: _Round | Failure | None, point: Evaluation) -> bool:
    """Whether it is a measurement whose statistics hold the point's metric."""
    return isinstance(outcome, _Round) and outcome.error.has(point.metric)


def remeasure(bench: Bench, rounds: int, *, all_plans: bool = False) -> None:
    """Measure what ``to_measure`` names until nothing is left, or a limit is reached.

    Processes are started at first, as none of the plans is to be measured where it was searched, and where a plan would
    come into one again. A plan that fails is left for the next session.
    """
    record, listener, failed = bench.record, bench.listener, set[str]()
    tools, beside = bench.toolchain, bench.toolchain.most_ahead
    bench.faults, bench.has_doubts = 0, True
    tools.restart()
    while todo := to_measure(record, bench.settings, rounds, failed, all_plans=all_plans, beside=beside):
        count = len({point.plan.fingerprint for _, point in todo})
        listener.stage(f"re-measuring {count} plan{'s' if count > 1 else ''}")
        if todo[-1][0] + 1 < rounds and beside == 1:
            tools.start_ahead()  # of the next round
        opened, left = 0, len(todo)
        todo = todo if beside == 1 else todo[:beside]  # processes that are left take a later round
        for index, (number, point) in enumerate(todo):
            count_down(listener, record.spent + index, left - index)
            if (limit := bench.limits.reached()) is not None:
                listener.stage(f"stopped re-measuring: {limit.value}; the same command resumes it")
                return
            fingerprint = point.plan.fingerprint
            if index >= opened:
                plans = [each.plan for _, each in todo[index : index + tools.most_ahead]]
                if not (placed := tools.open_ahead(plans, "held_out")):  # each process has had the first of them
                    tools.restart()
                    placed = tools.open_ahead(plans, "held_out")
                opened = index + max(placed, 1)
            result = bench.evaluate(point.plan, "held_out", partial(_doubt, point))
            if isinstance(result, Failure):
                failed.add(fingerprint)
                note = {"failure": result.to_json()}
            else:
                result = anchored(record, result)
                path = None if result.engine_path is None else str(result.engine_path)
                note = _Round(result.latency, result.error, result.drift, path, result.warnings).to_json()
            record.set_note(f"{CONFIRM_NOTE}{fingerprint}:{number}", note)


def emulate_unpinned(bench: Bench) -> None:
    """Emulate all-FP16 without the pins of findings on the held-out samples: for the reader, as no plan breaks them."""
    record, plan = bench.record, bench.record.space.unpinned_fp16
    if plan is None or record.note(UNPINNED_NOTE) is not None or bench.limits.reached() is not None:
        return
    errors = bench.toolchain.prediction.emulation.errors((plan,), "held_out")
    if not isinstance(errors, Failure):
        error = errors[0].without(bench.settings.ignore)
        value = math.inf if error.non_finite else error.value(record.metric)
        record.set_note(UNPINNED_NOTE, [plan.fingerprint, encode_float(value)])


def _doubt(point: Evaluation, measurement: Measurement) -> str:
    """What speaks against a measurement on the held-out samples: a plan is finite in the search; else empty."""
    if measurement.error.without(point.ignored).non_finite == 0:
        return ""
    return f"plan {point.plan.fingerprint} gave NaN or Inf on the held-out samples, and gives none"


def dropped_plans(
    record: StudyRecord, ignored: tuple[str, ...] = (), measured: _Rounds | None = None
) -> dict[str, OutputError]:
    """Fingerprint -> error of the plans whose outputs are not finite on the held-out samples; ignored ones left out."""
    return {
        fingerprint: outcome.error
        for fingerprint, rounds in (_rounds(record) if measured is None else measured).items()
        for outcome in rounds.values()
        if isinstance(outcome, _Round) and outcome.error.without(ignored).non_finite
    }


def confirmed_evaluations(
    record: StudyRecord,
    rounds: int,
    latency: LatencySettings,
    points: Sequence[Evaluation],
    measured: _Rounds | None = None,
) -> tuple[tuple[Evaluation, ...], tuple[tuple[Evaluation, Failure | None], ...]]:
    """What re-measuring has shown, read back from the record; and what was not confirmed, with why it failed.

    Where a plan did not fail, but is not finite on the held-out samples, that is None. Latencies are summed up again
    over the rounds, with an interval that holds what differs between sessions; the held-out error is that of the worst
    round. ``remeasured`` is True only where latency was measured again.
    """
    measured, sessions = _rounds(record) if measured is None else measured, Sessions(record)
    confirmed: list[Evaluation] = []
    unconfirmed: list[tuple[Evaluation, Failure | None]] = []
    for point in points:
        outcomes = [outcome for _, outcome in sorted(measured.get(point.plan.fingerprint, {}).items())]
        failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
        held = [each for each in outcomes if isinstance(each, _Round) and _holds(each, point)][:rounds]
        pooled = replace(point, latency=sessions.corrected(point.latency))
        if held:
            errors = [each.error.without(point.ignored) for each in held]
            values = [(error.non_finite, error.value(point.metric)) for error in errors]
            total = pool_latencies([each.latency for each in held], latency)
            pooled = replace(
                point,
                latency=sessions.corrected(total, [each.latency.session for each in held]),
                held_out=held[max(range(len(held)), key=values.__getitem__)].error,
                engine_path=next((each.engine_path for each in reversed(held) if each.engine_path), point.engine_path),
                remeasured=total.source == "measured",
                warnings=tuple(dict.fromkeys((*point.warnings, *(text for each in held for text in each.warnings)))),
            )
        if not pooled.is_finite:
            unconfirmed.append((pooled, None))
        elif failure is not None:
            unconfirmed.append((point, failure))
        if pooled.is_finite or point.origin == ORIGIN_FP32:
            confirmed.append(pooled if pooled.is_finite else point)
    baseline = next((p for p in confirmed if p.origin == ORIGIN_FP32), record.baseline())
    if baseline is not None:
        confirmed = [p.with_baseline(baseline.latency.median_ms) for p in confirmed]
    return tuple(confirmed), tuple(unconfirmed)
