"""The few points of a front that a person looks at first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.fronts.neighbours import cheap_exactness, error_ratio

MOST = 6

LEAST_APART = math.log(1.1)
"""Points between others are worth a row where their errors differ by this much."""

CLEARLY_FASTER = 0.98
CLEARLY_EXACT = 0.7
"""A neighbour is worth a look that takes at most this much of the latency, or of the error."""


def recommended(front: Front) -> list[tuple[Evaluation, list[str]]]:
    """At most six plans with what each is, the fastest first: the chosen one, its neighbours, both baselines.

    A neighbour is the nearest point that is clearly faster, and the nearest that is clearly more exact; where there
    is none, the nearest. What room is left goes to the points whose errors lie farthest from those of the others.
    """
    found: dict[str, tuple[Evaluation, list[str]]] = {}
    for evaluation, role in _roles(front):
        fingerprint = evaluation.plan.fingerprint
        if fingerprint in found:
            found[fingerprint] = (evaluation, [one for one in found[fingerprint][1] if one not in role] + [role])
        elif len(found) < MOST:
            found[fingerprint] = (evaluation, [role])
    mixed = [point for point in front.points if point.plan.reduced_groups]
    while len(found) < MOST:
        gap = _farthest(mixed, [evaluation for evaluation, _ in found.values()])
        if gap is None:
            break
        found[gap.plan.fingerprint] = (gap, ["between"])
    return sorted(found.values(), key=lambda one: one[0].latency.median_ms)


def _roles(front: Front) -> Iterator[tuple[Evaluation, str]]:
    chosen = front.chosen
    if chosen is not None:
        yield chosen, "chosen"
    yield front.fp32, "all-FP32"
    if front.fp16 is not None:
        yield front.fp16, front.fp16_name
    if chosen is None:
        return
    others = [point for point in front.points if point.plan != chosen.plan]
    faster = [point for point in others if point.latency.median_ms < chosen.latency.median_ms]
    slower = [point for point in others if point.latency.median_ms >= chosen.latency.median_ms]
    most_ms = chosen.latency.median_ms * CLEARLY_FASTER
    if faster:
        yield next((p for p in reversed(faster) if p.latency.median_ms <= most_ms), faster[-1]), "faster"
    if slower:
        yield next((p for p in slower if error_ratio(p, chosen) <= CLEARLY_EXACT), slower[0]), "more exact"
    cheap = cheap_exactness(front.points, chosen)
    if cheap is not None:
        yield cheap.evaluation, "more exact for little latency"


def _farthest(points: Sequence[Evaluation], taken: Sequence[Evaluation]) -> Evaluation | None:
    """The point whose error is farthest from those that are taken, as a ratio; None where none differs by a tenth."""

    def distance(point: Evaluation) -> float:
        errors = [max(evaluation.judged_error, ERROR_FLOOR) for evaluation in taken if evaluation.is_finite]
        own = math.log(max(point.judged_error, ERROR_FLOOR))
        return min((abs(own - math.log(error)) for error in errors), default=math.inf)

    best = max(points, key=distance, default=None)
    return best if best is not None and distance(best) > LEAST_APART else None
