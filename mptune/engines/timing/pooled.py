"""One latency from several sessions of the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mptune.engines.timing.latency import Latency, summarise
from mptune.settings import LatencySettings


def pool_latencies(latencies: Sequence[Latency], settings: LatencySettings) -> Latency:
    """One latency from several rounds of the same engine; the interval holds every round's median.

    Where the rounds' sessions are known their interval takes its place.
    """
    if len(latencies) == 1 or not all(one.raw_ms for one in latencies):
        return latencies[0]
    pooled = summarise([value for one in latencies for value in one.raw_ms], settings)
    medians = [one.median_ms for one in latencies]
    low, high = pooled.ci95_ms
    return replace(
        pooled,
        ci95_ms=(min(low, *medians), max(high, *medians)),
        transfer_ms=latencies[0].transfer_ms,
        warnings=max(latencies, key=lambda one: one.cv).warnings,
    )
