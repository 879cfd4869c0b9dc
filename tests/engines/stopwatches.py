"""Latencies of one session alone, for tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mptune.engines.base import EngineSession
from mptune.engines.timing.latency import Latency, Repetitions, calibrate, monotonic_ms, time_in_turn
from mptune.settings import LatencySettings

QUICK = LatencySettings(warmup_ms=0.0, duration_ms=1.0, min_iterations=10)
ONCE = Repetitions(10)


def calibrated(session: EngineSession, feeds: Mapping[str, np.ndarray]) -> Repetitions:
    """How often to repeat."""
    return calibrate(session.stopwatch(feeds).run_once, monotonic_ms, QUICK)


def timed(session: EngineSession, feeds: Mapping[str, np.ndarray], repetitions: Repetitions = ONCE) -> Latency:
    """The latency."""
    return time_in_turn([session.stopwatch(feeds)], repetitions, QUICK)[0]
