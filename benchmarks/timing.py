"""The jobs of ``benchmarks.measuring``: open a plan's session, run it, time it in alternation with the baseline."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.archive import read_samples
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Stage
from mptune.engines.latency import Latency, Repetitions, calibrate, monotonic_ms, time_in_turn
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions, Tf32
from mptune.engines.outputs import value_error
from mptune.engines.samples import Outputs
from mptune.processes.child import WorkerState
from mptune.settings import LatencySettings

FIRST_WARMUP_MS, WARMUP_MS = 1500.0, 15.0
"""Before calibrating, for the clocks; before a candidate, whose first runs have warmed it up already."""


@dataclass(frozen=True)
class Timed:
    """Result of ``TimeJob``: the alternating latencies of candidate and baseline, errors, seconds."""

    latency: Latency
    baseline: Latency
    error: OutputError
    build_s: float
    device_s: float


@dataclass(frozen=True)
class Ready:
    """Result of ``ReadyJob``: the repetitions, and the baseline's latency."""

    repetitions: Repetitions
    baseline_ms: float


@dataclass(frozen=True, kw_only=True)
class SessionJob:
    """What both jobs open: the baseline, which stays open, on one set of samples."""

    baseline: Path
    samples: Path
    provider: Provider
    latency: LatencySettings
    tf32_by_environment: bool = False

    def open(self, state: WorkerState) -> tuple[OrtSession, Sequence[Outputs], SessionOptions]:
        tf32: Tf32 = "off by environment" if self.tf32_by_environment else "off"
        options = SessionOptions(self.provider, "timed", tf32=tf32, cuda_graph=self.latency.cuda_graph)
        samples = state.cached("samples", self.samples, partial(read_samples, self.samples))
        key = (self.baseline, options)
        return state.cached("baseline", key, lambda: open_session(self.baseline, options)), samples, options


@dataclass(frozen=True, kw_only=True)
class ReadyJob(SessionJob):
    """Open the baseline's session (a first session loads libraries too), warm the clocks up, and time it."""

    repetitions: Repetitions | None

    def run(self, state: WorkerState) -> Ready:
        baseline, samples, _ = self.open(state)
        watch = baseline.stopwatch(samples[0])
        found = calibrate(watch.run_once, monotonic_ms, self.latency)
        repetitions = self.repetitions or replace(found, warmup_ms=WARMUP_MS)
        baseline_ms = time_in_turn([watch], repetitions, self.latency)[0].median_ms
        # Every session collects garbage when it closes, among all that was ever imported: 25 ms each time.
        gc.collect()
        gc.freeze()
        return Ready(repetitions, baseline_ms)


@dataclass(frozen=True, kw_only=True)
class TimeJob(SessionJob):
    """Open a candidate's session, run it on all samples, and time it in turn with the baseline on the first."""

    model: Path
    reference: Path
    repetitions: Repetitions

    def run(self, state: WorkerState) -> Timed:
        base, samples, options = self.open(state)
        wanted = state.cached("reference", self.reference, partial(read_samples, self.reference))
        started = time.perf_counter()
        candidate = open_session(self.model, options)
        try:
            build_s = time.perf_counter() - started
            state.enter(Stage.TIME)
            started = time.perf_counter()
            outputs = [candidate.run(sample) for sample in samples]  # the first run chooses and loads kernels
            watches = [session.stopwatch(samples[0]) for session in (base, candidate)]
            baseline, latency = time_in_turn(watches, self.repetitions, self.latency)
            device_s = time.perf_counter() - started
            error = objective(outputs, wanted)
        finally:
            candidate.close()
        return Timed(latency, baseline, error, build_s, device_s)


def objective(outputs: Sequence[Outputs], wanted: Sequence[Outputs]) -> OutputError:
    """Relative L2 and the share of non-finite values, as ``compare_outputs`` has them, without other statistics."""
    pairs = {name: [(got[name], ref[name]) for got, ref in zip(outputs, wanted, strict=True)] for name in wanted[0]}
    return OutputError(
        {
            name: {
                "relative_l2": tuple(value_error(got, ref) for got, ref in arrays),
                "non_finite": tuple(float((np.isfinite(ref) & ~np.isfinite(got)).sum()) for got, ref in arrays),
            }
            for name, arrays in pairs.items()
        }
    )
