"""The sampler's prior: what is known about errors and latencies before any build, from emulation and the roofline."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.files import read_json
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm
from mptune.settings import SearchSettings
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.dominance import ERROR_FLOOR
from mptune.tuning.plan_limits import part_errors, searched_error
from mptune.tuning.sampler.plans import Boundary, Crossings, End
from mptune.tuning.sampler.trials import Prior
from mptune.tuning.space import SearchSpace

SENSITIVITY_JSON = "sensitivity.json"
"""Name of the file in the run's data directory."""


_UNTAKEN_SD = 3.0
"""Standard deviation of the log of a squared error that is taken from other groups: a factor of 4.5 in the error."""

MOST_PARTS = 12
"""Parts of the outputs that are told apart; the others are taken together."""


@dataclass(frozen=True)
class Sensitivity(JsonForm):
    """One-group errors.

    Attributes:
        metric: the statistic.
        errors: group id -> error with that group alone in FP16; ``inf`` where it is not finite. Groups whose error has
            not been taken are missing.
        output_errors: group id -> the statistics behind its error, by sample.
        doubts: group id -> standard deviation of the logarithm of its error, against the error on all samples; missing
            where all were taken.
    """

    metric: str
    errors: Mapping[str, float]
    output_errors: Mapping[str, OutputError] = field(default_factory=dict)
    doubts: Mapping[str, float] = field(default_factory=dict)

    def ignoring(self, outputs: Collection[str]) -> Sensitivity:
        """The same without some outputs of the model."""
        counted = {group: error.without(outputs) for group, error in self.output_errors.items()}
        errors = {**self.errors, **{g: error_value(e, self.metric) for g, e in counted.items()}}
        return replace(self, errors=errors, output_errors=counted)

    @classmethod
    def load(cls, path: Path, metric: str) -> Sensitivity:
        """What a search has left for explanations; empty where there is nothing of this metric that can be read."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            read = cls.from_json(read_json(path))
            if read.metric == metric:
                return read
        return cls(metric, {})


def error_value(error: OutputError, metric: str) -> float:
    """The statistic of an error; ``inf`` where an output is not finite."""
    value = error.value(metric)
    return value if error.non_finite == 0 and math.isfinite(value) else math.inf


def make_prior(
    space: SearchSpace,
    sensitivity: Sensitivity,
    terms: LatencyTerms | None,
    *,
    exact: bool,
    settings: SearchSettings | None = None,
) -> Prior:
    """The sampler's prior: what is known about errors and latencies before any build.

    Errors of free groups that are missing are estimated from groups like them. ``exact`` latencies are predicted by
    these terms, so that they have no uncertainty; without terms none can be predicted.
    """
    groups, precisions = space.free, tuple(str(space.reduced_of(group)) for group in space.free)
    settings, law = settings or SearchSettings(), sensitivity.metric
    prior = Prior(groups, precisions=() if {*precisions} <= {str(Precision.FP16)} else precisions)
    if sensitivity.errors:
        output_errors = sensitivity.output_errors
        errors = {g: searched_error(e, law, settings) for g, e in output_errors.items()}
        squares = log_square_errors(space, replace(sensitivity, errors={**sensitivity.errors, **errors}))
        add = law in ADD_IN_SQUARES
        parts = [part_errors(output_errors[g], law, settings) if add and g in output_errors else {} for g in groups]
        prior = replace(
            prior,
            log_square_errors=tuple(mean for mean, _ in squares.values()),
            log_square_sds=tuple(sd for _, sd in squares.values()),
            part_shares=part_shares(parts),
        )
    if terms is None:
        return prior
    boundaries = _boundaries(space, terms)
    # What the pins and TF32 save against all-FP32, the Casts that the pins need under every plan counted in.
    pins = space.plan(dict.fromkeys(space.free, Precision.FP32))
    casts = Crossings(prior.columns, tuple(boundaries)).of(np.zeros((len(groups), 1), dtype=bool))[:, 0].tolist()
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


def log_square_errors(space: SearchSpace, sensitivity: Sensitivity) -> dict[str, tuple[float, float]]:
    """Of each free group, the log of its squared error and the standard deviation that is due to what was not taken.

    A group without an error has the mean of those of its kind, else of all. That of one that is not emulated is in
    doubt till it is measured.
    """
    kinds = {group.id: group.kind for group in space.groups}
    logs = {g: 2.0 * math.log(max(e, ERROR_FLOOR)) if e < math.inf else e for g, e in sensitivity.errors.items()}
    finite = {group: value for group, value in logs.items() if group in space.free and math.isfinite(value)}
    squares: dict[str, tuple[float, float]] = {}
    for group in space.free:
        if group in logs:
            doubt = _UNTAKEN_SD if group in space.not_emulated else 2.0 * sensitivity.doubts.get(group, 0.0)
            squares[group] = logs[group], doubt
            continue
        of_kind = [value for other, value in finite.items() if kinds[other] == kinds[group]]
        others = of_kind or list(finite.values()) or [math.log(1e-4**2)]
        squares[group] = float(np.mean(others)), math.hypot(_UNTAKEN_SD, float(np.std(others)))
    return squares


def part_shares(errors: Sequence[Mapping[str, float]]) -> tuple[tuple[float, ...], ...] | None:
    """Squared error of each group in each part, over that in its worst part, shape (n_groups, n_parts).

    A group whose errors are not known is taken to meet every part. None where one part decides whatever the plan.
    """
    parts = list(dict.fromkeys(part for by_part in errors for part in by_part))
    shares = np.ones((len(errors), len(parts)))
    for row, by_part in zip(shares, errors, strict=True):
        values = np.array([by_part.get(part, 0.0) for part in parts])
        if np.isfinite(values).all() and values.max(initial=0.0) > 0:
            row[:] = (values / values.max()) ** 2
    # A part that has no larger share of any group than another one never decides.
    chosen: list[int] = []
    for part in np.argsort(-shares.sum(axis=0), kind="stable").tolist():
        if not any((shares[:, part] <= shares[:, other]).all() for other in chosen):
            chosen.append(part)
    if len(chosen) < 2:
        return None
    # Those with the largest shares first; the last ones are taken together, each group with its largest share of them.
    apart, rest = shares[:, chosen[: MOST_PARTS - 1]], shares[:, chosen[MOST_PARTS - 1 :]]
    joined = np.hstack([apart, rest.max(axis=1, keepdims=True)]) if rest.size else apart
    return tuple(tuple(map(float, row)) for row in joined)
