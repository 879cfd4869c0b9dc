"""Which of two latencies is lower beyond noise.

95 % intervals that do not overlap are wanted, and are not enough. Two equally wide intervals of one plan are disjoint
in 0.56 % of the pairs where degrees of freedom are many. But all intervals of a search rest on one estimate of the
spread between sessions, with 6 degrees of freedom at first: where it is too low, both intervals are too short. So
1.3 % of the pairs are disjoint at 6 degrees of freedom, 3.5 % at one, and up to 5 % beside a latency that is known much
better (Schenker and Gentleman, The American Statistician 55, 2001). So the difference has to be significant as well,
by its own standard error and Student's t at ``LEVEL``. Each of the two variances has the quantile of its own degrees
of freedom; the quadratic mean of the two is used, which is no less than the mean that Cochran takes (Biometrics 20,
1964).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.paired import t_quantile
from mptune.engines.timing.latency import Latency

Bools = NDArray[np.bool_]

LEVEL = 0.005
"""Share of the pairs of sessions of one plan that may be called different: half of the limit of 1 %, since
values are not independent and sessions stop early. In simulated searches 0.2 to 0.7 % are, by the kind of noise
(``tests/engines/timing/test_enough.py``), by intervals alone 0.7 to 1.8 %."""


def is_lower(one: Latency, other: Latency) -> bool:
    """Whether ``one`` is lower beyond noise; latencies that are predicted have none."""
    if not (one.median_ms < other.median_ms and one.ci95_ms[1] < other.ci95_ms[0]):
        return False
    return other.median_ms - one.median_ms > math.hypot(_reaches(one)[1], _reaches(other)[0])


def are_lower(latencies: Sequence[Latency]) -> Bools:
    """Whether the row's latency is lower than the column's, as ``is_lower``; shape (latencies, latencies)."""
    medians = np.array([one.median_ms for one in latencies])
    lows, highs = (np.array([one.ci95_ms[side] for one in latencies]) for side in (0, 1))
    below, above = (np.array([_reaches(one)[side] for one in latencies]) for side in (0, 1))
    lower: Bools = (medians[:, None] < medians[None, :]) & (highs[:, None] < lows[None, :])
    lower &= medians[None, :] - medians[:, None] > np.hypot(above[:, None], below[None, :])
    return lower


def _reaches(latency: Latency) -> tuple[float, float]:
    """How far the interval of a latency reaches below and above its median, in ms, where its level is ``LEVEL``."""
    stretch, (low, high) = _stretch(latency.degrees), latency.ci95_ms
    return stretch * (latency.median_ms - low), stretch * (high - latency.median_ms)


@lru_cache(maxsize=1024)
def _stretch(degrees: float) -> float:
    """How many times as wide as the 95 % interval one of level ``LEVEL`` is."""
    return t_quantile(1.0 - LEVEL / 2.0, degrees) / t_quantile(0.975, degrees)
