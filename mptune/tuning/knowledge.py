"""What the sampler knows before a proposal: the roofline, one-group errors as far as they were taken, emulated plans.

Where emulations take long not all one-group errors are taken before the first plan. One sample tells most of what eight
do, so every group has one first, and then more, part by part of the samples. What is left is taken between plans, in
proportion to them: so a resumed search takes the same as one that was not interrupted.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.base import Failure
from mptune.errors import RunError
from mptune.files import READ_ERRORS, read_json, write_json
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import JsonForm
from mptune.settings import SearchSettings
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.bench import Bench, run_needed_job
from mptune.tuning.dominance import ERROR_FLOOR, REFERENCE_ERROR
from mptune.tuning.plan_limits import aimed_error, part_errors, searched_as, searched_error, stored, suffices
from mptune.tuning.sampler.plans import Boundary, Crossings, End
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN, PrecisionSampler, derive_seed
from mptune.tuning.sampler.trials import Prior
from mptune.tuning.space import SearchSpace

SENSITIVITY_JSON = "sensitivity.json"
"""Name of the file in the run's data directory."""

AT_FIRST = 120
"""Emulations of one group on one sample that come before the sampler's first plan where they take long, at least."""

_PER_PLAN_SAMPLE = 0.2
"""Later, emulations between two proposals for each sample of a plan's evaluation, which most plans take few of."""

_LEARNING_SHARE = 0.5
"""Of the time of a build, that emulations of plans may take from which the groups' errors are learnt."""

_UNTIMED = 2
"""Plans to learn from, before it is known how long an emulation takes."""

_NOTE = "one-group errors:"
"""Of the study: a note for each batch of groups on a part of the samples."""

_AT_A_TIME = 8
"""Groups per job: an interrupted run repeats at most one job, and progress is reported after each."""

_SPREAD = 0.4
"""Relative standard deviation of one group's error between samples, about: what few of them leave in doubt."""

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
        errors = {**self.errors, **{g: _error_value(e, self.metric) for g, e in counted.items()}}
        return replace(self, errors=errors, output_errors=counted)

    @classmethod
    def load(cls, path: Path, metric: str) -> Sensitivity:
        """What a search has left for explanations; empty where there is nothing of this metric that can be read."""
        try:
            read = cls.from_json(read_json(path))
        except READ_ERRORS:
            return cls(metric, {})
        return read if read.metric == metric else cls(metric, {})


def _error_value(error: OutputError, metric: str) -> float:
    """The statistic of an error; ``inf`` where an output is not finite."""
    value = error.value(metric)
    return value if error.non_finite == 0 and math.isfinite(value) else math.inf


class Knowledge:
    """All that is known of a search's plans beside their evaluations; more of it is found out between plans.

    Where errors are measured and emulation predicts them, it emulates plans before one of them is proposed, each once:
    elsewhere an evaluation is itself an emulation, and as quick. What earlier sessions emulated the sampler reads from
    the study.

    Attributes:
        prior: what the sampler knows by now.
    """

    def __init__(self, bench: Bench, law: str, data_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Ask for the roofline; ``law`` is the statistic that adds in squares."""
        self._bench, self._law, self._clock = bench, law, clock
        self._record, self._space, self._settings = bench.record, bench.record.space, bench.settings
        self._path, self._parts = data_dir / SENSITIVITY_JSON, bench.toolchain.emulated_samples.parts
        self._errors: dict[str, OutputError] = {}  # of groups alone
        self._failed: set[str] = set()  # groups whose emulation failed for good, perhaps after some samples
        self._read: set[str] = set()  # keys of the notes that have been added
        self._add_notes(is_first=True)
        what, toolchain = "predicting latencies", bench.toolchain
        terms = run_needed_job(toolchain.latency_terms, toolchain, bench.listener, what)
        if isinstance(terms, Failure):
            text = "no latency can be predicted, so the search learns it from builds alone"
            bench.listener.warning(f"{text}: {terms.message}")
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
        settings, evaluations = self._settings, self._record.evaluations()
        per_plan, allowed = self._bench.toolchain.emulated_samples.per_plan, math.inf
        if per_plan is not None:
            later = max(0, self._record.spent - len(self._space.seeds))
            allowed = AT_FIRST + _PER_PLAN_SAMPLE * per_plan * later
        self._bench.toolchain.open_baselines()  # while groups are emulated
        if self.take(allowed):
            missing = len(self._space.free) - len(self._errors)
            more = f"; {missing} one-group errors are estimated from groups like them" if missing else ""
            self._bench.listener.stage(f"searching{more}")
        new = (e for e in evaluations if e.number not in self._searched)
        self._searched |= {e.number: searched_error(e.error, self._law, settings) for e in new}
        alone = {self._space.alone(group).fingerprint: group for group in self._space.not_emulated}
        of_plans = {e.plan.fingerprint: self._searched[e.number] for e in evaluations}
        self._alone = {group: of_plans[name] for name, group in alone.items() if name in of_plans}
        build_s = float(np.median([evaluation.build_s for evaluation in evaluations] or [0.0]))
        return PrecisionSampler(
            self.prior,
            derive_seed(settings.seed, 0),
            limit=aimed_error(settings),
            # Of metrics that do not add in squares the largest error so far bounds the front.
            error_scale=REFERENCE_ERROR if self._record.metric in ADD_IN_SQUARES else math.inf,
            emulate=self.emulate if self._emulates else None,
            emulations_to_learn=self.affordable(_LEARNING_SHARE * build_s),
            errors=self._searched,
            error_name=searched_as(self._law, settings),
        )

    def least_fp32(self) -> PrecisionPlan | None:
        """FP16 but for the fewest groups whose errors alone, the largest first, keep the rest from meeting the limit.

        None where the search aims at no limit, or no errors are known.
        """
        limit, squares = aimed_error(self._settings), self.prior.log_square_errors
        if limit is None or squares is None:
            return None
        left, fp32 = limit**2, dict.fromkeys(self._space.free, Precision.FP32)
        fp16: dict[str, Precision] = {}
        for square, group in sorted(zip(np.exp(squares), self._space.free, strict=True)):
            left -= square
            if left < 0.0:
                break
            fp16[group] = self._space.reduced_of(group)
        return self._space.plan({**fp32, **fp16})

    def take(self, allowed: float) -> bool:
        """Emulate groups alone, as far as ``allowed`` emulations of one sample reach; whether more is known then.

        Those of all workers count, and of earlier runs: the study keeps them.
        """
        space, before = self._space, self._spent()

        def show(more: str = "") -> None:
            tried = self._failed | self._errors.keys()
            self._bench.listener.stage(f"one-group errors: {len(tried)} of {len(space.free)} groups{more}")

        while self._bench.limits.reached() is None:
            self._add_notes()
            # The first part of the samples for each group, then the second, and so on.
            jobs: list[tuple[range, list[str]]] = []
            for part in self._parts:
                lacking = [g for g in space.free if g not in self._failed and self._samples(g) == part.start]
                # An overflow shows on the first sample that has it, and more of them say nothing more.
                lacking = [g for g in lacking if part.start == 0 or self._errors[g].non_finite == 0]
                jobs += [(part, lacking[k : k + _AT_A_TIME]) for k in range(0, len(lacking), _AT_A_TIME)]
            jobs = [(part, groups) for part, groups in jobs if self._spent() + len(part) * len(groups) <= allowed]
            if not jobs:
                break
            # Several workers take the jobs of one part in a random order, so that they seldom take the same.
            part, groups = random.choice(
                jobs[:1] if self._record.is_alone else [job for job in jobs if job[0] == jobs[0][0]]
            )
            show(f", now on samples {part.start + 1} to {part.stop}" if part.start else "")
            plans = [space.all_fp32.replace({group: space.reduced_of(group)}) for group in groups]
            errors = dict(zip(groups, self._bench.emulate(plans, part if len(self._parts) > 1 else None), strict=True))
            # A hash: the keys of a database's attributes are short.
            batch = f"{self._law} {part.start} {part.stop} {' '.join(groups)} {self._settings.tolerance}"
            key = _NOTE + hashlib.sha256(batch.encode()).hexdigest()[:16]
            noted = {g: e and stored(e, self._law, self._settings).to_json() for g, e in errors.items()}
            note = {"metric": self._law, "samples": [part.start, part.stop], "errors": noted}
            self._record.set_note(key, note)
            self._read.discard(key)
            self._add_notes()
        if is_more := self._spent() > before:
            self._update()
            show()
        return is_more

    def sensitivity(self) -> Sensitivity:
        """All that is known, without the outputs that are ignored; of those the statistics stay."""
        errors = {group: self._errors[group] for group in self._space.free if group in self._errors}
        doubts: dict[str, float] = {}
        for group, error in errors.items():
            # Of the mean of n of N samples: sqrt((1 - n / N) / n) of one's (sampling without replacement).
            left = 1.0 - error.sample_count / self._parts[-1].stop
            if left > 0.0 and not error.non_finite:
                doubts[group] = _SPREAD * math.sqrt(left / error.sample_count)
        ignored = self._settings.ignore
        values = {group: _error_value(error.without(ignored), self._law) for group, error in errors.items()}
        return Sensitivity(self._law, values, errors, doubts)

    def _spent(self) -> int:
        return sum(map(self._samples, self._errors)) + len(self._failed - self._errors.keys())

    def _samples(self, group: str) -> int:
        return self._errors[group].sample_count if group in self._errors else 0

    def _add_notes(self, *, is_first: bool = False) -> None:
        """Add what any worker has noted since; a group without an error failed, which is no evidence of overflow.

        At first under tolerances that the search did not have before: errors that say nothing of them are taken anew.
        """
        notes = {key: note for key, note in self._record.notes(_NOTE).items() if key not in self._read}
        self._read |= notes.keys()
        for note in sorted(notes.values(), key=lambda note: note["samples"]):
            for group in note["errors"].keys() & set(self._space.free) if note["metric"] == self._law else ():
                if note["errors"][group] is None:
                    self._failed.add(group)
                    continue
                if self._samples(group) != note["samples"][0]:
                    continue
                error, earlier = OutputError.from_json(note["errors"][group]), self._errors.get(group)
                joined = error if earlier is None else earlier.with_samples_of(error)
                is_like = earlier is None or earlier.per_output.keys() == error.per_output.keys()
                if not is_like or (earlier is not None and not joined.has(self._law)):
                    self._failed.add(group)  # outputs whose shape depends on values: the parts do not add up
                elif not is_first or suffices(error, self._law, self._settings):
                    self._errors[group] = joined

    def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        """The errors of plans, as the search weighs them, by the precision of every free group.

        Those of groups that are not emulated are added in squares, as measured; NaN where an error is not known.
        """
        fp32 = dict.fromkeys(self._space.not_emulated, str(Precision.FP32))
        plans = [self._space.plan({**each, **fp32}) for each in choices]
        new = {plan.fingerprint: plan for plan in plans if plan.fingerprint not in self._emulated}
        if new and self._emulates and self._bench.limits.reached() is None:
            began_s = self._clock()
            try:
                outputs = self._bench.emulate(list(new.values()))
            except RunError as fault:
                self._emulates = False
                text = "the search goes on without emulating plans before they are built"
                self._bench.listener.warning(f"{text}: {fault.message}")
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
        error, plain = self._emulated.get(plan.fingerprint), SearchSettings(ignore=self._settings.ignore)
        return None if error is None else (searched_error(error, self._law, plain), error.sample_count)

    def _update(self) -> None:
        sensitivity = self.sensitivity()
        write_json(self._path, sensitivity.to_json(), indent=None)
        exact = self._bench.toolchain.latency_source == "predicted"
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

    A group without an error has the mean of those of its kind, else of all. ``exact`` latencies are predicted by these
    terms, so that they have no uncertainty; without terms none can be predicted.
    """
    groups, precisions = space.free, tuple(str(space.reduced_of(group)) for group in space.free)
    settings, law = settings or SearchSettings(), sensitivity.metric
    prior = Prior(groups, precisions=() if {*precisions} <= {str(Precision.FP16)} else precisions)
    if sensitivity.errors:
        output_errors, kinds = sensitivity.output_errors, {group.id: group.kind for group in space.groups}
        by_part = {group: part_errors(error, law, settings) for group, error in output_errors.items()}
        searched = {g: searched_error(e, law, settings, by_part[g]) for g, e in output_errors.items()}
        errors = {**sensitivity.errors, **searched}
        logs = {g: 2.0 * math.log(max(e, ERROR_FLOOR)) if e < math.inf else e for g, e in errors.items()}
        finite = {group: value for group, value in logs.items() if group in groups and math.isfinite(value)}
        squares: list[tuple[float, float]] = []
        for group in groups:
            if group in logs:  # that of one that is not emulated is in doubt till it is measured
                doubt = _UNTAKEN_SD if group in space.not_emulated else 2.0 * sensitivity.doubts.get(group, 0.0)
                squares.append((logs[group], doubt))
                continue
            of_kind = [value for other, value in finite.items() if kinds[other] == kinds[group]]
            others = of_kind or list(finite.values()) or [math.log(1e-4**2)]
            squares.append((float(np.mean(others)), math.hypot(_UNTAKEN_SD, float(np.std(others)))))
        add = law in ADD_IN_SQUARES
        parts = [by_part.get(group, {}) if add else {} for group in groups]
        prior = replace(
            prior,
            log_square_errors=tuple(mean for mean, _ in squares),
            log_square_sds=tuple(sd for _, sd in squares),
            part_shares=_part_shares(parts),
        )
    if terms is None:
        return prior
    boundaries = _boundaries(space, terms)
    # What the pins and TF32 save against all-FP32, the Casts that the pins need under every plan counted in.
    pins = space.plan(dict.fromkeys(space.free, Precision.FP32))
    casts = Crossings(prior.columns, tuple(boundaries)).count(np.zeros((len(groups), 1), dtype=bool))[:, 0].tolist()
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


def _part_shares(errors: Sequence[Mapping[str, float]]) -> tuple[tuple[float, ...], ...] | None:
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
