"""How engines are timed: warm-up, frozen repetitions, robust statistics, pooled sessions, which of two is lower."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import t_quantile
from mptune.engines.spread import LEAST_VALUES, SessionTiming, bootstrap_median_interval
from mptune.json_form import JsonForm
from mptune.settings import LatencySettings

MIN_SPAN_MS = 1.0
"""A timed value that spans less than this is dominated by the cost of the clock and of the launch."""
TARGET_SPAN_MS = 10.0
"""Span of one value on the baseline. Some engines have two execution times, which a value of several averages."""
HOST_BOUND_RATIO = 0.8
"""Enqueue over compute time above which the host, not the device, sets the latency (trtexec's own warning)."""
LatencySource = Literal["measured", "predicted"]
"""``measured``: by a clock, on the target. ``predicted``: computed by the roofline, without the target."""
MARGIN: Mapping[LatencySource, float] = {"measured": 0.01, "predicted": 0.02}
"""Share of the latency by which plans count as equally fast, beside the noise."""
LEVEL = 0.005
"""Share of the pairs of sessions of one plan that may be called different: half of the limit of 1 %, since values are
not independent and sessions stop early (simulated: ``tests/engines/test_spread.py``)."""
_MAX_PROBES = 1_000_000
_STEADY = LEAST_VALUES - 1  # last rounds that earlier ones are held against


@dataclass(frozen=True)
class Repetitions(JsonForm):
    """Numbers of executions for one latency: calibrated once on the baseline, then frozen for every candidate."""

    iterations: int  # timed values, at most
    executions_per_value: int = 1
    warmup_ms: float = 0.0


class Stopwatch(Protocol):
    """Times an engine whose inputs are on the device already."""

    @property
    def enqueue_ms(self) -> float | None:
        """Median host milliseconds of one enqueue so far, where the device runs asynchronously; else None."""

    def run_once(self) -> None:
        """Execute once and wait until it has finished."""

    def value_ms(self, executions: int) -> float:
        """Mean milliseconds of this many executions; an untimed one precedes more than one, to fill the caches."""

    def span_ms(self, executions: int) -> float:
        """Milliseconds, by the clock of ``value_ms``, from before the first to after the last execution, no more."""


@dataclass(frozen=True)
class Latency(JsonForm):
    """The latency of one engine, in milliseconds per execution."""

    median_ms: float
    p90_ms: float
    p99_ms: float
    ci95_ms: tuple[float, float]
    """95 % interval. Of values that were just taken it is the bootstrap interval of their median, which knows of this
    session alone; a search widens it by what differs between sessions."""
    cv: float
    source: LatencySource
    raw_ms: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    session: SessionTiming | None = None
    """Against the baseline that it was timed in turn with, which the intervals of a search rest on
    (``mptune.engines.spread``); None where it was timed alone, or is predicted."""
    degrees: float = math.inf
    """Degrees of freedom of the variance that the interval was made of; infinite where they are not known."""

    @classmethod
    def predicted(cls, ms: float) -> Latency:
        """A latency that was computed, not timed: it has no spread."""
        return cls(ms, ms, ms, (ms, ms), 0.0, "predicted")

    def scaled(self, factor: float) -> Latency:
        low, high = self.ci95_ms
        return replace(
            self,
            median_ms=self.median_ms * factor,
            p90_ms=self.p90_ms * factor,
            p99_ms=self.p99_ms * factor,
            ci95_ms=(low * factor, high * factor),
            raw_ms=tuple(round(value * factor, 6) for value in self.raw_ms),
        )


def monotonic_ms() -> float:
    """The host's clock in milliseconds."""
    return time.perf_counter_ns() / 1e6


def summarise(
    raw_ms: Sequence[float],
    settings: LatencySettings | None = None,
    *,
    executions_per_value: int = 1,
    enqueue_ms: float | None = None,
) -> Latency:
    """Statistics of timed values, milliseconds per execution in their order; ``enqueue_ms`` is the host's median."""
    values = np.asarray(raw_ms, dtype=np.float64)
    if not len(values):
        raise ValueError("there are no values")
    median = float(np.median(values))
    p90, p99 = np.percentile(values, (90, 99), method="inverted_cdf")  # ``sorted[n - 1 - int((1 - p/100) * n)]``
    mean, max_cv = float(values.mean()), (settings or LatencySettings()).max_cv
    cv = float(values.std(ddof=1)) / mean if len(values) > 1 and mean > 0 else 0.0
    warnings = []
    if cv > max_cv:
        warnings.append(f"latency varies by {cv:.1%} (limit {max_cv:.1%}): close other programs and lock the clocks")
    span_ms = median * executions_per_value
    if span_ms < MIN_SPAN_MS:
        warnings.append(
            f"one timed value spans only {span_ms:.3f} ms, close to the cost of the clock: use a larger --batch"
        )
    if enqueue_ms is not None and enqueue_ms > HOST_BOUND_RATIO * median:
        warnings.append(
            f"host-bound: enqueueing takes {enqueue_ms:.3f} ms of {median:.3f} ms, so precision hardly changes"
            " it: use a larger --batch, or remove what keeps the model from running as a CUDA graph"
        )
    return Latency(
        median_ms=median,
        p90_ms=float(p90),
        p99_ms=float(p99),
        ci95_ms=bootstrap_median_interval(values),
        cv=cv,
        source="measured",
        raw_ms=tuple(round(float(value), 6) for value in values),
        warnings=tuple(warnings),
    )


def calibrate(run_once: Callable[[], None], clock: Callable[[], float], settings: LatencySettings) -> Repetitions:
    """Calibrate the repetitions on the baseline."""
    run_once()  # Lazy initialisation must not enter the estimate.
    spans: list[float] = []
    start = clock()
    for _ in range(_MAX_PROBES):
        before = clock()
        run_once()
        after = clock()
        spans.append(after - before)
        if len(spans) >= 3 and after - start >= settings.warmup_ms:
            break
    # The later half, when the clocks are steady. At least 1e-4 ms: a coarse clock may measure 0.
    once_ms = max(float(np.median(spans[len(spans) // 2 :])), 1e-4)
    executions = max(1, math.ceil(TARGET_SPAN_MS / once_ms))
    iterations = math.ceil(max(settings.min_iterations / executions, settings.duration_ms / (once_ms * executions)))
    return Repetitions(max(LEAST_VALUES, iterations), executions, settings.warmup_ms)


class HostStopwatch:
    """Times synchronous executions with a host clock. Implements ``Stopwatch``."""

    enqueue_ms = None

    def __init__(self, run_once: Callable[[], None], clock: Callable[[], float] = monotonic_ms) -> None:
        self.run_once = run_once
        self._clock = clock

    def value_ms(self, executions: int) -> float:
        if executions > 1:
            self.run_once()
        return self.span_ms(executions) / executions

    def span_ms(self, executions: int) -> float:
        before = self._clock()
        for _ in range(executions):
            self.run_once()
        return self._clock() - before


def time_in_turn(
    watches: Sequence[Stopwatch],
    repetitions: Repetitions,
    settings: LatencySettings | None = None,
    clock: Callable[[], float] = monotonic_ms,
    is_enough: Callable[[Sequence[Sequence[float]]], bool] = lambda values: False,
) -> tuple[Latency, ...]:
    """Warm up the device, its clocks and its caches under the load that is timed; then time one value of each in turn.

    Executions that are waited for one by one do not warm an H200 up. Rounds after the warm-up that are not steady yet
    do not count (``_first_steady``). ``is_enough`` is asked after each value from ``min_iterations`` executions on,
    with those that count so far.
    """
    executions, start = repetitions.executions_per_value, clock()
    for _ in range(_MAX_PROBES):
        for watch in watches:
            watch.value_ms(executions)
        if clock() - start >= repetitions.warmup_ms:
            break
    least = math.ceil((settings or LatencySettings()).min_iterations / executions)
    values_of: list[list[float]] = [[] for _ in watches]
    first, counted = 0, values_of
    for _ in range(2 * repetitions.iterations):
        for watch, values in zip(watches, values_of, strict=True):
            values.append(watch.value_ms(executions))
        first = max(first, _first_steady(values_of))
        counted = [values[first:] for values in values_of]
        count = len(counted[0])
        if count >= repetitions.iterations or (count >= least and is_enough(counted)):
            break
    return tuple(
        summarise(values, settings, executions_per_value=executions, enqueue_ms=watch.enqueue_ms)
        for watch, values in zip(watches, counted, strict=True)
    )


def _first_steady(values_of: Sequence[Sequence[float]]) -> int:
    """The first round that is no further from the last ``_STEADY`` than these are from each other.

    On an H200 CUDA graphs take some per cent less at first, in some networks for longer than the warm-up.
    """
    values = np.array(values_of)
    rounds = (values / np.maximum(np.median(values, axis=1, keepdims=True), 1e-9)).sum(axis=0)
    last = rounds[-_STEADY:]
    return int(np.argmin(np.maximum(last.min() - rounds, rounds - last.max()) > np.ptp(last)))


def pool_latencies(latencies: Sequence[Latency], settings: LatencySettings) -> Latency:
    """One latency from several rounds of the same engine; the interval holds every round's median."""
    if len(latencies) == 1 or not all(latency.raw_ms for latency in latencies):
        return latencies[0]
    pooled = summarise([value for latency in latencies for value in latency.raw_ms], settings)
    ends = [*pooled.ci95_ms, *(latency.median_ms for latency in latencies)]
    warnings = max(latencies, key=lambda latency: latency.cv).warnings
    return replace(pooled, ci95_ms=(min(ends), max(ends)), warnings=warnings)


def is_lower(latency: Latency, other: Latency) -> bool:
    """Whether a latency is lower than the other beyond noise; latencies that are predicted have none."""
    return bool(are_lower([latency, other])[0, 1])


def are_lower(latencies: Sequence[Latency]) -> NDArray[np.bool_]:
    """Whether the row's latency is lower than the column's, as ``is_lower``; shape (latencies, latencies)."""
    medians = np.array([latency.median_ms for latency in latencies])
    lows, highs = np.array([latency.ci95_ms for latency in latencies]).reshape(-1, 2).T
    # How far intervals reach below and above their medians where their level is ``LEVEL``.
    wide, narrow = ([t_quantile(level, each.degrees) for each in latencies] for level in (1.0 - LEVEL / 2.0, 0.975))
    stretch = np.divide(wide, narrow)
    below, above = stretch * (medians - lows), stretch * (highs - medians)
    lower: NDArray[np.bool_] = (medians[:, None] < medians[None, :]) & (highs[:, None] < lows[None, :])
    lower &= medians[None, :] - medians[:, None] > np.hypot(above[:, None], below[None, :])
    return lower
