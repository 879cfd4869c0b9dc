"""When a timing is exact enough: once no decision hangs on more values.

Sessions of one plan differ by 0.05 to 0.33 % (``mptune.engines.timing.spread``), which more values of one session do
not average out. So values are taken until the doubt within the session is small beside what is between sessions, or
until it is clear where the plan stands: behind a plan that is no less exact, or apart from every plan of the front.

Looking again and again would call differences clear too often if each look were judged as if it were the only one
(Armitage, McPherson and Rowe, Journal of the Royal Statistical Society A 132, 1969). Looks are few, at numbers of
values that grow by ``_LOOK_GROWTH``, and clear is what is ``CLEAR`` standard errors away, the spread between sessions
counted in. No ranking rests on these looks: intervals are computed afterwards, from all sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mptune.engines.timing.session_timing import SessionTiming
from mptune.engines.timing.spread import SessionSpread

LEAST_VALUES = 5
"""Values of each engine that every timing takes: the median of fewer is at the mercy of one outlier."""

CLEAR = 4.0
"""A difference of so many standard errors is clear."""

EXACT = 6e-4
"""Standard error of a log ratio that is small beside any spread between sessions that was seen; one that is still
smaller is wanted where nothing is known of the spread of this model."""

COARSE = 1.2e-3
"""A standard error above this is never enough for a plan that may be on the front: its interval would look careless."""

_OF_SPREAD = 0.5
"""A standard error within a session of at most so much of the spread between sessions widens intervals by 12 %."""

_ASSUMED_SPREAD = 1.5e-3
"""Relative standard deviation between sessions where nothing is known of it: as on an H200, rather too large."""

_LOOK_GROWTH = 1.4


@dataclass(frozen=True)
class Enough:
    """What one timing has to show.

    Attributes:
        spread: between sessions of one plan, relative standard deviation.
        others: log ratio to the baseline and error of plans that were timed before, which it may be on the front with.
        error: of the plan that is timed; NaN where it is not known or not to be judged by it.
    """

    spread: float = _ASSUMED_SPREAD
    others: tuple[tuple[float, float], ...] = ()
    error: float = math.nan

    def is_reached(self, values_ms: Sequence[float], baseline_ms: Sequence[float]) -> bool:
        """Whether values that were taken in turn are enough.

        Args:
            baseline_ms: of the baseline, each before the plan's.
        """
        if len(values_ms) < LEAST_VALUES or not _is_look(len(values_ms)):
            return False
        timing = SessionTiming.of_values("", values_ms, baseline_ms)
        if timing.sd <= max(EXACT, _OF_SPREAD * self.spread):
            return True
        # The spread counts twice: that of this session and that of the other plan's.
        margin = CLEAR * math.hypot(timing.sd, math.sqrt(2.0) * self.spread)
        if timing.log_ratio - self._fastest_as_exact() >= margin:
            return True
        gaps = [abs(timing.log_ratio - log_ratio) for log_ratio, _ in self._front()]
        return timing.sd <= COARSE and len(gaps) > 1 and min(gaps) >= margin

    def _fastest_as_exact(self) -> float:
        """The smallest log ratio of a plan whose error is no larger; infinite where there is none."""
        return min((log_ratio for log_ratio, error in self.others if error <= self.error), default=math.inf)

    def _front(self) -> list[tuple[float, float]]:
        """The others that no other one dominates."""
        found: list[tuple[float, float]] = []
        for log_ratio, error in sorted(self.others):
            if not found or error < found[-1][1]:
                found.append((log_ratio, error))
        return found


def _is_look(count: int) -> bool:
    """Whether so many values are one of the numbers at which values are looked at: 5, 7, 10, 14, 20, 28, ..."""
    look = float(LEAST_VALUES)
    while round(look) < count:
        look *= _LOOK_GROWTH
    return round(look) == count


class Standings:
    """The timings of this process, by plan: what the next timing has to tell apart."""

    def __init__(self) -> None:
        self._timings: dict[str, list[SessionTiming]] = {}
        self._errors: dict[str, float] = {}

    def add(self, plan: str, timings: Sequence[SessionTiming], error: float = math.nan) -> None:
        """Take sessions of a plan, by its fingerprint, and its error; NaN leaves the error that is known."""
        self._timings.setdefault(plan, []).extend(timings)
        if not math.isnan(error):
            self._errors[plan] = error

    def enough(self, plan: str) -> Enough:
        """What the next timing of a plan has to show."""
        spread = SessionSpread(self._timings).sd
        return Enough(
            _ASSUMED_SPREAD if spread is None else spread,
            tuple(
                (float(np.mean([timing.log_ratio for timing in timings])), self._errors[other])
                for other, timings in self._timings.items()
                if other != plan and math.isfinite(self._errors.get(other, math.nan))
            ),
        )
