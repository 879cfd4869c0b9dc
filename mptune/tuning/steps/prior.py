"""The sampler's prior: one-group errors and the roofline's terms, as the sampler takes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.graph.plan import Precision
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.sampler.cuts.boundaries import Boundary
from mptune.tuning.sampler.cuts.casts import FIXED, NEVER, CastCounts, Casts, End
from mptune.tuning.sampler.plan_rows import Floats
from mptune.tuning.sampler.posterior import Alternatives, Prior
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.sensitivity import Sensitivity

_ALIKE_SD, _KIND_SD, _ANY_SD = 2.0, 3.0, 3.0
"""Standard deviation of the log of a squared error that is taken from groups of the same pattern, of the same kind, or
from all groups: factors of 2.7 and 4.5 in the error. Blocks of one pattern in a trained network differ so."""

_LARGEST_EXCESS = 2.0
"""The same log, by which an error on few samples is corrected at most: a factor of 2.7 in the error."""

_MAD_TO_SD = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""

MOST_KEPT = 12
"""Parts that are kept apart; the others join the one most like them, which takes the larger share of each group."""


def make_prior(
    space: SearchSpace,
    sensitivity: Sensitivity,
    terms: LatencyTerms | None,
    *,
    exact: bool,
    anchors: Sequence[OutputError] = (),
) -> Prior:
    """The sampler's prior: what is known about errors and latencies before any build.

    Args:
        space: The search space; its free groups are the prior's terms.
        sensitivity: One-group errors; that of a free group which is missing is estimated from groups like it.
        terms: Gains and boundary costs of the roofline, in milliseconds; None if no latency can be predicted.
        exact: Whether latencies are predicted by these terms, so that they have no uncertainty.
        anchors: Errors of evaluated plans, on the samples that one-group errors are taken on.
    """
    position = {group: index for index, group in enumerate(space.free)}
    estimates = log_square_errors(space, sensitivity, anchors)
    squares = tuple(mean for mean, _ in estimates.values()) if sensitivity.errors else None
    sds = tuple(sd for _, sd in estimates.values()) if any(sd for _, sd in estimates.values()) else None
    shares = part_shares([_by_part(sensitivity, group) for group in space.free]) if sensitivity.errors else None
    ops = {group.id: frozenset(group.ops) for group in space.groups}
    operators = tuple(ops[group] for group in space.free)
    reduced = tuple(str(space.reduced_of(group)) for group in space.free)
    reduced = () if set(reduced) <= {str(Precision.FP16)} else reduced
    alternatives = _alternatives(space, terms, position)
    if terms is None:
        return Prior(
            space.free,
            squares,
            operators=operators,
            log_square_sds=sds,
            part_shares=shares,
            reduced=reduced,
            alternatives=alternatives,
        )
    boundaries = _boundaries(space, terms, position)
    # What the pins and TF32 save against all-FP32, the Casts that the pins need under every plan counted in.
    pins = space.plan(dict.fromkeys(space.free, Precision.FP32))
    crossed = sum(c for boundary, c in boundaries.items() if boundary.fp16)
    return Prior(
        groups=space.free,
        log_square_errors=squares,
        log_square_sds=sds,
        part_shares=shares,
        gains_ms=tuple(float(terms.gains_ms.get(group, 0.0)) for group in space.free),
        boundaries=tuple(boundaries),
        boundary_costs_ms=tuple(boundaries.values()),
        fixed_gain_ms=terms.saved_ms(pins) + crossed,
        exact=exact,
        operators=operators,
        reduced=reduced,
        alternatives=alternatives,
    )


def _alternatives(space: SearchSpace, terms: LatencyTerms | None, position: Mapping[str, int]) -> Alternatives | None:
    """What is known of the groups that may be FP16 and BF16; None where there are none."""
    either = [group for group in space.free if group in space.alternatives]
    if not either:
        return None
    groups, unknown = tuple(position[group] for group in either), (math.nan,) * len(either)
    if terms is None:
        return Alternatives(groups, unknown, (0.0,) * len(either))
    columns = {group: len(space.free) + index for index, group in enumerate(either)}

    def end(group: str) -> End:
        if group in space.pinned:
            return FIXED[tuple(Precision).index(space.pinned[group].precision)]
        if group in columns:
            return position[group], columns[group]
        return (NEVER, position[group]) if space.reduced_of(group) is Precision.BF16 else (position[group], NEVER)

    costs_ms: dict[Casts, float] = {}
    for term in terms.boundaries:
        producer = FIXED[0] if term.producer_group is None else end(term.producer_group)
        readers = dict.fromkeys((*map(end, term.consumer_groups), *((FIXED[0],) if term.fp32_consumer else ())))
        tensor = Casts(producer, tuple(reader for reader in readers if reader != producer))
        if tensor.readers and tensor.members:
            costs_ms[tensor] = costs_ms.get(tensor, 0.0) + max(term.cost_ms, 0.0)
    pins = space.plan(dict.fromkeys(space.free, Precision.FP32))
    nothing = np.zeros((len(space.free) + len(either), 1), dtype=bool)
    cast_ms = float(np.array(list(costs_ms.values())) @ CastCounts(list(costs_ms)).of(nothing)[:, 0])
    return Alternatives(
        groups,
        unknown,
        (0.0,) * len(either),
        tuple(float(terms.gains_ms.get(group, 0.0)) for group in space.free),
        tuple(costs_ms),
        tuple(costs_ms.values()),
        terms.saved_ms(pins) + cast_ms,
    )


def _boundaries(space: SearchSpace, terms: LatencyTerms, position: Mapping[str, int]) -> dict[Boundary, float]:
    """The boundaries between groups with their costs in ms, where each group is FP32 or one reduced precision.

    A tensor's Casts are one to FP32, where its producer is reduced and a reader is not, and one to each other reduced
    precision that it is read in. With a producer, readers of its own reduced precision (alike) and of the other one
    (others) that is ``not all reduced + (producer or alike) any reduced + others any reduced - 1``, which holds for
    every plan; the constant is in the prior's fixed gain.
    """
    boundaries: dict[Boundary, float] = {}

    def add(ends: Iterable[str | None], cost_ms: float, *, fp32: bool = False, reduced: bool = False) -> None:
        groups = [end for end in dict.fromkeys(ends) if end is not None]
        members = tuple(sorted(position[end] for end in groups if end in position))
        reduced = reduced or any(end in space.pinned for end in groups)
        if members and not (fp32 and reduced) and len(members) + fp32 + reduced > 1:
            boundary = Boundary(members, fp32, reduced)
            boundaries[boundary] = boundaries.get(boundary, 0.0) + cost_ms

    for term in terms.boundaries:
        cost_ms, producer = max(term.cost_ms, 0.0), term.producer_group
        own = Precision.FP32 if producer is None else _lowest(space, producer)
        readers: dict[Precision, list[str]] = {}
        for group in term.consumer_groups:
            readers.setdefault(_lowest(space, group), []).append(group)
        fp32 = bool(readers.pop(Precision.FP32, ())) or term.fp32_consumer
        alike = readers.pop(own, [])
        if own is not Precision.FP32:
            others = [group for group in itertools.chain(*readers.values()) if group in position]
            if others and not fp32:
                add((producer, *alike, *others), cost_ms, reduced=True)
            add((producer, *alike), cost_ms, fp32=fp32 or bool(others))
        for groups in readers.values():
            add(groups, cost_ms, fp32=True)
    return boundaries


def _lowest(space: SearchSpace, group: str) -> Precision:
    """What a free group is where it is not FP32, and a pinned one under every plan."""
    pin = space.pinned.get(group)
    return space.reduced_of(group) if pin is None else pin.precision


def _by_part(sensitivity: Sensitivity, group: str) -> Mapping[Hashable, float] | None:
    """Error of a group alone in each part of the outputs; None where that was not taken, or does not add in squares."""
    error = sensitivity.taken.get(group)
    if error is None or error.non_finite or sensitivity.metric not in ADD_IN_SQUARES:
        return None
    return dict[Hashable, float](error.by_part(sensitivity.metric).items())


def log_square_errors(
    space: SearchSpace, sensitivity: Sensitivity, anchors: Sequence[OutputError] = ()
) -> dict[str, tuple[float, float]]:
    """Of each free group, the log of its squared error and the standard deviation that is due to what was not taken.

    A group without an error has the mean of those of its pattern, else of its kind, else of all. Some samples magnify
    every rounding; so where an error was taken on few samples it is divided by how much larger the anchors' errors are
    on those than on all (ratio estimation; Cochran, Sampling Techniques, 1977, chapter 6). Of the anchors' ratios the
    median is taken: in one plan a few groups may have most of the error, and those on a sample of their own.
    """
    excess = {
        count: _excess([anchor.of_first(count) for anchor in anchors], anchors, sensitivity.metric)
        for count in {error.sample_count for group, error in sensitivity.taken.items() if group in sensitivity.doubts}
    }

    def excess_of(group: str) -> tuple[float, float]:
        is_partial = group in sensitivity.doubts and group in sensitivity.taken
        return excess[sensitivity.taken[group].sample_count] if is_partial else (0.0, 0.0)

    taken_logs = {
        group: math.inf if math.isinf(error) else 2.0 * math.log(max(error, ERROR_FLOOR)) - excess_of(group)[0]
        for group, error in sensitivity.errors.items()
    }
    finite: dict[str, list[float]] = {}
    facts = {group.id: (f"pattern {group.pattern}", f"kind {group.kind}", "") for group in space.groups}
    for group in space.free:
        if math.isfinite(taken_logs.get(group, math.inf)):
            for fact in facts[group]:
                finite.setdefault(fact, []).append(taken_logs[group])
    return {
        group: (taken_logs[group], math.hypot(2.0 * sensitivity.doubts.get(group, 0.0), excess_of(group)[1]))
        if group in taken_logs
        else _estimate(facts[group], finite)
        for group in space.free
    }


def _excess(few: Sequence[OutputError], on_all: Sequence[OutputError], metric: str) -> tuple[float, float]:
    """Log of the anchors' squared errors on few samples, less that on all their samples, and its standard deviation.

    As if one more anchor had shown no excess: one alone says little of the groups.
    """
    values = [(on_few.value(metric), all_.value(metric)) for on_few, all_ in zip(few, on_all, strict=True)]
    ratios = [
        2.0 * math.log(on_few / all_)
        for on_few, all_ in values
        if min(on_few, all_) > ERROR_FLOOR and on_few + all_ < math.inf
    ]
    if not ratios:
        return 0.0, 0.0
    excess = float(np.median([0.0, *ratios]))
    spread = float(np.median(np.abs(np.array([0.0, *ratios]) - excess))) * _MAD_TO_SD
    return min(max(excess, -_LARGEST_EXCESS), _LARGEST_EXCESS), min(spread, _LARGEST_EXCESS)


def _estimate(facts: tuple[str, str, str], finite: Mapping[str, list[float]]) -> tuple[float, float]:
    for fact, sd in zip(facts, (_ALIKE_SD, _KIND_SD, _ANY_SD), strict=True):
        values = finite.get(fact)
        if values and fact != "pattern ":
            return float(np.mean(values)), math.hypot(sd, float(np.std(values)))
    return math.log(1e-4**2), 4.5


def part_shares(errors: Sequence[Mapping[Hashable, float] | None]) -> tuple[tuple[float, ...], ...] | None:
    """Squared error of each group in each part, over that in its worst part.

    Args:
        errors: of each group, part -> error; None where that is not known: such a group is taken to meet every part.

    Returns:
        Shape (n_groups, n_parts), the parts that cannot decide left out; None where one part decides whatever the plan.
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
