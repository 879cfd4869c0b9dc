"""The sampler's prior: one-group errors and the roofline's terms, as the sampler takes them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.graph.plan import Precision
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.sampler.boundaries import Boundary, Crossings, End
from mptune.tuning.sampler.plan_rows import Floats
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.sensitivity import Sensitivity

_ALIKE_SD, _KIND_SD, _ANY_SD = 2.0, 3.0, 3.0
"""Standard deviation of the log of a squared error that is taken from groups of the same pattern, of the same kind, or
from all groups: factors of 2.7 and 4.5 in the error. Blocks of one pattern in a trained network differ so."""

MOST_KEPT = 12
"""Parts that are kept apart; the others join the one most like them, which takes the larger share of each group."""


def make_prior(
    space: SearchSpace,
    sensitivity: Sensitivity,
    terms: LatencyTerms | None,
    *,
    exact: bool,
) -> Prior:
    """The sampler's prior: what is known about errors and latencies before any build.

    Errors of free groups that are missing are estimated from groups like them. ``exact`` latencies are predicted by
    these terms, so that they have no uncertainty; without terms none can be predicted.
    """
    groups, precisions = space.free, tuple(str(space.reduced_of(group)) for group in space.free)
    errors = list(log_square_errors(space, sensitivity).values())
    prior = Prior(
        groups,
        tuple(mean for mean, _ in errors) if sensitivity.errors else None,
        log_square_sds=tuple(sd for _, sd in errors) if any(sd for _, sd in errors) else None,
        part_shares=part_shares([_by_part(sensitivity, group) for group in groups]) if sensitivity.errors else None,
        precisions=() if {*precisions} <= {str(Precision.FP16)} else precisions,
    )
    if terms is None:
        return prior
    boundaries = _boundaries(space, terms)
    crossings = Crossings(prior.columns, tuple(boundaries))
    # What the pins and TF32 save against all-FP32, the Casts that the pins need under every plan counted in.
    pins = space.plan(dict.fromkeys(space.free, Precision.FP32))
    casts = crossings.of(np.zeros((len(groups), 1), dtype=bool))[:, 0].tolist()
    crossed = sum(cost_ms * count for cost_ms, count in zip(boundaries.values(), casts, strict=True) if count)
    return replace(
        prior,
        gains_ms=tuple(terms.gain_ms(group, space.reduced_of(group)) for group in groups),
        boundaries=tuple(boundaries),
        boundary_costs_ms=tuple(boundaries.values()),
        fixed_gain_ms=terms.saved_ms(pins) + crossed,
        exact=exact,
    )


def _boundaries(space: SearchSpace, terms: LatencyTerms) -> dict[Boundary, float]:
    """The boundaries between groups with their costs in ms."""
    columns = {group: column for column, group in enumerate(space.free)}

    def end(group: str | None) -> End:
        if group is None:
            return str(Precision.FP32)
        return str(space.pinned[group].precision.stored) if group in space.pinned else columns[group]

    labels = {*map(space.reduced_of, space.free)} | {pin.precision for pin in space.pinned.values()}
    is_symmetric = len(labels - {Precision.FP32}) == 1
    boundaries: dict[Boundary, float] = {}
    for term in terms.boundaries:
        producer, *readers = map(end, (term.producer_group, *term.consumer_groups))
        ends = dict.fromkeys((producer, *readers, *((end(None),) if term.fp32_consumer else ())))
        if is_symmetric:  # whichever of them computes it: tensors of the same ends are one boundary
            fixed = sorted(end for end in ends if isinstance(end, str))
            free = sorted(end for end in ends if not isinstance(end, str))
            if len(fixed) > 1:
                continue  # cast under every plan
            ends = dict.fromkeys((*free, *fixed))
        boundary = Boundary(next(iter(ends)), tuple(ends)[1:])
        if boundary.readers and boundary.members:
            boundaries[boundary] = boundaries.get(boundary, 0.0) + max(term.cost_ms, 0.0)
    return boundaries


def _by_part(sensitivity: Sensitivity, group: str) -> Mapping[Hashable, float] | None:
    """Error of a group alone in each part of the outputs; None where that was not taken, or does not add in squares."""
    error = sensitivity.output_errors.get(group)
    if error is None or error.non_finite or sensitivity.metric not in ADD_IN_SQUARES:
        return None
    return dict[Hashable, float](error.by_part(sensitivity.metric).items())


def log_square_errors(space: SearchSpace, sensitivity: Sensitivity) -> dict[str, tuple[float, float]]:
    """Of each free group, the log of its squared error and the standard deviation that is due to what was not taken.

    A group without an error has the mean of those of its pattern, else of its kind, else of all. That of one that is
    not emulated is in doubt till it is measured.
    """
    taken_logs = {
        group: math.inf if math.isinf(error) else 2.0 * math.log(max(error, ERROR_FLOOR))
        for group, error in sensitivity.errors.items()
    }
    finite: dict[str, list[float]] = {}
    facts = {group.id: (f"pattern {group.pattern}", f"kind {group.kind}", "") for group in space.groups}
    for group in space.free:
        if math.isfinite(taken_logs.get(group, math.inf)):
            for fact in facts[group]:
                finite.setdefault(fact, []).append(taken_logs[group])
    return {
        group: (taken_logs[group], _ANY_SD if group in space.not_emulated else 2.0 * sensitivity.doubts.get(group, 0.0))
        if group in taken_logs
        else _estimate(facts[group], finite)
        for group in space.free
    }


def _estimate(facts: tuple[str, str, str], finite: Mapping[str, list[float]]) -> tuple[float, float]:
    for fact, sd in zip(facts, (_ALIKE_SD, _KIND_SD, _ANY_SD), strict=True):
        values = finite.get(fact)
        if values and fact != "pattern ":
            return float(np.mean(values)), math.hypot(sd, float(np.std(values)))
    return math.log(1e-4**2), 4.5


def part_shares(errors: Sequence[Mapping[Hashable, float] | None]) -> tuple[tuple[float, ...], ...] | None:
    """Squared error of each group in each part, over that in its worst part, shape (n_groups, n_parts).

    A group whose errors are not known is taken to meet every part. None where one part decides whatever the plan.
    """
    parts = list(dict.fromkeys(part for by_part in errors if by_part for part in by_part))
    if len(parts) < 2:
        return None
    shares = np.ones((len(errors), len(parts)))
    for row, by_part in zip(shares, errors, strict=True):
        values = np.array([by_part.get(part, 0.0) if by_part else 0.0 for part in parts])
        if np.isfinite(values).all() and values.max() > 0:
            row[:] = (values / values.max()) ** 2
    shares = _joined(_undominated(shares))
    return None if shares.shape[1] < 2 else tuple(tuple(map(float, row)) for row in shares)


def _undominated(shares: Floats) -> Floats:
    """Without parts that have no larger share of any group than another one has."""
    kept: list[int] = []
    for part in np.argsort(-shares.sum(axis=0), kind="stable"):
        if not any((shares[:, part] <= shares[:, other]).all() for other in kept):
            kept.append(int(part))
    return shares[:, sorted(kept)]


def _joined(shares: Floats) -> Floats:
    """At most ``MOST_KEPT`` parts: those that differ most, each with what is most like it."""
    count = shares.shape[1]
    if count <= MOST_KEPT:
        return shares
    kept = [int(shares.sum(axis=0).argmax())]
    apart = np.abs(shares - shares[:, kept]).max(axis=0)
    while len(kept) < MOST_KEPT:
        kept.append(int(apart.argmax()))
        apart = np.minimum(apart, np.abs(shares - shares[:, kept[-1:]]).max(axis=0))
    nearest = np.abs(shares[:, :, None] - shares[:, None, kept]).max(axis=0).argmin(axis=1)
    return np.stack([shares[:, nearest == k].max(axis=1) for k in range(len(kept))], axis=1)
