"""Latencies that differ beyond noise: no more pairs of one latency are called different than is promised."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mptune.data.metrics.paired import t_quantile
from mptune.engines.timing.latency import LEVEL, Latency, is_lower

PAIRS = 4_000


def known(ms: float, half_ms: float, degrees: float = math.inf) -> Latency:
    return Latency(ms, ms, ms, (ms - half_ms, ms + half_ms), 0.0, "measured", degrees=degrees)


@pytest.mark.parametrize("degrees", [1, 3, 6, 20])
@pytest.mark.parametrize("sds", [(1.0, 1.0), (1.0, 0.1), (0.0, 1.0)])
def test_of_one_latency_no_more_pairs_are_called_different_than_promised(
    degrees: int, sds: tuple[float, float]
) -> None:
    """All intervals rest on one estimate of a variance."""
    generator = np.random.default_rng(0)
    medians = 1000.0 + np.array(sds)[:, None] * generator.normal(size=(2, PAIRS))
    found = np.sqrt(generator.chisquare(degrees, PAIRS) / degrees)
    halves = t_quantile(0.975, degrees) * np.array(sds)[:, None] * found
    ranked = disjoint = 0
    for (one, other), (half, other_half) in zip(medians.T, halves.T, strict=True):
        pair = known(one, half, degrees), known(other, other_half, degrees)
        ranked += is_lower(*pair) + is_lower(*reversed(pair))
        disjoint += abs(one - other) > half + other_half
    assert ranked <= (LEVEL + 3.0 * math.sqrt(LEVEL / PAIRS)) * PAIRS
    assert disjoint >= ranked
    if degrees <= 3 or 0.0 in sds:
        assert disjoint > 0.0125 * PAIRS, "disjoint intervals alone promise less"


def test_intervals_that_overlap_are_never_apart() -> None:
    assert not is_lower(known(1.0, 0.1), known(1.19, 0.1))
    assert is_lower(known(1.0, 0.1), known(1.21, 0.1))
    assert not is_lower(known(1.21, 0.1), known(1.0, 0.1))


def test_few_degrees_of_freedom_want_more_than_intervals_that_do_not_overlap() -> None:
    one, other = known(1.0, 0.1), known(1.21, 0.1)
    few = replace(other, degrees=3.0)
    assert is_lower(one, replace(other, degrees=30.0))
    assert not is_lower(replace(one, degrees=3.0), few)
    assert not is_lower(one, few), "one of both is enough"
    assert is_lower(replace(one, degrees=3.0), replace(few, median_ms=1.4, ci95_ms=(1.3, 1.5)))
