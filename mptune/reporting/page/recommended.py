"""The few points of a front that a person looks at first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR

MOST = 6

LEAST_APART = math.log(1.1)
"""Points between others are worth a row where their errors differ by this much."""


def recommended(front: Front) -> list[tuple[Evaluation, list[str]]]:
    """At most six plans with what each is, the fastest first: the chosen one, its neighbours, both baselines.

    What room is left goes to the points whose errors lie farthest from those of the others.
    """
    found: dict[str, tuple[Evaluation, list[str]]] = {}
    for evaluation, role in _roles(front):
        fingerprint = evaluation.plan.fingerprint
        if fingerprint in found:
            found[fingerprint][1].append(role)
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
    for beside in front.neighbours:
        yield beside.evaluation, beside.role


def _farthest(points: Sequence[Evaluation], taken: Sequence[Evaluation]) -> Evaluation | None:
    """The point whose error is farthest from those that are taken, as a ratio; None where none differs by a tenth."""

    def distance(point: Evaluation) -> float:
        errors = [max(evaluation.judged_error, ERROR_FLOOR) for evaluation in taken if evaluation.is_finite]
        own = math.log(max(point.judged_error, ERROR_FLOOR))
        return min((abs(own - math.log(error)) for error in errors), default=math.inf)

    best = max(points, key=distance, default=None)
    return best if best is not None and distance(best) > LEAST_APART else None
