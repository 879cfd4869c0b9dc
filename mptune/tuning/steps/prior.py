"""What the sampler knows before a proposal: the roofline, one-group errors as far as they were taken, emulated plans.

Where emulations take long only few are taken before the first plan, and more between plans, in proportion to the plans
that have been evaluated: so a resumed search takes the same as one that was not interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.base import Failure
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR, REFERENCE_ERROR
from mptune.tuning.fronts.searched_error import part_errors, searched_as, searched_error
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.plans import Boundary, Crossings, End
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN, PrecisionSampler, derive_seed
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.attempts import run_needed_job
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, OneGroupErrors, Sensitivity, emulate_outputs

AT_FIRST = 200
"""Emulations of one group on one sample that come before the sampler's first plan where they take long, at least. One
computes about half of the model, as it begins at a waist before its group."""

_PER_SEED_SAMPLE = 2.0
"""Of those that come then, for each sample of the seeds, where that is more: about as long as the seeds took."""

_PER_PLAN_SAMPLE = 0.5
"""Later, emulations between two proposals for each sample of a plan's evaluation: a quarter of its time."""

_LEARNING_SHARE = 0.5
"""Of the time of a build, that emulations of plans may take from which the groups' errors are learnt."""

_UNTAKEN_SD = 3.0
"""Standard deviation of the log of a squared error that is taken from other groups: a factor of 4.5 in the error."""

_UNTIMED = 2
"""Plans to learn from, before it is known how long an emulation takes."""

MOST_PARTS = 12
"""Parts of the outputs that are told apart; the others are taken together."""


class Knowledge:
    """All that is known of a search's plans beside their evaluations; more of it is found out between plans.

    Where errors are measured and emulation predicts them, it emulates plans before one of them is proposed, each once:
    elsewhere an evaluation is itself an emulation, and as quick. What earlier sessions emulated the sampler reads from
    the study.

    Attributes:
        prior: what the sampler knows by now.
    """

    def __init__(
        self,
        record: StudyRecord,
        toolchain: Toolchain,
        settings: SearchSettings,
        listener: Listener,
        law: str,
        data_dir: Path,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask for the roofline; ``law`` is the statistic that adds in squares."""
        self._record, self._space, self._toolchain, self._law = record, record.space, toolchain, law
        self._settings, self._listener, self._limits, self._clock = settings, listener, limits, clock
        path = data_dir / SENSITIVITY_JSON
        self.errors = OneGroupErrors(record, toolchain, law, path, listener, settings, limits)
        terms = run_needed_job(toolchain.latency_terms, toolchain, listener, "predicting latencies")
        if isinstance(terms, Failure):
            text = "no latency can be predicted, so the search learns it from builds alone"
            listener.warning(f"{text}: {terms.message}")
        self._terms = None if isinstance(terms, Failure) else terms
        self._searched: dict[int, float] = {}  # number of an evaluation -> its error as the search weighs it
        self._emulates = toolchain.error_source == "measured" and toolchain.emulation_holds
        self._emulated: dict[str, OutputError | None] = {}  # of plans by their fingerprint; None where emulation fails
        self._alone: dict[str, float] = {}  # measured errors of groups that are not emulated
        self._emulating_s, self._emulations = 0.0, 0
        self._update()

    def sampler(self) -> PrecisionSampler:
        """Emulate the groups that are due by now; what proposes the next plan then.

        Called before each proposal, so that none waits for many.
        """
        evaluations, per_plan, allowed = self._record.evaluations(), self._toolchain.emulated_samples.per_plan, math.inf
        if per_plan is not None:
            seeds = len(self._space.seeds)
            later = _PER_PLAN_SAMPLE * per_plan * max(0, self._record.spent - seeds)
            allowed = max(AT_FIRST, _PER_SEED_SAMPLE * per_plan * seeds) + later
        if self.errors.take(allowed):
            self._update()
            missing = len(self._space.free) - len(self.errors.sensitivity().errors)
            more = f"; {missing} one-group errors are estimated from groups like them" if missing else ""
            self._listener.stage(f"searching{more}")
        alone = {self._space.alone(group).fingerprint: group for group in self._space.not_emulated}
        for evaluation in evaluations:
            if evaluation.number not in self._searched:
                error = self._searched[evaluation.number] = searched_error(evaluation.error, self._law, self._settings)
                if (group := alone.get(evaluation.plan.fingerprint)) is not None:
                    self._alone[group] = error
        build_s = float(np.median([evaluation.build_s for evaluation in evaluations] or [0.0]))
        return PrecisionSampler(
            self.prior,
            derive_seed(self._settings.seed, 0),
            # Of metrics that do not add in squares the largest error so far bounds the front.
            error_scale=REFERENCE_ERROR if self._record.metric in ADD_IN_SQUARES else math.inf,
            emulate=self.emulate if self._emulates else None,
            emulations_to_learn=self.affordable(_LEARNING_SHARE * build_s),
            errors=self._searched,
            error_name=searched_as(self._law, self._settings),
        )

    def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        """The errors of plans, as the search weighs them, by the precision of every free group.

        Those of groups that are not emulated are added in squares, as measured; NaN where an error is not known.
        """
        fp32 = dict.fromkeys(self._space.not_emulated, str(Precision.FP32))
        plans = [self._space.plan({**each, **fp32}) for each in choices]
        new = {plan.fingerprint: plan for plan in plans if plan.fingerprint not in self._emulated}
        if new and self._emulates and (self._limits is None or self._limits.reached() is None):
            began_s = self._clock()
            try:
                outputs = emulate_outputs(self._toolchain, list(new.values()), self._listener)
            except RunError as fault:
                self._emulates = False
                text = "the search goes on without emulating plans before they are built"
                self._listener.warning(f"{text}: {fault.message}")
            else:
                self._emulating_s += self._clock() - began_s
                self._emulations += len(new)
                self._emulated.update(zip(new, outputs, strict=True))
        errors = []
        for plan, each in zip(plans, choices, strict=True):
            error = self._emulated.get(plan.fingerprint)
            emulated = math.nan if error is None else searched_error(error, self._law, self._settings)
            alone = (self._alone.get(group, math.nan) for group in fp32 if each[group] != Precision.FP32)
            errors.append(math.hypot(emulated, *alone))
        return errors

    def affordable(self, seconds: float) -> int:
        """How many plans can be emulated in this time, by the time that emulation has taken; a few before any."""
        if not self._emulates or seconds <= 0.0:
            return 0
        if not self._emulations:
            return _UNTIMED
        return min(EMULATIONS_TO_LEARN, int(seconds * self._emulations / max(self._emulating_s, 1e-9)))

    def recall(self, plan: PrecisionPlan) -> tuple[float, int] | None:
        """A plan's emulated objective statistic, and on how many samples; None if it was not emulated, or failed."""
        if (error := self._emulated.get(plan.fingerprint)) is None:
            return None
        plain = SearchSettings(ignore=self._settings.ignore)
        return searched_error(error, self._law, plain), error.sample_count

    def _update(self) -> None:
        sensitivity = self.errors.sensitivity()
        exact = self._toolchain.latency_source == "predicted"
        self.prior = make_prior(self._space, sensitivity, self._terms, exact=exact, settings=self._settings)
        if self._emulates:  # groups that have been emulated on all samples are plans, too
            uncertain = {*sensitivity.doubts, *self._space.not_emulated}
            alone = {g: error for g, error in sensitivity.output_errors.items() if g not in uncertain}
            self._emulated |= {self._space.alone(group).fingerprint: error for group, error in alone.items()}


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
