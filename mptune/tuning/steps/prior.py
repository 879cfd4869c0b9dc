"""What the sampler knows before a proposal: the roofline, one-group errors as far as they were taken, emulated plans.

Where emulations take long only few are taken before the first plan, and more between plans, in proportion to the plans
that have been evaluated: so a resumed search takes the same as one that was not interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.base import Failure
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.plan import Precision
from mptune.settings import SearchSettings
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR, REFERENCE_ERROR
from mptune.tuning.fronts.searched_error import part_errors, searched_as, searched_error
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.plans import Boundary, Crossings, End
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.sampler.precision import PrecisionSampler, derive_seed
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.attempts import in_fresh_processes
from mptune.tuning.steps.emulated import PlanEmulator
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, OneGroupErrors, Sensitivity
from mptune.tuning.steps.shared_errors import SharedErrors

SEEDS_FIRST = 2
"""Seeds before the sampler's first plan where emulations take long: all-FP32 and all-FP16."""

AT_FIRST = 200
"""Emulations of one group on one sample that come soon, at least; as many as all seeds take, where those take more. One
computes about half of the model, as it begins at a waist before its group."""

_SOON = 2.0
"""Until then, emulations for each sample of the plans that have been evaluated: about as long as those took."""

_PER_PLAN_SAMPLE = 0.5
"""Later, emulations between two proposals for each sample of a plan's evaluation: a quarter of its time."""

_LEARNING_SHARE = 0.5
"""Of the time of a build, that emulations of plans may take from which the groups' errors are learnt."""

_ALIKE_SD, _KIND_SD, _ANY_SD = 2.0, 3.0, 3.0
"""Standard deviation of the log of a squared error that is taken from groups of the same pattern, of the same kind, or
from all groups: factors of 2.7 and 4.5 in the error. Blocks of one pattern in a trained network differ so."""

MOST_PARTS = 12
"""Parts of the outputs that are told apart; the others are taken together."""


class Knowledge:
    """All that is known of a search's plans beside their evaluations; more of it is found out between plans.

    Attributes:
        prior: what the sampler knows by now.
        terms: the roofline's, by which latencies are predicted; None where they cannot be.
        emulator: of whole plans; None where an evaluation is an emulation itself.
        seeds_first: how many seeds come before the sampler's first plan; None for all.
    """

    def __init__(
        self,
        record: StudyRecord,
        space: SearchSpace,
        toolchain: Toolchain,
        settings: SearchSettings,
        listener: Listener,
        law: str,
        data_dir: Path,
        limits: Limits | None = None,
    ) -> None:
        """Ask for the roofline; errors go on where ``data_dir`` ends. ``law`` is the statistic that adds in squares."""
        self._record, self._space, self._toolchain = record, space, toolchain
        self._settings, self._listener, self._law = settings, listener, law
        path, shared = data_dir / SENSITIVITY_JSON, SharedErrors(record, searched_as(law, settings))
        self.errors = OneGroupErrors(space, toolchain, law, path, listener, shared, settings, limits)
        self.emulator: PlanEmulator | None = None
        if toolchain.error_source == "measured" and toolchain.emulation_holds:
            self.emulator = PlanEmulator(space, toolchain, law, listener, settings, limits)
        terms = in_fresh_processes(toolchain.latency_terms, toolchain, listener, "predicting latencies")
        if isinstance(terms, Failure):
            text = "no latency can be predicted, so the search learns it from builds alone"
            listener.warning(f"{text}: {terms.message}")
        self.terms = None if isinstance(terms, Failure) else terms
        self._per_plan = toolchain.emulated_samples.per_plan
        self.seeds_first = None if self._per_plan is None else SEEDS_FIRST
        self._searched: dict[int, float] = {}  # number of an evaluation -> its error as the search weighs it
        self._announced = ""
        self._update()

    def sampler(self) -> PrecisionSampler:
        """Emulate the groups that are due by now; what proposes the next plan then.

        Called before each proposal, so that none waits for many.
        """
        record, evaluations = self._record, self._record.evaluations()
        if self._per_plan is None:
            allowed = math.inf
        else:
            seeds, spent = len(self._space.seeds), record.spent
            soon = min(max(AT_FIRST, _SOON * seeds * self._per_plan), _SOON * spent * self._per_plan)
            allowed = soon + _PER_PLAN_SAMPLE * self._per_plan * max(0, spent - seeds)
        if self.errors.take(allowed) or not self._announced:
            self._update()
            missing = len(self._space.free) - len(self.errors.sensitivity().errors)
            estimated = f"; {missing} one-group errors are estimated from groups like them"
            text = f"searching{estimated if missing else ''}"
            if text != self._announced:
                self._announced = text
                self._listener.stage(text)
        to_learn = 0
        if self.emulator is not None:
            self.emulator.learn_measured(evaluations)
            build_s = float(np.median([evaluation.build_s for evaluation in evaluations] or [0.0]))
            to_learn = self.emulator.affordable(_LEARNING_SHARE * build_s)
        for evaluation in evaluations:
            if evaluation.number not in self._searched:
                self._searched[evaluation.number] = searched_error(evaluation.error, self._law, self._settings)
        return PrecisionSampler(
            self.prior,
            derive_seed(self._settings.seed, 0),
            # Of metrics that do not add in squares the largest error so far bounds the front.
            error_scale=REFERENCE_ERROR if record.metric in ADD_IN_SQUARES else math.inf,
            emulate=self.emulator,
            emulations_to_learn=to_learn,
            errors=self._searched,
            error_name=searched_as(self._law, self._settings),
        )

    def _update(self) -> None:
        sensitivity = self.errors.sensitivity()
        exact = self._toolchain.latency_source == "predicted"
        self.prior = make_prior(self._space, sensitivity, self.terms, exact=exact, settings=self._settings)
        if self.emulator is not None:
            uncertain = {*sensitivity.doubts, *self._space.not_emulated}
            self.emulator.learn({g: e for g, e in sensitivity.output_errors.items() if g not in uncertain})


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

    A group without an error has the mean of those of its pattern, else of its kind, else of all. That of one that is
    not emulated is in doubt till it is measured.
    """
    logs = {
        group: math.inf if math.isinf(error) else 2.0 * math.log(max(error, ERROR_FLOOR))
        for group, error in sensitivity.errors.items()
    }
    alike = {g.id: (f"pattern {g.pattern}" if g.pattern else "", f"kind {g.kind}", "any") for g in space.groups}
    finite: dict[str, list[float]] = {}
    for group in space.free:
        for fact in alike[group] if math.isfinite(logs.get(group, math.inf)) else ():
            finite.setdefault(fact, []).append(logs[group])
    squares: dict[str, tuple[float, float]] = {}
    for group in space.free:
        if group in logs:
            doubt = _ANY_SD if group in space.not_emulated else 2.0 * sensitivity.doubts.get(group, 0.0)
            squares[group] = logs[group], doubt
            continue
        squares[group] = math.log(1e-4**2), 4.5
        for fact, sd in zip(alike[group], (_ALIKE_SD, _KIND_SD, _ANY_SD), strict=True):
            if fact and (values := finite.get(fact)):
                squares[group] = float(np.mean(values)), math.hypot(sd, float(np.std(values)))
                break
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
