"""What the toolchains that time engines have in common: a timer that corrects for drift, and a profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mptune.engines.base import Failure, FailureKind, Measurement, Stage
from mptune.engines.jobs.layer_times import LayerTime, with_group_times
from mptune.engines.jobs.measure import MeasureResult
from mptune.engines.timing.enough import Standings
from mptune.engines.timing.latency import Repetitions
from mptune.engines.timing.record import DRIFT_TEXT, TimingRecord
from mptune.engines.timing.session_timing import SessionTiming
from mptune.errors import MptuneError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import PrecisionPlan
from mptune.settings import LatencySettings
from mptune.targets.engine_memory import EngineMemory

DRIFT_WARNING = 0.1
"""A baseline whose latency has changed by more than this share since its first timing is a warning."""


class Timer:
    """Makes latencies that were taken hours apart comparable.

    The repetitions are calibrated once per device and then frozen, resumed runs included; each latency is scaled by the
    drift of the FP32 baseline that is timed in turn with it.
    """

    def __init__(self, data_dir: Path, engine: str, device: str, settings: LatencySettings) -> None:
        """Read nothing yet.

        Args:
            settings: a record that was taken with others does not count.
        """
        name = re.sub(r"[^a-z0-9]+", "-", f"{engine} {device}".lower()).strip("-")
        self._path = data_dir / f"timing-{name}.json"
        self._settings = settings
        self._record: TimingRecord | None = None
        self.standings = Standings()
        """What was timed in this process, which tells how exact the next timing has to be."""

    def corrected(self, plan: PrecisionPlan, result: MeasureResult | Failure) -> Measurement | Failure:
        """The measurement of a plan, corrected for drift; the first one freezes the repetitions."""
        if isinstance(result, Failure):
            return result
        if result.latency.session is not None:
            self.standings.add(plan.fingerprint, [result.latency.session], result.objective)
        if self._record is None:
            self._record = TimingRecord(result.repetitions, result.baseline.median_ms)
            self._record.write(self._path, self._settings)
        drift = self._record.baseline_ms / result.baseline.median_ms
        warnings = result.warnings
        if abs(drift - 1.0) > DRIFT_WARNING:
            text = (
                f"{DRIFT_TEXT} {1 / drift:.2f} times as long as when it was first measured; latencies are"
                " corrected for it, but less exact: lock the clocks and close other programs"
            )
            warnings = (*warnings, text)
        bytes_ = result.context_bytes
        context = None if bytes_ is None else EngineMemory(None, bytes_, None, "measured")
        return Measurement(
            latency=result.latency.scaled(drift),
            baseline=result.baseline,
            drift=drift,
            error=result.error,
            error_source="measured",
            build_s=result.build_s,
            warnings=warnings,
            memory=context,
        )

    def with_reopened(
        self, plan: PrecisionPlan, timings: tuple[SessionTiming, ...] | Failure
    ) -> tuple[SessionTiming, ...] | Failure:
        """Sessions of a plan that were opened anew, as they are; they tell how far sessions differ."""
        if not isinstance(timings, Failure):
            self.standings.add(plan.fingerprint, timings)
        return timings

    @property
    def repetitions(self) -> Repetitions | None:
        """The frozen repetitions; None before the first timing."""
        self._record = self._record or TimingRecord.read(self._path, self._settings)
        return None if self._record is None else self._record.repetitions


class Profiler:
    """Adds group times to measurements. After one failure it profiles no more: each try may cost the worker."""

    def __init__(self, grouped: GroupedModel) -> None:
        self.failed = False
        self._grouped = grouped

    def profile(
        self, measurement: Measurement, layer_times: Callable[[], tuple[LayerTime, ...] | Failure]
    ) -> Measurement:
        """The measurement with the time of each group; where profiling fails, with a warning instead."""
        try:
            layers = layer_times()
        except (MptuneError, OSError) as error:
            message = error.message if isinstance(error, MptuneError) else str(error)
            layers = Failure(Stage.TIME, FailureKind.ERROR, message)
        self.failed = self.failed or isinstance(layers, Failure)
        return with_group_times(measurement, layers, self._grouped)
