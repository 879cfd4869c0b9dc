"""A stopwatch on a CUDA stream: events around each execution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mptune.engines.cuda.runtime import Event, Stream


class StreamStopwatch:
    """Times executions by events around each of them on their stream, as trtexec does. Implements ``Stopwatch``."""

    def __init__(
        self,
        enqueue: Callable[[], None],
        stream: Stream,
        clock: Callable[[], float],
        transfer_ms: float | None = None,
        *,
        delay: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is executed yet.

        Args:
            clock: of the host, in milliseconds.
            delay: keeps the stream busy for a moment. For an ``enqueue`` that returns only when the execution has
                ended: it would find the stream empty each time, and its duration is no cost of the host. None where
                ``enqueue`` returns at once.
        """
        self.transfer_ms = transfer_ms
        self._enqueue = enqueue
        self._stream = stream
        self._clock = clock
        self._delay = delay
        self._enqueue_ms: list[float] = []

    @property
    def enqueue_ms(self) -> float | None:
        """See ``Stopwatch``."""
        return None if self._delay or not self._enqueue_ms else float(np.median(self._enqueue_ms))

    def run_once(self) -> None:
        """See ``Stopwatch``."""
        self._enqueue()
        self._stream.synchronize()

    def value_ms(self, executions: int) -> float:
        """See ``Stopwatch``. The device does not wait for the host, unless enqueueing takes longer than executing.

        An execution, or the delay, always stands before the first event: on an empty stream the launch of the execution
        (20 to 150 us on a Jetson's CPU) would lie between the events. trtexec enqueues one ahead, too.
        """
        pairs: list[tuple[Event, Event]] = []
        try:
            for _ in range(executions):
                pairs.append((Event(), Event()))
            if executions > 1 or self._delay is None:
                self._enqueue()
            for start, end in pairs:
                if self._delay is not None:
                    self._delay()
                before = self._clock()
                start.record(self._stream)
                self._enqueue()
                end.record(self._stream)
                self._enqueue_ms.append(self._clock() - before)
            self._stream.synchronize()
            return float(np.mean([start.elapsed_ms(end) for start, end in pairs]))
        finally:
            for event in (event for pair in pairs for event in pair):
                event.close()

    def span_ms(self, executions: int) -> float:
        """See ``Stopwatch``: one event before all executions, which the device has reached, and one after them."""
        start, end = Event(), Event()
        try:
            start.record(self._stream)
            self._stream.synchronize()
            for _ in range(executions):
                self._enqueue()
            end.record(self._stream)
            self._stream.synchronize()
            return start.elapsed_ms(end)
        finally:
            start.close()
            end.close()
