"""How long a search will go on, from how long its last plans took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

_LAST = 20
"""So many durations are looked at: builds grow faster with a timing cache, and slower with a worker that is shared."""

_LEAST = 2
"""With fewer nothing is said: the first plans start workers and fill caches."""


class RemainingTime:
    """Learns from each plan that is done; plans of earlier sessions do not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known yet.

        Args:
            clock: seconds, monotonic.
        """
        self._clock = clock
        self._durations_s: deque[float] = deque(maxlen=_LAST)
        self._last: tuple[int, float] | None = None

    def add(self, done: int) -> None:
        """So many plans are done now; several at a time share the time that they took."""
        now_s = self._clock()
        if self._last is not None and done > self._last[0]:
            count = done - self._last[0]
            self._durations_s.extend([(now_s - self._last[1]) / count] * count)
        self._last = done, now_s

    def seconds(self, left: int) -> float | None:
        """Until so many more plans are done, less what has passed since the last one; None where nothing is known.

        The median of the last durations counts: one plan that ran into its deadline is not the next one's duration.
        """
        if self._last is None or len(self._durations_s) < _LEAST:
            return None
        expected_s = median(self._durations_s) * left
        return max(expected_s - (self._clock() - self._last[1]), 0.0)
