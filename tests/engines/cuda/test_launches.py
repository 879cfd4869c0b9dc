# ruff: noqa: N802, N815 (the names are CUDA's)
"""The launch of an execution lies outside of the interval that is timed, however many executions make a value."""

from __future__ import annotations

from typing import Any

import pytest

from mptune.engines.cuda import runtime as cuda
from mptune.engines.cuda.runtime import StreamStopwatch
from mptune.engines.timing.latency import Repetitions, time_in_turn
from mptune.settings import LatencySettings


class SlowLaunches:
    """A host and a device, each with a clock: a call costs the host time, and arrives when the host has made it."""

    cudaStreamNonBlocking = 1

    def __init__(self, launch_us: float) -> None:
        self.launch_ms = launch_us / 1000
        self.host_ms = self.device_ms = 0.0

    def enqueue(self, work_ms: float) -> None:
        self.host_ms += self.launch_ms
        self.device_ms = max(self.device_ms, self.host_ms) + work_ms

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        return 0, 1

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        self.host_ms = max(self.host_ms, self.device_ms)
        return (0,)

    def cudaEventCreate(self) -> tuple[int, list[float]]:
        return 0, []

    def cudaEventRecord(self, event: list[float], stream: int) -> tuple[int]:
        event[:] = [max(self.device_ms, self.host_ms)]
        return (0,)

    def cudaEventElapsedTime(self, start: list[float], end: list[float]) -> tuple[int, float]:
        return 0, end[0] - start[0]

    def cudaEventDestroy(self, event: Any) -> tuple[int]:
        return (0,)


@pytest.mark.parametrize("launch_us", [20.0, 150.0])
@pytest.mark.parametrize("executions", [1, 2, 4])
def test_no_launch_is_inside(launch_us: float, executions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 ms against 3 ms, as a baseline and its candidate: both must come out as they are."""
    device = SlowLaunches(launch_us)
    monkeypatch.setattr(cuda, "runtime", lambda: device)
    stream = cuda.Stream()
    watches = [StreamStopwatch(lambda ms=ms: device.enqueue(ms), stream, lambda: device.host_ms) for ms in (12.0, 3.0)]
    repetitions = Repetitions(10, executions)
    baseline, candidate = time_in_turn(watches, repetitions, LatencySettings(warmup_ms=0.0))
    assert baseline.median_ms == pytest.approx(12.0)
    assert candidate.median_ms == pytest.approx(3.0)
