"""The timings of single sessions that a study holds, and the intervals of latencies that follow from all of them.

A plan's sessions stand in its evaluation and in what re-measuring recorded. Those that were opened anew, to learn how
far sessions of one plan differ, are one note of the study.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mptune.engines.base import Measurement
from mptune.engines.latency import Latency
from mptune.engines.spread import SessionSpread, SessionTiming
from mptune.graph.plan import PrecisionPlan
from mptune.json_form import decode_float
from mptune.tuning.record.record import StudyRecord

DRIFTED = 1.1
"""A baseline that changes by more than this factor during a search is worth a warning."""

_REOPENED = "reopened sessions"
_FIRST = "first baseline"
_CONFIRMED = "confirm:"


class Sessions:
    """Reads a record's sessions once; made anew, it sees what has been added."""

    def __init__(self, record: StudyRecord) -> None:
        first = record.note(_FIRST) or {}
        self._anchor_ms: float | None = first.get("ms")
        timings: dict[str, list[SessionTiming]] = {}
        for evaluation in record.evaluations():
            if evaluation.latency.session is not None:
                timings.setdefault(evaluation.plan.fingerprint, []).append(evaluation.latency.session)
        for fingerprint, timing in record.note(_REOPENED) or ():
            timings.setdefault(fingerprint, []).append(SessionTiming.from_json(timing))
        for key, note in record.notes(_CONFIRMED).items():
            if (session := note.get("latency", {}).get("session")) is not None:
                timings.setdefault(key.split(":")[1], []).append(SessionTiming.from_json(session))
        self.spread = SessionSpread(timings, first.get("session"))

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


def anchored(record: StudyRecord, measurement: Measurement) -> Measurement:
    """A measurement whose drift correction refers to the first baseline of the whole study.

    A toolchain knows the first baseline of its own session only. The study remembers the very first, so that figures of
    a search that was resumed days later stay comparable.
    """
    baseline, session = measurement.baseline, measurement.latency.session
    if baseline is None:
        return measurement
    first = record.note(_FIRST)
    if first is None:
        first = {"ms": baseline.median_ms * measurement.drift, "session": None if session is None else session.baseline}
        record.set_note(_FIRST, first)
    return measurement.with_drift(first["ms"] / baseline.median_ms)


def keep_reopened(record: StudyRecord, plan: PrecisionPlan, timings: Sequence[SessionTiming]) -> None:
    """Note the sessions of a plan that were opened anew. Of two workers that do so at once, one may be overwritten."""
    added = [[plan.fingerprint, timing.to_json()] for timing in timings]
    record.set_note(_REOPENED, [*(record.note(_REOPENED) or ()), *added])
