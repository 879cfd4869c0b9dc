"""The timings of single sessions that a study holds, and the intervals of latencies that follow from all of them.

Sessions that were opened anew to learn how far they differ are notes of the study (``session:FINGERPRINT:BASELINE``);
those of evaluations and confirmations stand in their latencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mptune.engines.base import Measurement
from mptune.engines.timing.latency import Latency
from mptune.engines.timing.spread import SessionSpread, SessionTiming
from mptune.graph.plan import PrecisionPlan
from mptune.json_form import decode_float
from mptune.tuning.record.record import StudyRecord

DRIFTED = 1.1
"""A baseline that changes by more than this factor during a search is worth a warning."""

_PREFIX = "session:"
_CONFIRMED = "confirm:"
_FIRST_BASELINE = "first baseline, ms"
_FIRST_SESSION = "first baseline, session"


class Sessions:
    """Reads a record's sessions once; made anew, it sees what has been added."""

    def __init__(self, record: StudyRecord) -> None:
        self._anchor_ms: float | None = record.note(_FIRST_BASELINE)
        timings: dict[str, list[SessionTiming]] = {}
        for evaluation in record.evaluations():
            if evaluation.latency.session is not None:
                timings.setdefault(evaluation.plan.fingerprint, []).append(evaluation.latency.session)
        for key, note in record.notes(_PREFIX).items():
            fingerprint = key.removeprefix(_PREFIX).partition(":")[0]
            timings.setdefault(fingerprint, []).extend(map(SessionTiming.from_json, note))
        for key, note in record.notes(_CONFIRMED).items():
            if (session := note.get("latency", {}).get("session")) is not None:
                fingerprint = key.removeprefix(_CONFIRMED).partition(":")[0]
                timings.setdefault(fingerprint, []).append(SessionTiming.from_json(session))
        self.spread = SessionSpread(timings, record.note(_FIRST_SESSION))

    def corrected(self, latency: Latency, sessions: Iterable[SessionTiming | None] | None = None) -> Latency:
        """The latency with the interval that holds what differs between sessions, too.

        It is scaled by what the baseline's session differs from the first one, as far as that is known.
        """
        given = [latency.session] if sessions is None else list(sessions)
        timed = [session for session in given if session is not None]
        if self._anchor_ms is None or not timed or len(timed) < len(given):
            return latency
        estimate = self.spread.estimate(timed)
        low, high = (self._anchor_ms * bound for bound in estimate.interval())
        scaled = latency.scaled(self._anchor_ms * math.exp(estimate.log_ratio) / latency.median_ms)
        return replace(scaled, ci95_ms=(low, high), degrees=estimate.degrees)


def drift_warning(record: StudyRecord) -> tuple[str, ...]:
    """A line that says how far the latency of the baseline changed, confirmation counted in; else nothing."""
    factors = [evaluation.drift for evaluation in record.evaluations()]
    factors += [decode_float(note["drift"]) for note in record.notes(_CONFIRMED).values() if "drift" in note]
    ratios = [1.0 / factor for factor in factors if math.isfinite(factor) and factor > 0]
    if not ratios or max(ratios) <= DRIFTED * min(ratios):
        return ()
    return (
        f"the FP32 baseline took {min(ratios):.2f} to {max(ratios):.2f} times its first latency while plans were timed:"
        " every latency is stated as if it had stayed the first, so speed-ups hold better than milliseconds; lock the"
        " clocks and close other programs",
    )


def reopened_baselines(record: StudyRecord) -> set[str]:
    """The sessions of the baseline beside which sessions of a plan were opened anew."""
    return {key.removeprefix(_PREFIX).partition(":")[2] for key in record.notes(_PREFIX)}


def anchored(record: StudyRecord, measurement: Measurement) -> Measurement:
    """A measurement whose drift correction refers to the first baseline of the whole study.

    A toolchain knows the first baseline of its own session only. The study remembers the very first, so that figures of
    a search that was resumed days later stay comparable.
    """
    baseline = measurement.baseline
    if baseline is None:
        return measurement
    first_ms = record.note(_FIRST_BASELINE)
    if first_ms is None:
        first_ms = baseline.median_ms * measurement.drift
        record.set_note(_FIRST_BASELINE, first_ms)
        if measurement.latency.session is not None:
            record.set_note(_FIRST_SESSION, measurement.latency.session.baseline)
    return measurement.with_drift(first_ms / baseline.median_ms)


def keep_reopened(record: StudyRecord, plan: PrecisionPlan, timings: Sequence[SessionTiming]) -> None:
    """Write down the sessions of a plan that were opened anew in one worker."""
    by_baseline: dict[str, list[SessionTiming]] = {}
    for timing in timings:
        by_baseline.setdefault(timing.baseline, []).append(timing)
    for baseline, of_baseline in by_baseline.items():
        key = f"{_PREFIX}{plan.fingerprint}:{baseline}"
        record.set_note(key, [*(record.note(key) or []), *(timing.to_json() for timing in of_baseline)])
