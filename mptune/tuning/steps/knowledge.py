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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.base import Failure
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.files import write_json
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.dominance import REFERENCE_ERROR
from mptune.tuning.listener import Listener
from mptune.tuning.plan_limits import searched_as, searched_error, stored, suffices
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN, PrecisionSampler, derive_seed
from mptune.tuning.steps.attempts import emulate_outputs, run_needed_job
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.prior import SENSITIVITY_JSON, Sensitivity, error_value, make_prior

AT_FIRST = 200
"""Emulations of one group on one sample that come before the sampler's first plan where they take long, at least."""

_PER_SEED_SAMPLE = 2.0
"""Of those that come then, for each sample of the seeds, where that is more: about as long as the seeds took."""

_PER_PLAN_SAMPLE = 0.5
"""Later, emulations between two proposals for each sample of a plan's evaluation: a quarter of its time."""

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
        self._path, self._parts = data_dir / SENSITIVITY_JSON, toolchain.emulated_samples.parts
        self._errors: dict[str, OutputError] = {}  # of groups alone
        self._failed: set[str] = set()  # groups whose emulation failed for good, perhaps after some samples
        self._read: set[str] = set()  # keys of the notes that have been added
        self._written: Sensitivity | None = None
        self._add_notes(is_first=True)
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
        if self.take(allowed):
            self._update()
            missing = len(self._space.free) - len(self.sensitivity().errors)
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

    def take(self, allowed: float) -> bool:
        """Emulate groups alone, as far as ``allowed`` emulations of one sample reach; whether more is known then.

        Those of all workers count, and of earlier runs: the study keeps them.
        """
        before = self._spent()
        while self._limits is None or self._limits.reached() is None:
            self._add_notes()
            # The first part of the samples for each group, then the second, and so on.
            jobs: list[tuple[range, list[str]]] = []
            for part in self._parts:
                lacking = [g for g in self._space.free if g not in self._failed and self._samples(g) == part.start]
                # An overflow shows on the first sample that has it, and more of them say nothing more.
                lacking = [g for g in lacking if part.start == 0 or self._errors[g].non_finite == 0]
                jobs += [(part, lacking[k : k + _AT_A_TIME]) for k in range(0, len(lacking), _AT_A_TIME)]
            jobs = [(part, groups) for part, groups in jobs if self._spent() + len(part) * len(groups) <= allowed]
            if not jobs:
                break
            # Several workers take the jobs of one part in a random order, so that they seldom take the same.
            alike = jobs[:1] if self._record.is_alone else [job for job in jobs if job[0] == jobs[0][0]]
            self._do(*random.choice(alike))
        if (sensitivity := self.sensitivity()) != self._written:
            write_json(self._path, sensitivity.to_json())
            self._written = sensitivity
        return self._spent() > before

    def sensitivity(self) -> Sensitivity:
        """All that is known, without the outputs that are ignored; of those the statistics stay."""
        errors = {group: self._errors[group] for group in self._space.free if group in self._errors}
        doubts: dict[str, float] = {}
        for group, error in errors.items():
            # Of the mean of n of N samples: sqrt((1 - n / N) / n) of one's (sampling without replacement).
            left = 1.0 - error.sample_count / self._parts[-1].stop
            if left > 0.0 and not error.non_finite:
                doubts[group] = _SPREAD * math.sqrt(left / error.sample_count)
        values = {
            group: error_value(error.without(self._settings.ignore), self._law) for group, error in errors.items()
        }
        return Sensitivity(self._law, values, errors, doubts)

    def _spent(self) -> int:
        return sum(map(self._samples, self._errors)) + len(self._failed - self._errors.keys())

    def _samples(self, group: str) -> int:
        return self._errors[group].sample_count if group in self._errors else 0

    def _do(self, part: range, groups: list[str]) -> None:
        """Emulate groups, each alone, and note what comes of it; two workers may now and then do the same."""
        tried = self._failed | self._errors.keys()
        more = f", now on samples {part.start + 1} to {part.stop}" if part.start else ""
        self._listener.stage(f"one-group errors: {len(tried)} of {len(self._space.free)} groups{more}")
        plans = [self._space.all_fp32.replace({group: self._space.reduced_of(group)}) for group in groups]
        outputs = emulate_outputs(self._toolchain, plans, self._listener, part if len(self._parts) > 1 else None)
        to_store = [None if error is None else stored(error, self._law, self._settings) for error in outputs]
        note = {
            "metric": self._law,
            "samples": [part.start, part.stop],
            "errors": {g: None if e is None else e.to_json() for g, e in zip(groups, to_store, strict=True)},
        }
        # A hash: the keys of a database's attributes are short.
        batch = f"{self._law} {part.start} {part.stop} {' '.join(groups)} {self._settings.tolerance}"
        key = _NOTE + hashlib.sha256(batch.encode()).hexdigest()[:16]
        self._record.set_note(key, note)
        self._read.discard(key)
        self._add_notes()

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
                error, earlier = OutputError.from_json(note["errors"][group]), self._errors.get(group)
                if self._samples(group) != note["samples"][0]:
                    continue
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
        sensitivity = self.sensitivity()
        exact = self._toolchain.latency_source == "predicted"
        self.prior = make_prior(self._space, sensitivity, self._terms, exact=exact, settings=self._settings)
        if self._emulates:  # groups that have been emulated on all samples are plans, too
            uncertain = {*sensitivity.doubts, *self._space.not_emulated}
            alone = {g: error for g, error in sensitivity.output_errors.items() if g not in uncertain}
            self._emulated |= {self._space.alone(group).fingerprint: error for group, error in alone.items()}
